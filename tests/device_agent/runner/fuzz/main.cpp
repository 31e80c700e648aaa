// Reads cases as `mobizo-runner serve` reads its standard input: mobizo-fuzz CASES ANSWERS [--overrun]
//
// CASES has for each case its length (uint32) and its bytes. ANSWERS gets for each case whether all its requests are
// well-formed (uint8), and the length (uint32) and the bytes of the answers, which repeat the requests' tensors. The
// program ends at a finding and names its case: a sanitizer's report, an exception that is not an ExecutorError, a tensor
// whose bytes do not match its shape, more memory than Connection::read_request promises, or more than 20 s.
// --overrun: with a deliberate fault. It is the runner's connection.cpp with this file, compiled by GCC (test_fuzz.py).
#include "connection.hpp"

#include <sanitizer/common_interface_defs.h>

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <new>
#include <string>

namespace {

constexpr unsigned CASE_SECONDS = 20;
constexpr size_t OVERHEAD = (size_t{1} << 20) + (size_t{1} << 17); // bytes: the first piece, the buffer, small objects

size_t present_case = 0;
size_t allocated = 0, peak = 0; // bytes by operator new

[[noreturn]] void report(const char *finding) {
  std::fprintf(stderr, "%s\n", finding);
  std::abort();
}

void check(const mobizo::Request &request, bool overrun) {
  for (const mobizo::Tensor &tensor : request.inputs) {
    size_t size = mobizo::size_of(tensor.type);
    for (const int32_t length : tensor.shape) {
      size *= static_cast<size_t>(length);
    }
    if (size != tensor.bytes.size()) {
      report("a tensor's bytes do not match its shape");
    }
    if (overrun) {
      volatile const uint8_t byte = tensor.bytes.data()[size];
      (void)byte;
    }
  }
}

// Returns whether all requests are well-formed.
bool run_case(std::FILE *input, std::FILE *output, size_t size, bool overrun) {
  const auto check_memory = [size, before = allocated] {
    if (peak - before > 3 * size + OVERHEAD) {
      report("the reader took more memory than it promises");
    }
  };
  try {
    mobizo::Connection connection(input, output);
    for (;;) {
      peak = allocated;
      const auto request = connection.read_request();
      check_memory();
      if (!request) {
        return true;
      }
      check(*request, overrun);
      connection.answer(request->inputs);
    }
  } catch (const mobizo::ExecutorError &) {
    check_memory();
    return false;
  }
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

int main(int, char **arguments) {
  std::ifstream cases(arguments[1], std::ios::binary);
  std::ofstream answers(arguments[2], std::ios::binary);
  std::signal(SIGALRM, [](int) { report("the case takes more than 20 s"); });
  __sanitizer_set_death_callback([] { std::fprintf(stderr, "in case %zu\n", present_case); });
  for (uint32_t size = 0; cases.read(reinterpret_cast<char *>(&size), sizeof size); ++present_case) {
    std::string bytes(size, '\0');
    cases.read(bytes.data(), size);
    const int input = memfd_create("input", 0), output = memfd_create("output", 0);
    if (pwrite(input, bytes.data(), size, 0) != static_cast<ssize_t>(size)) {
      report("the case cannot be written");
    }
    alarm(CASE_SECONDS);
    std::FILE *const requests = fdopen(input, "rb"), *const sent = fdopen(output, "wb");
    const bool complete = run_case(requests, sent, size, arguments[3] != nullptr);
    alarm(0);
    const auto length = static_cast<uint32_t>(lseek(output, 0, SEEK_END));
    std::string answer(length, '\0');
    if (pread(output, answer.data(), length, 0) != static_cast<ssize_t>(length)) {
      report("the answer cannot be read");
    }
    answers.put(complete ? 1 : 0).write(reinterpret_cast<const char *>(&length), sizeof length) << answer;
    std::fclose(requests);
    std::fclose(sent);
  }
  return 0;
}
