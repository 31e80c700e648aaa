// Runs a compiled program's methods, which share one B, with ExecuTorch.
#pragma once

#include "packed_weights.hpp"
#include "tensor.hpp"

#include <executorch/extension/module/module.h>
#include <executorch/runtime/core/hierarchical_allocator.h>

#include <chrono>
#include <memory>
#include <string>
#include <vector>

namespace mobizo {

// One program, which is in memory until the process ends.
class Program {
public:
  // packed: a file that keeps the packed weights for the next start, or empty. resident: all packed weights stay in
  // memory, for programs that read them once for each token. Throws ExecutorError.
  Program(const std::string &program, const std::string &weights, const std::string &packed, bool resident);

  // Returns copies of the outputs, because another method may reuse their memory. Throws ExecutorError.
  std::vector<Tensor> call(const std::string &method, const std::vector<Tensor> &inputs);

  // Returns the time spent loading methods so far, including packing their weights.
  std::chrono::nanoseconds load_time() const { return load_time_; }

private:
  void load(const std::string &method);
  void plan();
  // Returns the memory of activations beyond a method's plan to the system. Only the arenas after the first have state.
  void release_activations(const std::string &method);

  // Memory that all methods share, as Module would allocate it, but from calloc: pages are allocated when written to,
  // so that a key-value cache takes memory as the text fills it. Module would write zeros to all of it.
  std::vector<executorch::runtime::Span<uint8_t>> arenas_;
  std::unique_ptr<executorch::runtime::HierarchicalAllocator> planned_;
  const MappedFile *graph_ = nullptr, *weights_ = nullptr; // the module's
  std::unique_ptr<PackedWeights> packed_; // outlives the module, whose operators point into it
  std::unique_ptr<executorch::extension::Module> module_;
  std::vector<std::string> names_;
  std::chrono::nanoseconds load_time_{0};
};

} // namespace mobizo
