// What the fuzzer runs: the files of a run's directory, and a command line.
#pragma once

#include <cstdint>
#include <map>
#include <random>
#include <string>
#include <string_view>
#include <vector>

namespace fuzz {

// Random numbers that are the same on every machine.
class Random {
public:
  explicit Random(uint64_t seed) : engine_(seed) {}

  uint64_t next() { return engine_(); }
  int64_t between(int64_t least, int64_t most) {
    return least + static_cast<int64_t>(next() % static_cast<uint64_t>(most - least + 1));
  }
  bool chance(unsigned one_in) { return next() % one_in == 0; }
  size_t below(size_t count) { return static_cast<size_t>(next() % count); }

private:
  std::mt19937_64 engine_;
};

// Names of the files that are not the runner's own: its command line, its standard input, and the double's behaviour.
inline constexpr const char *ARGUMENTS = "arguments", *REQUEST = "request", *PROGRAM = "program";

// How the double of the program behaves: the bytes of the file PROGRAM.
struct Behaviour {
  int32_t size = 1, state = 1, width = 0, vocabulary = 2; // D, M, hidden width, tokens
  int32_t stop_after = 0;                                 // SIGTERM in the call with this number; 0: never
  int32_t wrong_one_in = 0;                               // how often an output is wrong; 0: never
  int32_t seed = 0;
  int32_t overrun = 0; // reads beyond the end of an input, which the sanitizers must notice
};

// Content by path in the run's directory. ARGUMENTS has one command-line argument per line; @ stands for the directory.
using Case = std::map<std::string, std::string>;

struct Record {
  char kind = 0;
  uint32_t number = 0;
  std::string payload;
};

template <typename T> void put(std::string &bytes, T value) {
  bytes.append(reinterpret_cast<const char *>(&value), sizeof value);
}

// Whole frames with right checksums after a file's first line.
std::vector<Record> split(std::string_view data);
std::string join(std::string_view first_line, const std::vector<Record> &records);

std::string checkpoint(uint32_t step, std::string_view state);

// A case that the runner completes with status 0.
Case valid_case(Random &random);

} // namespace fuzz
