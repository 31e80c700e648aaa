// Attention over the filled part of a key-value cache: a kernel of llama::custom_sdpa.out, the operator of ExecuTorch's
// LLM extension, which ExecuTorch's C++ package lacks. It takes what inference programs pass: one text, float32, causal.
//
// A prompt: every query head of a few tokens is one task of the thread pool. A task reads the keys and values up to its
// last token only, so that a token costs as much as the text is long, whatever the cache's capacity.
//
// A token alone waits for memory. So all query heads of a few keys are one task: each key and value is read once, in the
// order of memory, and the tasks' results are joined by their largest scores.
#include <executorch/extension/kernel_util/make_boxed_from_unboxed_functor.h>
#include <executorch/runtime/kernel/kernel_includes.h>
#include <executorch/runtime/kernel/thread_parallel_interface.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <optional>
#include <vector>

// The compiler writes one version of the marked functions for each of these processors; the loader chooses one.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && !defined(__ANDROID__)
#define MOBIZO_VECTORIZED __attribute__((target_clones("avx512f", "arch=haswell", "default")))
#else
#define MOBIZO_VECTORIZED
#endif

namespace mobizo {
namespace {

using executorch::aten::ScalarType;
using executorch::aten::Tensor;
using executorch::runtime::Error;
using executorch::runtime::KernelRuntimeContext;

constexpr int64_t WIDTH = 16;  // floats of a Lane
constexpr int64_t TOKENS = 4;  // of a task
constexpr int64_t KEYS = 32;   // read for all tokens of a task before the next ones
constexpr float LOWEST = -87.0F; // its exponential is the smallest that is exact

typedef float Lane __attribute__((vector_size(WIDTH * sizeof(float)), aligned(alignof(float)), may_alias));
typedef int32_t Whole __attribute__((vector_size(WIDTH * sizeof(int32_t))));

// One query head over its keys and values. Rows of keys and values are `stride` floats apart.
struct Task {
  const float *keys, *values;
  int64_t stride, size;        // size: of a head
  const float *queries;        // (tokens, query_stride)
  float *mixed;                // as queries
  int64_t query_stride, tokens;
  int64_t first;               // position of the first token; token t attends to first + t + 1 keys
  float scale;
};

// Writes e^x of x <= 0: 2^n * e^r with |r| <= ln(2) / 2; the relative error is below 2e-7.
MOBIZO_VECTORIZED void exponentials(float *row, int64_t count, float largest) {
  int64_t at = 0;
  for (; at < count; at += WIDTH) { // the row has room for whole lanes
    Lane &lane = *reinterpret_cast<Lane *>(row + at);
    Lane x = lane - largest;
    x = x < LOWEST ? Lane{} + LOWEST : x;
    const Whole n = __builtin_convertvector(x * 1.44269504F - 0.5F, Whole); // truncation rounds towards zero
    const Lane whole = __builtin_convertvector(n, Lane);
    const Lane r = (x - whole * 0.693359375F) + whole * 2.12194440e-4F;
    Lane y = r * 1.9875691500e-4F + 1.3981999507e-3F;
    y = y * r + 8.3334519073e-3F;
    y = y * r + 4.1665795894e-2F;
    y = y * r + 1.6666665459e-1F;
    y = y * r + 5.0000001201e-1F;
    y = y * r * r + r + 1.0F;
    const Whole power = (n + 127) << 23;
    lane = y * reinterpret_cast<const Lane &>(power);
  }
}

MOBIZO_VECTORIZED void scores(const Task &task, float *rows, int64_t capacity) {
  const int64_t most = task.first + task.tokens;
  for (int64_t begin = 0; begin < most; begin += KEYS) {
    for (int64_t token = 0; token < task.tokens; ++token) {
      const float *query = task.queries + token * task.query_stride;
      const int64_t end = std::min(begin + KEYS, task.first + token + 1);
      for (int64_t key = begin; key < end; ++key) {
        const float *row = task.keys + key * task.stride;
        Lane sums{};
        int64_t at = 0;
        for (; at + WIDTH <= task.size; at += WIDTH) {
          sums += *reinterpret_cast<const Lane *>(query + at) * *reinterpret_cast<const Lane *>(row + at);
        }
        float sum = 0.0F;
        for (; at < task.size; ++at) {
          sum += query[at] * row[at];
        }
        // By halves, which the compiler turns into shuffles.
        typedef float Half __attribute__((vector_size(32)));
        typedef float Quarter __attribute__((vector_size(16)));
        Half halves[2];
        std::memcpy(halves, &sums, sizeof sums);
        halves[0] += halves[1];
        Quarter quarters[2];
        std::memcpy(quarters, halves, sizeof quarters);
        quarters[0] += quarters[1];
        sum += (quarters[0][0] + quarters[0][2]) + (quarters[0][1] + quarters[0][3]);
        rows[token * capacity + key] = sum * task.scale;
      }
    }
  }
}

MOBIZO_VECTORIZED void mix(const Task &task, const float *rows, int64_t capacity) {
  const int64_t most = task.first + task.tokens;
  for (int64_t token = 0; token < task.tokens; ++token) {
    std::fill_n(task.mixed + token * task.query_stride, task.size, 0.0F);
  }
  for (int64_t begin = 0; begin < most; begin += KEYS) {
    for (int64_t token = 0; token < task.tokens; ++token) {
      const float *weights = rows + token * capacity;
      float *mixed = task.mixed + token * task.query_stride;
      const int64_t end = std::min(begin + KEYS, task.first + token + 1);
      int64_t at = 0;
      for (; at + 4 * WIDTH <= task.size; at += 4 * WIDTH) {
        Lane *out = reinterpret_cast<Lane *>(mixed + at);
        Lane sums[4] = {out[0], out[1], out[2], out[3]};
        for (int64_t key = begin; key < end; ++key) {
          const Lane *row = reinterpret_cast<const Lane *>(task.values + key * task.stride + at);
          for (int part = 0; part < 4; ++part) {
            sums[part] += weights[key] * row[part];
          }
        }
        std::copy_n(sums, 4, out);
      }
      for (; at + WIDTH <= task.size; at += WIDTH) {
        Lane &out = *reinterpret_cast<Lane *>(mixed + at);
        Lane sum = out;
        for (int64_t key = begin; key < end; ++key) {
          sum += weights[key] * *reinterpret_cast<const Lane *>(task.values + key * task.stride + at);
        }
        out = sum;
      }
      for (; at < task.size; ++at) {
        for (int64_t key = begin; key < end; ++key) {
          mixed[at] += weights[key] * task.values[key * task.stride + at];
        }
      }
    }
  }
}

// Replaces a row of scores by e^(score - largest); returns the largest. The row has room for whole lanes.
float weigh(float *row, int64_t count, double &sum) {
  const float largest = *std::max_element(row, row + count);
  std::fill(row + count, row + (count + WIDTH - 1) / WIDTH * WIDTH, largest); // not read again
  exponentials(row, count, largest);
  sum = 0.0;
  for (int64_t key = 0; key < count; ++key) {
    sum += row[key];
  }
  return largest;
}

void attend(const Task &task) {
  const int64_t most = task.first + task.tokens, capacity = (most + WIDTH - 1) / WIDTH * WIDTH;
  thread_local std::vector<float> rows;
  rows.resize(static_cast<size_t>(TOKENS * capacity));
  scores(task, rows.data(), capacity);
  for (int64_t token = 0; token < task.tokens; ++token) {
    const int64_t count = task.first + token + 1;
    float *row = rows.data() + token * capacity;
    double sum = 0.0;
    weigh(row, count, sum);
    const auto share = static_cast<float>(1.0 / sum);
    for (int64_t key = 0; key < count; ++key) {
      row[key] *= share;
    }
  }
  mix(task, rows.data(), capacity);
}

// The token of `task`, whose queries and mixed values are those of all heads; `shared` heads read the same keys.
bool attend_alone(const Task &task, int64_t heads, int64_t shared) {
  const int64_t keys = task.first + 1, spans = (keys + KEYS - 1) / KEYS;
  thread_local std::vector<float> mixed, largest, sums; // of each span and head
  mixed.resize(static_cast<size_t>(spans * heads * task.size));
  largest.resize(static_cast<size_t>(spans * heads));
  sums.resize(static_cast<size_t>(spans * heads));
  float *const parts = mixed.data(), *const tops = largest.data(), *const totals = sums.data();
  const auto run = [&](int64_t begin, int64_t end) {
    for (int64_t span = begin; span < end; ++span) {
      const int64_t count = std::min(KEYS, keys - span * KEYS);
      for (int64_t head = 0; head < heads; ++head) {
        const int64_t at = span * KEYS * task.stride + head / shared * task.size, number = span * heads + head;
        const Task part{task.keys + at, task.values + at, task.stride, task.size, task.queries + head * task.size,
                        parts + number * task.size, 0, 1, count - 1, task.scale};
        float row[KEYS];
        double sum = 0.0;
        scores(part, row, KEYS);
        tops[number] = weigh(row, count, sum);
        totals[number] = static_cast<float>(sum);
        mix(part, row, KEYS);
      }
    }
  };
  if (!executorch::extension::parallel_for(0, spans, 1, run)) {
    return false;
  }
  for (int64_t head = 0; head < heads; ++head) {
    float top = tops[head], total = 0.0F, *out = task.mixed + head * task.size;
    for (int64_t number = head; number < spans * heads; number += heads) {
      top = std::max(top, tops[number]);
    }
    std::fill_n(out, task.size, 0.0F);
    for (int64_t number = head; number < spans * heads; number += heads) {
      const float weight = std::exp(tops[number] - top);
      total += weight * totals[number];
      for (int64_t at = 0; at < task.size; ++at) {
        out[at] += weight * parts[number * task.size + at];
      }
    }
    for (int64_t at = 0; at < task.size; ++at) {
      out[at] /= total;
    }
  }
  return true;
}

bool is_plain(const Tensor &tensor, int64_t heads, int64_t size) {
  return tensor.scalar_type() == ScalarType::Float && tensor.dim() == 4 && tensor.size(0) == 1 &&
         tensor.size(2) == heads && tensor.size(3) == size;
}

// query (1, L, heads, size) at positions from `start` on; key, value (1, C, kv_heads, size). out: as query.
Tensor &attention_out(KernelRuntimeContext &context, const Tensor &query, const Tensor &key, const Tensor &value,
                      int64_t start, const std::optional<Tensor> &mask, double dropout, bool causal,
                      std::optional<double> scale, Tensor &out) {
  const bool shaped = query.dim() == 4 && key.dim() == 4 && key.size(2) > 0 && query.size(2) % key.size(2) == 0;
  const int64_t heads = shaped ? query.size(2) : 0, size = shaped ? query.size(3) : 0;
  const int64_t kv = shaped ? key.size(2) : 0, length = shaped ? query.size(1) : 0;
  const bool fits = shaped && is_plain(query, heads, size) && is_plain(key, kv, size) && is_plain(value, kv, size) &&
                    value.size(1) == key.size(1) && start >= 0 && start + length <= key.size(1) &&
                    !mask.has_value() && dropout == 0.0 && causal &&
                    executorch::runtime::resize_tensor(out, query.sizes()) == Error::Ok &&
                    out.scalar_type() == ScalarType::Float;
  if (!fits) {
    context.fail(Error::InvalidArgument);
    return out;
  }
  const auto *queries = query.const_data_ptr<float>();
  const auto *keys = key.const_data_ptr<float>(), *values = value.const_data_ptr<float>();
  auto *mixed = out.mutable_data_ptr<float>();
  const auto factor = static_cast<float>(scale.value_or(1.0 / std::sqrt(static_cast<double>(size))));
  if (length == 1) {
    const Task token{keys, values, kv * size, size, queries, mixed, 0, 1, start, factor};
    if (!attend_alone(token, heads, heads / kv)) {
      context.fail(Error::Internal);
    }
    return out;
  }
  const int64_t blocks = (length + TOKENS - 1) / TOKENS;
  const auto run = [&](int64_t begin, int64_t end) {
    for (int64_t number = begin; number < end; ++number) {
      // The blocks from both ends in turn, since later tokens have more keys.
      const int64_t turn = number / heads, head = number % heads;
      const int64_t block = turn % 2 == 0 ? turn / 2 : blocks - 1 - turn / 2;
      const int64_t token = block * TOKENS, at = (token * heads + head) * size, kept = head / (heads / kv) * size;
      attend({keys + kept, values + kept, kv * size, size, queries + at, mixed + at, heads * size,
              std::min(TOKENS, length - token), start + token, factor});
    }
  };
  if (!executorch::extension::parallel_for(0, blocks * heads, 1, run)) {
    context.fail(Error::Internal);
  }
  return out;
}

EXECUTORCH_LIBRARY(llama, "custom_sdpa.out", attention_out);

} // namespace
} // namespace mobizo
