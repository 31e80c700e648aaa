// mobizo-runner: the commands (docs/runner.md).
#include "frames.hpp"
#include "generate.hpp"
#include "gradient_trainer.hpp"
#include "plan.hpp"
#include "report.hpp"
#include "score.hpp"
#include "serve.hpp"
#include "trainer.hpp"

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <set>
#include <stdexcept>
#include <system_error>
#include <thread>

namespace {

using namespace mobizo;

constexpr int FAILED = 1, USAGE = 2, ORPHANED = 3; // exit statuses

constexpr const char *HELP =
    "mobizo-runner version\n"
    "mobizo-runner train --program P.pte --weights W.ptd --run DIR [--attached] [--packed FILE]\n"
    "mobizo-runner score --program P.pte --weights W.ptd --run DIR --adapter B.f32 --split validation|test\n"
    "mobizo-runner generate --program I.pte --weights W.ptd --adapter B.f32 --tokens 1,2,3 --most N --length S "
    "--context C\n"
    "mobizo-runner serve --program P.pte --weights W.ptd [--packed FILE]\n";

struct Usage : std::runtime_error {
  using std::runtime_error::runtime_error;
};

volatile std::sig_atomic_t asked_to_stop = 0;

void ask_to_stop(int) { asked_to_stop = 1; }

// A page of a mapped file cannot be read: the file was cut, or the disk fails.
void report_lost_page(int) {
  constexpr char LINE[] =
      "{\"error\": {\"code\": \"runtime-failed\", \"detail\": \"a file of the program was cut or cannot be read while it "
      "is in use; the run resumes where it stopped, once the program is downloaded again\"}}\n";
  (void)!write(1, LINE, sizeof LINE - 1);
  _exit(FAILED);
}

class Options {
public:
  Options(int count, char **arguments) {
    for (int at = 2; at < count; ++at) {
      const std::string name = arguments[at];
      if (name == "--attached") {
        flags_.insert(name);
      } else if (name.rfind("--", 0) == 0 && at + 1 < count) {
        values_[name] = arguments[++at];
      } else {
        throw Usage("what is " + name + "?");
      }
    }
  }

  bool flag(const std::string &name) const { return flags_.count(name) > 0; }

  const std::string &operator[](const std::string &name) const {
    const auto option = values_.find(name);
    if (option == values_.end()) {
      throw Usage(name + " is missing");
    }
    return option->second;
  }

  std::string or_empty(const std::string &name) const {
    const auto option = values_.find(name);
    return option == values_.end() ? "" : option->second;
  }

  int64_t count(const std::string &name) const {
    char *end = nullptr;
    const std::string &text = (*this)[name];
    const int64_t value = std::strtoll(text.c_str(), &end, 10);
    if (text.empty() || *end != '\0' || value < 1) {
      throw Usage(name + " must be a whole number from 1");
    }
    return value;
  }

private:
  std::map<std::string, std::string> values_;
  std::set<std::string> flags_;
};

// Takes the run's lock until this process ends. Waits for an orphaned runner to finish its step.
void lock(const std::string &directory) {
  const int descriptor = open((directory + "/lock").c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  if (descriptor < 0 || flock(descriptor, LOCK_EX) != 0) {
    throw std::system_error(errno, std::generic_category(), directory + "/lock");
  }
}

void die_with_the_agent() {
  std::thread([] {
    char byte = 0;
    ssize_t got = 0;
    while ((got = read(0, &byte, 1)) > 0 || (got < 0 && errno == EINTR)) {
    }
    _exit(ORPHANED);
  }).detach();
}

std::vector<float> read_adapter(const std::string &path, size_t size) {
  const std::string data = read_file(path);
  if (data.size() % sizeof(float) != 0 || data.empty() || (size > 0 && data.size() != size * sizeof(float))) {
    throw std::runtime_error(path + " does not contain a B of this program");
  }
  std::vector<float> flat(data.size() / sizeof(float));
  std::memcpy(flat.data(), data.data(), data.size());
  return flat;
}

int train(const Options &options) {
  const std::string &directory = options["--run"];
  std::signal(SIGTERM, ask_to_stop);
  std::signal(SIGINT, SIG_IGN); // Ctrl-C reaches the whole group; the agent decides what it means
  if (options.flag("--attached")) {
    die_with_the_agent();
  }
  std::signal(SIGBUS, report_lost_page);
  lock(directory);
  const Plan plan = Plan::read(directory + "/plan.bin");
  print_line("{\"progress\": {\"phase\": \"loading\"}}");
  Program program(options["--program"], options["--weights"], options.or_empty("--packed"));
  const auto stop = [] { return asked_to_stop != 0; };
  std::unique_ptr<Trainer> trainer;
  if (plan.gradient) {
    trainer = std::make_unique<GradientTrainer>(directory, plan, program, stop);
  } else if (plan.checkpoint_steps) {
    trainer = std::make_unique<DirectionalTrainer>(directory, plan, program, stop);
  } else {
    trainer = std::make_unique<Trainer>(directory, plan, program, stop);
  }
  try {
    trainer->train();
    print_line("{\"trained\": true, \"spent\": " + trainer->spent() + "}");
  } catch (const Stopped &) {
    print_line("{\"stopped\": true, \"spent\": " + trainer->spent() + "}");
  }
  return 0;
}

int score(const Options &options) {
  const Plan plan = Plan::read(options["--run"] + "/plan.bin");
  const std::string &split = options["--split"];
  if (split != "validation" && split != "test") {
    throw Usage("--split must be validation or test");
  }
  const std::vector<ScoreBatch> &batches = split == "test" ? plan.test : plan.validation;
  if (batches.empty()) {
    throw std::runtime_error("the plan has no split '" + split + "'");
  }
  Program program(options["--program"], options["--weights"], options.or_empty("--packed"));
  program.call("load", {floats(read_adapter(options["--adapter"], static_cast<size_t>(plan.settings.size)))});
  PrefixCache prefix(plan.settings, program);
  const bool split_program = plan.settings.width > 0 && program.has(SCORE_SUFFIX);
  const Measured measured = measure(program, batches, [] {}, {split_program ? &prefix : nullptr});
  print_line("{\"split\": " + quoted(split) + ", \"correct\": " + std::to_string(measured.correct) +
      ", \"total\": " + std::to_string(measured.total) + ", \"loss\": " + number(measured.loss) + "}");
  return 0;
}

int generate_text(const Options &options) {
  std::vector<int64_t> tokens;
  const char *at = options["--tokens"].c_str();
  while (*at != '\0') {
    char *end = nullptr;
    tokens.push_back(std::strtoll(at, &end, 10));
    if (end == at || tokens.back() < 0) {
      throw Usage("--tokens must be numbers with commas");
    }
    at = *end == ',' ? end + 1 : end;
  }
  Program program(options["--program"], options["--weights"], options.or_empty("--packed"), true);
  generate(program, read_adapter(options["--adapter"], 0), tokens, options.count("--most"), options.count("--length"),
           options.count("--context"));
  return 0;
}

int run(int count, char **arguments) {
  const std::string command = count > 1 ? arguments[1] : "";
  const Options options(count, arguments);
  if (command == "version") {
    print_line("{\"version\": " + quoted(MOBIZO_VERSION) + ", \"executorch\": " + quoted(EXECUTORCH_BUILD) + ", \"plan\": 2}");
    return 0;
  }
  if (command == "train") {
    return train(options);
  }
  if (command == "score") {
    return score(options);
  }
  if (command == "generate") {
    return generate_text(options);
  }
  if (command == "serve") {
    return serve(options["--program"], options["--weights"], options.or_empty("--packed"));
  }
  throw Usage("a command is missing");
}

} // namespace

int main(int count, char **arguments) {
  std::signal(SIGPIPE, SIG_IGN);
  try {
    return run(count, arguments);
  } catch (const Usage &error) {
    std::fprintf(stderr, "mobizo-runner: %s\n%s", error.what(), HELP);
    return USAGE;
  } catch (const Diverged &error) {
    print_error("diverged", error.what());
  } catch (const std::system_error &error) {
    const bool full = error.code().value() == ENOSPC || error.code().value() == EDQUOT;
    if (full) {
      print_error("does-not-fit", "the disk is full; free some space and the run resumes where it stopped");
    } else {
      print_error("runtime-failed", error.what());
    }
  } catch (const std::bad_alloc &) {
    print_error("does-not-fit", "memory ran out; stop something and the job is tried again");
  } catch (const std::exception &error) {
    print_error("runtime-failed", error.what());
  }
  return FAILED;
}
