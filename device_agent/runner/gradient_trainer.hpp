// Trains one run with exact gradients (device_agent/training/gradient_trainer.py): as `Trainer`, with checkpoints instead
// of replay. A killed run resumes from its last checkpoint and computes the steps after it again, with the same bytes on
// the same machine.
#pragma once

#include "checkpoints.hpp"
#include "trainer.hpp"

namespace mobizo {

class GradientTrainer : public Trainer {
public:
  // See `Trainer`.
  GradientTrainer(const std::string &directory, const Plan &plan, Program &program, std::function<bool()> stop);

private:
  void restore(size_t steps) override;
  void pull(float factor) override;
  void step() override;
  void evaluate(const std::string &split, const std::vector<ScoreBatch> &batches, int64_t best) override;
  std::vector<Tensor> invoke(size_t step, float lr, std::vector<Tensor> inputs,
                             const std::vector<Tensor> &secret) override;
  std::vector<Tensor> move_privately(size_t step, float lr) override;

  void checkpoint();

  Checkpoints checkpoints_;
};

} // namespace mobizo
