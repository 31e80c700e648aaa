// Frames, of which ledgers and plans are made: kind (1 byte), number and length (uint32), payload, CRC-32 of all that.
// Little-endian.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace mobizo {

struct Frame {
  char kind = 0;
  uint32_t number = 0;
  std::string_view payload;
};

uint32_t crc32(const char *data, size_t size);

std::string make_frame(char kind, uint32_t number, std::string_view payload);

// Reads frames one after the other from bytes that outlive it.
class FrameReader {
public:
  FrameReader(std::string_view data, size_t at) : data_(data), at_(at) {}

  // Whether a whole frame follows; it is in `frame` then.
  bool next(Frame &frame);

  // The offset after the last frame read.
  size_t end() const { return at_; }

private:
  std::string_view data_;
  size_t at_;
};

// Reads numbers from a payload. Throws std::runtime_error at its end.
class Numbers {
public:
  explicit Numbers(std::string_view data) : data_(data) {}

  template <typename T> T one() {
    T value;
    take(&value, sizeof value);
    return value;
  }

  template <typename T> std::vector<T> many(size_t count) {
    expect(count, sizeof(T));
    std::vector<T> values(count);
    take(values.data(), count * sizeof(T));
    return values;
  }

  // A count of things that take at least `size` bytes each; that many bytes follow.
  size_t count(size_t size) {
    const auto found = one<uint32_t>();
    expect(found, size);
    return found;
  }

  // Throws std::runtime_error if numbers are left.
  void end() const;

private:
  void expect(size_t count, size_t size) const;
  void take(void *target, size_t size);

  std::string_view data_;
};

// A file's bytes; empty if there is no such file.
std::string read_file(const std::string &path);

// Replaces a file: written aside, synced, renamed, and the rename synced. Throws std::system_error.
void write_durably(const std::string &path, std::string_view data);

// Syncs a file's directory, so that renames in it survive a power cut.
void sync_directory_of(const std::string &path);

} // namespace mobizo
