// Saves known steps endlessly, one process for each rank. test_kills.py kills it.
// save_loop FOLDER RANK WORLD FILE FORMAT sync|async: the ranks meet in FILE. They read every byte of the step that
// find_step finds in FOLDER, continue from there and save in FORMAT. The first rank prints "found ITERATION GENERATION"
// (0 0: none), and after each save "saved ITERATION GENERATION". Exits with an error message if a visible step is
// damaged.
#include <c10/util/Exception.h>
#include <unistd.h>

#include <cstdio>

#include "checkpoint/dcp/dcp_writer.h"
#include "parallel/collectives/rendezvous.h"
#include "tests/faults/known_step.h"

namespace megashard::testing {
namespace {

void print_line(const std::string& text) {  // without buffering
  const auto line = text + "\n";
  TORCH_CHECK(::write(STDOUT_FILENO, line.data(), line.size()) == static_cast<ssize_t>(line.size()));
}

void run(const std::string& folder, int rank, int world, const std::string& meeting, CheckpointFormat format,
         bool beside_training) {
  RendezvousOptions options;
  options.rank = rank;
  options.world_size = options.local_world_size = world;
  options.init_method = "file://" + meeting;
  options.timeout = std::chrono::seconds(30);
  const auto group = init_process_group(options);
  const auto print = [rank](const std::string& what, Mark mark) {
    if (rank == 0) print_line(what + " " + std::to_string(mark.iteration) + " " + std::to_string(mark.generation));
  };
  Mark mark = load_known_step(folder, group, {.depth = VerifyDepth::kBytes}).value_or(Mark{});
  if (rank == 0 && mark != Mark{}) {
    for (const auto& step : list_steps(folder)) verify_step(step.folder, VerifyDepth::kBytes);
  }
  print("found", mark);
  const SaveOptions saving{
      .format = format, .retention = {.most_recent = 2}, .plans = std::make_shared<SavePlanCache>()};
  AsyncSaver saver(group);
  while (true) {
    // Saves some steps again, as if the run had been set back.
    const bool again = mark.iteration % 3 == 1 && mark.generation < 2;
    mark = again ? Mark{mark.iteration, mark.generation + 1} : Mark{mark.iteration + 1, 0};
    save_known_step(folder, mark, group, saving, beside_training ? &saver : nullptr);
    print("saved", mark);
  }
}

}  // namespace
}  // namespace megashard::testing

int main(int argc, char** argv) {
  if (argc != 7) return 2;
  try {
    megashard::testing::run(argv[1], std::stoi(argv[2]), std::stoi(argv[3]), argv[4],
                            megashard::format_of_name(argv[5]), std::string(argv[6]) == "async");
  } catch (const c10::Error& error) {
    std::fprintf(stderr, "%s\n", error.what_without_backtrace());
  }
  return 1;
}
