// The bundle's `mobizo-runner`, linked statically: starts bin/mobizo-runner by the bundle's own loader with the bundle's
// own libraries, whatever C library the device has. The process keeps its argv[0], by which `ps` and `pidof` find it.
#include <sys/auxv.h>
#include <unistd.h>

#include <cerrno>
#include <climits>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace {

constexpr int kNotExecutable = 126; // as a shell says it
constexpr int kLeading = 6;         // arguments before the runner's own arguments

int fail(const char* path) {
  fprintf(stderr, "mobizo-runner: %s: %s; unpack the whole bundle with its modes\n", path, strerror(errno));
  return kNotExecutable;
}

} // namespace

int main(int argc, char** argv) {
  // Unlike /proc/self/exe, this needs no mounted /proc.
  const auto* self = reinterpret_cast<const char*>(getauxval(AT_EXECFN));
  static char root[PATH_MAX], loader[PATH_MAX + 64], libraries[PATH_MAX + 64], program[PATH_MAX + 64];
  if (self == nullptr || realpath(self, root) == nullptr) {
    return fail("its own path");
  }
  *strrchr(root, '/') = '\0';
  snprintf(loader, sizeof loader, "%s/lib/" MOBIZO_LOADER, root);
  snprintf(libraries, sizeof libraries, "%s/lib", root);
  snprintf(program, sizeof program, "%s/bin/mobizo-runner", root);
  const char* name = argc > 0 ? argv[0] : program;
  auto** arguments = static_cast<const char**>(calloc(static_cast<size_t>(argc) + kLeading + 1, sizeof(char*)));
  if (arguments == nullptr) {
    return fail("memory");
  }
  const char* leading[kLeading] = {name, "--argv0", name, "--library-path", libraries, program};
  memcpy(arguments, leading, sizeof leading);
  for (int i = 1; i < argc; ++i) {
    arguments[kLeading + i - 1] = argv[i];
  }
  execv(loader, const_cast<char* const*>(arguments));
  return fail(loader);
}
