// Generates text, as tokens, with an inference file.
#pragma once

#include "program.hpp"

namespace mobizo {

// Prints up to `most` tokens that follow `tokens`, the likeliest each time, one JSON line each. length: most tokens that
// `extend` reads at once. context: positions of the cache. Throws std::runtime_error if the text does not fit it.
void generate(Program &program, const std::vector<float> &adapter, const std::vector<int64_t> &tokens, int64_t most,
              int64_t length, int64_t context);

} // namespace mobizo
