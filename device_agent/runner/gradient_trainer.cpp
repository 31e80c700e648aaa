#include "gradient_trainer.hpp"

#include <cmath>
#include <stdexcept>

namespace mobizo {

GradientTrainer::GradientTrainer(const std::string &directory, const Plan &plan, Program &program,
                                 std::function<bool()> stop)
    : Trainer(directory, plan, program, std::move(stop)), checkpoints_(directory + "/checkpoints") {
  // Checkpoints after steps that the ledger lacks may be another run's, whose ledger was moved away.
  std::set<size_t> own;
  for (const size_t step : checkpoints_.steps()) {
    if (ledger_.steps() > 0 && step <= ledger_.steps()) {
      own.insert(step);
    }
  }
  checkpoints_.keep(own);
}

void GradientTrainer::restore(size_t steps) {
  tell("loading");
  size_t at = 0;
  std::vector<float> state;
  const std::set<size_t> kept = checkpoints_.steps();
  for (auto found = kept.rbegin(); found != kept.rend() && state.empty(); ++found) {
    if (*found <= steps) {
      at = *found;
      state = checkpoints_.read(at);
    }
  }
  if (state.empty()) {
    at = 0;
    load_start();
  } else {
    program_.call("restore", {floats(state)});
  }
  for (size_t step = at; step < steps; ++step) {
    pulse();
    move(step, plan_.lr[step]);
    if (!plan_.pulls.empty()) {
      pull(ledger_.numbers(step).back());
    }
    tell("loading"); // a step takes its time: the runner must not look as if it hung
  }
}

// The optimizer's state, which follows B, does not change.
void GradientTrainer::pull(float factor) {
  const Tensor found = output_of(program_.call("state", {}), 0);
  std::vector<float> state = numbers_of(found, found.count());
  if (state.size() < static_cast<size_t>(plan_.settings.size)) {
    throw std::runtime_error("the program's state is smaller than its B; the program is another recipe's");
  }
  pull_towards_start(state, factor);
  program_.call("restore", {floats(state)});
}

void GradientTrainer::step() {
  Trainer::step();
  if (ledger_.steps() % static_cast<size_t>(plan_.gradient->checkpoint_steps) == 0) {
    checkpoint();
  }
}

// After a checkpoint, so that the evaluated B can be restored later.
void GradientTrainer::evaluate(const std::string &split, const std::vector<ScoreBatch> &batches, int64_t best) {
  if (best < 0 && !batches.empty() && !recorded(split, best)) {
    checkpoint();
  }
  Trainer::evaluate(split, batches, best);
}

// Stores the current state, and removes all other checkpoints except that of the best validation.
void GradientTrainer::checkpoint() {
  const size_t step = ledger_.steps();
  if (checkpoints_.steps().count(step) == 0) {
    const Tensor state = output_of(program_.call("state", {}), 0);
    checkpoints_.write(step, numbers_of(state, state.count()));
  }
  std::set<size_t> wanted{step};
  if (const Evaluation *best = ledger_.best()) {
    wanted.insert(static_cast<size_t>(best->step));
  }
  checkpoints_.keep(wanted);
}

// Returns the step's loss (1,) twice: the ledger has it in place of a coefficient. Of a private step: its totals, and the
// norm of the noised mean gradient.
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
  const Tensor &told = outputs[whole ? 0 : 1];
  return {told, told};
}

// Returns the norm of the noised mean gradient (1,) twice, in place of a loss, which would reveal the data.
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
