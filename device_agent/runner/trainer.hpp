// Trains one run in its directory, resuming from its ledger, and writes both B files.
#pragma once

#include "ledger.hpp"
#include "plan.hpp"
#include "prefix.hpp"
#include "report.hpp"
#include "score.hpp"

#include <deque>
#include <functional>
#include <optional>

namespace mobizo {

// The run was asked to stop; its ledger is the resume point.
struct Stopped {};

class Trainer {
public:
  // stop: asked before each call of the program.
  Trainer(const std::string &directory, const Plan &plan, Program &program, std::function<bool()> stop);
  virtual ~Trainer() = default;

  // Trains to the end. Throws Stopped, Diverged, or std::runtime_error.
  void train();

  // Time and memory that this process spent, as JSON.
  std::string spent() const;

protected:
  // Makes the program's B what it was after `steps` steps of the ledger.
  virtual void restore(size_t steps);
  virtual void pull(float factor);
  virtual void step();
  // Measures B as it is, unless the ledger has it. best: the step of B, if it is the best one's; -1: B is the current one.
  virtual void evaluate(const std::string &split, const std::vector<ScoreBatch> &batches, int64_t best = -1);
  // Calls the program's step. inputs: the data. secret: inputs of a private step. Returns losses, or totals of a private
  // step, and coefficients (q,).
  virtual std::vector<Tensor> invoke(size_t step, float lr, std::vector<Tensor> inputs,
                                     const std::vector<Tensor> &secret);
  // Makes one step on the sample of a private run.
  virtual std::vector<Tensor> move_privately(size_t step, float lr);

  void load_start();
  // Makes a step's recorded update again.
  void replay(size_t step);
  // The current B (D,).
  std::vector<float> current() const;
  void pull_towards_start(std::vector<float> &flat, float factor) const;
  bool recorded(const std::string &split, int64_t best) const;
  std::vector<Tensor> move(size_t step, float lr);
  std::vector<Tensor> call(size_t step, float lr, const std::vector<int32_t> &indices,
                           const std::vector<Tensor> &secret = {});
  std::string step_method() const;
  void pulse() const;
  void report_progress(const std::string &phase, float lr = 0) const;

  const Plan &plan_;
  Program &program_;
  Ledger ledger_;

private:
  void obey_limits();
  void conclude();
  // The cache for an evaluation. Training's states have precedence in it, then validation's.
  FrozenStates frozen_states(const std::string &split);
  void pause(double seconds);

  std::string directory_;
  std::function<bool()> stop_;
  Clock::time_point began_ = Clock::now();
  double train_seconds_ = 0;   // of steps, with all that the loop does around the program
  double program_seconds_ = 0; // of these, inside the program
  std::deque<double> step_seconds_;
  double loss_ = 0;
  PrefixCache prefix_;
  std::optional<Upcoming> upcoming_; // of training; made at the first step of this process
};

// A program's float32 result of `count` numbers. Throws std::runtime_error for another result.
std::vector<float> numbers_of(const Tensor &tensor, size_t count);

} // namespace mobizo
