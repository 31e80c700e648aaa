#include "program.hpp"

#include "errors.hpp"

#include <executorch/extension/tensor/tensor.h>
#include <executorch/runtime/backend/interface.h>
#include <executorch/runtime/backend/options.h>
#include <executorch/runtime/platform/runtime.h>

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <iterator>

namespace mobizo {

using executorch::aten::ScalarType;
using executorch::extension::Module;
using executorch::extension::TensorPtr;
using executorch::runtime::Error;
using executorch::runtime::EValue;
using executorch::runtime::HierarchicalAllocator;
using executorch::runtime::Span;
using Clock = std::chrono::steady_clock;

namespace {

constexpr ScalarType TYPES[] = {ScalarType::Float, ScalarType::Long, ScalarType::Int}; // by `Type`

Type type_of(ScalarType type) {
  const auto *found = std::find(std::begin(TYPES), std::end(TYPES), type);
  if (found == std::end(TYPES)) {
    throw ExecutorError(Status::Failed, "the program returned a tensor of an unsupported type");
  }
  return static_cast<Type>(found - TYPES);
}

// text: what failed. exhausted: the cause was a lack of memory, whatever ExecuTorch reports.
[[noreturn]] void fail(const std::string &text, Error error, bool exhausted = false) {
  Status status = Status::Failed;
  std::string cause;
  if (exhausted || error == Error::MemoryAllocationFailed || error == Error::DelegateMemoryAllocationFailed) {
    status = Status::OutOfMemory;
    cause = "memory ran out; ";
  } else if (error == Error::AccessFailed) {
    status = Status::FileUnreadable;
  }
  throw ExecutorError(status, text + " (" + cause + "ExecuTorch " + executorch::runtime::to_string(error) + ")");
}

// Lets the methods share one packed copy of the base weights; otherwise step and score would each hold one.
void share_packed_weights() {
  executorch::runtime::BackendOptions<1> options;
  if (options.set_option("weight_cache_enabled", true) == Error::Ok) {
    // A build without XNNPACK has nothing to share.
    (void)executorch::runtime::set_option("XnnpackBackend", options.view());
  }
}

} // namespace

Program::Program(const std::string &program, const std::string &weights, const std::string &packed, bool resident) {
  const Clock::time_point start = Clock::now();
  executorch::runtime::runtime_init();
  share_packed_weights();
  auto instructions = std::make_unique<MappedFile>(program);
  auto data = std::make_unique<MappedFile>(weights);
  graph_ = instructions.get();
  weights_ = data.get();
  packed_ = std::make_unique<PackedWeights>(*weights_, *graph_, packed, resident);
  packed_weights = packed_.get();
  module_ = std::make_unique<Module>(std::move(instructions), nullptr, nullptr, nullptr, std::move(data));
  auto names = module_->method_names();
  if (!names.ok()) {
    fail("the program does not load", names.error());
  }
  names_.assign(names->begin(), names->end());
  plan();
  load_time_ = Clock::now() - start;
  load("adapter"); // loading the first method sets B to zero
}

void Program::plan() {
  std::vector<size_t> sizes;
  for (const std::string &name : names_) {
    const auto meta = module_->method_meta(name);
    if (!meta.ok()) {
      fail("method '" + name + "' does not load", meta.error());
    }
    sizes.resize(std::max(sizes.size(), meta->num_memory_planned_buffers()));
    for (size_t at = 0; at < meta->num_memory_planned_buffers(); ++at) {
      sizes[at] = std::max(sizes[at], static_cast<size_t>(*meta->memory_planned_buffer_size(at)));
    }
  }
  for (const size_t size : sizes) {
    auto *arena = static_cast<uint8_t *>(std::calloc(std::max<size_t>(size, 1), 1));
    if (arena == nullptr) {
      throw ExecutorError(Status::OutOfMemory, "the program needs " + std::to_string(size) + " bytes of memory");
    }
    arenas_.emplace_back(arena, size);
  }
  planned_ = std::make_unique<HierarchicalAllocator>(Span<Span<uint8_t>>(arenas_.data(), arenas_.size()));
}

void Program::release_activations(const std::string &method) {
  const auto meta = module_->method_meta(method);
  if (!meta.ok() || meta->num_memory_planned_buffers() == 0) {
    return;
  }
  const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  const auto start = reinterpret_cast<uintptr_t>(arenas_[0].data());
  const uintptr_t first = (start + static_cast<size_t>(*meta->memory_planned_buffer_size(0)) + page - 1) / page * page;
  const uintptr_t last = (start + arenas_[0].size()) / page * page;
  if (first < last) {
    (void)madvise(reinterpret_cast<void *>(first), last - first, MADV_DONTNEED);
  }
}

void Program::load(const std::string &method) {
  if (std::find(names_.begin(), names_.end(), method) == names_.end()) {
    throw ExecutorError(Status::Failed, "the program has no method '" + method + "'");
  }
  if (module_->is_method_loaded(method)) {
    return;
  }
  const Clock::time_point start = Clock::now();
  const Error error = module_->load_method(method, planned_.get());
  if (error != Error::Ok) {
    fail("method '" + method + "' does not load", error, packed_->exhausted());
  }
  packed_->commit();
  weights_->release();
  graph_->release(); // XNNPACK has read its part of it
  load_time_ += Clock::now() - start;
}

std::vector<Tensor> Program::call(const std::string &method, const std::vector<Tensor> &inputs) {
  load(method);
  if (method.rfind("score", 0) == 0) { // reads lm_head's whole table, and plans less than the step before it
    release_activations(method);
  }
  std::vector<TensorPtr> held;
  std::vector<EValue> values;
  for (const Tensor &input : inputs) {
    std::vector<executorch::aten::SizesType> shape(input.shape.begin(), input.shape.end());
    void *data = const_cast<uint8_t *>(input.bytes.data());
    held.push_back(executorch::extension::from_blob(data, std::move(shape), TYPES[static_cast<size_t>(input.type)]));
    values.emplace_back(held.back());
  }
  auto results = module_->execute(method, values);
  weights_->release();
  if (!results.ok()) {
    fail("method '" + method + "' failed", results.error());
  }
  std::vector<Tensor> outputs;
  for (const EValue &result : *results) {
    if (!result.isTensor()) {
      throw ExecutorError(Status::Failed, "method '" + method + "' returned a value that is not a tensor");
    }
    const auto &tensor = result.toTensor();
    const auto *data = static_cast<const uint8_t *>(tensor.const_data_ptr());
    outputs.push_back({type_of(tensor.scalar_type()),
                       {tensor.sizes().begin(), tensor.sizes().end()},
                       {data, data + tensor.nbytes()}});
  }
  return outputs;
}

} // namespace mobizo
