// The weights as XNNPACK packs them: shared by all methods and kept in a file for the next start.
#pragma once

#include "mapped_file.hpp"
#include "packed_index.hpp"

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

namespace mobizo {

// The memory of a packed tensor.
struct PackedRange {
  void *start = nullptr;
  size_t size = 0;
  bool in_file = false; // its pages can be released
};

// Packed weights of one weights file, until the process ends.
//
// With a path, packed weights are in PATH, which is mapped, and PATH.index has their offsets. One process writes at a
// time; others read the tensors in the index and pack the rest in memory. A tensor in the index never changes. A file
// that is damaged, or of another runner, library, processor or weights file, is replaced. Without a path, without disk
// space, or beyond MAX_PACKED, weights are packed in memory.
class PackedWeights {
public:
  // path: of the file, or empty. resident: no pages are released after their use.
  PackedWeights(const MappedFile &weights, const MappedFile &program, std::string path, bool resident);

  // Returns the index of a packed tensor for `address`, or SIZE_MAX if it is not packed yet.
  size_t find(const PackedKey &key);
  // Returns memory for a tensor to be packed; null if there is none. keyed: it may be in the file.
  void *reserve(size_t size, bool keyed);
  // Records reserved memory, under a key if there is one. Returns its index for `address`.
  size_t insert(const std::optional<PackedKey> &key, void *start, size_t size);
  void *address(size_t place) const { return places_.at(place).start; }
  std::optional<PackedKey> key_of(const void *kernel, const void *bias, uint32_t seed, uint32_t fingerprint) const;
  void alias(const void *other, const void *original);

  // Returns those tensors found or inserted since the last call, the packed weights of one XNNPACK runtime, whose pages
  // are released after each use. The first ones of a program stay in memory: layers are used in turn, so the most
  // recently used layer is needed last.
  std::vector<PackedRange> take_transient();
  // Releases the pages of both files that packing has read.
  void release_sources() const {
    weights_.release();
    program_.release();
  }
  // Adds the newly packed tensors to the file's index.
  void commit();
  // Returns whether memory for a packed tensor could not be allocated.
  bool exhausted() const { return exhausted_; }

private:
  void open_file();
  bool verified(int descriptor, const std::vector<PackedEntry> &entries) const;
  void replace_file();
  void *reserve_in_file(size_t size);
  void remember(const PackedEntry &entry, void *start);

  const MappedFile &weights_, &program_;
  std::string path_;
  uint64_t identity_ = 0;
  int descriptor_ = -1; // of the file, if this process writes it
  uint64_t end_ = 0;    // of the packed tensors in the file
  size_t page_ = 4096;
  bool resident_;
  size_t resident_bytes_ = 0;                    // of packed weights in the file that stay in memory
  std::map<const void *, bool> resident_ranges_; // by start: whether a range's pages stay in memory
  std::vector<PackedRange> places_;
  std::map<PackedKey, size_t> known_;
  std::unordered_map<const void *, const void *> aliases_;
  std::map<void *, std::pair<uint64_t, size_t>> reserved_; // mapped from the file: offset and mapped bytes
  std::vector<size_t> used_;
  std::vector<PackedEntry> entries_;
  bool changed_ = false, overflowed_ = false, exhausted_ = false;
};

// The packed weights of this process's program, which the hooks in xnnpack_hooks.cpp use; null: ExecuTorch's own cache.
extern PackedWeights *packed_weights;

// Removes the pages of ranges from this process's memory; they remain in the file.
void release_pages(const std::vector<PackedRange> &ranges);

} // namespace mobizo
