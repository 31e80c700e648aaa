// The command `serve`: runs a program's methods for another process, over standard input and output (docs/runner.md).
#pragma once

#include <string>

namespace mobizo {

struct ServeOptions {
  std::string program, weights, packed; // paths; packed: may be empty
  bool resident = false;                // as in `Program`
};

// Answers requests until standard input ends. Ends the process at once if the client goes away during a call, or if a
// page of a file cannot be read. Returns whether the program was loaded and all requests were well-formed.
bool serve(const ServeOptions &options);

} // namespace mobizo
