// Serves a program's methods to another process over standard input and output.
//
// It first sends an answer: no tensors if the program is loaded, or an error text. A request is the
// length of a method's name (uint32), the name, and tensors. An answer is 0 (uint8) and tensors, or 1, the length of a
// text (uint32) and the text. Tensors are their number (uint32), then for each its type (uint8: 0 float32, 1 int64, 2
// int32), its rank (uint32), its sizes (uint32 each) and its bytes. All little-endian.
#pragma once

#include "program.hpp"

namespace mobizo {

// Answers until standard input ends. Returns the exit status. Throws std::runtime_error for a request out of form.
// packed: as in `Program`.
int serve(const std::string &program, const std::string &weights, const std::string &packed);

} // namespace mobizo
