#include "checkpointed_trainer.hpp"

#include <algorithm>
#include <stdexcept>

namespace mobizo {

CheckpointedTrainer::CheckpointedTrainer(const std::string &directory, const Plan &plan, Program &program,
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

void CheckpointedTrainer::restore(size_t steps) {
  report_progress("loading");
  size_t at = 0;
  std::vector<float> state;
  const std::set<size_t> kept = checkpoints_.steps();
  for (auto newest = kept.rbegin(); newest != kept.rend() && state.empty(); ++newest) {
    if (*newest <= steps) {
      at = *newest;
      state = checkpoints_.read(at);
    }
  }
  if (state.empty()) {
    at = 0;
    load_start();
  } else {
    resume(at, state);
  }
  for (size_t step = at; step < steps; ++step) {
    pulse();
    recompute(step);
    if (!plan_.pulls.empty()) {
      pull(ledger_.numbers(step).back());
    }
    report_progress("loading"); // a step takes its time: the runner must not look as if it hung
  }
}

void CheckpointedTrainer::resume(size_t, const std::vector<float> &state) {
  program_.call("restore", {floats(state)});
}

void CheckpointedTrainer::recompute(size_t step) { move(step, plan_.lr[step]); }

std::vector<float> CheckpointedTrainer::state() {
  const Tensor output = output_of(program_.call("state", {}), 0);
  std::vector<float> state = numbers_of(output, output.count());
  if (state.size() < static_cast<size_t>(plan_.settings.size)) {
    throw std::runtime_error("the program's state is smaller than its B; the program is another recipe's");
  }
  return state;
}

// The optimizer's state, which follows B, does not change.
void CheckpointedTrainer::pull(float factor) {
  std::vector<float> moved = state();
  pull_towards_start(moved, factor);
  program_.call("restore", {floats(moved)});
}

void CheckpointedTrainer::step() {
  Trainer::step();
  if (ledger_.steps() % static_cast<size_t>(*plan_.checkpoint_steps) == 0) {
    checkpoint();
  }
}

// After a checkpoint, so that the evaluated B can be restored later.
void CheckpointedTrainer::evaluate(const std::string &split, const std::vector<ScoreBatch> &batches, int64_t best) {
  if (best < 0 && !batches.empty() && !recorded(split, best)) {
    checkpoint();
  }
  Trainer::evaluate(split, batches, best);
}

// Stores the current state, and removes all other checkpoints except that of the best validation.
void CheckpointedTrainer::checkpoint() {
  const size_t step = ledger_.steps();
  if (checkpoints_.steps().count(step) == 0) {
    checkpoints_.write(step, state());
  }
  std::set<size_t> wanted{step};
  if (const Evaluation *best = ledger_.best()) {
    wanted.insert(static_cast<size_t>(best->step));
  }
  checkpoints_.keep(wanted);
}

void DirectionalTrainer::resume(size_t step, const std::vector<float> &state) {
  Trainer::restore(step);
  restore_beside(current(), state);
}

void DirectionalTrainer::recompute(size_t step) {
  const std::vector<float> b = current();
  CheckpointedTrainer::recompute(step);
  restore_beside(b, state());
  replay(step);
}

void DirectionalTrainer::restore_beside(const std::vector<float> &b, std::vector<float> state) {
  if (state.size() < b.size()) {
    throw std::runtime_error("a checkpoint is smaller than B; remove the run's checkpoints to compute its steps again");
  }
  std::copy(b.begin(), b.end(), state.begin());
  program_.call("restore", {floats(state)});
}

} // namespace mobizo
