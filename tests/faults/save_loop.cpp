// Saves known steps without end, one process a rank, for test_kills.py to kill. save_loop ...
//
// - run FOLDER RANK WORLD FILE: goes on from what is in FOLDER; the ranks meet in FILE. The first
// rank
//   writes a line "ITERATION GENERATION" after each save, and what find_step says as "# LINE".
// - check FOLDER: what a reader finds there, every byte of it, as such a line; or "none". Every
// step
//   that can be seen is whole.
#include <unistd.h>

#include <cstdio>
#include <exception>

#include "parallel/rendezvous.h"
#include "tests/faults/known_step.h"

namespace megashard::testing {
namespace {

void print_line(const std::string& text) {  // at once, whatever comes next
  const auto line = text + "\n";
  TORCH_CHECK(::write(STDOUT_FILENO, line.data(), line.size()) == static_cast<ssize_t>(line.size()));
}

std::string text_of(Mark mark) {
  return std::to_string(mark.iteration) + " " + std::to_string(mark.generation);
}

void save_for_ever(const std::string& folder, int rank, int world, const std::string& meeting) {
  RendezvousOptions options;
  options.rank = rank;
  options.world_size = options.local_world_size = world;
  options.init_method = "file://" + meeting;
  options.timeout = std::chrono::seconds(30);
  const auto group = init_process_group(options);
  const auto print = [rank](const std::string& text) {
    if (rank == 0) print_line(text);
  };
  const SaveOptions saving{.retention = {.most_recent = 2}};
  Mark mark = load_known_step(folder, group,
                              {.notice = [&](const std::string& line) { print("# " + line); }})
                  .value_or(Mark{});
  while (true) {
    // Some steps are saved again, as when a run was set back.
    mark = mark.iteration % 3 == 1 && mark.generation < 2
               ? Mark{mark.iteration, mark.generation + 1}
               : Mark{mark.iteration + 1, 0};
    save_known_step(folder, mark, group, saving);
    print(text_of(mark));
  }
}

void check(const std::string& folder) {
  const auto mark = load_known_step(folder, nullptr, {.depth = VerifyDepth::kBytes});
  print_line(mark ? text_of(*mark) : "none");
  for (const auto& step : list_steps(folder)) verify_step(step.folder, VerifyDepth::kBytes);
}

}  // namespace
}  // namespace megashard::testing

int main(int argc, char** argv) {
  const std::string command = argc > 2 ? argv[1] : "";
  try {
    if (command == "check") {
      megashard::testing::check(argv[2]);
    } else if (command == "run" && argc == 6) {
      megashard::testing::save_for_ever(argv[2], std::stoi(argv[3]), std::stoi(argv[4]), argv[5]);
    } else {
      return 2;
    }
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
  return 0;
}
