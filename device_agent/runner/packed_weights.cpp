#include "packed_weights.hpp"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

namespace mobizo {

PackedWeights *packed_weights = nullptr;

namespace {

constexpr uint64_t MAX_PACKED = 3;                // times the weights file: forward, transposed, and other tilings
constexpr uint64_t MIN_FREE = uint64_t{64} << 20; // bytes of the disk that are left free for the run
// Packed weights that stay in memory: a share of the weights file, and bytes.
constexpr double MAX_RESIDENT_SHARE = 0.5;
constexpr size_t MAX_RESIDENT = size_t{64} << 20;
constexpr size_t PIECE = size_t{1} << 20;
constexpr uint64_t NO_BIAS = UINT64_MAX, OF_PROGRAM = uint64_t{1} << 63;

size_t whole_pages(size_t size, size_t page) { return (size + page - 1) / page * page; }

} // namespace

PackedWeights::PackedWeights(const MappedFile &weights, const MappedFile &program, std::string path, bool resident)
    : weights_(weights), program_(program), path_(std::move(path)), page_(static_cast<size_t>(sysconf(_SC_PAGESIZE))),
      resident_(resident) {
  if (!path_.empty()) {
    identity_ = packing_identity(weights_.identity());
    open_file();
  }
}

void PackedWeights::open_file() {
  int descriptor = open(path_.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  if (descriptor < 0) {
    return;
  }
  const bool writes = flock(descriptor, LOCK_EX | LOCK_NB) == 0;
  const std::vector<PackedEntry> entries = read_index(path_ + ".index", identity_);
  if (!verified(descriptor, entries)) {
    close(descriptor);
    // Another process may still map the old file, so it is replaced, not truncated. A file with a writer is left alone.
    if (writes) {
      replace_file();
    }
    return;
  }
  for (const PackedEntry &entry : entries) {
    end_ = std::max(end_, entry.offset + entry.size);
  }
  void *start = end_ == 0 ? nullptr : mmap(nullptr, end_, PROT_READ, MAP_SHARED, descriptor, 0);
  if (start == MAP_FAILED) {
    close(descriptor);
    return;
  }
  for (const PackedEntry &entry : entries) {
    remember(entry, static_cast<uint8_t *>(start) + entry.offset);
  }
  end_ = whole_pages(end_, page_);
  if (writes) {
    descriptor_ = descriptor;
  } else {
    close(descriptor);
  }
}

// Reads the file instead of its mapping, whose pages would count as this process's memory.
bool PackedWeights::verified(int descriptor, const std::vector<PackedEntry> &entries) const {
  struct stat found {};
  if (entries.empty() || fstat(descriptor, &found) != 0) {
    return false;
  }
  std::vector<uint8_t> data;
  for (const PackedEntry &entry : entries) {
    const auto size = static_cast<uint64_t>(found.st_size);
    if (entry.offset % page_ != 0 || entry.offset > size || entry.size > size - entry.offset || entry.size == 0) {
      return false;
    }
    uint64_t sum = 0;
    for (uint64_t at = 0; at < entry.size; at += PIECE) {
      const size_t piece = std::min<uint64_t>(PIECE, entry.size - at);
      data.resize(std::max(data.size(), piece));
      if (pread(descriptor, data.data(), piece, static_cast<off_t>(entry.offset + at)) != static_cast<ssize_t>(piece)) {
        return false;
      }
      sum = sum * 31 + checksum(data.data(), piece);
    }
    if (sum != entry.sum) {
      return false;
    }
  }
  return true;
}

void PackedWeights::replace_file() {
  (void)unlink((path_ + ".index").c_str());
  (void)unlink(path_.c_str());
  const int descriptor = open(path_.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
  if (descriptor < 0 || flock(descriptor, LOCK_EX | LOCK_NB) == 0) {
    descriptor_ = descriptor;
  } else {
    close(descriptor);
  }
}

void PackedWeights::remember(const PackedEntry &entry, void *start) {
  known_[entry.key] = places_.size();
  places_.push_back({start, static_cast<size_t>(entry.size), true});
  entries_.push_back(entry);
}

std::optional<PackedKey> PackedWeights::key_of(const void *kernel, const void *bias, uint32_t seed,
                                               uint32_t fingerprint) const {
  // The program file has A, and of a reverse pass the biases and, in 4 bits, transposed weights.
  const auto place_of = [this](const void *pointer) -> std::optional<uint64_t> {
    const auto found = aliases_.find(pointer);
    const void *original = found == aliases_.end() ? pointer : found->second;
    const auto within = program_.offset_of(original);
    if (!within) {
      return weights_.offset_of(original);
    }
    const uint64_t place[] = {program_.identity(), *within};
    return checksum(place, sizeof place) | OF_PROGRAM;
  };
  const auto at = place_of(kernel);
  const auto biased = bias == nullptr ? std::optional<uint64_t>(NO_BIAS) : place_of(bias);
  if (!at || !biased) {
    return std::nullopt;
  }
  return PackedKey{*at, *biased, seed | uint64_t{fingerprint} << 32};
}

void PackedWeights::alias(const void *other, const void *original) { aliases_[other] = original; }

size_t PackedWeights::find(const PackedKey &key) {
  const auto found = known_.find(key);
  if (found == known_.end()) {
    return SIZE_MAX;
  }
  used_.push_back(found->second);
  return found->second;
}

void *PackedWeights::reserve(size_t size, bool keyed) {
  if (void *start = keyed ? reserve_in_file(size) : nullptr) {
    return start;
  }
  const size_t bytes = whole_pages(std::max<size_t>(size, 1), page_);
  void *start = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (start == MAP_FAILED) {
    exhausted_ = true;
    return nullptr;
  }
  return start;
}

void *PackedWeights::reserve_in_file(size_t size) {
  const size_t bytes = whole_pages(size, page_);
  const uint64_t max_bytes = MAX_PACKED * *weights_.size();
  struct statvfs disk {};
  overflowed_ = overflowed_ || (descriptor_ >= 0 && end_ + bytes > max_bytes);
  if (descriptor_ < 0 || bytes == 0 || end_ + bytes > max_bytes || fstatvfs(descriptor_, &disk) != 0 ||
      uint64_t{disk.f_bavail} * disk.f_frsize < bytes + MIN_FREE) {
    return nullptr;
  }
  // Without allocated blocks, writing a page to a full disk would raise SIGBUS.
  if (posix_fallocate(descriptor_, static_cast<off_t>(end_), static_cast<off_t>(bytes)) != 0) {
    return nullptr;
  }
  void *start =
      mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor_, static_cast<off_t>(end_));
  if (start == MAP_FAILED) {
    return nullptr;
  }
  reserved_[start] = {end_, bytes};
  end_ += bytes;
  return start;
}

size_t PackedWeights::insert(const std::optional<PackedKey> &key, void *start, size_t size) {
  const size_t place = places_.size();
  const auto filed = reserved_.find(start);
  places_.push_back({start, size, filed != reserved_.end()});
  used_.push_back(place);
  if (key) {
    known_[*key] = place;
    if (filed != reserved_.end()) {
      uint64_t sum = 0;
      for (size_t at = 0; at < size; at += PIECE) {
        sum = sum * 31 + checksum(static_cast<uint8_t *>(start) + at, std::min(PIECE, size - at));
      }
      entries_.push_back({*key, filed->second.first, size, sum});
      (void)mprotect(start, filed->second.second, PROT_READ);
      changed_ = true;
    }
  }
  return place;
}

std::vector<PackedRange> PackedWeights::take_transient() {
  const auto share = static_cast<size_t>(MAX_RESIDENT_SHARE * static_cast<double>(*weights_.size()));
  const size_t max_bytes = std::min(share, MAX_RESIDENT);
  std::vector<PackedRange> ranges;
  for (const size_t place : used_) {
    const PackedRange &range = places_[place];
    if (resident_ || !range.in_file) {
      continue;
    }
    const auto [found, first] = resident_ranges_.emplace(range.start, resident_bytes_ + range.size <= max_bytes);
    if (first && found->second) {
      resident_bytes_ += range.size;
    }
    if (!found->second) {
      ranges.push_back(range);
    }
  }
  used_.clear();
  aliases_.clear();
  return ranges;
}

void PackedWeights::commit() {
  if (overflowed_) {
    (void)unlink((path_ + ".index").c_str()); // full of other programs' weights: the next start replaces the file
  } else if (changed_) {
    (void)write_index(path_ + ".index", identity_, entries_);
    changed_ = false;
  }
}

void release_pages(const std::vector<PackedRange> &ranges) {
  for (const PackedRange &range : ranges) {
    (void)madvise(range.start, range.size, MADV_DONTNEED);
  }
}

} // namespace mobizo
