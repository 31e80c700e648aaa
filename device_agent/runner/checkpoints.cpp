#include "checkpoints.hpp"

#include "frames.hpp"

#include <sys/stat.h>

#include <cerrno>
#include <charconv>
#include <cstdint>
#include <filesystem>
#include <string_view>
#include <system_error>

namespace mobizo {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view MAGIC = "MOBIZO-CHECKPOINT 1\n", PREFIX = "step-", SUFFIX = ".bin";
constexpr size_t HEAD = MAGIC.size() + 2 * sizeof(uint32_t); // magic, steps, CRC-32 of the state

} // namespace

std::set<size_t> Checkpoints::steps() const {
  std::set<size_t> steps;
  if (!fs::is_directory(directory_)) {
    return steps;
  }
  for (const fs::directory_entry &entry : fs::directory_iterator(directory_)) {
    const std::string name = entry.path().filename().string();
    if (name.size() <= PREFIX.size() + SUFFIX.size() || name.compare(0, PREFIX.size(), PREFIX) != 0) {
      continue;
    }
    const char *const first = name.data() + PREFIX.size(), *const last = name.data() + name.size() - SUFFIX.size();
    size_t step = 0;
    const auto [end, error] = std::from_chars(first, last, step);
    if (error == std::errc{} && end == last && name.substr(name.size() - SUFFIX.size()) == SUFFIX) {
      steps.insert(step);
    }
  }
  return steps;
}

std::vector<float> Checkpoints::read(size_t step) const {
  const std::string data = read_file(file(step));
  if (data.size() < HEAD || std::string_view(data).substr(0, MAGIC.size()) != MAGIC) {
    return {};
  }
  const std::string_view state = std::string_view(data).substr(HEAD);
  Numbers head(std::string_view(data).substr(MAGIC.size(), HEAD - MAGIC.size()));
  const auto steps = head.one<uint32_t>(), crc = head.one<uint32_t>();
  if (steps != step || state.size() % sizeof(float) != 0 || crc != crc32(state.data(), state.size())) {
    return {};
  }
  return Numbers(state).many<float>(state.size() / sizeof(float));
}

void Checkpoints::write(size_t step, const std::vector<float> &state) const {
  if (mkdir(directory_.c_str(), 0700) != 0 && errno != EEXIST) {
    throw std::system_error(errno, std::generic_category(), directory_);
  }
  const std::string_view bytes(reinterpret_cast<const char *>(state.data()), state.size() * sizeof(float));
  const uint32_t head[] = {static_cast<uint32_t>(step), crc32(bytes.data(), bytes.size())};
  std::string data(MAGIC);
  data.append(reinterpret_cast<const char *>(head), sizeof head);
  data.append(bytes);
  write_durably(file(step), data);
}

void Checkpoints::keep(const std::set<size_t> &wanted) const {
  for (const size_t step : steps()) {
    if (wanted.count(step) == 0) {
      fs::remove(file(step));
    }
  }
}

std::string Checkpoints::file(size_t step) const {
  return directory_ + "/" + std::string(PREFIX) + std::to_string(step) + std::string(SUFFIX);
}

} // namespace mobizo
