#include "score.hpp"

#include <algorithm>
#include <cmath>

namespace mobizo {

Measured measure(Program &program, const std::vector<ScoreBatch> &split, const std::function<void()> &pulse) {
  Measured measured;
  std::vector<double> rights; // by the example's place in the split, whatever batch it was in
  for (const ScoreBatch &batch : split) {
    pulse();
    const Tensor found = output_of(program.call("score", batch.inputs), 0); // (R, T, C)
    if (found.type != Type::Float || found.shape != batch.inputs.at(2).shape) { // the cells point into that shape
      throw std::runtime_error("the program's scores have another shape than the plan's candidates; the program is "
                               "another recipe's");
    }
    const auto answer = static_cast<size_t>(found.shape.at(1)), choices = static_cast<size_t>(found.shape.at(2));
    for (const Scored &example : batch.examples) {
      std::vector<double> scores;
      for (const std::vector<Cell> &cells : example.candidates) {
        double sum = 0;
        for (const auto &[row, place, choice] : cells) {
          const size_t at =
              (static_cast<size_t>(row) * answer + static_cast<size_t>(place)) * choices + static_cast<size_t>(choice);
          sum += static_cast<double>(found.data<float>()[at]);
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
