#include "frames.hpp"

#include <fcntl.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <iterator>
#include <stdexcept>
#include <system_error>

namespace mobizo {
namespace {

constexpr size_t HEAD = 9, CRC = 4;

std::array<uint32_t, 256> make_table() {
  std::array<uint32_t, 256> table{};
  for (uint32_t byte = 0; byte < 256; ++byte) {
    uint32_t value = byte;
    for (int bit = 0; bit < 8; ++bit) {
      value = (value & 1U) != 0 ? 0xEDB88320U ^ (value >> 1U) : value >> 1U;
    }
    table[byte] = value;
  }
  return table;
}

uint32_t number_at(std::string_view data, size_t at) {
  uint32_t number = 0;
  std::memcpy(&number, data.data() + at, sizeof number);
  return number;
}

[[noreturn]] void fail(const std::string &what) { throw std::system_error(errno, std::generic_category(), what); }

} // namespace

uint32_t crc32(const char *data, size_t size) {
  static const std::array<uint32_t, 256> table = make_table();
  uint32_t value = 0xFFFFFFFFU;
  for (size_t at = 0; at < size; ++at) {
    value = table[(value ^ static_cast<uint8_t>(data[at])) & 0xFFU] ^ (value >> 8U);
  }
  return value ^ 0xFFFFFFFFU;
}

std::string make_frame(char kind, uint32_t number, std::string_view payload) {
  std::string bytes(HEAD, '\0');
  const auto length = static_cast<uint32_t>(payload.size());
  bytes[0] = kind;
  std::memcpy(bytes.data() + 1, &number, 4);
  std::memcpy(bytes.data() + 5, &length, 4);
  bytes.append(payload);
  const uint32_t crc = crc32(bytes.data(), bytes.size());
  bytes.append(reinterpret_cast<const char *>(&crc), CRC);
  return bytes;
}

bool FrameReader::next(Frame &frame) {
  if (at_ + HEAD > data_.size()) {
    return false;
  }
  const size_t length = number_at(data_, at_ + 5), end = at_ + HEAD + length;
  if (end + CRC > data_.size() || number_at(data_, end) != crc32(data_.data() + at_, HEAD + length)) {
    return false;
  }
  frame = {data_[at_], number_at(data_, at_ + 1), data_.substr(at_ + HEAD, length)};
  at_ = end + CRC;
  return true;
}

void Numbers::expect(size_t count, size_t size) const {
  if (count > data_.size() / size) {
    throw std::runtime_error("a record of the plan is too short; have the agent write it again");
  }
}

void Numbers::end() const {
  if (!data_.empty()) {
    throw std::runtime_error("a record of the plan is too long; have the agent write it again");
  }
}

void Numbers::take(void *target, size_t size) {
  expect(size, 1);
  if (size > 0) { // the pointers of nothing may be null
    std::memcpy(target, data_.data(), size);
  }
  data_.remove_prefix(size);
}

std::string read_file(const std::string &path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

void sync_directory_of(const std::string &path) {
  const size_t slash = path.rfind('/');
  const std::string directory = slash == std::string::npos ? "." : path.substr(0, slash);
  const int descriptor = open(directory.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (descriptor < 0 || fsync(descriptor) != 0) {
    fail(directory);
  }
  close(descriptor);
}

void write_durably(const std::string &path, std::string_view data) {
  const std::string aside = path + ".new";
  const int descriptor = open(aside.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
  if (descriptor < 0) {
    fail(aside);
  }
  while (!data.empty()) {
    const ssize_t piece = write(descriptor, data.data(), data.size());
    if (piece < 0 && errno != EINTR) {
      const int error = errno;
      close(descriptor);
      unlink(aside.c_str());
      errno = error;
      fail(path);
    }
    data.remove_prefix(piece < 0 ? 0 : static_cast<size_t>(piece));
  }
  if (fsync(descriptor) != 0 || close(descriptor) != 0 || rename(aside.c_str(), path.c_str()) != 0) {
    fail(path);
  }
  sync_directory_of(path);
}

} // namespace mobizo
