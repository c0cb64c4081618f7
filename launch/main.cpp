#include <dlfcn.h>
#include <sys/resource.h>

#include <cstdio>
#include <stdexcept>
#include <string>
#include <string_view>

#include "launch/programs.h"
#include "launch/ranks/failure.h"
#include "launch/ranks/launch_command.h"

namespace {

decltype(&megashard_run) load_programs() {
  // RTLD_LAZY: a run uses a few thousand of the 31,000 functions that LibTorch would resolve at once.
  void* library = dlopen("libmegashard_programs.so", RTLD_LAZY | RTLD_GLOBAL);
  if (library == nullptr) {
    throw std::runtime_error("cannot load " + std::string(dlerror()) + ": build it with launch/setup");
  }
  return reinterpret_cast<decltype(&megashard_run)>(dlsym(library, "megashard_run"));
}

/// A checkpoint of many ranks has more files than the usual limit of open files (1024), and readers keep files open.
void allow_many_files() {
  rlimit limit{};
  if (::getrlimit(RLIMIT_NOFILE, &limit) != 0) return;
  limit.rlim_cur = limit.rlim_max;
  ::setrlimit(RLIMIT_NOFILE, &limit);
}

}  // namespace

int main(int argc, char** argv) {
  allow_many_files();
  const std::string_view subcommand = argc > 1 ? argv[1] : "--help";
  return megashard::run_program([&] {
    if (subcommand == "launch") return megashard::run_launch(argc - 1, argv + 1);
    if (subcommand == "--version")
      return std::puts("megashard " MEGASHARD_VERSION "\n" MEGASHARD_BUILT_WITH) < 0 ? 1 : 0;
    return load_programs()(argc, argv);
  });
}
