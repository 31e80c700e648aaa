// mobizo-runner: the commands (docs/runner.md).
#include "serve.hpp"

#include <csignal>
#include <cstdio>
#include <map>
#include <stdexcept>
#include <string>

namespace {

constexpr int FAILED = 1, USAGE = 2; // exit statuses
constexpr int PROTOCOL = 1;          // version of the protocol of `serve`

constexpr const char *HELP = "mobizo-runner version\n"
                             "mobizo-runner serve --program P.pte --weights W.ptd [--packed FILE] [--resident]\n";

struct UsageError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

class Arguments {
public:
  Arguments(int count, char **arguments) {
    for (int at = 1; at < count; ++at) {
      const std::string word = arguments[at];
      if (word.rfind("--", 0) != 0) {
        if (!command.empty()) {
          throw UsageError("unexpected argument " + word);
        }
        command = word;
      } else if (word == "--resident") {
        options_[word] = word;
      } else if (word != "--program" && word != "--weights" && word != "--packed") {
        throw UsageError("unknown option " + word);
      } else if (++at == count) {
        throw UsageError("option " + word + " needs a value");
      } else {
        options_[word] = arguments[at];
      }
    }
  }

  // Returns an option's value, or an empty text.
  std::string optional(const std::string &name) const {
    const auto option = options_.find(name);
    return option == options_.end() ? "" : option->second;
  }

  std::string required(const std::string &name) const {
    if (optional(name).empty()) {
      throw UsageError("option " + name + " is missing");
    }
    return optional(name);
  }

  std::string command;

private:
  std::map<std::string, std::string> options_;
};

int run(const Arguments &arguments) {
  if (arguments.command == "version") {
    std::printf("{\"version\": \"%s\", \"executorch\": \"%s\", \"protocol\": %d}\n", MOBIZO_VERSION, EXECUTORCH_BUILD,
                PROTOCOL);
    return 0;
  }
  if (arguments.command == "serve") {
    const bool completed =
        mobizo::serve({arguments.required("--program"), arguments.required("--weights"),
                       arguments.optional("--packed"), !arguments.optional("--resident").empty()});
    return completed ? 0 : FAILED;
  }
  throw UsageError(arguments.command.empty() ? "a command is missing" : "unknown command " + arguments.command);
}

} // namespace

int main(int count, char **arguments) {
  std::signal(SIGPIPE, SIG_IGN);
  try {
    return run(Arguments(count, arguments));
  } catch (const UsageError &error) {
    std::fprintf(stderr, "mobizo-runner: %s\n%s", error.what(), HELP);
    return USAGE;
  } catch (const std::exception &error) {
    std::fprintf(stderr, "mobizo-runner: %s\n", error.what());
    return FAILED;
  }
}
