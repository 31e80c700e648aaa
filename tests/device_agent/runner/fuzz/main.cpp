// mobizo-fuzz: reads valid and mutated requests as `mobizo-runner serve` does, until one breaks the reader.
//
//   mobizo-fuzz --directory DIR [--seed N] --cases N | --seconds N     stops after so many cases, or so much time
//   mobizo-fuzz --directory DIR --replay CASE [--overrun]              runs one case; --overrun: with a deliberate fault
//
// A case is the content of standard input. A finding is a sanitizer's report, an exception that is not an ExecutorError,
// a tensor whose bytes do not match its shape, more memory than Connection::read_request promises, more than 20 s, or a
// valid case that is not read back to the byte. The case is then in DIR/kept, and the exit status is not 0. The program
// is the runner's connection.cpp with this file, compiled by GCC (test_fuzz.py).
#include "connection.hpp"

#include <sanitizer/common_interface_defs.h>

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <new>
#include <random>
#include <string>
#include <vector>

namespace {

using mobizo::Connection;
using mobizo::Request;
using mobizo::Tensor;

constexpr int CASE_SECONDS = 20;
constexpr size_t OVERHEAD = (size_t{1} << 20) + (size_t{1} << 17); // bytes: the first piece, the buffer, small objects
constexpr size_t MAX_CORPUS = 200;

std::string directory;
const std::string *present_case = nullptr;
size_t allocated = 0, peak = 0; // bytes by operator new

class Random {
public:
  explicit Random(uint64_t seed) : engine_(seed) {}

  size_t below(size_t count) { return static_cast<size_t>(engine_() % count); }
  bool one_in(size_t count) { return below(count) == 0; }
  uint8_t byte() { return static_cast<uint8_t>(engine_()); }
  // A number near a limit of the protocol or of its type.
  uint32_t number() {
    constexpr uint32_t NUMBERS[] = {0,  1,  3,         8,         9,         16,        17,
                                    64, 65, 1U << 20U, 1U << 30U, INT32_MAX, 1U << 31U, UINT32_MAX};
    return NUMBERS[below(std::size(NUMBERS))];
  }

private:
  std::mt19937_64 engine_;
};

void put(std::string &bytes, uint32_t number) { bytes.append(reinterpret_cast<const char *>(&number), sizeof number); }

std::string tensors(Random &random) {
  std::string bytes;
  const size_t count = random.below(5);
  put(bytes, static_cast<uint32_t>(count));
  for (size_t at = 0; at < count; ++at) {
    const size_t type = random.below(3), rank = random.below(4);
    size_t size = type == 1 ? 8 : 4;
    bytes += static_cast<char>(type);
    put(bytes, static_cast<uint32_t>(rank));
    for (size_t axis = 0; axis < rank; ++axis) {
      const size_t length = random.one_in(200) ? 2000 : random.below(9);
      put(bytes, static_cast<uint32_t>(length));
      size *= length;
    }
    for (; size > 0; --size) {
      bytes += static_cast<char>(random.byte());
    }
  }
  return bytes;
}

std::string valid_case(Random &random) {
  std::string bytes;
  for (size_t requests = random.below(6); requests > 0; --requests) {
    const std::string method(random.below(65), 'm');
    put(bytes, static_cast<uint32_t>(method.size()));
    bytes += method + tensors(random);
  }
  return bytes;
}

void mutate(std::string &bytes, const std::string &other, Random &random) {
  const size_t at = random.below(bytes.size() + 1), count = random.below(std::min<size_t>(bytes.size() - at, 40) + 1);
  const uint32_t number = random.number();
  switch (random.below(5)) {
  case 0:
    bytes.resize(at);
    break;
  case 1:
    bytes.erase(at, count);
    break;
  case 2:
    bytes.insert(at, other, random.below(other.size() + 1), 40);
    break;
  case 3:
    std::generate_n(bytes.begin() + static_cast<std::ptrdiff_t>(at), count, [&random] { return random.byte(); });
    break;
  default:
    std::memcpy(bytes.data() + at, &number, std::min(bytes.size() - at, sizeof number));
  }
}

[[noreturn]] void report(const char *finding) {
  std::fprintf(stderr, "%s\n", finding);
  std::abort();
}

void keep_case() {
  if (present_case != nullptr) {
    std::ofstream(directory + "/kept", std::ios::binary) << *present_case;
    std::fprintf(stderr, "the case is in %s/kept\n", directory.c_str());
  }
}

void check(const Request &request, size_t case_size) {
  size_t total = 0;
  for (const Tensor &tensor : request.inputs) {
    size_t size = mobizo::size_of(tensor.type);
    for (const int32_t length : tensor.shape) {
      size *= static_cast<size_t>(length);
    }
    total += size;
    if (size != tensor.bytes.size()) {
      report("a tensor's bytes do not match its shape");
    }
  }
  if (total > case_size) {
    report("the request has more bytes than arrived");
  }
}

std::string contents(int descriptor) {
  std::string data(static_cast<size_t>(lseek(descriptor, 0, SEEK_END)), '\0');
  if (pread(descriptor, data.data(), data.size(), 0) != static_cast<ssize_t>(data.size())) {
    report("the answer cannot be read");
  }
  return data;
}

// Returns whether all requests are well-formed.
bool run_case(const std::string &bytes, bool valid, bool overrun) {
  present_case = &bytes;
  const int input = memfd_create("input", 0), output = memfd_create("output", 0);
  if (pwrite(input, bytes.data(), bytes.size(), 0) != static_cast<ssize_t>(bytes.size())) {
    report("the case cannot be written");
  }
  const size_t before = allocated;
  peak = allocated;
  alarm(CASE_SECONDS);
  bool complete = false;
  std::string expected; // the answers: an answer with a request's tensors has the bytes of the request after the name
  try {
    Connection connection(input, output);
    for (off_t start = 0;; start = lseek(input, 0, SEEK_CUR)) {
      const auto request = connection.read_request();
      if (!request) {
        break;
      }
      check(*request, bytes.size());
      if (overrun && !request->inputs.empty()) {
        volatile const uint8_t byte = request->inputs[0].bytes.data()[request->inputs[0].bytes.size()];
        (void)byte;
      }
      if (valid) {
        connection.answer(request->inputs);
        const size_t tensors = static_cast<size_t>(start) + sizeof(uint32_t) + request->method.size();
        expected += '\0' + bytes.substr(tensors, static_cast<size_t>(lseek(input, 0, SEEK_CUR)) - tensors);
      }
    }
    complete = true;
  } catch (const mobizo::ExecutorError &) {
  }
  alarm(0);
  if (!valid && peak - before > 3 * bytes.size() + OVERHEAD) {
    report("the reader took more memory than it promises");
  }
  if (valid && (!complete || contents(output) != expected)) {
    report("a valid case is not read back to the byte");
  }
  close(input);
  close(output);
  present_case = nullptr;
  return complete;
}

int search(uint64_t seed, uint64_t cases, double seconds) {
  using Clock = std::chrono::steady_clock;
  const Clock::time_point start = Clock::now();
  const auto spent = [start] { return std::chrono::duration<double>(Clock::now() - start).count(); };
  Random random(seed);
  std::vector<std::string> corpus{""};
  uint64_t number = 0, completed = 0;
  for (; cases > 0 ? number < cases : spent() < seconds; ++number) {
    const bool valid = number % 4 == 0;
    std::string bytes = valid ? valid_case(random) : corpus[random.below(corpus.size())];
    if (valid) {
      if (corpus.size() < MAX_CORPUS) {
        corpus.push_back(bytes);
      } else {
        corpus[random.below(corpus.size())] = bytes;
      }
    }
    for (size_t changes = valid ? 0 : 1 + random.below(4); changes > 0; --changes) {
      mutate(bytes, corpus[random.below(corpus.size())], random);
    }
    completed += run_case(bytes, valid, false) ? 1 : 0;
  }
  std::printf("{\"cases\": %llu, \"completed\": %llu}\n", static_cast<unsigned long long>(number),
              static_cast<unsigned long long>(completed));
  return 0;
}

} // namespace

void *operator new(size_t size) {
  auto *memory = static_cast<size_t *>(std::malloc(size + 2 * sizeof(size_t)));
  if (memory == nullptr) {
    throw std::bad_alloc();
  }
  *memory = size;
  allocated += size;
  peak = std::max(peak, allocated);
  return memory + 2; // aligned like malloc's
}

void operator delete(void *memory) noexcept {
  if (memory != nullptr) {
    allocated -= static_cast<size_t *>(memory)[-2];
    std::free(static_cast<size_t *>(memory) - 2);
  }
}

void operator delete(void *memory, size_t) noexcept { operator delete(memory); }

extern "C" const char *__asan_default_options() { return "handle_abort=1"; }
extern "C" const char *__ubsan_default_options() { return "print_stacktrace=1"; }

int main(int count, char **arguments) {
  uint64_t seed = 1, cases = 0;
  double seconds = 0;
  std::string replayed;
  bool overrun = false;
  for (int at = 1; at < count; ++at) {
    const std::string name = arguments[at], value = at + 1 < count ? arguments[at + 1] : "";
    at += name == "--overrun" ? 0 : 1;
    if (name == "--directory") {
      directory = value;
    } else if (name == "--seed") {
      seed = std::stoull(value);
    } else if (name == "--cases") {
      cases = std::stoull(value);
    } else if (name == "--seconds") {
      seconds = std::stod(value);
    } else if (name == "--replay") {
      replayed = value;
    } else if (name == "--overrun") {
      overrun = true;
    }
  }
  if (directory.empty() || (cases == 0 && seconds <= 0 && replayed.empty())) {
    std::fprintf(stderr, "usage: mobizo-fuzz --directory DIR [--seed N] --cases N | --seconds N | --replay CASE\n");
    return 2;
  }
  std::signal(SIGALRM, [](int) { report("the case takes more than 20 s"); });
  __sanitizer_set_death_callback(keep_case);
  if (!replayed.empty()) {
    std::ifstream file(replayed, std::ios::binary);
    const std::string bytes{std::istreambuf_iterator<char>(file), {}};
    std::printf("%s\n", run_case(bytes, false, overrun) ? "all requests are well-formed" : "a request is malformed");
    return 0;
  }
  return search(seed, cases, seconds);
}
