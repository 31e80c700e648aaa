#include "gradient_trainer.hpp"

#include <cmath>

namespace mobizo {

// Returns the step's loss (1,) twice: the ledger stores it instead of a coefficient. Of a private step: its totals,
// and the norm of the noised mean gradient.
std::vector<Tensor> GradientTrainer::invoke(size_t, float lr, std::vector<Tensor> inputs,
                                            const std::vector<Tensor> &secret) {
  inputs.push_back(scalar(lr));
  inputs.push_back(scalar(plan_.gradient->max_norm));
  inputs.push_back(scalar(plan_.gradient->weight_decay));
  inputs.insert(inputs.end(), secret.begin(), secret.end());
  std::vector<Tensor> outputs = program_.call(step_method(), inputs);
  if (!secret.empty()) {
    return outputs;
  }
  // A norm that is not finite stops the run.
  const bool whole = std::isfinite(numbers_of(output_of(outputs, 1), 1)[0]);
  const Tensor &reported = outputs[whole ? 0 : 1];
  return {reported, reported};
}

// Returns the norm of the noised mean gradient (1,) twice instead of a loss, which would reveal the data.
std::vector<Tensor> GradientTrainer::move_privately(size_t step, float lr) {
  const std::vector<std::vector<int32_t>> pieces = plan_.pieces(step);
  Tensor totals(Type::Int32, {static_cast<int32_t>(plan_.settings.size)});
  std::vector<Tensor> results;
  for (size_t piece = 0; piece < pieces.size(); ++piece) {
    const bool last = piece + 1 == pieces.size();
    if (!last) {
      pulse();
    }
    results = call(step, lr, pieces[piece],
                   {scalar(plan_.clip), scalar(plan_.sigma), scalar(last ? 1.0F : 0.0F), plan_.keys_of(step), totals});
    totals = output_of(results, 0);
  }
  const Tensor &norm = output_of(results, 1);
  return {norm, norm};
}

} // namespace mobizo
