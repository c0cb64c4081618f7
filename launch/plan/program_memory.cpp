#include "launch/plan/program_memory.h"

#include <ATen/core/grad_mode.h>
#include <malloc.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <fstream>

#include "launch/plan/quiet_callbacks.h"
#include "launch/train/session.h"

namespace megashard {
namespace {

constexpr std::array kTraining = {"pretrain",
                                  "--num-layers=1",
                                  "--hidden-size=64",
                                  "--num-attention-heads=1",
                                  "--seq-length=512",
                                  "--max-position-embeddings=512",
                                  "--vocab-size=100",
                                  "--tokenizer-type=NullTokenizer",
                                  "--swiglu",
                                  "--normalization=RMSNorm",
                                  "--position-embedding-type=rope",
                                  "--disable-bias-linear",
                                  "--micro-batch-size=1",
                                  "--lr=1e-4",
                                  "--mock-data",
                                  "--train-iters=2",
                                  "--eval-iters=0",
                                  "--use-torch-fsdp2"};

/// Resident file pages and allocated heap; free heap will be reused by tensors.
int64_t resident_now() {
  int64_t pages = 0, resident = 0, of_files = 0;
  std::ifstream("/proc/self/statm") >> pages >> resident >> of_files;
  const auto heaps = ::mallinfo2();
  return of_files * ::sysconf(_SC_PAGESIZE) + static_cast<int64_t>(heaps.uordblks + heaps.hblkhd);
}

}  // namespace

int64_t program_memory(const ProcessGroupPtr& group) {
  const at::AutoGradMode grad(true);
  const DiagnosticSink quiet = [](Severity, const std::string&) {};
  const RunPlan plan =
      plan_run(parse_arguments(static_cast<int>(kTraining.size()), kTraining.data()), {},
               {.rank = group->rank(), .world_size = group->size(), .local_world_size = group->size()}, quiet);
  const Arguments& arguments = plan.arguments;
  const Session session = build_session(plan, ParallelGroups(arguments, group),
                                        {.source = WeightSource::kInitialisation, .initialises = true}, quiet);
  const auto vocab_size = session.model().vocab_size();
  int64_t most = 0;
  Trainer trainer(arguments, session.model(), session.groups, session.device,
                  data_options(arguments, vocab_size, vocab_size - 1),
                  quiet_callbacks([&] { most = std::max(most, resident_now()); }));
  trainer.train();
  return most;
}

}  // namespace megashard
