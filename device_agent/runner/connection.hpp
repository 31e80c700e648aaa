// The executor protocol on two streams: reads requests and writes answers (docs/runner.md).
#pragma once

#include "errors.hpp"
#include "tensor.hpp"

#include <cstdio>
#include <optional>
#include <string>
#include <vector>

namespace mobizo {

struct Request {
  std::string method;
  std::vector<Tensor> inputs;
};

class Connection {
public:
  Connection(std::FILE *input, std::FILE *output) : input_(input), output_(output) {}

  // Returns the next request, or nothing if the input ended before it. Memory is allocated as the bytes arrive: at most
  // three times their number, and 1 MiB. Throws ExecutorError for a malformed request, std::bad_alloc.
  std::optional<Request> read_request();

  // Both throw ExecutorError if the client closed the connection.
  void answer(const std::vector<Tensor> &outputs);
  void answer_error(Status status, const std::string &text);

private:
  bool read_all(void *target, size_t size, bool may_end);
  uint32_t read_number(uint32_t max, const char *what);
  Tensor read_tensor();
  void put(const void *source, size_t size);
  void put_number(uint32_t number) { put(&number, sizeof number); }
  void flush();

  std::FILE *input_, *output_;
};

} // namespace mobizo
