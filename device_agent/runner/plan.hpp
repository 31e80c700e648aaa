// What one run trains: written by the agent (device_agent/training/plan.py) and described in docs/runner.md.
#pragma once

#include "program.hpp"

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace mobizo {

constexpr int32_t NOISE_KEYS = 4; // of one step's noise on a gradient (shared/privacy.py)
constexpr std::string_view PLAN_MAGIC = "MOBIZO-PLAN 4\n";

struct Settings {
  int64_t steps, interval, queries, batch, length, answer, choices, score_rows, size, dynamic, candidates, stored, width,
      stride, prefix_bytes, vocabulary, patience;
  double eps;
};

using Tokens = std::vector<int32_t>;

// A training example: the right candidate's tokens and, by answer position (T), what the loss is over.
struct Example {
  int32_t opening = 0; // leading tokens that are never cut off
  Tokens tokens;
  std::vector<int32_t> positions, answers, choices;
  std::vector<float> choice_mask, mask;

  // The same example in at most `most` tokens, by the front of its prompt; as it is if that cannot be.
  Example shortened(size_t most) const;
};

using Cell = std::array<int32_t, 3>; // of score's result: row, position, candidate

// An example as scored: for each candidate, the entries whose sum is its log-probability.
struct Scored {
  int32_t index = 0; // in the split
  int32_t correct = 0;
  std::vector<std::vector<Cell>> candidates;
};

struct ScoreBatch {
  std::vector<Tensor> inputs; // of `score`
  std::vector<Scored> examples;

  // Tokens of the rows that examples use; the other rows are blank.
  std::vector<Tokens> texts() const;
};

// A run with estimator `gradient`.
struct GradientSettings {
  float max_norm; // upper bound of the mean gradient's L2 norm; infinity: no clipping
  float weight_decay;
};

struct Plan {
  Settings settings{};
  std::string header; // the ledger's, as it is written there
  std::vector<float> start;          // B (D,) before the first step; empty: zeros
  std::vector<float> pulls;          // (steps,): factors of B's distance from the start; empty: no pulls
  bool uploads_last = false;        // upload B after the last step, not the best validated one
  std::vector<float> lr;             // (steps,)
  std::vector<int32_t> seeds, order; // (steps, q, 2), (steps, E); of a private run as many a step as `counts` says
  bool secret = false;               // a private run: nothing that depends on the data is reported
  float clip = 0;                    // C
  std::vector<int32_t> counts;       // (steps,)
  std::vector<float> noise;          // (steps, q), whole units; empty in a run with exact gradients
  float sigma = 0;                   // noise multiplier of a private run with exact gradients
  std::vector<int32_t> keys;         // (steps, NOISE_KEYS, 2): of its noise, secret
  std::optional<int32_t> checkpoint_steps;  // between two checkpoints; absent if the program has no `state`
  std::optional<GradientSettings> gradient; // absent with every other estimator
  std::vector<Example> examples;
  std::vector<ScoreBatch> validation, test;

  // Throws std::runtime_error for a file that is no whole plan, or whose numbers do not fit one another.
  static Plan read(const std::string &path);

  Tensor seeds_of(size_t step) const;

  // Count of all examples that a private run samples. Throws std::runtime_error for a negative count.
  size_t sampled() const;

  // Indices of a step's examples.
  std::vector<int32_t> sample(size_t step) const;

  // Tokens of all examples that training visits from a step on, in order.
  std::vector<const Tokens *> texts_from(size_t step) const;

  // The same for each call of the step, E at a time; at least one call.
  std::vector<std::vector<int32_t>> pieces(size_t step) const;

  // Keys of a step's noise, (NOISE_KEYS, 2).
  Tensor keys_of(size_t step) const;

  // The data inputs of `step` for these examples; of `suffix` without the first.
  std::vector<Tensor> pack(const std::vector<const Example *> &batch) const;
};

} // namespace mobizo
