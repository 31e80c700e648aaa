// mobizo-runner: the commands, and the client's end of a served program (docs/runner.md).
#include "connection.hpp"
#include "program.hpp"

#ifdef __GLIBC__
#include <malloc.h>
#endif
#include <getopt.h>
#include <poll.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <map>
#include <memory>
#include <new>
#include <thread>

namespace mobizo {
namespace {

constexpr int FAILED = 1, USAGE = 2; // exit statuses
constexpr int PROTOCOL = 1;          // version of the protocol of `serve`

constexpr const char *HELP = "mobizo-runner version\n"
                             "mobizo-runner serve --program P.pte --weights W.ptd [--packed FILE] [--resident]\n";

constexpr const char *USAGE_METHOD = "$usage"; // answers the memory and the load time of this process
constexpr int LARGE_BLOCK = 128 << 10;         // bytes

std::atomic<bool> calling{false};   // the main thread loads or runs a method, so it does not see the input end
std::atomic<bool> gone{false};      // the client closed its end
std::atomic<bool> answering{false}; // a part of an answer may have been written

// Sets a flag for as long as the object lives.
class Setting {
public:
  explicit Setting(std::atomic<bool> &flag) : flag_(flag) { flag_ = true; }
  ~Setting() { flag_ = false; }

private:
  std::atomic<bool> &flag_;
};

// Exits when the client goes away during a call, which may take minutes. Consumes no input.
void watch_client() {
  std::thread([] {
    pollfd input{0, POLLRDHUP, 0};
    while (poll(&input, 1, -1) <= 0) { // interrupted
    }
    gone = true;
    if (calling) {
      _exit(FAILED);
    }
  }).detach();
}

// Begins no call for a client that went away. `calling` is set before: either this thread or the other one sees it.
void check_client() {
  if (gone) {
    _exit(FAILED);
  }
}

// SIGBUS: a page of a mapped file cannot be read, because the file was truncated or the disk fails.
void answer_lost_page(int) {
  constexpr char TEXT[] = "a file of the program was truncated or cannot be read";
  constexpr uint32_t LENGTH = sizeof TEXT - 1;
  static std::atomic_flag handled = ATOMIC_FLAG_INIT;
  while (handled.test_and_set()) {
    pause(); // another thread answers and exits
  }
  if (!answering) {
    char answer[1 + sizeof LENGTH + LENGTH];
    answer[0] = static_cast<char>(Status::FileUnreadable);
    std::memcpy(answer + 1, &LENGTH, sizeof LENGTH);
    std::memcpy(answer + 1 + sizeof LENGTH, TEXT, LENGTH);
    (void)!write(1, answer, sizeof answer);
  }
  _exit(FAILED);
}

// Returns a size that /proc/self/status states in KiB, in bytes.
int64_t status_bytes(const std::string &name) {
  std::ifstream status("/proc/self/status");
  for (std::string word; status >> word;) {
    if (word == name) {
      int64_t kibibytes = 0;
      status >> kibibytes;
      return kibibytes * 1024;
    }
  }
  return 0;
}

// int64 (3,): resident bytes, peak resident bytes, microseconds spent loading methods.
Tensor usage(const Program &program) {
  const auto load_time = std::chrono::duration_cast<std::chrono::microseconds>(program.load_time());
  const int64_t values[] = {status_bytes("VmRSS:"), status_bytes("VmHWM:"), load_time.count()};
  Tensor tensor{Type::Int64, {3}, std::vector<uint8_t>(sizeof values)};
  std::memcpy(tensor.bytes.data(), values, sizeof values);
  return tensor;
}

// Answers with the exception that is being handled.
void answer_exception(Connection &connection) {
  const Setting set(answering);
  try {
    throw;
  } catch (const ExecutorError &error) {
    connection.answer_error(error.status, error.what());
  } catch (const std::bad_alloc &) {
    connection.answer_error(Status::OutOfMemory, "memory ran out");
  } catch (const std::exception &error) {
    connection.answer_error(Status::Failed, error.what());
  }
}

void answer(Connection &connection, const std::vector<Tensor> &outputs) {
  const Setting set(answering);
  connection.answer(outputs);
}

// Answers requests until standard input ends. Ends the process at once if the client goes away during a call, or if a
// page of a file cannot be read. Returns whether the program was loaded and all requests were well-formed. The arguments
// are those of `Program`.
bool serve(const std::string &path, const std::string &weights, const std::string &packed, bool resident) {
#ifdef __GLIBC__
  if (!resident) {
    // Freed tensors return to the system at once. By default the heap keeps blocks as large as the largest freed one.
    mallopt(M_MMAP_THRESHOLD, LARGE_BLOCK);
  }
#endif
  watch_client();
  std::signal(SIGBUS, answer_lost_page);
  Connection connection(stdin, stdout);
  std::unique_ptr<Program> program;
  try {
    const Setting set(calling);
    check_client();
    program = std::make_unique<Program>(path, weights, packed, resident);
  } catch (...) {
    answer_exception(connection);
    return false;
  }
  answer(connection, {});
  for (;;) {
    std::optional<Request> request;
    try {
      request = connection.read_request();
    } catch (...) {
      answer_exception(connection); // the start of the next request is unknown
      return false;
    }
    if (!request) {
      return true;
    }
    std::vector<Tensor> outputs;
    try {
      const Setting set(calling);
      check_client();
      outputs = request->method == USAGE_METHOD ? std::vector<Tensor>{usage(*program)}
                                                : program->call(request->method, request->inputs);
    } catch (...) {
      answer_exception(connection);
      continue;
    }
    answer(connection, outputs);
  }
}

int refuse(const std::string &why) {
  std::fprintf(stderr, "mobizo-runner: %s\n%s", why.c_str(), HELP);
  return USAGE;
}

int run(int count, char **arguments) {
  if (count < 2) {
    return refuse("a command is missing");
  }
  const std::string command = arguments[1];
  const option options[] = {{"program", required_argument, nullptr, 'p'},
                            {"weights", required_argument, nullptr, 'w'},
                            {"packed", required_argument, nullptr, 'k'},
                            {"resident", no_argument, nullptr, 'r'},
                            {}};
  std::map<int, std::string> values; // by the options' letters
  optind = 2;                        // after the command
  for (int found; (found = getopt_long(count, arguments, "", options, nullptr)) != -1;) {
    if (found == '?') { // getopt_long has named the fault
      std::fputs(HELP, stderr);
      return USAGE;
    }
    values[found] = optarg == nullptr ? "" : optarg;
  }
  if (optind < count) {
    return refuse("unexpected argument " + std::string(arguments[optind]));
  }
  if (command == "version") {
    std::printf("{\"version\": \"%s\", \"executorch\": \"%s\", \"protocol\": %d}\n", MOBIZO_VERSION, EXECUTORCH_BUILD,
                PROTOCOL);
    return 0;
  }
  if (command != "serve") {
    return refuse("unknown command " + command);
  }
  if (values['p'].empty() || values['w'].empty()) {
    return refuse("serve needs --program and --weights");
  }
  return serve(values['p'], values['w'], values['k'], values.count('r') != 0) ? 0 : FAILED;
}

} // namespace
} // namespace mobizo

int main(int count, char **arguments) {
  std::signal(SIGPIPE, SIG_IGN);
  try {
    return mobizo::run(count, arguments);
  } catch (const std::exception &error) {
    std::fprintf(stderr, "mobizo-runner: %s\n", error.what());
    return mobizo::FAILED;
  }
}
