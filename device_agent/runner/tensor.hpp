// Dense tensors, in which a program's inputs and outputs are passed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace mobizo {

enum class Type : uint8_t { Float = 0, Int64 = 1, Int32 = 2 };

// A dense tensor that owns its bytes, row-major.
struct Tensor {
  Type type = Type::Float;
  std::vector<int32_t> shape;
  std::vector<uint8_t> bytes;

  Tensor() = default;
  Tensor(Type type, std::vector<int32_t> shape); // zeros

  size_t count() const;
  template <typename T> T *data() { return reinterpret_cast<T *>(bytes.data()); }
  template <typename T> const T *data() const { return reinterpret_cast<const T *>(bytes.data()); }
};

size_t size_of(Type type);

// A method's output with an index. Throws std::runtime_error if the program gave fewer.
const Tensor &output_of(const std::vector<Tensor> &outputs, size_t index);

Tensor scalar(float value);

// Throws std::runtime_error for more values than a tensor's size can state.
Tensor floats(const std::vector<float> &values);

} // namespace mobizo
