// Trains one run with exact gradients (device_agent/training/gradient_trainer.py), whose ledger does not record a step's
// update.
#pragma once

#include "checkpointed_trainer.hpp"

namespace mobizo {

class GradientTrainer : public CheckpointedTrainer {
public:
  using CheckpointedTrainer::CheckpointedTrainer;

private:
  std::vector<Tensor> invoke(size_t step, float lr, std::vector<Tensor> inputs,
                             const std::vector<Tensor> &secret) override;
  std::vector<Tensor> move_privately(size_t step, float lr) override;
};

} // namespace mobizo
