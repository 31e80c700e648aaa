#include "prefix.hpp"

#include "report.hpp"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace mobizo {

int64_t PrefixCache::state_bytes(size_t tokens) const {
  return static_cast<int64_t>(tokens * sizeof(float)) * settings_.width;
}

int32_t PrefixCache::computed_length(const Tokens &text) const {
  const auto stride = static_cast<size_t>(settings_.stride);
  const auto own = static_cast<int64_t>((text.size() + stride - 1) / stride * stride);
  return static_cast<int32_t>(settings_.dynamic != 0 ? std::min(own, settings_.length) : settings_.length);
}

int64_t PrefixCache::room(int64_t reserved) {
  if (budget_ < 0) {
    // Decided after the program has allocated its memory.
    budget_ = std::min(settings_.prefix_bytes, spare_bytes() / 4);
  }
  return budget_ - reserved - bytes_;
}

const Tokens *PrefixCache::next(Upcoming &upcoming, int32_t length) const {
  std::deque<const Tokens *> &waiting = upcoming.waiting_[length];
  while (waiting.empty() && upcoming.at_ < upcoming.texts_.size()) {
    const Tokens *text = upcoming.texts_[upcoming.at_++];
    upcoming.waiting_[computed_length(*text)].push_back(text);
  }
  if (waiting.empty()) {
    return nullptr;
  }
  const Tokens *text = waiting.front();
  waiting.pop_front();
  return text;
}

void PrefixCache::add_companions(std::vector<const Tokens *> &group, int32_t length, Upcoming &upcoming,
                                 int64_t room) const {
  for (const Tokens *text : group) {
    room -= state_bytes(text->size());
  }
  const auto rows = static_cast<size_t>(settings_.batch);
  while (group.size() < rows && room > 0) {
    const Tokens *text = next(upcoming, length);
    if (text == nullptr) {
      return;
    }
    const bool known = kept_.count(*text) > 0 || std::any_of(group.begin(), group.end(), [text](const Tokens *other) {
                         return *other == *text;
                       });
    if (known) {
      continue;
    }
    room -= state_bytes(text->size());
    if (room >= 0) {
      group.push_back(text);
    }
  }
}

void PrefixCache::compute(const std::vector<const Tokens *> &texts, int32_t length, int64_t room, States &passing) {
  const auto rows = static_cast<int32_t>(settings_.batch);
  const auto columns = static_cast<size_t>(length), width = static_cast<size_t>(settings_.width);
  Tensor tokens(Type::Int64, {rows, length});
  for (size_t row = 0; row < texts.size(); ++row) {
    std::copy(texts[row]->begin(), texts[row]->end(), tokens.data<int64_t>() + row * columns);
  }
  const std::vector<Tensor> outputs = program_.call("prefix", {tokens});
  const Tensor &fresh = output_of(outputs, 0);
  const size_t count = static_cast<size_t>(rows) * columns * width;
  if (fresh.type != Type::Float || fresh.count() != count) {
    throw std::runtime_error("the program gave " + std::to_string(fresh.count()) + " hidden states in place of " +
                             std::to_string(count) + "; the program is another recipe's");
  }
  for (size_t row = 0; row < texts.size(); ++row) {
    const float *state = fresh.data<float>() + row * columns * width;
    const int64_t size = state_bytes(texts[row]->size());
    const bool fits = size <= room;
    room -= fits ? size : 0;
    bytes_ += fits ? size : 0;
    (fits ? kept_ : passing)[*texts[row]].assign(state, state + texts[row]->size() * width);
  }
}

Tensor PrefixCache::hidden(const std::vector<const Tokens *> &texts, int32_t rows, int32_t length, Upcoming &upcoming,
                           int64_t reserved) {
  States passing; // states that do not fit the cache
  std::map<int32_t, std::vector<const Tokens *>> missing;
  for (auto text = texts.begin(); text != texts.end(); ++text) {
    const bool again = std::any_of(texts.begin(), text, [text](const Tokens *other) { return *other == **text; });
    if (!again && kept_.count(**text) == 0) {
      missing[computed_length(**text)].push_back(*text);
    }
  }
  const auto most = static_cast<size_t>(settings_.batch);
  for (const auto &[own, all] : missing) {
    for (size_t at = 0; at < all.size(); at += most) {
      const auto first = all.begin() + static_cast<std::ptrdiff_t>(at);
      std::vector<const Tokens *> group(first, first + static_cast<std::ptrdiff_t>(std::min(most, all.size() - at)));
      const int64_t free = room(reserved);
      add_companions(group, own, upcoming, free);
      compute(group, own, free, passing);
    }
  }
  Tensor result(Type::Float, {rows, length, static_cast<int32_t>(settings_.width)});
  for (size_t row = 0; row < texts.size(); ++row) {
    const auto kept = kept_.find(*texts[row]);
    const std::vector<float> &state = kept != kept_.end() ? kept->second : passing.at(*texts[row]);
    std::copy(state.begin(), state.end(),
              result.data<float>() + row * static_cast<size_t>(length) * static_cast<size_t>(settings_.width));
  }
  return result;
}

} // namespace mobizo
