#include "packed_index.hpp"

#include <dlfcn.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>
#include <fstream>
#include <iterator>
#include <set>
#include <sstream>
#include <type_traits>

namespace mobizo {
namespace {

constexpr uint64_t MAGIC = 0x31'4b'43'41'50'42'4f'4dULL; // "MOBPACK1"
constexpr uint64_t MIX = 0x9e3779b97f4a7c15ULL;
static_assert(std::is_trivially_copyable<PackedEntry>::value && sizeof(PackedEntry) == 48, "written to the file as is");

// Returns a file's bytes; empty if it cannot be read.
std::string read_file(const std::string &path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

struct Header {
  uint64_t magic, identity, count, sum;
};

// Returns the lines of /proc/cpuinfo that describe the instruction set, without duplicates. Its frequency changes.
std::string processor() {
  std::set<std::string> facts;
  std::istringstream lines(read_file("/proc/cpuinfo"));
  for (std::string line; std::getline(lines, line);) {
    for (const char *name : {"flags", "Features", "vendor_id", "cpu family", "model", "stepping", "CPU implementer",
                             "CPU architecture", "CPU variant", "CPU part"}) {
      if (line.rfind(name, 0) == 0) {
        facts.insert(line);
      }
    }
  }
  std::string all;
  for (const std::string &fact : facts) {
    all += fact + "\n";
  }
  return all;
}

// Returns size and mtime of the library that packs.
std::string library() {
  Dl_info info{};
  struct stat found {};
  void *backend = dlsym(RTLD_DEFAULT, "xnn_initialize");
  if (backend == nullptr || dladdr(backend, &info) == 0 || info.dli_fname == nullptr ||
      stat(info.dli_fname, &found) != 0) {
    return "";
  }
  return std::to_string(found.st_size) + " " + std::to_string(found.st_mtim.tv_sec);
}

} // namespace

uint64_t checksum(const void *data, size_t size) {
  const auto *at = static_cast<const uint8_t *>(data);
  uint64_t lanes[4] = {MIX, MIX * 3, MIX * 5, MIX * 7};
  size_t left = size;
  for (; left >= sizeof lanes; left -= sizeof lanes, at += sizeof lanes) {
    uint64_t words[4];
    std::memcpy(words, at, sizeof words);
    for (int lane = 0; lane < 4; ++lane) { // four chains, so that the multiplications overlap
      lanes[lane] = (lanes[lane] ^ words[lane]) * MIX;
      lanes[lane] ^= lanes[lane] >> 29;
    }
  }
  uint64_t rest[4] = {};
  std::memcpy(rest, at, left);
  uint64_t sum = size;
  for (int lane = 0; lane < 4; ++lane) {
    sum = (sum ^ lanes[lane]) * MIX;
    sum = (sum ^ (sum >> 32) ^ rest[lane]) * MIX;
  }
  return sum ^ (sum >> 32);
}

uint64_t packing_identity(uint64_t weights) {
  const std::string facts = std::to_string(weights) + "\n" + MOBIZO_VERSION + "\n" + EXECUTORCH_BUILD + "\n" +
                            library() + "\n" + processor();
  return checksum(facts.data(), facts.size());
}

std::vector<PackedEntry> read_index(const std::string &path, uint64_t identity) {
  const std::string data = read_file(path);
  Header header{};
  if (data.size() < sizeof header) {
    return {};
  }
  std::memcpy(&header, data.data(), sizeof header);
  const size_t bytes = data.size() - sizeof header;
  if (header.magic != MAGIC || header.identity != identity || bytes % sizeof(PackedEntry) != 0 ||
      header.count != bytes / sizeof(PackedEntry) ||
      header.sum != checksum(data.data() + sizeof header, bytes)) {
    return {};
  }
  std::vector<PackedEntry> entries(header.count);
  if (bytes > 0) {
    std::memcpy(entries.data(), data.data() + sizeof header, bytes);
  }
  return entries;
}

bool write_index(const std::string &path, uint64_t identity, const std::vector<PackedEntry> &entries) {
  const size_t bytes = entries.size() * sizeof(PackedEntry);
  const Header header{MAGIC, identity, entries.size(), checksum(entries.data(), bytes)};
  std::string data(reinterpret_cast<const char *>(&header), sizeof header);
  data.append(reinterpret_cast<const char *>(entries.data()), bytes);
  const std::string temporary = path + ".new";
  const int descriptor = open(temporary.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
  if (descriptor < 0) {
    return false;
  }
  const bool complete = write(descriptor, data.data(), data.size()) == static_cast<ssize_t>(data.size());
  if (close(descriptor) != 0 || !complete || std::rename(temporary.c_str(), path.c_str()) != 0) {
    (void)unlink(temporary.c_str());
    return false;
  }
  return true;
}

} // namespace mobizo
