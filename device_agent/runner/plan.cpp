#include "plan.hpp"

#include "frames.hpp"
#include "plan_check.hpp"

#include <algorithm>
#include <numeric>
#include <stdexcept>

namespace mobizo {
namespace {

constexpr size_t MIN_LENGTH = 2; // tokens of the shortest sequence a program of dynamic length takes

Tensor integers(const std::vector<int32_t> &values, std::vector<int32_t> shape) {
  Tensor tensor(Type::Int64, std::move(shape));
  std::copy(values.begin(), values.end(), tensor.data<int64_t>());
  return tensor;
}

Example read_example(std::string_view payload, const Settings &settings) {
  Numbers numbers(payload);
  Example example;
  const auto count = numbers.one<uint32_t>();
  example.opening = numbers.one<int32_t>();
  example.tokens = numbers.many<int32_t>(count);
  const size_t answer = product({settings.answer}), cells = product({settings.answer, settings.choices});
  example.positions = numbers.many<int32_t>(answer);
  if (settings.candidates != 0) {
    example.choices = numbers.many<int32_t>(cells);
    example.choice_mask = numbers.many<float>(cells);
  } else {
    example.answers = numbers.many<int32_t>(answer);
  }
  example.mask = numbers.many<float>(answer);
  numbers.end();
  return example;
}

ScoreBatch read_scores(std::string_view payload, const Settings &settings) {
  Numbers numbers(payload);
  ScoreBatch batch;
  const auto length = numbers.one<int32_t>();
  const auto rows = static_cast<int32_t>(settings.score_rows), answer = static_cast<int32_t>(settings.answer),
             choices = static_cast<int32_t>(settings.choices);
  for (const std::vector<int32_t> &shape :
       {std::vector<int32_t>{rows, length}, {rows, answer}, {rows, answer, choices}}) {
    const size_t count = product({shape[0], shape[1], shape.size() > 2 ? shape[2] : 1});
    batch.inputs.push_back(integers(numbers.many<int32_t>(count), shape));
  }
  batch.examples.resize(numbers.count(3 * sizeof(int32_t)));
  for (Scored &example : batch.examples) {
    example.index = numbers.one<int32_t>();
    example.correct = numbers.one<int32_t>();
    example.candidates.resize(numbers.count(sizeof(uint32_t)));
    for (std::vector<Cell> &cells : example.candidates) {
      cells.resize(numbers.count(sizeof(Cell)));
      for (Cell &cell : cells) {
        cell = numbers.one<Cell>();
      }
    }
  }
  numbers.end();
  return batch;
}

} // namespace

Example Example::shortened(size_t most) const {
  if (tokens.size() <= most) {
    return *this;
  }
  // At least one token of the prompt stays, since the first answer token is predicted from it.
  const size_t prompt = static_cast<size_t>(positions.front()) + 1, front = static_cast<size_t>(opening);
  const size_t spare = prompt > front + 1 ? prompt - front - 1 : 0;
  const size_t cut = std::min(tokens.size() - most, spare);
  Example example = *this;
  const auto from = example.tokens.begin() + static_cast<std::ptrdiff_t>(front);
  example.tokens.erase(from, from + static_cast<std::ptrdiff_t>(cut));
  for (size_t t = 0; t < positions.size(); ++t) {
    example.positions[t] -= mask[t] != 0 ? static_cast<int32_t>(cut) : 0;
  }
  return example;
}

std::vector<Tokens> ScoreBatch::texts() const {
  int32_t rows = 0;
  for (const Scored &example : examples) {
    for (const std::vector<Cell> &cells : example.candidates) {
      for (const Cell &cell : cells) {
        rows = std::max(rows, cell[0] + 1);
      }
    }
  }
  const auto length = static_cast<size_t>(inputs.at(0).shape.at(1));
  const auto answer = static_cast<size_t>(inputs.at(1).shape.at(1));
  std::vector<Tokens> texts;
  for (size_t row = 0; row < static_cast<size_t>(rows); ++row) {
    // The last token that the model reads predicts the answer's last one.
    const int64_t *positions = inputs[1].data<int64_t>() + row * answer;
    const auto count = static_cast<std::ptrdiff_t>(*std::max_element(positions, positions + answer) + 1);
    const int64_t *tokens = inputs[0].data<int64_t>() + row * length;
    texts.emplace_back(tokens, tokens + count);
  }
  return texts;
}

Plan Plan::read(const std::string &path) {
  const std::string data = read_file(path);
  if (std::string_view(data).substr(0, PLAN_MAGIC.size()) != PLAN_MAGIC) {
    throw std::runtime_error(path + " is no plan of this version; have the agent write it again");
  }
  Plan plan;
  FrameReader frames(data, PLAN_MAGIC.size());
  Frame frame;
  uint32_t frames_read = 0;
  bool whole = false;
  while (!whole && frames.next(frame)) {
    Numbers numbers(frame.payload);
    const Settings &s = plan.settings;
    if ((frame.kind == 'C') != (frames_read == 0)) {
      throw std::runtime_error(path + " does not begin with its settings; have the agent write it again");
    }
    switch (frame.kind) {
    case 'C':
      plan.settings = numbers.one<Settings>();
      numbers.end();
      check_settings(plan.settings);
      break;
    case 'H':
      plan.header = frame.payload;
      break;
    case 'B':
      plan.start = numbers.many<float>(product({s.size}));
      numbers.end();
      break;
    case 'P':
      plan.pulls = numbers.many<float>(product({s.steps}));
      numbers.end();
      break;
    case 'K':
      plan.uploads_last = true;
      numbers.end();
      break;
    case 'L':
      plan.lr = numbers.many<float>(product({s.steps}));
      numbers.end();
      break;
    case 'Q':
      plan.seeds = numbers.many<int32_t>(product({s.steps, s.queries, 2}));
      numbers.end();
      break;
    case 'D':
      plan.secret = true;
      plan.clip = numbers.one<float>();
      plan.counts = numbers.many<int32_t>(product({s.steps}));
      if (plan.gradient) { // a run with exact gradients says so before
        plan.sigma = numbers.one<float>();
        plan.keys = numbers.many<int32_t>(product({s.steps, NOISE_KEYS, 2}));
      } else {
        plan.noise = numbers.many<float>(product({s.steps, s.queries}));
      }
      numbers.end();
      break;
    case 'M':
      plan.checkpoint_steps = numbers.one<int32_t>();
      numbers.end();
      break;
    case 'G':
      plan.gradient = numbers.one<GradientSettings>();
      numbers.end();
      break;
    case 'O':
      plan.order = numbers.many<int32_t>(plan.secret ? plan.sampled() : product({s.steps, s.batch}));
      numbers.end();
      break;
    case 'X':
      plan.examples.push_back(read_example(frame.payload, s));
      break;
    case 'V':
      plan.validation.push_back(read_scores(frame.payload, s));
      break;
    case 'T':
      plan.test.push_back(read_scores(frame.payload, s));
      break;
    case 'Z':
      whole = frame.number == frames_read;
      break;
    default:
      throw std::runtime_error(path + " has a record of another version");
    }
    ++frames_read;
  }
  if (!whole) {
    throw std::runtime_error(path + " is damaged; have the agent write it again");
  }
  check_plan(plan);
  return plan;
}

size_t Plan::sampled() const {
  size_t all = 0;
  for (const int32_t count : counts) {
    all += product({count});
  }
  return all;
}

Tensor Plan::seeds_of(size_t step) const {
  const auto queries = static_cast<size_t>(settings.queries);
  Tensor tensor(Type::Int32, {static_cast<int32_t>(queries), 2});
  std::copy_n(seeds.begin() + static_cast<std::ptrdiff_t>(step * queries * 2), queries * 2, tensor.data<int32_t>());
  return tensor;
}

std::vector<int32_t> Plan::sample(size_t step) const {
  const auto batch = static_cast<size_t>(settings.batch);
  const auto own = counts.begin() + static_cast<std::ptrdiff_t>(secret ? step : 0);
  const size_t before = secret ? std::accumulate(counts.begin(), own, size_t{0}) : step * batch;
  const size_t count = secret ? static_cast<size_t>(*own) : batch;
  const auto first = order.begin() + static_cast<std::ptrdiff_t>(before);
  return {first, first + static_cast<std::ptrdiff_t>(count)};
}

std::vector<const Tokens *> Plan::texts_from(size_t step) const {
  const auto first = counts.begin(), own = first + static_cast<std::ptrdiff_t>(secret ? step : 0);
  const size_t before = secret ? std::accumulate(first, own, size_t{0}) : step * static_cast<size_t>(settings.batch);
  std::vector<const Tokens *> texts;
  for (size_t position = before; position < order.size(); ++position) {
    texts.push_back(&examples.at(static_cast<size_t>(order[position])).tokens);
  }
  return texts;
}

std::vector<std::vector<int32_t>> Plan::pieces(size_t step) const {
  const std::vector<int32_t> all = sample(step);
  const auto most = static_cast<size_t>(settings.batch);
  std::vector<std::vector<int32_t>> parts(1);
  for (const int32_t index : all) {
    if (parts.back().size() == most) {
      parts.emplace_back();
    }
    parts.back().push_back(index);
  }
  return parts;
}

Tensor Plan::keys_of(size_t step) const {
  const size_t count = size_t{NOISE_KEYS} * 2;
  Tensor tensor(Type::Int32, {NOISE_KEYS, 2});
  std::copy_n(keys.begin() + static_cast<std::ptrdiff_t>(step * count), count, tensor.data<int32_t>());
  return tensor;
}

std::vector<Tensor> Plan::pack(const std::vector<const Example *> &batch) const {
  const auto rows = static_cast<int32_t>(settings.batch), answer = static_cast<int32_t>(settings.answer),
             choices = static_cast<int32_t>(settings.choices);
  size_t length = settings.dynamic != 0 ? MIN_LENGTH : static_cast<size_t>(settings.length);
  for (const Example *example : batch) {
    length = std::max(length, example->tokens.size());
  }
  Tensor tokens(Type::Int64, {rows, static_cast<int32_t>(length)}), positions(Type::Int64, {rows, answer});
  Tensor answers(Type::Int64, {rows, answer}), mask(Type::Float, {rows, answer});
  Tensor candidates(Type::Int64, {rows, answer, choices}), candidate_mask(Type::Float, {rows, answer, choices});
  const auto t = static_cast<size_t>(answer), c = t * static_cast<size_t>(choices);
  for (size_t cell = 0; cell < candidate_mask.count(); cell += static_cast<size_t>(choices)) {
    candidate_mask.data<float>()[cell] = 1; // a row without an example has one candidate
  }
  for (size_t row = 0; row < batch.size(); ++row) {
    const Example &example = *batch[row];
    std::copy(example.tokens.begin(), example.tokens.end(), tokens.data<int64_t>() + row * length);
    std::copy(example.positions.begin(), example.positions.end(), positions.data<int64_t>() + row * t);
    std::copy(example.answers.begin(), example.answers.end(), answers.data<int64_t>() + row * t);
    std::copy(example.choices.begin(), example.choices.end(), candidates.data<int64_t>() + row * c);
    std::copy(example.choice_mask.begin(), example.choice_mask.end(), candidate_mask.data<float>() + row * c);
    std::copy(example.mask.begin(), example.mask.end(), mask.data<float>() + row * t);
  }
  if (settings.candidates != 0) {
    return {tokens, positions, candidates, candidate_mask, mask};
  }
  return {tokens, positions, answers, mask};
}

} // namespace mobizo
