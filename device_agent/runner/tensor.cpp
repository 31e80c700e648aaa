#include "tensor.hpp"

#include <algorithm>
#include <functional>
#include <numeric>
#include <stdexcept>
#include <string>

namespace mobizo {

size_t size_of(Type type) { return type == Type::Int64 ? 8 : 4; }

Tensor::Tensor(Type type, std::vector<int32_t> shape) : type(type), shape(std::move(shape)) {
  bytes.resize(count() * size_of(type));
}

size_t Tensor::count() const {
  return std::accumulate(shape.begin(), shape.end(), size_t{1}, std::multiplies<size_t>());
}

const Tensor &output_of(const std::vector<Tensor> &outputs, size_t index) {
  if (index >= outputs.size()) {
    throw std::runtime_error("the program gave " + std::to_string(outputs.size()) +
                             " outputs, too few; the program is another recipe's");
  }
  return outputs[index];
}

Tensor scalar(float value) { return floats({value}); }

Tensor floats(const std::vector<float> &values) {
  if (values.size() > INT32_MAX) {
    throw std::runtime_error("B or the optimizer's state has too many numbers");
  }
  Tensor tensor(Type::Float, {static_cast<int32_t>(values.size())});
  std::copy(values.begin(), values.end(), tensor.data<float>());
  return tensor;
}

} // namespace mobizo
