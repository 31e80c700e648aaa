// The index of a file of packed weights: the offset, size and checksum of each packed tensor.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace mobizo {

// Detects damage to data, not manipulation: the file lies in the agent's own directory.
uint64_t checksum(const void *data, size_t size);

// Identifies one packed tensor: the offsets of its kernel and bias in the weights file, and how XNNPACK packed them: a
// seed, which covers the shape, the tile sizes and whether the weights are transposed, and above it a fingerprint.
using PackedKey = std::array<uint64_t, 3>;

struct PackedEntry {
  PackedKey key{};
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
