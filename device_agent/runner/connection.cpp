#include "connection.hpp"

#include <algorithm>

namespace mobizo {
namespace {

constexpr uint32_t MAX_NAME = 64, MAX_TENSORS = 16, MAX_RANK = 8;
constexpr uint64_t MAX_TENSOR_BYTES = uint64_t{1} << 32;
constexpr size_t FIRST_PIECE = size_t{1} << 20;

} // namespace

// Returns false if the input ended before the first byte and `may_end` is set.
bool Connection::read_all(void *target, size_t size, bool may_end) {
  const size_t got = std::fread(target, 1, size, input_);
  if (got < size && !(may_end && got == 0)) {
    throw ExecutorError(Status::Failed, "the request is truncated");
  }
  return got == size;
}

uint32_t Connection::read_number(uint32_t max, const char *what) {
  uint32_t number = 0;
  read_all(&number, sizeof number, false);
  if (number > max) {
    throw ExecutorError(Status::Failed, "the request has " + std::string(what) + " of " + std::to_string(number) +
                                            "; at most " + std::to_string(max) + " is allowed");
  }
  return number;
}

Tensor Connection::read_tensor() {
  uint8_t type = 0;
  read_all(&type, sizeof type, false);
  if (type > static_cast<uint8_t>(Type::Int32)) {
    throw ExecutorError(Status::Failed, "the request has a tensor of the unknown type " + std::to_string(type));
  }
  Tensor tensor{static_cast<Type>(type), {}, {}};
  tensor.shape.resize(read_number(MAX_RANK, "a tensor with a rank"));
  uint64_t total = size_of(tensor.type), bound = total; // bound: as if no size were 0, so that no product overflows
  for (int32_t &size : tensor.shape) {
    size = static_cast<int32_t>(read_number(INT32_MAX, "a tensor with a size"));
    total *= static_cast<uint64_t>(size);
    bound *= static_cast<uint64_t>(std::max(size, 1));
    if (bound > MAX_TENSOR_BYTES) {
      throw ExecutorError(Status::Failed, "the request has a tensor of more than 4 GiB");
    }
  }
  for (size_t got = 0, piece = 0; got < total; got += piece) {
    piece = std::min<size_t>(total - got, std::max(got, FIRST_PIECE));
    tensor.bytes.resize(got + piece);
    read_all(tensor.bytes.data() + got, piece, false);
  }
  return tensor;
}

std::optional<Request> Connection::read_request() {
  uint32_t length = 0;
  if (!read_all(&length, sizeof length, true)) {
    return std::nullopt;
  }
  if (length > MAX_NAME) {
    throw ExecutorError(Status::Failed, "the request has a method name of " + std::to_string(length) + " bytes");
  }
  Request request{std::string(length, '\0'), {}};
  read_all(request.method.data(), length, false);
  const uint32_t count = read_number(MAX_TENSORS, "a number of tensors");
  while (request.inputs.size() < count) {
    request.inputs.push_back(read_tensor());
  }
  return request;
}

void Connection::answer(const std::vector<Tensor> &outputs) {
  const Status status = Status::Ok;
  put(&status, 1);
  put_number(static_cast<uint32_t>(outputs.size()));
  for (const Tensor &tensor : outputs) {
    put(&tensor.type, 1);
    put_number(static_cast<uint32_t>(tensor.shape.size()));
    for (const int32_t size : tensor.shape) {
      put_number(static_cast<uint32_t>(size));
    }
    put(tensor.bytes.data(), tensor.bytes.size());
  }
  flush();
}

void Connection::answer_error(Status status, const std::string &text) {
  put(&status, 1);
  put_number(static_cast<uint32_t>(text.size()));
  put(text.data(), text.size());
  flush();
}

void Connection::put(const void *source, size_t size) {
  if (size > 0) { // an empty tensor has no address, which fwrite must not be given
    std::fwrite(source, 1, size, output_);
  }
}

void Connection::flush() {
  if (std::fflush(output_) != 0 || std::ferror(output_) != 0) {
    throw ExecutorError(Status::Failed, "the client closed the connection");
  }
}

} // namespace mobizo
