// Accuracy and loss of a program's current B on one split.
#pragma once

#include "plan.hpp"
#include "prefix.hpp"

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

constexpr const char *SCORE_SUFFIX = "score_suffix"; // the method; programs of earlier compilers lack it

// Where an evaluation takes the frozen layers' states from. cache: null: from nowhere, and `score` computes all layers.
// reserved: bytes of the cache that the evaluation leaves free.
struct FrozenStates {
  PrefixCache *cache = nullptr;
  int64_t reserved = 0;
};

// pulse: called before each batch; what it throws ends the pass. Throws Diverged.
Measured measure(Program &program, const std::vector<ScoreBatch> &split, const std::function<void()> &pulse,
                 const FrozenStates &frozen = {});

} // namespace mobizo
