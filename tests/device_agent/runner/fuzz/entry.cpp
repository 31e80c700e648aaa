// The runner's own `main`, callable more than once.
#define main runner_main
#include "../../../../device_agent/runner/main.cpp"
#undef main

int run_runner(int count, char **arguments) {
  asked_to_stop = 0;
  const int status = runner_main(count, arguments);
  std::signal(SIGTERM, SIG_DFL);
  std::signal(SIGINT, SIG_DFL);
  return status;
}
