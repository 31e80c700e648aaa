#include "plan_check.hpp"

#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numeric>
#include <stdexcept>
#include <string>

namespace mobizo {
namespace {

constexpr int64_t MOST = INT32_MAX;                     // of each setting: sizes of tensors are int32
constexpr size_t MOST_PRODUCT = size_t{1} << 40U;       // elements
constexpr int64_t MOST_PREFIX_BYTES = int64_t{1} << 50U; // bytes

[[noreturn]] void refuse(const std::string &what) {
  throw std::runtime_error("the plan " + what + "; have the agent write it again");
}

void expect(const std::string &name, size_t count, size_t expected) {
  if (count != expected) {
    refuse("has " + std::to_string(count) + " numbers of " + name + " where " + std::to_string(expected) + " belong");
  }
}

// index: of `name`, from 0 and below `count`.
void check_index(const std::string &name, int64_t index, size_t count) {
  if (index < 0 || static_cast<size_t>(index) >= count) {
    refuse("refers to " + name + " " + std::to_string(index) + ", but has only " + std::to_string(count));
  }
}

void check_range(const std::string &name, int64_t value, int64_t least, int64_t most) {
  if (value < least || value > most) {
    refuse("has " + std::to_string(value) + " for " + name);
  }
}

void check_finite(const std::string &name, double value) {
  if (!std::isfinite(value)) {
    refuse("has a value of " + name + " that is not finite");
  }
}

void check_finite(const std::string &name, const std::vector<float> &values) {
  for (const float value : values) {
    check_finite(name, static_cast<double>(value));
  }
}

template <typename Integer>
void check_indices(const std::string &name, const Integer *indices, size_t number, int64_t count) {
  for (size_t i = 0; i < number; ++i) {
    check_index(name, static_cast<int64_t>(indices[i]), static_cast<size_t>(count));
  }
}

void check_example(const Example &example, const Settings &settings) {
  const size_t count = example.tokens.size();
  check_range("the length of an example", static_cast<int64_t>(count), 1, settings.length);
  check_range("the opening of an example", example.opening, 0, static_cast<int64_t>(count));
  for (const std::vector<int32_t> *tokens : {&example.tokens, &example.answers, &example.choices}) {
    check_indices("token", tokens->data(), tokens->size(), settings.vocabulary);
  }
  // A shortened example moves the positions of its answer, by at most the first of them.
  for (size_t t = 0; t < example.positions.size(); ++t) {
    const int32_t position = example.positions[t];
    check_index("answer position", position, count);
    if (example.mask[t] == 0 ? position != 0 : position < example.positions.front()) {
      refuse("has answer positions out of order");
    }
  }
}

// seen: whether the example with an index in the split was read before.
void check_scored(const Scored &example, const Settings &settings, std::vector<bool> &seen) {
  check_index("scored example", example.index, seen.size());
  if (seen[static_cast<size_t>(example.index)]) {
    refuse("scores example " + std::to_string(example.index) + " twice");
  }
  seen[static_cast<size_t>(example.index)] = true;
  check_index("right candidate", example.correct, example.candidates.size());
  for (const std::vector<Cell> &cells : example.candidates) {
    for (const auto &[row, position, choice] : cells) {
      check_index("score row", row, static_cast<size_t>(settings.score_rows));
      check_index("score position", position, static_cast<size_t>(settings.answer));
      check_index("score candidate", choice, static_cast<size_t>(settings.choices));
    }
  }
}

void check_split(const std::vector<ScoreBatch> &batches, const Settings &settings) {
  const size_t count = std::accumulate(batches.begin(), batches.end(), size_t{0},
                                       [](size_t sum, const ScoreBatch &batch) { return sum + batch.examples.size(); });
  if (count == 0 && !batches.empty()) {
    refuse("has a split without examples");
  }
  std::vector<bool> seen(count);
  for (const ScoreBatch &batch : batches) {
    const Tensor &tokens = batch.inputs.at(0), &positions = batch.inputs.at(1), &choices = batch.inputs.at(2);
    const int32_t length = tokens.shape.at(1);
    check_range("the length of a batch to score", length, 1, settings.length);
    check_indices("token", tokens.data<int64_t>(), tokens.count(), settings.vocabulary);
    check_indices("score position", positions.data<int64_t>(), positions.count(), length);
    check_indices("token", choices.data<int64_t>(), choices.count(), settings.vocabulary);
    for (const Scored &example : batch.examples) {
      check_scored(example, settings, seen);
    }
  }
}

// Refuses tensors of a step that no other record has the content of, and that the machine cannot hold.
void check_memory(const Plan &plan) {
  const Settings &s = plan.settings;
  size_t longest = s.dynamic != 0 ? 1 : product({s.length});
  for (const Example &example : plan.examples) {
    longest = std::max(longest, example.tokens.size());
  }
  const auto length = static_cast<int64_t>(longest);
  const size_t bytes = product({s.batch, length}) * sizeof(int64_t) +
                       product({s.batch, length, s.width}) * sizeof(float) +
                       product({s.batch, s.answer, s.choices}) * (sizeof(int64_t) + sizeof(float)) +
                       product({s.size}) * sizeof(float);
  if (bytes > static_cast<size_t>(sysconf(_SC_PHYS_PAGES)) * static_cast<size_t>(sysconf(_SC_PAGESIZE))) {
    refuse("has settings that ask for " + std::to_string(bytes) + " bytes a step, more than this machine has");
  }
}

} // namespace

size_t product(std::initializer_list<int64_t> sizes) {
  size_t result = 1;
  for (const int64_t size : sizes) {
    check_range("a size", size, 0, MOST);
    if (size > 0 && result > MOST_PRODUCT / static_cast<size_t>(size)) {
      refuse("has settings that ask for more numbers than any memory holds");
    }
    result *= static_cast<size_t>(size);
  }
  return result;
}

void check_settings(const Settings &s) {
  check_range("the number of steps", s.steps, 1, MOST);
  check_range("the evaluation interval", s.interval, 1, MOST);
  check_range("the number of queries", s.queries, 1, MOST);
  check_range("the number of examples a step", s.batch, 1, MOST);
  check_range("the sequence length", s.length, 1, MOST);
  check_range("the number of answer positions", s.answer, 1, MOST);
  check_range("the number of candidates", s.choices, 1, MOST);
  check_range("the number of score rows", s.score_rows, 1, MOST);
  check_range("the size of B", s.size, 1, MOST);
  check_range("the prefix's width", s.width, 0, MOST);
  check_range("the stride of prefix lengths", s.stride, 1, MOST);
  check_range("the bytes of kept prefixes", s.prefix_bytes, 0, MOST_PREFIX_BYTES);
  check_range("the size of the vocabulary", s.vocabulary, 1, MOST);
  check_range("the patience", s.patience, 0, MOST);
  check_finite("eps", s.eps);
  // The runner allocates tensors of these shapes.
  product({s.batch, s.length, std::max<int64_t>(s.width, 1)});
  product({s.batch, s.answer, s.choices});
  product({s.score_rows, s.answer, s.choices});
  product({s.score_rows, s.length});
}

void check_plan(const Plan &plan) {
  const Settings &s = plan.settings;
  if (plan.header.empty()) {
    refuse("has no header of the trajectory");
  }
  expect("`lr`", plan.lr.size(), product({s.steps}));
  check_finite("`lr`", plan.lr);
  expect("`seeds`", plan.seeds.size(), product({s.steps, s.queries, 2}));
  if (!plan.start.empty()) {
    expect("`start`", plan.start.size(), product({s.size}));
    check_finite("`start`", plan.start);
  }
  if (!plan.pulls.empty()) {
    expect("`pulls`", plan.pulls.size(), product({s.steps}));
    check_finite("`pulls`", plan.pulls);
  }
  expect("`order`", plan.order.size(), plan.secret ? plan.sampled() : product({s.steps, s.batch}));
  for (const int32_t index : plan.order) {
    check_index("training example", index, plan.examples.size());
  }
  for (const Example &example : plan.examples) {
    check_example(example, s);
  }
  if (!plan.uploads_last && plan.validation.empty()) {
    refuse("has no validation split to choose B by");
  }
  check_split(plan.validation, s);
  check_split(plan.test, s);
  check_memory(plan);
  check_finite("the clipping bound", static_cast<double>(plan.clip));
  check_finite("the noise", plan.noise);
  if (plan.checkpoint_steps) {
    check_range("the steps between checkpoints", *plan.checkpoint_steps, 1, MOST);
  }
  if (plan.gradient) {
    if (!plan.checkpoint_steps) {
      refuse("has exact gradients and no steps between checkpoints");
    }
    check_finite("the weight decay", static_cast<double>(plan.gradient->weight_decay));
    if (!(plan.gradient->max_norm > 0)) { // infinity: no clipping
      refuse("has " + std::to_string(plan.gradient->max_norm) + " for the bound of the gradient's norm");
    }
  }
  if (plan.secret) {
    const bool exact = plan.gradient.has_value();
    expect("`noise`", plan.noise.size(), exact ? 0 : product({s.steps, s.queries}));
    expect("`keys`", plan.keys.size(), exact ? product({s.steps, NOISE_KEYS, 2}) : 0);
    if (exact && !(std::isfinite(plan.sigma) && plan.sigma > 0)) {
      refuse("has " + std::to_string(plan.sigma) + " for the noise multiplier");
    }
  }
}

} // namespace mobizo
