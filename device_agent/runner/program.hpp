// Runs a compiled program's methods, which share one B, with ExecuTorch.
#pragma once

#include "tensor.hpp"

#include <memory>
#include <string>
#include <vector>

namespace mobizo {

class Program {
public:
  // packed: a file that keeps the packed weights for the next start, or empty. resident: all packed weights stay in
  // memory, for programs that read them once for each token. Throws std::runtime_error.
  Program(const std::string &program, const std::string &weights, const std::string &packed = "",
          bool resident = false);
  ~Program();

  bool has(const std::string &method) const;

  // Returns copies of the outputs, because another method may reuse their memory. Throws std::runtime_error.
  std::vector<Tensor> call(const std::string &method, const std::vector<Tensor> &inputs);

  // Seconds that loading methods took so far, with packing their weights.
  double load_seconds() const { return load_seconds_; }

private:
  void load(const std::string &method);

  struct Runtime; // ExecuTorch's part, which no other file includes

  std::unique_ptr<Runtime> runtime_;
  std::vector<std::string> names_;
  double load_seconds_ = 0;
};

} // namespace mobizo
