// The runner's output: JSON lines on standard output (device_agent/training/messages.py), and this process's own figures.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>

namespace mobizo {

// A double as Python writes it: the fewest digits that give it back.
std::string number(double value);

// A text as a JSON string.
std::string quoted(const std::string &text);

// Resident memory now and at its most, bytes.
int64_t rss_bytes();
int64_t peak_rss_bytes();

// Memory that can be allocated without swapping, bytes.
int64_t spare_bytes();

// Writes a line and flushes it.
void print_line(const std::string &line);

// Writes the last line of a failed command. code: one of the agent's error codes (shared/errors.py).
void print_error(const std::string &code, const std::string &detail);

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point when);

} // namespace mobizo
