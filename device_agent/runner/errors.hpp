// Errors that reach the client of an executor, with the status that its answer begins with (docs/runner.md).
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

namespace mobizo {

enum class Status : uint8_t { Ok = 0, Failed = 1, OutOfMemory = 2, FileUnreadable = 3 };

struct ExecutorError : std::runtime_error {
  ExecutorError(Status status, const std::string &text) : std::runtime_error(text), status(status) {}

  const Status status;
};

} // namespace mobizo
