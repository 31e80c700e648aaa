#include "ledger.hpp"

#include "frames.hpp"
#include "report.hpp"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <system_error>
#include <tuple>

namespace mobizo {
namespace {

constexpr std::string_view MAGIC = "MOBIZO-TRAJECTORY 1\n";

// What stands after a key in one of the ledger's own flat JSON objects.
std::string field(std::string_view object, std::string_view key) {
  const std::string quoted = "\"" + std::string(key) + "\":";
  size_t at = object.find(quoted);
  if (at == std::string_view::npos) {
    return "";
  }
  at = object.find_first_not_of(' ', at + quoted.size());
  if (at == std::string_view::npos) {
    return "";
  }
  const bool text = object[at] == '"';
  at += text ? 1 : 0;
  return std::string(object.substr(at, object.find_first_of(text ? "\"" : ",}", at) - at));
}

// The number after a key; nothing if there is none, or one that the type cannot hold.
std::optional<int64_t> integer(std::string_view object, std::string_view key) {
  const std::string text = field(object, key);
  int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  return error == std::errc{} && end == text.data() + text.size() ? std::optional(value) : std::nullopt;
}

std::optional<double> real(std::string_view object, std::string_view key) {
  const std::string text = field(object, key);
  char *end = nullptr;
  const double value = std::strtod(text.c_str(), &end);
  return end != text.c_str() && std::isfinite(value) ? std::optional(value) : std::nullopt;
}

// Nothing if the evaluation cannot have happened. steps: so many are before it.
std::optional<Evaluation> read_evaluation(std::string_view payload, size_t steps) {
  const auto step = integer(payload, "step"), correct = integer(payload, "correct"), total = integer(payload, "total");
  const auto loss = real(payload, "loss");
  if (!step || *step < 0 || static_cast<size_t>(*step) > steps || !total || *total < 1 || !correct || *correct < 0 ||
      *correct > *total || !loss) {
    return std::nullopt;
  }
  const std::string split = field(payload, "split"), adapter = field(payload, "adapter");
  if ((split != "validation" && split != "test") || (adapter != "current" && adapter != "best")) {
    return std::nullopt;
  }
  return Evaluation{*step, split, *correct, *total, *loss, adapter};
}

// Nothing if no device sets such limits.
std::optional<Limits> read_limits(std::string_view payload) {
  const auto step = integer(payload, "step");
  const auto rest = real(payload, "rest");
  const auto length = field(payload, "max_length") == "null" ? 0 : integer(payload, "max_length");
  if (!step || *step < 0 || !rest || *rest < 0 || *rest > MOST_REST || !length || *length < 0) {
    return std::nullopt;
  }
  return Limits{*step, *rest, *length};
}

} // namespace

Ledger::Ledger(const std::string &path, const std::string &header, size_t numbers) {
  read(path, header, numbers);
  const bool begins = end_ == 0;
  descriptor_ = open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  if (descriptor_ < 0 || ftruncate(descriptor_, static_cast<off_t>(end_)) != 0) {
    throw std::system_error(errno, std::generic_category(), path);
  }
  if (begins) {
    write(std::string(MAGIC) + make_frame('H', 0, header));
    sync_directory_of(path);
  }
}

Ledger::~Ledger() { close(descriptor_); }

void Ledger::read(const std::string &path, const std::string &header, size_t numbers) {
  const std::string data = read_file(path);
  if (std::string_view(data).substr(0, MAGIC.size()) != MAGIC) {
    return;
  }
  FrameReader frames(data, MAGIC.size());
  Frame frame;
  while (frames.next(frame)) {
    if ((frame.kind == 'H') != (end_ == 0) || (frame.kind == 'H' && frame.payload != header)) {
      throw std::runtime_error(path + " is the trajectory of another run; move it away to start this one");
    }
    if (frame.kind == 'S') {
      if (frame.number != steps() || frame.payload.size() != 4 * numbers) {
        throw std::runtime_error(path + " has a step where another belongs; move it away to start the run anew");
      }
      numbers_.push_back(Numbers(frame.payload).many<float>(numbers));
    } else if (frame.kind == 'E') {
      const std::optional<Evaluation> evaluation = read_evaluation(frame.payload, steps());
      if (!evaluation) {
        throw std::runtime_error(path + " has an impossible evaluation; move it away to start the run anew");
      }
      evaluations_.push_back(*evaluation);
    } else if (frame.kind == 'L') {
      const std::optional<Limits> limits = read_limits(frame.payload);
      if (!limits) {
        throw std::runtime_error(path + " has impossible limits; move it away to start the run anew");
      }
      limits_.push_back(*limits);
    }
    end_ = frames.end();
  }
}

Limits Ledger::limits_at(size_t step) const {
  const auto newest = std::find_if(limits_.rbegin(), limits_.rend(), [step](const Limits &limits) {
    return limits.step <= static_cast<int64_t>(step);
  });
  return newest == limits_.rend() ? Limits{} : *newest;
}

const Evaluation *Ledger::find(const std::string &split, int64_t step, const std::string &adapter) const {
  for (const Evaluation &evaluation : evaluations_) {
    if (evaluation.split == split && evaluation.step == step && evaluation.adapter == adapter) {
      return &evaluation;
    }
  }
  return nullptr;
}

const Evaluation *Ledger::best() const {
  const Evaluation *best = nullptr;
  const auto rank = [](const Evaluation &evaluation) {
    return std::tuple(-evaluation.accuracy(), evaluation.loss, evaluation.step);
  };
  for (const Evaluation &evaluation : evaluations_) {
    if (evaluation.split == "validation" && (best == nullptr || rank(evaluation) < rank(*best))) {
      best = &evaluation;
    }
  }
  return best;
}

bool Ledger::out_of_patience(int64_t patience) const {
  const Evaluation *top = best();
  return patience > 0 && top != nullptr &&
         std::count_if(evaluations_.begin(), evaluations_.end(), [top](const Evaluation &evaluation) {
           return evaluation.split == "validation" && evaluation.step > top->step;
         }) >= patience;
}

void Ledger::append(const std::vector<float> &numbers) {
  const std::string_view payload(reinterpret_cast<const char *>(numbers.data()), numbers.size() * 4);
  write(make_frame('S', static_cast<uint32_t>(steps()), payload));
  numbers_.push_back(numbers);
}

void Ledger::append(const Evaluation &evaluation) {
  // As Python's json writes it, so that equal runs have equal ledgers whatever trained them.
  const std::string payload = "{\"step\": " + std::to_string(evaluation.step) + ", \"split\": \"" + evaluation.split +
                              "\", \"correct\": " + std::to_string(evaluation.correct) +
                              ", \"total\": " + std::to_string(evaluation.total) +
                              ", \"loss\": " + number(evaluation.loss) + ", \"adapter\": \"" + evaluation.adapter +
                              "\"}";
  write(make_frame('E', static_cast<uint32_t>(steps()), payload));
  evaluations_.push_back(evaluation);
}

void Ledger::append(const Limits &limits) {
  const std::string length = limits.max_length == 0 ? "null" : std::to_string(limits.max_length);
  const std::string payload = "{\"step\": " + std::to_string(steps()) + ", \"rest\": " + number(limits.rest) +
                              ", \"max_length\": " + length + "}";
  write(make_frame('L', static_cast<uint32_t>(steps()), payload));
  limits_.push_back(limits);
  limits_.back().step = static_cast<int64_t>(steps());
}

void Ledger::write(const std::string &bytes) {
  size_t done = 0;
  while (done < bytes.size()) {
    const ssize_t piece =
        pwrite(descriptor_, bytes.data() + done, bytes.size() - done, static_cast<off_t>(end_ + done));
    if (piece < 0 && errno == EINTR) {
      continue;
    }
    if (piece <= 0) {
      break;
    }
    done += static_cast<size_t>(piece);
  }
  if (done < bytes.size() || fsync(descriptor_) != 0) {
    const int error = errno;
    // A full disk must not leave half a frame in the middle of the ledger.
    if (ftruncate(descriptor_, static_cast<off_t>(end_)) != 0) {
      throw std::system_error(errno, std::generic_category(), "the ledger");
    }
    throw std::system_error(error, std::generic_category(), "the ledger");
  }
  end_ += bytes.size();
}

} // namespace mobizo
