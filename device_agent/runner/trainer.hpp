// One run in its directory, from wherever its ledger stands to both B's on disk. Knows no agent.
#pragma once

#include "ledger.hpp"
#include "plan.hpp"
#include "report.hpp"

#include <deque>
#include <functional>
#include <map>

namespace mobizo {

// The run was asked to stop; its ledger says where to go on.
struct Stopped {};

class Trainer {
public:
  // stop: asked before each call of the program.
  Trainer(const std::string &directory, const Plan &plan, Program &program, std::function<bool()> stop);

  // Trains to the end. Throws Stopped, Diverged, or std::runtime_error.
  void train();

  // Time and memory that this process spent, as JSON.
  std::string spent() const;

private:
  void restore(size_t steps);
  void pull(float factor);
  void step();
  void obey_limits();
  void evaluate(const std::string &split, const std::vector<ScoreBatch> &batches, int64_t best = -1);
  void conclude();
  std::vector<Tensor> move(size_t step, float lr);
  std::vector<Tensor> move_privately(size_t step, float lr);
  std::vector<Tensor> call(size_t step, float lr, const std::vector<int32_t> &indices,
                           const std::vector<float> &carried = {});
  Tensor hidden(const std::vector<int32_t> &indices, const std::vector<const Example *> &examples, int32_t length);
  void rest(double seconds);
  void pulse() const;
  void tell(const std::string &phase, float lr = 0) const;

  std::string directory_;
  const Plan &plan_;
  Program &program_;
  std::function<bool()> stop_;
  Ledger ledger_;
  Clock::time_point began_ = Clock::now();
  double train_seconds_ = 0;   // of steps, with all that the loop does around the program
  double program_seconds_ = 0; // of these, inside the program
  std::deque<double> step_seconds_;
  double loss_ = 0;
  std::map<int32_t, std::vector<float>> states_; // prefix states kept, by example
  int64_t room_ = -1;                            // bytes left for them; -1: not looked yet
};

} // namespace mobizo
