// The weights as XNNPACK packs them: shared by all methods, kept in a file for the next start, released page by page.
#pragma once

#include "mapped_file.hpp"
#include "packed_index.hpp"

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

namespace mobizo {

// A range of memory that a packed tensor takes.
struct PackedRange {
  void *start = nullptr;
  size_t size = 0;
  bool filed = false; // it is in the file, so its pages can be released
};

// Packed weights of one weights file.
//
// With a path, packed weights lie in PATH, mapped, and PATH.index says where. One process writes at a time; others read
// what the index has and pack the rest in memory. Nothing in the file is changed once the index names it. A file that is
// damaged, or of another runner, library, processor or weights file, is replaced. Without a path, without space on the
// disk, or beyond MOST_PACKED, weights are packed in memory.
class PackedWeights {
public:
  // path: of the file, or empty. resident: no pages are released after their use.
  PackedWeights(const MappedFile &weights, const MappedFile &program, std::string path, bool resident);
  ~PackedWeights();
  PackedWeights(const PackedWeights &) = delete;
  PackedWeights &operator=(const PackedWeights &) = delete;

  // Where a packed tensor lies among the addresses, or SIZE_MAX.
  size_t find(const PackedKey &key);
  // Returns memory for a tensor to be packed; null if there is none. keyed: it may lie in the file.
  void *reserve(size_t size, bool keyed);
  // Makes reserved memory known under a key, or under none. Returns its place among the addresses.
  size_t insert(const PackedKey *key, void *start, size_t size);
  void *address(size_t place) const { return places_.at(place).start; }
  std::unique_ptr<PackedKey> key_of(const void *kernel, const void *bias, uint32_t seed, uint32_t fingerprint) const;
  void alias(const void *other, const void *original);

  // What was found or inserted since the last call: the packed weights of one XNNPACK runtime.
  std::vector<PackedRange> take_used();
  // Returns of these ranges those whose pages are to be released after each use, so that the others stay in memory.
  // The first ones of a program stay: a layer is used again when all others were, so the last used one is needed last.
  std::vector<PackedRange> transient(const std::vector<PackedRange> &used);
  // Releases the pages that were read to pack them.
  void release_sources() const { weights_.release(); }
  // Writes what is new to the file's index.
  void commit();

private:
  struct Hash {
    size_t operator()(const PackedKey &key) const { return checksum(&key, sizeof key); }
  };

  void open_file();
  bool verified(int descriptor, const std::vector<PackedEntry> &entries) const;
  bool start_anew();
  void *reserve_in_file(size_t size);
  void remember(const PackedEntry &entry, void *start);

  const MappedFile &weights_, &program_;
  std::string path_;
  uint64_t identity_ = 0;
  int descriptor_ = -1; // of the file, if this process writes it
  uint64_t end_ = 0;    // of what the file has
  size_t page_ = 4096;
  bool resident_;
  size_t kept_ = 0; // bytes of packed weights that stay in memory
  std::vector<PackedRange> places_;
  std::unordered_map<PackedKey, size_t, Hash> known_;
  std::unordered_map<const void *, const void *> aliases_;
  std::map<const void *, bool> lasting_; // by start: whether a range's pages stay in memory
  std::map<void *, std::pair<uint64_t, size_t>> reserved_; // mapped from the file: offset and mapped bytes
  std::vector<size_t> used_;
  std::vector<PackedEntry> entries_;
  std::vector<std::pair<void *, size_t>> mapped_;
  bool changed_ = false, overflowed_ = false;
};

// The packed weights of this process's program, which the hooks in xnnpack_hooks.cpp use; null: ExecuTorch's own cache.
extern PackedWeights *packed_weights;

// Takes the pages of ranges out of this process's memory; they are in the file.
void release_pages(const std::vector<PackedRange> &ranges);

} // namespace mobizo
