// mobizo-fuzz: runs the runner on valid and mutated cases until one breaks it.
//
//   mobizo-fuzz --directory DIR [--seed N] [--cases N] [--seconds N]     stops after so many cases, or so much time
//   mobizo-fuzz --directory DIR --replay KEPT                            runs one kept case
//
// A case breaks the runner if a sanitizer stops it, if it takes too long, or if it does not end as docs/runner.md says:
// with status 0, or with one error line that a person can read. The case is then in DIR/kept, and the status is not 0.
// A run of N cases is the same on every machine that has the same compiler.
#include "cases.hpp"
#include "mutations.hpp"

#include <sanitizer/common_interface_defs.h>

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <unistd.h>

#include <algorithm>
#include <bitset>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <iterator>
#include <memory>
#include <stdexcept>

int run_runner(int count, char **arguments);

namespace {

namespace fs = std::filesystem;
using fuzz::Case;
using fuzz::Random;

constexpr size_t BLOCKS = 1 << 20;        // bytes of the program's code that are distinguished
constexpr size_t MOST_KEPT = 4000;        // cases to mutate further
constexpr size_t MOST_BYTES = 1 << 20;    // of a file of a case
constexpr int CASE_SECONDS = 20;          // of processor time

std::bitset<BLOCKS> reached;
size_t fresh = 0; // blocks that this case was the first to reach
bool following = false;
uint64_t ticks = 0; // milliseconds

std::string directory;
const Case *present = nullptr;
uint64_t number = 0;

extern "C" char __executable_start;

// What the runner wrote, and with which status it ended.
struct Outcome {
  int status = 0;
  std::string output;
};

void write_case(const Case &files, const fs::path &path) {
  fs::remove_all(path);
  fs::create_directories(path);
  for (const auto &[name, data] : files) {
    fs::create_directories((path / name).parent_path());
    std::ofstream(path / name, std::ios::binary) << data;
  }
}

Case read_case(const fs::path &path) {
  Case files;
  for (const fs::directory_entry &entry : fs::recursive_directory_iterator(path)) {
    if (entry.is_regular_file()) {
      std::ifstream file(entry.path(), std::ios::binary);
      files[fs::relative(entry.path(), path).string()] = {std::istreambuf_iterator<char>(file), {}};
    }
  }
  return files;
}

void keep_case() {
  following = false;
  if (present != nullptr) {
    write_case(*present, fs::path(directory) / "kept");
    std::fprintf(stderr, "case %llu breaks the runner; it is in %s/kept\n", static_cast<unsigned long long>(number),
                 directory.c_str());
  }
}

void took_too_long(int) {
  std::fprintf(stderr, "the case takes more than %d s\n", CASE_SECONDS);
  std::abort();
}

void set_timer(int seconds) {
  const itimerval timer{{0, 0}, {seconds, 0}};
  setitimer(ITIMER_PROF, &timer, nullptr);
}

std::string contents(int descriptor) {
  std::string data(static_cast<size_t>(lseek(descriptor, 0, SEEK_END)), '\0');
  if (pread(descriptor, data.data(), data.size(), 0) != static_cast<ssize_t>(data.size())) {
    throw std::runtime_error("the output is gone");
  }
  return data;
}

Outcome run_case(const Case &files) {
  const fs::path path = fs::path(directory) / "run";
  write_case(files, path);
  std::vector<std::string> arguments{"mobizo-runner"};
  if (const auto lines = files.find(fuzz::ARGUMENTS); lines != files.end()) {
    for (size_t at = 0, end = 0; (end = lines->second.find('\n', at)) != std::string::npos; at = end + 1) {
      std::string word = lines->second.substr(at, end - at);
      arguments.push_back(!word.empty() && word[0] == '@' ? path.string() + word.substr(1) : word);
    }
  }
  std::vector<char *> pointers;
  for (std::string &word : arguments) {
    pointers.push_back(word.data());
  }
  pointers.push_back(nullptr);
  // The runner's standard streams are files of this case's own.
  const int saved_in = dup(0), saved_out = dup(1), saved_err = dup(2);
  __sanitizer_set_report_fd(reinterpret_cast<void *>(static_cast<intptr_t>(saved_err)));
  const int in = memfd_create("in", 0), out = memfd_create("out", 0), err = memfd_create("err", 0);
  if (const auto request = files.find(fuzz::REQUEST); request != files.end()) {
    if (pwrite(in, request->second.data(), request->second.size(), 0) < 0) {
      throw std::runtime_error("no request could be written");
    }
  }
  dup2(in, 0);
  dup2(out, 1);
  dup2(err, 2);
  Outcome outcome;
  set_timer(CASE_SECONDS);
  ticks = 0;
  following = true;
  outcome.status = run_runner(static_cast<int>(arguments.size()), pointers.data());
  following = false;
  set_timer(0);
  std::fflush(stdout);
  std::fflush(stderr);
  outcome.output = contents(out);
  dup2(saved_in, 0);
  dup2(saved_out, 1);
  dup2(saved_err, 2);
  __sanitizer_set_report_fd(reinterpret_cast<void *>(intptr_t{2}));
  close_range(3, ~0U, 0); // the run's lock too
  return outcome;
}

// Whether a text begins with a JSON value; `at` is moved behind it.
bool is_value(std::string_view text, size_t &at);

bool is_text(std::string_view text, size_t &at) {
  for (++at; at < text.size() && text[at] != '"'; ++at) {
    if (static_cast<unsigned char>(text[at]) < 0x20) {
      return false;
    }
    at += text[at] == '\\' ? 1 : 0;
  }
  return at++ < text.size();
}

bool is_list(std::string_view text, size_t &at, bool named) {
  const char end = named ? '}' : ']';
  for (++at; at < text.size() && text[at] != end;) {
    if (named && (text[at] != '"' || !is_text(text, at) || text.substr(at, 2) != ": ")) {
      return false;
    }
    at += named ? 2 : 0;
    if (!is_value(text, at)) {
      return false;
    }
    at += text.substr(at, 2) == ", " ? 2 : 0;
  }
  return at++ < text.size();
}

bool is_value(std::string_view text, size_t &at) {
  if (at >= text.size()) {
    return false;
  }
  if (text[at] == '"') {
    return is_text(text, at);
  }
  if (text[at] == '{' || text[at] == '[') {
    return is_list(text, at, text[at] == '{');
  }
  for (const std::string_view word : {"true", "false", "null"}) {
    if (text.substr(at, word.size()) == word) {
      at += word.size();
      return true;
    }
  }
  const size_t first = at + (text[at] == '-' ? 1 : 0);
  at = std::min(text.find_first_not_of("0123456789.e+-", at), text.size());
  return at > first && text[first] >= '0' && text[first] <= '9';
}

bool is_json(std::string_view line) {
  size_t at = 0;
  return !line.empty() && line[0] == '{' && is_value(line, at) && at == line.size();
}

// Why the outcome of a case is none that docs/runner.md knows; empty if it is one.
std::string fault(const Case &files, const Outcome &outcome, bool valid) {
  static const std::string CODES[] = {"runtime-failed", "diverged", "does-not-fit"};
  static const std::string VAGUE[] = {"_M_", "vector", "basic_", "std::", "map::", "bad_", "::at", "stoi", "Success"};
  const auto arguments = files.find(fuzz::ARGUMENTS);
  const bool serves = arguments != files.end() && arguments->second.rfind("serve\n", 0) == 0;
  if (outcome.status < 0 || outcome.status > 2) {
    return "the status is " + std::to_string(outcome.status);
  }
  if (valid && outcome.status != 0) {
    return "a valid case fails";
  }
  if (serves) {
    return "";
  }
  std::string last;
  for (size_t at = 0; at < outcome.output.size();) {
    const size_t end = std::min(outcome.output.find('\n', at), outcome.output.size());
    last = outcome.output.substr(at, end - at);
    at = end + 1;
    if (!is_json(last)) {
      return "a line is no JSON";
    }
  }
  if (outcome.status == 0 && last.rfind("{\"error\"", 0) == 0) {
    return "an error has status 0";
  }
  if (outcome.status == 1) {
    const bool known = std::any_of(std::begin(CODES), std::end(CODES), [&last](const std::string &code) {
      return last.rfind("{\"error\": {\"code\": \"" + code + "\"", 0) == 0;
    });
    if (!known) {
      return "a failure has no error line";
    }
    for (const std::string &text : VAGUE) {
      if (last.find(text) != std::string::npos) {
        return "the error says nothing to a person";
      }
    }
  }
  return "";
}

Outcome check_case(const Case &files, bool valid) {
  present = &files;
  Outcome outcome = run_case(files);
  if (const std::string why = fault(files, outcome, valid); !why.empty()) {
    std::fprintf(stderr, "%s: status %d, output\n%s\n", why.c_str(), outcome.status, outcome.output.c_str());
    keep_case();
    std::exit(1);
  }
  present = nullptr;
  return outcome;
}

struct Budget {
  uint64_t seed = 1, cases = 0;
  double seconds = 0;
};

int search(const Budget &budget) {
  using Clock = std::chrono::steady_clock;
  const Clock::time_point began = Clock::now();
  const auto spent = [began] { return std::chrono::duration<double>(Clock::now() - began).count(); };
  Random random(budget.seed);
  std::vector<Case> corpus;
  uint64_t statuses[3] = {};
  double reported_at = 0;
  for (number = 0; budget.cases > 0 ? number < budget.cases : spent() < budget.seconds; ++number) {
    const bool valid = number % 16 == 0;
    const bool known = !valid && !corpus.empty() && !random.chance(3);
    Case files = known ? corpus[random.below(corpus.size())] : valid_case(random);
    if (!valid) {
      const Case other = corpus.empty() ? files : corpus[random.below(corpus.size())];
      for (int64_t changes = random.chance(2) ? 1 : random.between(1, 5); changes > 0 && !files.empty(); --changes) {
        mutate(files, other, random);
      }
    }
    for (auto &[name, data] : files) {
      data.resize(std::min(data.size(), MOST_BYTES));
    }
    fresh = 0;
    const Outcome outcome = check_case(files, valid);
    ++statuses[outcome.status];
    if (fresh > 0) {
      if (corpus.size() < MOST_KEPT) {
        corpus.push_back(files);
      } else {
        corpus[random.below(corpus.size())] = files;
      }
    }
    if (spent() - reported_at > 30) {
      reported_at = spent();
      std::fprintf(stderr, "%llu cases, %zu blocks, %.0f s\n", static_cast<unsigned long long>(number),
                   reached.count(), reported_at);
    }
  }
  std::printf("{\"cases\": %llu, \"completed\": %llu, \"failed\": %llu, \"usage\": %llu, \"blocks\": %zu, "
              "\"corpus\": %zu, \"seconds\": %.1f}\n",
              static_cast<unsigned long long>(number), static_cast<unsigned long long>(statuses[0]),
              static_cast<unsigned long long>(statuses[1]), static_cast<unsigned long long>(statuses[2]),
              reached.count(), corpus.size(), spent());
  return 0;
}

} // namespace

extern "C" {

// Called by each block of the runner's code.
void __sanitizer_cov_trace_pc() {
  if (following) {
    const auto offset = static_cast<size_t>(static_cast<char *>(__builtin_return_address(0)) - &__executable_start);
    fresh += reached[offset % BLOCKS] ? 0 : 1;
    reached[offset % BLOCKS] = true;
  }
}

const char *__asan_default_options() { return "handle_abort=1:allocator_may_return_null=1"; }
const char *__ubsan_default_options() { return "print_stacktrace=1"; }

// While a case runs, each look at the clock takes a millisecond: what the runner prints must depend on the case alone.
int clock_gettime(clockid_t clock, timespec *time) {
  if (!following) {
    return static_cast<int>(syscall(SYS_clock_gettime, clock, time));
  }
  ++ticks;
  *time = {static_cast<time_t>(ticks / 1000), static_cast<long>(ticks % 1000 * 1000000)};
  return 0;
}

int fsync(int) { return 0; } // nothing of a case must survive a power cut

// A pause asks the runner to stop, as nobody waits for it.
int nanosleep(const timespec *, timespec *) { return std::raise(SIGTERM); }
int clock_nanosleep(clockid_t, int, const timespec *, timespec *) { return std::raise(SIGTERM); }
}

int main(int count, char **arguments) {
  Budget budget;
  std::string replayed;
  for (int at = 1; at + 1 < count; at += 2) {
    const std::string name = arguments[at], value = arguments[at + 1];
    if (name == "--directory") {
      directory = fs::absolute(value).string();
    } else if (name == "--seed") {
      budget.seed = std::stoull(value);
    } else if (name == "--cases") {
      budget.cases = std::stoull(value);
    } else if (name == "--seconds") {
      budget.seconds = std::stod(value);
    } else if (name == "--replay") {
      replayed = value;
    }
  }
  if (directory.empty() || (budget.cases == 0 && budget.seconds <= 0 && replayed.empty())) {
    std::fprintf(stderr, "usage: mobizo-fuzz --directory DIR [--seed N] --cases N | --seconds N | --replay KEPT\n");
    return 2;
  }
  std::signal(SIGPROF, took_too_long);
  __sanitizer_set_death_callback(keep_case);
  if (!replayed.empty()) {
    const Outcome outcome = check_case(read_case(replayed), false);
    std::printf("%s\nstatus %d\n", outcome.output.c_str(), outcome.status);
    return 0;
  }
  return search(budget);
}
