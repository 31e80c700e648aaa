#include "connection.hpp"

#include <unistd.h>

#include <algorithm>
#include <cerrno>

namespace mobizo {
namespace {

constexpr uint32_t MAX_NAME = 64, MAX_TENSORS = 16, MAX_RANK = 8;
constexpr uint64_t MAX_TENSOR_BYTES = uint64_t{1} << 32;
constexpr size_t FIRST_PIECE = size_t{1} << 20;
constexpr size_t BUFFER = size_t{1} << 16;

} // namespace

// Returns false if the input ended before the first byte and `may_end` is set.
bool Connection::read_all(void *target, size_t size, bool may_end) {
  auto *at = static_cast<uint8_t *>(target);
  for (size_t got = 0; got < size;) {
    const ssize_t count = read(input_, at + got, size - got);
    if (count < 0 && errno == EINTR) {
      continue;
    }
    if (count <= 0) {
      if (may_end && got == 0) {
        return false;
      }
      throw ExecutorError(Status::Failed, "the request is truncated");
    }
    got += static_cast<size_t>(count);
  }
  return true;
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
  if (buffer_.size() + size > BUFFER) {
    flush();
  }
  if (size > BUFFER) {
    write_all(source, size);
  } else {
    const auto *bytes = static_cast<const uint8_t *>(source);
    buffer_.insert(buffer_.end(), bytes, bytes + size);
  }
}

void Connection::flush() {
  write_all(buffer_.data(), buffer_.size());
  buffer_.clear();
}

void Connection::write_all(const void *source, size_t size) {
  const auto *at = static_cast<const uint8_t *>(source);
  while (size > 0) {
    const ssize_t count = write(output_, at, size);
    if (count < 0 && errno == EINTR) {
      continue;
    }
    if (count <= 0) {
      throw ExecutorError(Status::Failed, "the client closed the connection");
    }
    at += count;
    size -= static_cast<size_t>(count);
  }
}

} // namespace mobizo
