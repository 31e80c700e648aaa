// The index of a file of packed weights: the offset, size and checksum of each packed tensor.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace mobizo {

// Detects damage to data, not manipulation: the file lies in the agent's own directory.
uint64_t checksum(const void *data, size_t size);

// Identifies one packed tensor: the offsets of its kernel and bias in the weights file, and how XNNPACK packed them. The
// seed covers the shape, the tile sizes and whether the weights are transposed.
struct PackedKey {
  uint64_t kernel = 0, bias = 0;
  uint32_t seed = 0, fingerprint = 0;

  bool operator==(const PackedKey &other) const {
    return kernel == other.kernel && bias == other.bias && seed == other.seed && fingerprint == other.fingerprint;
  }
};

struct PackedEntry {
  PackedKey key;
  uint64_t offset = 0, size = 0, sum = 0;
};

// Identifies everything else that packed weights depend on: this executable, ExecuTorch's library and the processor.
// weights: `MappedFile::identity`.
uint64_t packing_identity(uint64_t weights);

// Returns the entries, or none if the index is missing, damaged, or of another identity.
std::vector<PackedEntry> read_index(const std::string &path, uint64_t identity);

// Replaces the index atomically. Returns whether that succeeded.
bool write_index(const std::string &path, uint64_t identity, const std::vector<PackedEntry> &entries);

} // namespace mobizo
