// Dense tensors: the inputs and outputs of a program's methods.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace mobizo {

enum class Type : uint8_t { Float = 0, Int64 = 1, Int32 = 2 };

inline size_t size_of(Type type) { return type == Type::Int64 ? 8 : 4; }

// A dense tensor that owns its bytes, row-major.
struct Tensor {
  Type type = Type::Float;
  std::vector<int32_t> shape;
  std::vector<uint8_t> bytes;
};

} // namespace mobizo
