// The command `serve`: runs a program's methods for another process, over standard input and output (docs/runner.md).
#pragma once

#include <string>

namespace mobizo {

// Answers requests until standard input ends. Ends the process at once if the client goes away during a call, or if a
// page of a file cannot be read. Returns whether the program was loaded and all requests were well-formed. The arguments
// are those of `Program`.
bool serve(const std::string &program, const std::string &weights, const std::string &packed, bool resident);

} // namespace mobizo
