// A run's ledger on disk (shared/trajectory.py): each append is on the disk before it returns. Knows no program.
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

// How the device holds itself back from a step on.
struct Limits {
  double rest = 0;        // seconds of pause for each second of a step
  int64_t max_length = 0; // tokens; 0: no limit

  bool operator==(const Limits &other) const { return rest == other.rest && max_length == other.max_length; }
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
  const std::vector<float> &numbers(size_t step) const { return numbers_[step]; }
  const std::vector<Evaluation> &evaluations() const { return evaluations_; }
  const Limits &limits() const { return limits_; }

  const Evaluation *find(const std::string &split, int64_t step, const std::string &adapter) const;
  // Highest validation accuracy, then lowest loss, then fewest steps; nothing before the first validation.
  const Evaluation *best() const;

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
  Limits limits_;
};

} // namespace mobizo
