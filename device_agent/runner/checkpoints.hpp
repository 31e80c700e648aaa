// Checkpoints of a run with an optimizer (device_agent/training/checkpoints.py): B and the optimizer's state after
// some steps.
#pragma once

#include <set>
#include <string>
#include <vector>

namespace mobizo {

class Checkpoints {
public:
  // directory: the first write creates it.
  explicit Checkpoints(std::string directory) : directory_(std::move(directory)) {}

  // Numbers of steps that have a checkpoint.
  std::set<size_t> steps() const;

  // The state (M,) after `step` steps; empty if the checkpoint is absent or damaged.
  std::vector<float> read(size_t step) const;

  // Stores the state after `step` steps; it is durable on return. Throws std::system_error.
  void write(size_t step, const std::vector<float> &state) const;

  // Removes all checkpoints except those of `wanted`. Throws std::system_error.
  void keep(const std::set<size_t> &wanted) const;

private:
  std::string file(size_t step) const;

  std::string directory_;
};

} // namespace mobizo
