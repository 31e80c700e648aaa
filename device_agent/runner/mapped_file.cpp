#include "mapped_file.hpp"

#include "errors.hpp"
#include "packed_index.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

namespace mobizo {

using executorch::runtime::Error;
using executorch::runtime::FreeableBuffer;
using executorch::runtime::Result;

namespace {

constexpr size_t IDENTIFYING_BYTES = 1 << 16;

[[noreturn]] void fail(const std::string &path, int error) {
  const Status status = error == ENOMEM ? Status::OutOfMemory : Status::FileUnreadable;
  throw ExecutorError(status, "cannot map " + path + ": " + (error == 0 ? "it is empty" : std::strerror(error)));
}

} // namespace

MappedFile::MappedFile(const std::string &path) {
  const int descriptor = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (descriptor < 0) {
    fail(path, errno);
  }
  struct stat found {};
  int error = fstat(descriptor, &found) == 0 ? 0 : errno;
  size_ = static_cast<size_t>(found.st_size);
  void *mapped = size_ == 0 ? MAP_FAILED : mmap(nullptr, size_, PROT_READ, MAP_SHARED, descriptor, 0);
  if (size_ > 0 && mapped == MAP_FAILED) {
    error = errno;
  }
  close(descriptor);
  if (mapped == MAP_FAILED) {
    fail(path, error);
  }
  start_ = static_cast<const uint8_t *>(mapped);
  const uint64_t facts[] = {size_, static_cast<uint64_t>(found.st_mtim.tv_sec),
                            static_cast<uint64_t>(found.st_mtim.tv_nsec),
                            checksum(start_, std::min(size_, IDENTIFYING_BYTES))};
  identity_ = checksum(facts, sizeof facts);
}

Result<FreeableBuffer> MappedFile::load(size_t offset, size_t size, const SegmentInfo &) const {
  if (offset > size_ || size > size_ - offset) {
    return Error::AccessFailed; // the file is shorter than its content says
  }
  return FreeableBuffer(start_ + offset, size, nullptr);
}

Error MappedFile::load_into(size_t offset, size_t size, const SegmentInfo &, void *buffer) const {
  if (offset > size_ || size > size_ - offset) {
    return Error::AccessFailed; // the file is shorter than its content says
  }
  std::memcpy(buffer, start_ + offset, size);
  return Error::Ok;
}

Result<size_t> MappedFile::size() const { return size_; }

std::optional<uint64_t> MappedFile::offset_of(const void *pointer) const {
  const auto *at = static_cast<const uint8_t *>(pointer);
  if (at < start_ || at >= start_ + size_) {
    return std::nullopt;
  }
  return static_cast<uint64_t>(at - start_);
}

void MappedFile::release() const { (void)madvise(const_cast<uint8_t *>(start_), size_, MADV_DONTNEED); }

} // namespace mobizo
