#include "report.hpp"

#include "frames.hpp"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <cstdlib>

namespace mobizo {
namespace {

// The bytes that /proc states for a name, in kilobytes there.
int64_t proc_bytes(const char *path, const std::string &name) {
  const std::string text = "\n" + read_file(path);
  const size_t at = text.find("\n" + name + ":");
  return at == std::string::npos ? 0 : std::atoll(text.c_str() + at + name.size() + 2) * 1024;
}

} // namespace

std::string number(double value) {
  if (!std::isfinite(value)) {
    return std::isnan(value) ? "NaN" : value > 0 ? "Infinity" : "-Infinity";
  }
  char buffer[64];
  const auto end = std::to_chars(buffer, buffer + sizeof buffer, value, std::chars_format::scientific).ptr;
  const std::string text(buffer, end);
  const size_t e = text.find('e');
  const int exponent = std::atoi(text.c_str() + e + 1);
  const bool negative = text[0] == '-';
  std::string digits = text.substr(negative ? 1 : 0, e - (negative ? 1 : 0));
  digits.erase(std::remove(digits.begin(), digits.end(), '.'), digits.end());
  std::string result;
  if (exponent < -4 || exponent >= 16) {
    result = digits.substr(0, 1) + (digits.size() > 1 ? "." + digits.substr(1) : "") + text.substr(e);
  } else if (exponent < 0) {
    result = "0." + std::string(static_cast<size_t>(-exponent - 1), '0') + digits;
  } else {
    const auto whole = static_cast<size_t>(exponent) + 1;
    digits.resize(std::max(digits.size(), whole + 1), '0');
    result = digits.substr(0, whole) + "." + digits.substr(whole);
  }
  return (negative ? "-" : "") + result;
}

std::string quoted(const std::string &text) {
  std::string result = "\"";
  for (const char character : text) {
    if (character == '"' || character == '\\') {
      result += '\\';
      result += character;
    } else if (static_cast<unsigned char>(character) < 0x20) {
      char escape[8];
      std::snprintf(escape, sizeof escape, "\\u%04x", character);
      result += escape;
    } else {
      result += character;
    }
  }
  return result + "\"";
}

int64_t rss_bytes() { return proc_bytes("/proc/self/status", "VmRSS"); }
int64_t peak_rss_bytes() { return proc_bytes("/proc/self/status", "VmHWM"); }
int64_t spare_bytes() { return proc_bytes("/proc/meminfo", "MemAvailable"); }

void print_line(const std::string &line) {
  std::fwrite(line.data(), 1, line.size(), stdout);
  std::fputc('\n', stdout);
  std::fflush(stdout);
}

void print_error(const std::string &code, const std::string &detail) {
  print_line("{\"error\": {\"code\": " + quoted(code) + ", \"detail\": " + quoted(detail) + "}}");
}

double seconds_since(Clock::time_point when) { return std::chrono::duration<double>(Clock::now() - when).count(); }

} // namespace mobizo
