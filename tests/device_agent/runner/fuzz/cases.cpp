#include "cases.hpp"

#include "frames.hpp"
#include "plan.hpp"

#include <algorithm>
#include <cmath>

namespace fuzz {
namespace {

using mobizo::Settings;

constexpr const char *LEDGER_MAGIC = "MOBIZO-TRAJECTORY 1\n", *CHECKPOINT_MAGIC = "MOBIZO-CHECKPOINT 1\n";
constexpr const char *HEADER = R"({"job_id":"job-1","job_seed":3,"recipe_id":"00","noise":"rademacher"})";


struct Shape {
  Settings settings{};
  bool gradient = false, secret = false; // exact gradients; a private run
  bool checkpoints = false;              // the program has a `state`
  bool pulls = false, start = false, uploads_last = false;
  int64_t examples = 1;
};

float real(Random &random) { return static_cast<float>(random.between(-1000, 1000)) / 500.0F; }

void put_reals(std::string &bytes, int64_t count, Random &random) {
  for (int64_t i = 0; i < count; ++i) {
    put(bytes, real(random));
  }
}

void put_integers(std::string &bytes, int64_t count, int64_t most, Random &random) {
  for (int64_t i = 0; i < count; ++i) {
    put(bytes, static_cast<int32_t>(random.between(0, most)));
  }
}

Shape random_shape(Random &random) {
  Shape shape;
  Settings &s = shape.settings;
  shape.gradient = random.chance(2);
  shape.secret = random.chance(3);
  s.steps = random.between(1, 8);
  s.interval = random.between(1, 4);
  s.queries = shape.gradient ? 1 : random.between(1, 3);
  s.batch = random.between(1, 4);
  s.length = random.between(4, 40);
  s.answer = random.between(1, 3);
  s.choices = random.between(1, 3);
  s.score_rows = random.between(1, 6);
  s.size = random.between(1, 12);
  s.dynamic = random.between(0, 1);
  s.candidates = random.between(0, 1);
  s.stored = shape.gradient ? 0 : random.between(0, 1);
  shape.checkpoints = shape.gradient || (s.stored == 0 && !shape.secret && random.chance(2));
  s.width = random.chance(2) ? random.between(1, 3) : 0;
  s.stride = random.between(1, 16);
  s.prefix_bytes = random.chance(2) ? 1 << 20 : random.between(0, 300);
  s.vocabulary = random.between(2, 60);
  s.eps = 0.05;
  shape.pulls = random.chance(3);
  shape.start = random.chance(2);
  shape.uploads_last = shape.secret || random.chance(3);
  shape.examples = random.between(1, 6);
  return shape;
}

std::string settings_record(const Settings &settings) {
  std::string payload;
  put(payload, settings);
  return payload;
}

std::string example_record(const Settings &s, Random &random) {
  const int64_t answers = random.between(1, s.answer), count = random.between(answers + 1, s.length);
  const int64_t first = count - answers;
  std::string payload;
  put(payload, static_cast<uint32_t>(count));
  put(payload, static_cast<int32_t>(random.between(0, first)));
  put_integers(payload, count, s.vocabulary - 1, random);
  for (int64_t t = 0; t < s.answer; ++t) {
    put(payload, static_cast<int32_t>(t < answers ? first + t : 0));
  }
  put_integers(payload, s.answer * (s.candidates != 0 ? s.choices : 1), s.vocabulary - 1, random);
  if (s.candidates != 0) {
    for (int64_t cell = 0; cell < s.answer * s.choices; ++cell) {
      put(payload, cell % s.choices == 0 ? 1.0F : static_cast<float>(random.between(0, 1)));
    }
  }
  for (int64_t t = 0; t < s.answer; ++t) {
    put(payload, t < answers ? 1.0F : 0.0F);
  }
  return payload;
}

// A batch with the examples from `first` on of a split.
std::string scores_record(const Settings &s, int32_t first, int32_t count, Random &random) {
  const int64_t length = s.dynamic != 0 ? random.between(2, s.length) : s.length;
  std::string payload;
  put(payload, static_cast<int32_t>(length));
  put_integers(payload, s.score_rows * length, s.vocabulary - 1, random);
  put_integers(payload, s.score_rows * s.answer, length - 1, random);
  put_integers(payload, s.score_rows * s.answer * s.choices, s.vocabulary - 1, random);
  put(payload, static_cast<uint32_t>(count));
  for (int32_t index = first; index < first + count; ++index) {
    const int64_t candidates = random.between(1, 3);
    put(payload, index);
    put(payload, static_cast<int32_t>(random.between(0, candidates - 1)));
    put(payload, static_cast<uint32_t>(candidates));
    for (int64_t candidate = 0; candidate < candidates; ++candidate) {
      const int64_t cells = random.between(1, 3);
      put(payload, static_cast<uint32_t>(cells));
      for (int64_t cell = 0; cell < cells; ++cell) {
        put_integers(payload, 1, s.score_rows - 1, random);
        put_integers(payload, 1, s.answer - 1, random);
        put_integers(payload, 1, s.choices - 1, random);
      }
    }
  }
  return payload;
}

void add_split(std::vector<Record> &records, char kind, const Settings &s, Random &random) {
  int32_t first = 0;
  for (int64_t batch = random.between(1, 3); batch > 0; --batch) {
    const auto count = static_cast<int32_t>(random.between(1, 3));
    records.push_back({kind, 0, scores_record(s, first, count, random)});
    first += count;
  }
}

std::string plan(const Shape &shape, Random &random) {
  const Settings &s = shape.settings;
  std::vector<Record> records{{'C', 0, settings_record(s)}, {'H', 0, HEADER}};
  const auto add = [&records](char kind) -> std::string & {
    records.push_back({kind, 0, ""});
    return records.back().payload;
  };
  if (shape.start) {
    put_reals(add('B'), s.size, random);
  }
  if (shape.pulls) {
    put_reals(add('P'), s.steps, random);
  }
  if (shape.uploads_last) {
    add('K');
  }
  put_reals(add('L'), s.steps, random);
  put_integers(add('Q'), s.steps * s.queries * 2, INT32_MAX, random);
  if (shape.checkpoints) {
    put(add('M'), static_cast<int32_t>(random.between(1, 4)));
  }
  if (shape.gradient) {
    std::string &settings = add('G');
    put(settings, random.chance(2) ? INFINITY : 1.0F);
    put(settings, 0.01F);
  }
  int64_t drawn = s.steps * s.batch;
  if (shape.secret) {
    std::string &samples = add('D');
    put(samples, 0.5F);
    drawn = 0;
    for (int64_t step = 0; step < s.steps; ++step) {
      const int64_t count = random.between(0, 9);
      put(samples, static_cast<int32_t>(count));
      drawn += count;
    }
    if (shape.gradient) {
      put(samples, 0.7F);
      put_integers(samples, s.steps * mobizo::NOISE_KEYS * 2, INT32_MAX, random);
    } else {
      put_reals(samples, s.steps * s.queries, random);
    }
  }
  put_integers(add('O'), drawn, shape.examples - 1, random);
  for (int64_t i = 0; i < shape.examples; ++i) {
    add('X') = example_record(s, random);
  }
  if (!shape.secret) {
    add_split(records, 'V', s, random);
    if (random.chance(2)) {
      add_split(records, 'T', s, random);
    }
  }
  add('Z');
  return join(mobizo::PLAN_MAGIC, records);
}

std::string evaluation(int64_t step, const char *split) {
  return R"({"step": )" + std::to_string(step) + R"(, "split": ")" + split +
         R"(", "correct": 3, "total": 9, "loss": 0.6931, "adapter": "current"})";
}

std::string limits(int64_t step, bool length) {
  return R"({"step": )" + std::to_string(step) + R"(, "rest": 0.0, "max_length": )" + (length ? "4" : "null") + "}";
}

std::string ledger(const Shape &shape, int64_t steps, Random &random) {
  const Settings &s = shape.settings;
  std::vector<Record> records{{'H', 0, HEADER}};
  for (int64_t step = 0; step <= steps; ++step) {
    const auto number = static_cast<uint32_t>(step);
    if (!shape.secret && step % s.interval == 0) {
      records.push_back({'E', number, evaluation(step, "validation")});
    }
    if (random.chance(3)) {
      records.push_back({'L', number, limits(step, s.width == 0 && s.dynamic != 0)});
    }
    if (step < steps) {
      records.push_back({'S', number, ""});
      put_reals(records.back().payload, s.queries + (shape.pulls ? 1 : 0), random);
    }
  }
  return join(LEDGER_MAGIC, records);
}

void add_run(Case &files, const Shape &shape, Random &random) {
  files["plan.bin"] = plan(shape, random);
  if (random.chance(2)) {
    const int64_t steps = random.between(0, shape.settings.steps);
    files["trajectory.bin"] = ledger(shape, steps, random);
    if (shape.checkpoints) {
      const int64_t at = random.between(0, steps);
      std::string state;
      put_reals(state, 3 * shape.settings.size, random);
      files["checkpoints/step-" + std::to_string(at) + ".bin"] = checkpoint(static_cast<uint32_t>(at), state);
    }
  }
  if (random.chance(3)) {
    files["limits"] = "rest 0.5\nlength " + std::to_string(random.between(0, 20)) + "\n";
  }
}

void put_tensor(std::string &bytes, mobizo::Type type, const std::vector<uint32_t> &shape, Random &random) {
  put(bytes, static_cast<uint8_t>(type));
  put(bytes, static_cast<uint32_t>(shape.size()));
  uint32_t count = 1;
  for (const uint32_t size : shape) {
    put(bytes, size);
    count *= size;
  }
  for (uint32_t i = 0; i < count; ++i) {
    if (type == mobizo::Type::Int64) {
      put(bytes, random.between(0, 1));
    } else {
      put(bytes, int32_t{0});
    }
  }
}

std::string request(int32_t size, Random &random) {
  std::string bytes;
  for (int64_t calls = random.between(0, 5); calls > 0; --calls) {
    const std::string method = random.chance(2) ? "load" : "score";
    put(bytes, static_cast<uint32_t>(method.size()));
    bytes += method;
    if (method == "load") {
      put(bytes, uint32_t{1});
      put_tensor(bytes, mobizo::Type::Float, {static_cast<uint32_t>(size)}, random);
    } else {
      put(bytes, uint32_t{3});
      put_tensor(bytes, mobizo::Type::Int64, {2, 4}, random);
      put_tensor(bytes, mobizo::Type::Int64, {2, 3}, random);
      put_tensor(bytes, mobizo::Type::Int64, {2, 3, 2}, random);
    }
  }
  return bytes;
}

} // namespace

std::vector<Record> split(std::string_view data) {
  std::vector<Record> records;
  const size_t line = data.find('\n');
  if (line == std::string_view::npos) {
    return records;
  }
  mobizo::FrameReader frames(data, line + 1);
  mobizo::Frame frame;
  while (frames.next(frame)) {
    records.push_back({frame.kind, frame.number, std::string(frame.payload)});
  }
  return records;
}

std::string join(std::string_view first_line, const std::vector<Record> &records) {
  std::string data(first_line);
  const bool numbered = first_line == mobizo::PLAN_MAGIC; // a plan's records are, a ledger's have their step
  for (size_t at = 0; at < records.size(); ++at) {
    const Record &record = records[at];
    data += mobizo::make_frame(record.kind, numbered ? static_cast<uint32_t>(at) : record.number, record.payload);
  }
  return data;
}

std::string checkpoint(uint32_t step, std::string_view state) {
  std::string data = CHECKPOINT_MAGIC;
  put(data, step);
  put(data, mobizo::crc32(state.data(), state.size()));
  return data.append(state);
}

Case valid_case(Random &random) {
  const Shape shape = random_shape(random);
  const Settings &s = shape.settings;
  Behaviour behaviour;
  behaviour.size = static_cast<int32_t>(s.size);
  behaviour.state = static_cast<int32_t>(3 * s.size);
  behaviour.width = static_cast<int32_t>(s.width);
  behaviour.vocabulary = static_cast<int32_t>(s.vocabulary);
  behaviour.seed = static_cast<int32_t>(random.below(1 << 30));
  behaviour.stop_after = random.chance(8) ? static_cast<int32_t>(random.between(1, 30)) : 0;
  Case files;
  put(files[PROGRAM], behaviour);
  put_reals(files["b.f32"], s.size, random);
  const std::string program = "--program\n@/program\n--weights\n@/weights\n";
  const size_t command = random.below(16);
  if (command < 10) {
    add_run(files, shape, random);
    files[ARGUMENTS] = "train\n" + program + "--run\n@\n";
  } else if (command < 12 && !shape.secret) {
    add_run(files, shape, random);
    files[ARGUMENTS] = "score\n" + program + "--run\n@\n--adapter\n@/b.f32\n--split\nvalidation\n";
  } else if (command < 14) {
    files[ARGUMENTS] = "serve\n" + program;
    files[REQUEST] = request(behaviour.size, random);
  } else {
    files[ARGUMENTS] = "generate\n" + program + "--adapter\n@/b.f32\n--tokens\n0,1,1\n--most\n3\n--length\n" +
                   std::to_string(random.between(1, 5)) + "\n--context\n16\n";
  }
  return files;
}

} // namespace fuzz
