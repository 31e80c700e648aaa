#include "generate.hpp"

#include "report.hpp"

#include <algorithm>
#include <stdexcept>

namespace mobizo {
namespace {

Tensor integers(const std::vector<int64_t> &values, std::vector<int32_t> shape) {
  Tensor tensor(Type::Int64, std::move(shape));
  std::copy(values.begin(), values.end(), tensor.data<int64_t>());
  return tensor;
}

} // namespace

void generate(Program &program, const std::vector<float> &adapter, const std::vector<int64_t> &tokens, int64_t most,
              int64_t length, int64_t context) {
  const auto given = static_cast<int64_t>(tokens.size());
  if (tokens.empty() || most < 1 || most - 1 > context - given) {
    throw std::runtime_error(std::to_string(given) + " tokens and " + std::to_string(most) +
                             " more do not fit the program's context, " + std::to_string(context) + "; ask for less");
  }
  program.call("load", {floats(adapter)});
  std::vector<int64_t> part = tokens;
  int64_t position = 0;
  for (int64_t generated = 0; generated < most; ++generated) {
    Tensor logits;
    for (size_t at = 0; at < part.size(); at += static_cast<size_t>(length)) {
      const size_t end = std::min(part.size(), at + static_cast<size_t>(length));
      const std::vector<int64_t> piece(part.begin() + static_cast<std::ptrdiff_t>(at),
                                       part.begin() + static_cast<std::ptrdiff_t>(end));
      const auto size = static_cast<int32_t>(piece.size());
      const std::vector<Tensor> outputs =
          program.call("extend", {integers(piece, {1, size}), integers({position}, {1}), integers({size - 1}, {1})});
      logits = output_of(outputs, 0); // (1, V)
      position += size;
    }
    if (logits.type != Type::Float || logits.count() == 0) {
      throw std::runtime_error("the program gives no logits; it is no inference program");
    }
    const float *first = logits.data<float>(), *last = first + logits.count();
    const int64_t token = std::max_element(first, last) - first;
    print_line("{\"token\": " + std::to_string(token) + "}");
    part = {token};
  }
}

} // namespace mobizo
