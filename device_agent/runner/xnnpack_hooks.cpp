// Gives XNNPACK the runner's own cache of packed weights.
//
// ExecuTorch has no option for that: its delegate always passes its own cache, which holds packed weights on the heap,
// or in a file without checksums that a second process would overwrite. The delegate calls these functions of its
// library by name, so the executable's definitions come first; each calls the library's own. The declarations are copied
// from the XNNPACK that ExecuTorch 1.5.1 pins, because its headers are not in the package.
#include "packed_weights.hpp"

#include <dlfcn.h>

#include <cstdio>
#include <cstdlib>
#include <unordered_map>

extern "C" {

struct xnn_weights_cache_look_up_key {
  uint32_t seed;
  const void *kernel;
  const void *bias;
  uint32_t fingerprint_id;
};

struct xnn_weights_cache_provider {
  void *context;
  size_t (*look_up)(void *, const xnn_weights_cache_look_up_key *);
  void *(*reserve_space)(void *, size_t);
  size_t (*look_up_or_insert)(void *, const xnn_weights_cache_look_up_key *, void *, size_t);
  bool (*is_finalized)(void *);
  void *(*offset_to_addr)(void *, size_t);
  int (*delete_cache)(void *);
  int (*alias_data)(void *, void *, void *);
};
}

namespace mobizo {
namespace {

using Key = xnn_weights_cache_look_up_key;
constexpr int SUCCESS = 0; // xnn_status

std::optional<PackedKey> key_of(const Key *key) {
  return packed_weights->key_of(key->kernel, key->bias, key->seed, key->fingerprint_id);
}

// XNNPACK looks up, then reserves, then inserts. Without a key the next start could not find the tensor in the file.
bool keyed = false;

size_t look_up(void *, const Key *key) {
  const auto known = key_of(key);
  keyed = known.has_value();
  return known ? packed_weights->find(*known) : SIZE_MAX;
}

void *reserve_space(void *, size_t size) { return packed_weights->reserve(size, keyed); }

size_t look_up_or_insert(void *, const Key *key, void *start, size_t size) {
  return packed_weights->insert(key_of(key), start, size);
}

bool is_finalized(void *) { return true; } // asked only while operators are prepared to run
void *offset_to_addr(void *, size_t place) { return packed_weights->address(place); }
int delete_cache(void *) { return SUCCESS; }

int alias_data(void *, void *other, void *original) {
  packed_weights->alias(other, original);
  return SUCCESS;
}

xnn_weights_cache_provider provider{nullptr,      look_up,        reserve_space, look_up_or_insert,
                                    is_finalized, offset_to_addr, delete_cache,  alias_data};

// By XNNPACK runtime: packed weights whose pages are released once another of these runtimes is used.
std::unordered_map<const void *, std::vector<PackedRange>> &transient_ranges() {
  static std::unordered_map<const void *, std::vector<PackedRange>> ranges;
  return ranges;
}

// Releases the pages of the runtime that was used before `runtime`. A layer that is used several times in a row, as
// lm_head is for one part of the answers after the other, keeps its pages.
void take_turn(const void *runtime) {
  static const void *last = nullptr;
  if (const auto found = transient_ranges().find(last); runtime != last && found != transient_ranges().end()) {
    release_pages(found->second);
  }
  last = runtime;
}

// Returns XNNPACK's own function. The executable links its library, so there is one.
template <typename Function> Function next(const char *name) {
  void *function = dlsym(RTLD_NEXT, name);
  if (function == nullptr) {
    std::fprintf(stderr, "mobizo-runner: %s\n", dlerror());
    std::abort();
  }
  return reinterpret_cast<Function>(function);
}

} // namespace
} // namespace mobizo

extern "C" {

__attribute__((visibility("default"))) int xnn_create_runtime_v4(void *subgraph, xnn_weights_cache_provider *cache,
                                                                 void *workspace, void *threadpool, uint32_t flags,
                                                                 void **runtime) {
  using namespace mobizo;
  static const auto create =
      next<int (*)(void *, xnn_weights_cache_provider *, void *, void *, uint32_t, void **)>("xnn_create_runtime_v4");
  const bool ours = packed_weights != nullptr && cache != nullptr;
  take_turn(nullptr);
  const int status = create(subgraph, ours ? &provider : cache, workspace, threadpool, flags, runtime);
  if (ours) {
    std::vector<PackedRange> transient = packed_weights->take_transient();
    release_pages(transient);
    packed_weights->release_sources();
    if (status == SUCCESS) {
      transient_ranges()[*runtime] = std::move(transient);
    }
  }
  return status;
}

__attribute__((visibility("default"))) int xnn_invoke_runtime(void *runtime) {
  using namespace mobizo;
  static const auto invoke = next<int (*)(void *)>("xnn_invoke_runtime");
  if (transient_ranges().count(runtime) != 0) {
    take_turn(runtime);
  }
  return invoke(runtime);
}
}
