#include "mutations.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <iterator>

namespace fuzz {
namespace {

constexpr int64_t EXTREMES[] = {0,         1,         -1,         -2,        -3,        2,         3,
                                7,         8,         16,         127,       128,       255,       256,
                                4096,      65535,     65536,      -1000000,  1LL << 30, 1LL << 31, 1LL << 33,
                                1LL << 40, 1LL << 50, 1LL << 62,  INT32_MAX, INT32_MIN, INT64_MAX, INT64_MIN,
                                INT32_MAX - 1,        UINT32_MAX, INT64_MAX - 1};
constexpr float REALS[] = {0.0F, -0.0F, 1e-45F, 1e38F, -1e38F, INFINITY, -INFINITY, NAN, 1.0F, -1.0F};
constexpr const char *TEXTS[] = {
    "0", "-1", "1", "9223372036854775807", "9223372036854775808", "99999999999999999999999999", "-99999999999999999999",
    "4294967296", "2147483648", "1e400", "-1e400", "1e-400", "nan", "inf", "-inf", "0x10", "1.5", "null", "true", "\"",
    "\\", "\"x\"", "{", "}", "[", "]", ",", ":", " ", "\n", "", "validation", "test", "current", "best", "rest ",
    "length ", "\"step\":", "\"total\":", "\"split\": \"validation\"", "\"loss\":", "\"max_length\":", "\"rest\":"};
constexpr char KINDS[] = {'C', 'H', 'B', 'P', 'K', 'L', 'Q', 'D', 'M', 'G', 'O', 'X', 'V', 'T', 'Z', 'S', 'E', '?', '\0'};

// A number near one that is in use, or one at an end of a type.
int64_t number(Random &random, int64_t present) {
  switch (random.below(4)) {
  case 0:
    return static_cast<int64_t>(static_cast<uint64_t>(present) + static_cast<uint64_t>(random.between(-3, 3)));
  case 1:
    return random.between(-4, 64);
  default:
    return EXTREMES[random.below(std::size(EXTREMES))];
  }
}

template <typename T> void change_number(std::string &bytes, size_t at, Random &random) {
  T value{};
  std::memcpy(&value, bytes.data() + at, sizeof value);
  value = static_cast<T>(static_cast<uint64_t>(number(random, static_cast<int64_t>(value))));
  std::memcpy(bytes.data() + at, &value, sizeof value);
}

void change_numbers(std::string &bytes, Random &random) {
  if (bytes.size() < 8) {
    return;
  }
  // Counts and settings are at the front of a record.
  const size_t most = random.chance(2) ? std::min<size_t>(bytes.size(), 136) : bytes.size();
  if (random.chance(2)) {
    change_number<int64_t>(bytes, random.below(most / 8) * 8, random);
  } else if (random.chance(4)) {
    const float value = REALS[random.below(std::size(REALS))];
    std::memcpy(bytes.data() + random.below(most / 4) * 4, &value, sizeof value);
  } else {
    change_number<int32_t>(bytes, random.below(most / 4) * 4, random);
  }
}

void repeat(std::string &bytes, Random &random) {
  if (bytes.empty()) {
    return;
  }
  const size_t from = random.below(bytes.size()), count = 1 + random.below(std::min<size_t>(64, bytes.size() - from));
  const std::string piece = bytes.substr(from, count);
  std::string more;
  for (int64_t times = random.chance(16) ? 5000 : random.between(1, 4); times > 0; --times) {
    more += piece;
  }
  bytes.insert(from, more);
}

void change_bytes(std::string &bytes, std::string_view other, Random &random) {
  const size_t at = bytes.empty() ? 0 : random.below(bytes.size());
  switch (random.below(8)) {
  case 0:
    if (!bytes.empty()) {
      bytes[at] = static_cast<char>(bytes[at] ^ (1 << random.below(8)));
    }
    break;
  case 1:
    if (!bytes.empty()) {
      bytes[at] = static_cast<char>(random.below(256));
    }
    break;
  case 2:
    bytes.resize(at);
    break;
  case 3:
    bytes.erase(at, 1 + random.below(16));
    break;
  case 4:
    repeat(bytes, random);
    break;
  case 5:
    if (!other.empty()) {
      const size_t from = random.below(other.size());
      bytes.insert(at, other.substr(from, 1 + random.below(64)));
    }
    break;
  default:
    change_numbers(bytes, random);
  }
}

// Changes a text such as JSON: a number or a name in it becomes something else, or it nests deeply.
void change_text(std::string &text, Random &random) {
  const char *const replacement = TEXTS[random.below(std::size(TEXTS))];
  if (text.empty() || random.chance(8)) {
    const size_t depth = random.chance(4) ? 20000 : 3;
    text.insert(text.empty() ? 0 : random.below(text.size()), depth, random.chance(2) ? '[' : '{');
    return;
  }
  const size_t at = text.find_first_of("0123456789", random.below(text.size()));
  if (at == std::string::npos || random.chance(3)) {
    const size_t from = random.below(text.size());
    text.replace(from, random.below(6), replacement);
    return;
  }
  const size_t end = text.find_first_not_of("0123456789.e", at);
  text.replace(at, (end == std::string::npos ? text.size() : end) - at, replacement);
}

void change_records(std::string &data, std::string_view other, Random &random) {
  std::vector<Record> records = split(data);
  const std::vector<Record> others = split(other);
  if (records.empty()) {
    change_bytes(data, other, random);
    return;
  }
  const size_t at = random.below(records.size());
  Record &record = records[at];
  switch (random.below(12)) {
  case 0:
    records.erase(records.begin() + static_cast<std::ptrdiff_t>(at));
    break;
  case 1:
    records.insert(records.begin() + static_cast<std::ptrdiff_t>(random.below(records.size() + 1)), Record(record));
    break;
  case 2:
    std::swap(record, records[random.below(records.size())]);
    break;
  case 3:
    record.kind = KINDS[random.below(std::size(KINDS))];
    break;
  case 4:
    if (!others.empty()) {
      record = others[random.below(others.size())];
    }
    break;
  case 5:
    record.number = static_cast<uint32_t>(number(random, record.number));
    break;
  case 6:
    record.payload.resize(record.payload.size() + 1 + random.below(16));
    break;
  case 7:
    if (record.payload.size() > 3) {
      record.payload.resize(record.payload.size() - 1 - random.below(4));
    }
    break;
  case 8:
    change_text(record.payload, random);
    break;
  case 9:
    change_bytes(record.payload, others.empty() ? "" : others[random.below(others.size())].payload, random);
    break;
  default:
    change_numbers(record.payload, random);
  }
  data = join(std::string(data.substr(0, data.find('\n') + 1)), records);
}

// One setting of a plan becomes another: the records after it no longer fit it.
void change_setting(std::string &data, Random &random) {
  std::vector<Record> records = split(data);
  if (records.empty() || records[0].payload.size() < 8) {
    return;
  }
  std::string &settings = records[0].payload;
  change_number<int64_t>(settings, random.below(settings.size() / 8) * 8, random);
  data = join(std::string(data.substr(0, data.find('\n') + 1)), records);
}

void change_checkpoint(std::string &data, const std::string &path, Random &random) {
  constexpr size_t HEAD = 28;
  if (data.size() < HEAD || random.chance(2)) {
    change_bytes(data, data, random);
    return;
  }
  std::string state = data.substr(HEAD);
  change_bytes(state, state, random);
  const auto step = static_cast<uint32_t>(std::strtoul(path.c_str() + path.rfind('-') + 1, nullptr, 10));
  data = checkpoint(step, state); // with the right checksum
}

void rename_checkpoint(Case &files, const std::string &path, Random &random) {
  static const char *const NAMES[] = {"step-0.bin", "step-1.bin", "step-.bin", "step-18446744073709551616.bin",
                                      "step-18446744073709551615.bin", "step--1.bin", "step-1x.bin", "step-01.bin",
                                      "step-4294967297.bin", "step.bin", ".bin", "step-1.bin.new"};
  files["checkpoints/" + std::string(NAMES[random.below(std::size(NAMES))])] = files[path];
}

void change_arguments(std::string &arguments, Random &random) {
  std::vector<std::string> list;
  for (size_t at = 0; at < arguments.size();) {
    const size_t end = arguments.find('\n', at);
    list.push_back(arguments.substr(at, end - at));
    at = end + 1;
  }
  std::string &word = list[random.below(list.size())];
  switch (random.below(4)) {
  case 0:
    word = TEXTS[random.below(std::size(TEXTS))];
    break;
  case 1:
    word = std::to_string(number(random, 1));
    break;
  case 2:
    word.clear();
    break;
  default:
    list.erase(list.begin() + static_cast<std::ptrdiff_t>(random.below(list.size())));
  }
  arguments.clear();
  for (std::string &kept : list) {
    std::replace(kept.begin(), kept.end(), '\n', ' ');
    arguments += kept + "\n";
  }
}

void change_behaviour(std::string &bytes, Random &random) {
  Behaviour behaviour;
  if (bytes.size() < sizeof behaviour || random.chance(32)) {
    bytes.resize(random.below(bytes.size() + 1));
    return;
  }
  std::memcpy(&behaviour, bytes.data(), sizeof behaviour);
  behaviour.wrong_one_in = static_cast<int32_t>(random.between(1, 20));
  behaviour.seed = static_cast<int32_t>(random.below(1 << 30));
  std::memcpy(bytes.data(), &behaviour, sizeof behaviour);
}

} // namespace

void mutate(Case &files, const Case &other, Random &random) {
  auto chosen = files.begin();
  std::advance(chosen, static_cast<std::ptrdiff_t>(random.below(files.size())));
  if (files.count("plan.bin") > 0 && random.chance(2)) {
    chosen = files.find("plan.bin"); // the largest of the inputs
  }
  const std::string path = chosen->first;
  std::string &data = chosen->second;
  const auto twin = other.find(path);
  const std::string_view spare = twin == other.end() ? std::string_view() : std::string_view(twin->second);
  const bool checkpoint = path.rfind("checkpoints/", 0) == 0;
  if (path == ARGUMENTS) {
    if (random.chance(4)) {
      change_arguments(data, random);
    }
  } else if (path == PROGRAM) {
    change_behaviour(data, random);
  } else if (random.chance(32)) {
    files.erase(chosen);
  } else if (path == "limits") {
    change_text(data, random);
  } else if (checkpoint && random.chance(4)) {
    rename_checkpoint(files, path, random);
  } else if (checkpoint) {
    change_checkpoint(data, path, random);
  } else if (path == "plan.bin" && random.chance(4)) {
    change_setting(data, random);
  } else if ((path == "plan.bin" || path == "trajectory.bin") && !random.chance(16)) {
    change_records(data, spare, random);
  } else {
    change_bytes(data, spare, random);
  }
}

} // namespace fuzz
