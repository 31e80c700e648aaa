// Runs a compiled program's methods, which share one B, with ExecuTorch.
#pragma once

#include <executorch/extension/module/module.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace mobizo {

enum class Type : uint8_t { Float = 0, Int64 = 1, Int32 = 2 };

// A dense tensor that owns its bytes, row-major.
struct Tensor {
  Type type = Type::Float;
  std::vector<int32_t> shape;
  std::vector<uint8_t> bytes;

  Tensor() = default;
  Tensor(Type type, std::vector<int32_t> shape);

  size_t count() const;
  template <typename T> T *data() { return reinterpret_cast<T *>(bytes.data()); }
  template <typename T> const T *data() const { return reinterpret_cast<const T *>(bytes.data()); }
};

size_t size_of(Type type);
Tensor scalar(float value);
Tensor floats(const std::vector<float> &values);

class Program {
public:
  // Throws std::runtime_error.
  Program(const std::string &program, const std::string &weights);

  bool has(const std::string &method) const;

  // Returns copies of the outputs, because another method may reuse their memory. Throws std::runtime_error.
  std::vector<Tensor> call(const std::string &method, const std::vector<Tensor> &inputs);

private:
  void load(const std::string &method);

  std::unique_ptr<executorch::extension::Module> module_;
  std::vector<std::string> names_;
};

} // namespace mobizo
