// Runs a compiled program's methods, which share one B, with ExecuTorch.
#pragma once

#include "tensor.hpp"

#include <chrono>
#include <memory>
#include <string>
#include <vector>

namespace mobizo {

class Program {
public:
  // packed: a file that keeps the packed weights for the next start, or empty. resident: all packed weights stay in
  // memory, for programs that read them once for each token. Throws ExecutorError.
  Program(const std::string &program, const std::string &weights, const std::string &packed, bool resident);
  ~Program();

  // Returns copies of the outputs, because another method may reuse their memory. Throws ExecutorError.
  std::vector<Tensor> call(const std::string &method, const std::vector<Tensor> &inputs);

  // Returns the time spent loading methods so far, including packing their weights.
  std::chrono::nanoseconds load_time() const { return load_time_; }

private:
  void load(const std::string &method);

  struct Runtime; // holds ExecuTorch's objects, so that no other file needs its headers

  std::unique_ptr<Runtime> runtime_;
  std::vector<std::string> names_;
  std::chrono::nanoseconds load_time_{0};
};

} // namespace mobizo
