#include "serve.hpp"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <stdexcept>

namespace mobizo {
namespace {

constexpr uint32_t MOST_NAME = 64, MOST_TENSORS = 16, MOST_RANK = 8;
constexpr uint64_t MOST_BYTES = uint64_t{1} << 32;
constexpr size_t PIECE = size_t{1} << 24U;

// Whether `size` bytes came; false at an end between requests. Throws when it ends within one.
bool read_all(void *target, size_t size, bool within) {
  auto *at = static_cast<uint8_t *>(target);
  for (size_t got = 0; got < size;) {
    const ssize_t piece = read(0, at + got, size - got);
    if (piece < 0 && errno == EINTR) {
      continue;
    }
    if (piece <= 0) {
      if (!within && got == 0) {
        return false;
      }
      throw std::runtime_error("a request is incomplete");
    }
    got += static_cast<size_t>(piece);
  }
  return true;
}

void write_all(const void *source, size_t size) {
  const auto *at = static_cast<const uint8_t *>(source);
  while (size > 0) {
    const ssize_t piece = write(1, at, size);
    if (piece < 0 && errno == EINTR) {
      continue;
    }
    if (piece <= 0) {
      throw std::runtime_error("the client closed the connection");
    }
    at += piece;
    size -= static_cast<size_t>(piece);
  }
}

uint32_t read_number(uint32_t most, const char *what) {
  uint32_t number = 0;
  read_all(&number, sizeof number, true);
  if (number > most) {
    throw std::runtime_error(std::string("a request has an impossible ") + what);
  }
  return number;
}

std::vector<Tensor> read_tensors() {
  std::vector<Tensor> tensors(read_number(MOST_TENSORS, "number of tensors"));
  for (Tensor &tensor : tensors) {
    uint8_t type = 0;
    read_all(&type, sizeof type, true);
    if (type > static_cast<uint8_t>(Type::Int32)) {
      throw std::runtime_error("a request has a tensor of an unknown type");
    }
    std::vector<int32_t> shape(read_number(MOST_RANK, "rank"));
    uint64_t bytes = 8;
    for (int32_t &size : shape) {
      size = static_cast<int32_t>(read_number(INT32_MAX, "size"));
      bytes *= static_cast<uint64_t>(size);
      if (bytes > MOST_BYTES) {
        throw std::runtime_error("a request has a tensor that is too large");
      }
    }
    tensor.type = static_cast<Type>(type);
    tensor.shape = std::move(shape);
    // Memory is taken as the bytes come: a few bytes must not claim gigabytes.
    for (size_t left = tensor.count() * size_of(tensor.type), piece = 0; left > 0; left -= piece) {
      piece = std::min(left, PIECE);
      tensor.bytes.resize(tensor.bytes.size() + piece);
      read_all(tensor.bytes.data() + tensor.bytes.size() - piece, piece, true);
    }
  }
  return tensors;
}

void write_number(uint32_t number) { write_all(&number, sizeof number); }

void answer(const std::vector<Tensor> &tensors) {
  const uint8_t well = 0;
  write_all(&well, 1);
  write_number(static_cast<uint32_t>(tensors.size()));
  for (const Tensor &tensor : tensors) {
    write_all(&tensor.type, 1);
    write_number(static_cast<uint32_t>(tensor.shape.size()));
    for (const int32_t size : tensor.shape) {
      write_number(static_cast<uint32_t>(size));
    }
    write_all(tensor.bytes.data(), tensor.bytes.size());
  }
}

void refuse(const std::string &why) {
  const uint8_t badly = 1;
  write_all(&badly, 1);
  write_number(static_cast<uint32_t>(why.size()));
  write_all(why.data(), why.size());
}

} // namespace

int serve(const std::string &program_path, const std::string &weights, const std::string &packed) {
  std::unique_ptr<Program> program;
  try {
    program = std::make_unique<Program>(program_path, weights, packed, true);
  } catch (const std::exception &error) {
    refuse(error.what());
    return 1;
  }
  answer({});
  uint32_t length = 0;
  while (read_all(&length, sizeof length, false)) {
    if (length > MOST_NAME) {
      throw std::runtime_error("a request has an impossible name");
    }
    std::string method(length, '\0');
    read_all(method.data(), length, true);
    const std::vector<Tensor> inputs = read_tensors();
    std::vector<Tensor> outputs;
    try {
      outputs = program->call(method, inputs);
    } catch (const std::exception &error) {
      refuse(error.what());
      continue;
    }
    answer(outputs);
  }
  return 0;
}

} // namespace mobizo
