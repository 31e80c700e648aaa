#include "score.hpp"

#include <algorithm>
#include <cmath>

namespace mobizo {

namespace {

// Calls the program on one batch. Returns its outputs: log-probabilities (R, T, C).
std::vector<Tensor> call(Program &program, const ScoreBatch &batch, const std::vector<Tokens> &texts,
                         Upcoming &upcoming, const FrozenStates &frozen) {
  if (frozen.cache == nullptr) {
    return program.call("score", batch.inputs);
  }
  std::vector<const Tokens *> rows;
  for (const Tokens &text : texts) {
    rows.push_back(&text);
  }
  const std::vector<int32_t> &shape = batch.inputs.at(0).shape;
  Tensor hidden = frozen.cache->hidden(rows, shape.at(0), shape.at(1), upcoming, frozen.reserved);
  return program.call(SCORE_SUFFIX, {hidden, batch.inputs.at(1), batch.inputs.at(2)});
}

} // namespace

Measured measure(Program &program, const std::vector<ScoreBatch> &split, const std::function<void()> &pulse,
                 const FrozenStates &frozen) {
  std::vector<std::vector<Tokens>> texts;
  std::vector<const Tokens *> order;
  for (const ScoreBatch &batch : split) {
    texts.push_back(batch.texts());
  }
  for (const std::vector<Tokens> &rows : texts) {
    for (const Tokens &text : rows) {
      order.push_back(&text);
    }
  }
  Upcoming upcoming(std::move(order));
  Measured measured;
  std::vector<double> rights; // by the example's index in the split, whatever batch it was in
  for (size_t at = 0; at < split.size(); ++at) {
    pulse();
    const ScoreBatch &batch = split[at];
    const Tensor output = output_of(call(program, batch, texts[at], upcoming, frozen), 0); // (R, T, C)
    if (output.type != Type::Float || output.shape != batch.inputs.at(2).shape) { // the cells point into that shape
      throw std::runtime_error("the program's scores have another shape than the plan's candidates; the program is "
                               "another recipe's");
    }
    const auto answer = static_cast<size_t>(output.shape.at(1)), choices = static_cast<size_t>(output.shape.at(2));
    for (const Scored &example : batch.examples) {
      std::vector<double> scores;
      for (const std::vector<Cell> &cells : example.candidates) {
        double sum = 0;
        for (const auto &[row, position, choice] : cells) {
          const size_t at =
              (static_cast<size_t>(row) * answer + static_cast<size_t>(position)) * choices +
              static_cast<size_t>(choice);
          sum += static_cast<double>(output.data<float>()[at]);
        }
        if (!std::isfinite(sum)) {
          throw Diverged("training diverged: the adapter's scores are no numbers any more; lower lr");
        }
        scores.push_back(sum);
      }
      const auto right = static_cast<size_t>(example.correct), index = static_cast<size_t>(example.index);
      measured.correct += std::max_element(scores.begin(), scores.end()) - scores.begin() == example.correct;
      rights.resize(std::max(rights.size(), index + 1));
      rights[index] = scores[right];
    }
  }
  measured.total = static_cast<int64_t>(rights.size());
  double loss = 0;
  for (const double right : rights) {
    loss -= right;
  }
  measured.loss = loss / static_cast<double>(measured.total);
  return measured;
}

} // namespace mobizo
