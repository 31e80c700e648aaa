// Trains one run with an optimizer (device_agent/training/checkpointed_trainer.py): as `Trainer`, with checkpoints of B and
// the optimizer's state. A killed run resumes from its last checkpoint and computes the steps after it again, with the
// same bytes on the same machine.
#pragma once

#include "checkpoints.hpp"
#include "trainer.hpp"

namespace mobizo {

class CheckpointedTrainer : public Trainer {
public:
  // See `Trainer`.
  CheckpointedTrainer(const std::string &directory, const Plan &plan, Program &program, std::function<bool()> stop);

protected:
  void restore(size_t steps) override;
  void pull(float factor) override;
  void step() override;
  void evaluate(const std::string &split, const std::vector<ScoreBatch> &batches, int64_t best) override;
  // Restores a checkpoint (M,) that was taken after `step` steps.
  virtual void resume(size_t step, const std::vector<float> &state);
  // Makes a recorded step again.
  virtual void recompute(size_t step);

  // B and the optimizer's state (M,). Throws std::runtime_error.
  std::vector<float> state();

private:
  void checkpoint();

  Checkpoints checkpoints_;
};

// Estimator `directional` with an optimizer. B always comes from the ledger; only the optimizer's state comes from
// checkpoints and steps that are computed again. B thus equals the trajectory's replay bit for bit.
class DirectionalTrainer : public CheckpointedTrainer {
public:
  using CheckpointedTrainer::CheckpointedTrainer;

private:
  void resume(size_t step, const std::vector<float> &state) override;
  void recompute(size_t step) override;
  // Sets B (D,), and the optimizer's state to that of `state` (M,).
  void restore_beside(const std::vector<float> &b, std::vector<float> state);
};

} // namespace mobizo
