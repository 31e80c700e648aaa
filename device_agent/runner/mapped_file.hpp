// A program's file, mapped once, as a loader for ExecuTorch.
#pragma once

#include <executorch/runtime/core/data_loader.h>

#include <cstdint>
#include <optional>
#include <string>

namespace mobizo {

// Maps a file until the process ends. ExecuTorch's own loader maps each tensor separately; with one mapping,
// the offset of a tensor in the file identifies it, and all pages can be released at once.
class MappedFile : public executorch::runtime::DataLoader {
public:
  // Throws ExecutorError.
  explicit MappedFile(const std::string &path);

  executorch::runtime::Result<executorch::runtime::FreeableBuffer> load(size_t offset, size_t size,
                                                                        const SegmentInfo &segment) const override;
  executorch::runtime::Error load_into(size_t offset, size_t size, const SegmentInfo &segment,
                                       void *buffer) const override;
  executorch::runtime::Result<size_t> size() const override;

  // Returns the offset in the file that a pointer points to, or nothing if it points elsewhere.
  std::optional<uint64_t> offset_of(const void *pointer) const;

  // Removes the file's pages from this process's memory. They are clean: the next access reads them again.
  void release() const;

  // Identifies the file without reading all of it: size, mtime, and a checksum of its first bytes.
  uint64_t identity() const { return identity_; }

private:
  const uint8_t *start_ = nullptr;
  size_t size_ = 0;
  uint64_t identity_ = 0;
};

} // namespace mobizo
