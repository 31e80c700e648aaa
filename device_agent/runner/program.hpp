// Runs a compiled program's methods, which share one B, with ExecuTorch.
#pragma once

#include "tensor.hpp"

#include <memory>
#include <string>
#include <vector>

namespace mobizo {

class Program {
public:
  // Throws std::runtime_error.
  Program(const std::string &program, const std::string &weights);
  ~Program();

  bool has(const std::string &method) const;

  // Returns copies of the outputs, because another method may reuse their memory. Throws std::runtime_error.
  std::vector<Tensor> call(const std::string &method, const std::vector<Tensor> &inputs);

private:
  void load(const std::string &method);

  struct Runtime; // ExecuTorch's part, which no other file includes

  std::unique_ptr<Runtime> runtime_;
  std::vector<std::string> names_;
};

} // namespace mobizo
