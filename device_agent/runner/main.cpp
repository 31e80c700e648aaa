// mobizo-runner: the commands (docs/runner.md).
#include "serve.hpp"

#include <getopt.h>

#include <csignal>
#include <cstdio>
#include <exception>
#include <map>
#include <string>

namespace {

constexpr int FAILED = 1, USAGE = 2; // exit statuses
constexpr int PROTOCOL = 1;          // version of the protocol of `serve`

constexpr const char *HELP = "mobizo-runner version\n"
                             "mobizo-runner serve --program P.pte --weights W.ptd [--packed FILE] [--resident]\n";

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
  return mobizo::serve(values['p'], values['w'], values['k'], values.count('r') != 0) ? 0 : FAILED;
}

} // namespace

int main(int count, char **arguments) {
  std::signal(SIGPIPE, SIG_IGN);
  try {
    return run(count, arguments);
  } catch (const std::exception &error) {
    std::fprintf(stderr, "mobizo-runner: %s\n", error.what());
    return FAILED;
  }
}
