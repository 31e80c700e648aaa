// Lets large allocations fail, as on a small device, instead of taking the memory of the machine that runs the fuzzer.
#include <cstdlib>
#include <new>

namespace {

constexpr size_t MOST_BYTES = size_t{512} << 20U;

} // namespace

void *operator new(size_t size) {
  void *const memory = size > MOST_BYTES ? nullptr : std::malloc(size > 0 ? size : 1);
  if (memory == nullptr) {
    throw std::bad_alloc();
  }
  return memory;
}

void operator delete(void *memory) noexcept { std::free(memory); }
void operator delete(void *memory, size_t) noexcept { std::free(memory); }
