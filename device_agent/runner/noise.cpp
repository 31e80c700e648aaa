// The paper's noise operator, registered through ExecuTorch's own extension API: mobizo::noise.out.
//
// One direction a seed, drawn by Threefry-2x32-20 (Salmon et al., SC'11) and Box-Muller as shared/zo/noise.py draws them,
// so that a program that calls the operator can be replayed, which the runtime's own randn does not allow.
#include <executorch/extension/kernel_util/make_boxed_from_unboxed_functor.h>
#include <executorch/runtime/kernel/kernel_includes.h>

#include <cmath>
#include <cstdint>

namespace mobizo {
namespace {

using executorch::aten::ScalarType;
using executorch::aten::Tensor;
using executorch::runtime::Error;
using executorch::runtime::KernelRuntimeContext;

constexpr uint32_t ROTATIONS[8] = {13, 15, 26, 6, 17, 29, 16, 24};

struct Words {
  uint32_t first, second;
};

Words threefry(uint32_t key0, uint32_t key1, uint32_t counter) {
  const uint32_t schedule[3] = {key0, key1, key0 ^ key1 ^ 0x1BD11BDAU};
  uint32_t x0 = counter + schedule[0], x1 = schedule[1];
  for (uint32_t round = 0; round < 20; ++round) {
    const uint32_t rotation = ROTATIONS[round % 8];
    x0 += x1;
    x1 = ((x1 << rotation) | (x1 >> (32 - rotation))) ^ x0;
    if (round % 4 == 3) {
      const uint32_t block = round / 4 + 1;
      x0 += schedule[block % 3];
      x1 += schedule[(block + 1) % 3] + block;
    }
  }
  return {x0, x1};
}

// seeds: int32 (q, 2). out: float32 (q, size), standard normal.
Tensor &noise_out(KernelRuntimeContext &context, const Tensor &seeds, int64_t size, Tensor &out) {
  const bool fits = seeds.scalar_type() == ScalarType::Int && seeds.dim() == 2 && seeds.size(1) == 2 &&
                    out.scalar_type() == ScalarType::Float && out.dim() == 2 && out.size(0) == seeds.size(0) &&
                    out.size(1) == size;
  if (!fits) {
    context.fail(Error::InvalidArgument);
    return out;
  }
  const auto *keys = seeds.const_data_ptr<int32_t>();
  auto *values = out.mutable_data_ptr<float>();
  for (int64_t query = 0; query < seeds.size(0); ++query, values += size) {
    const auto key0 = static_cast<uint32_t>(keys[2 * query]), key1 = static_cast<uint32_t>(keys[2 * query + 1]);
    for (int64_t pair = 0; 2 * pair < size; ++pair) {
      const Words drawn = threefry(key0, key1, static_cast<uint32_t>(pair));
      const float u1 = (static_cast<float>(drawn.first >> 8U) + 1.0F) * 0x1p-24F;
      const float u2 = static_cast<float>(drawn.second >> 8U) * 0x1p-24F;
      const float radius = std::sqrt(-2.0F * std::log(u1));
      const float angle = 6.2831853071795864769F * u2;
      values[2 * pair] = radius * std::cos(angle);
      if (2 * pair + 1 < size) {
        values[2 * pair + 1] = radius * std::sin(angle);
      }
    }
  }
  return out;
}

EXECUTORCH_LIBRARY(mobizo, "noise.out", noise_out);

} // namespace
} // namespace mobizo
