// Accuracy and loss of a program's current B on one split.
#pragma once

#include "plan.hpp"

#include <functional>
#include <stdexcept>

namespace mobizo {

// A loss or an update is not finite.
struct Diverged : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct Measured {
  int64_t correct = 0, total = 0;
  double loss = 0; // mean negative log-probability of the right answer, nats
};

// pulse: called before each batch; what it throws ends the pass. Throws Diverged.
Measured measure(Program &program, const std::vector<ScoreBatch> &split, const std::function<void()> &pulse);

} // namespace mobizo
