// Hidden states before the first adapted layer, cached by text as device_agent/training/prefix.py does.
#pragma once

#include "plan.hpp"

#include <cstdint>
#include <deque>
#include <map>
#include <vector>

namespace mobizo {

// Texts in the order in which their states will be requested. They fill rows of a call that would be empty. The texts
// must outlive the object.
class Upcoming {
public:
  explicit Upcoming(std::vector<const Tokens *> texts = {}) : texts_(std::move(texts)) {}

private:
  friend class PrefixCache;
  std::vector<const Tokens *> texts_;
  size_t at_ = 0;
  std::map<int32_t, std::deque<const Tokens *>> waiting_; // by the length at which their states are computed
};

class PrefixCache {
public:
  PrefixCache(const Settings &settings, Program &program) : settings_(settings), program_(program) {}

  // Returns hidden states (rows, length, width), zero at padding and in rows without a text. texts: of the first rows.
  // reserved: bytes of the cache that stay free for other texts.
  Tensor hidden(const std::vector<const Tokens *> &texts, int32_t rows, int32_t length, Upcoming &upcoming,
                int64_t reserved = 0);

  // The size of the states of so many tokens, in bytes.
  int64_t state_bytes(size_t tokens) const;

private:
  using States = std::map<Tokens, std::vector<float>>;

  // The length at which a text's state is computed. It depends on the text alone.
  int32_t computed_length(const Tokens &text) const;
  const Tokens *next(Upcoming &upcoming, int32_t length) const;
  // Adds upcoming texts in the rows that `group` leaves free, as many as can be cached.
  void add_companions(std::vector<const Tokens *> &group, int32_t length, Upcoming &upcoming, int64_t room) const;
  // Computes the states of at most E texts, and caches those that fit `room` bytes; puts the others into `passing`.
  void compute(const std::vector<const Tokens *> &texts, int32_t length, int64_t room, States &passing);
  int64_t room(int64_t reserved);

  const Settings &settings_;
  Program &program_;
  States kept_;
  int64_t budget_ = -1; // bytes; -1: not determined yet
  int64_t bytes_ = 0;   // of kept states
};

} // namespace mobizo
