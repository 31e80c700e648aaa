// A run's ledger on disk (shared/zo/trajectory.py): each append is synced before it returns.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace mobizo {

struct Evaluation {
  int64_t step = 0;
  std::string split;
  int64_t correct = 0, total = 0;
  double loss = 0;
  std::string adapter;

  double accuracy() const { return static_cast<double>(correct) / static_cast<double>(total); }
};

constexpr double MOST_REST = 100; // seconds of pause for each second of a step

// The limits that apply from a step on.
struct Limits {
  int64_t step = 0;       // the first step that they apply to
  double rest = 0;        // seconds of pause for each second of a step
  int64_t max_length = 0; // tokens; 0: no limit

  // Whether both set the same limits, regardless of the step.
  bool same(const Limits &other) const { return rest == other.rest && max_length == other.max_length; }
};

class Ledger {
public:
  // Opens the ledger, cutting off a torn tail, or begins one. numbers: in a step's frame, its coefficients and, in a run
  // with pulls, the pull's factor. Throws std::runtime_error if it is another run's, and std::system_error.
  Ledger(const std::string &path, const std::string &header, size_t numbers);
  ~Ledger();
  Ledger(const Ledger &) = delete;
  Ledger &operator=(const Ledger &) = delete;

  size_t steps() const { return numbers_.size(); }
  const std::vector<float> &numbers(size_t step) const { return numbers_.at(step); }
  const std::vector<Evaluation> &evaluations() const { return evaluations_; }
  Limits limits() const { return limits_at(steps()); }
  // The limits for a step that is in the ledger, or for the next one.
  Limits limits_at(size_t step) const;

  const Evaluation *find(const std::string &split, int64_t step, const std::string &adapter) const;
  // Highest validation accuracy, then lowest loss, then fewest steps; nothing before the first validation.
  const Evaluation *best() const;

  // Whether the last `patience` validations were none better than the one before them; 0: never.
  bool out_of_patience(int64_t patience) const;

  void append(const std::vector<float> &numbers);
  void append(const Evaluation &evaluation);
  void append(const Limits &limits);

private:
  void read(const std::string &path, const std::string &header, size_t numbers);
  void write(const std::string &bytes);

  int descriptor_ = -1;
  size_t end_ = 0;
  std::vector<std::vector<float>> numbers_;
  std::vector<Evaluation> evaluations_;
  std::vector<Limits> limits_;
};

} // namespace mobizo
