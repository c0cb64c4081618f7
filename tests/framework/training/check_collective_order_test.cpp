// --check-collective-order: a training whose ranks run other units ends with where they part, in the steps that are
// looked at.

#include <gmock/gmock.h>

#include "framework/arguments/argument_validation.h"
#include "framework/training/trainer.h"
#include "tests/framework/training/small_run.h"
#include "tests/support/diagnostics.h"
#include "tests/support/formula.h"
#include "tests/support/run_ranks.h"

namespace megashard::testing {
namespace {

using ::testing::HasSubstr;

/// Has two units alike. From forward `parts_at` on, rank 1 runs the second one, as a branch on its data would have it.
class TwoUnits : public MultiModalModule {
 public:
  TwoUnits(const ProcessGroupPtr& world, int parts_at) : parts_at_(world->rank() == 1 ? parts_at : 1000) {
    register_module("first", first_);
    register_module("second", second_);
    for (const auto& unit : {first_, second_}) fully_shard(*unit, {.mesh = flat_mesh(world)});
    fully_shard(*this, {.mesh = flat_mesh(world)});
  }
  ModelOutput forward(Batch input) override {
    const bool parted = ++forwards_ >= parts_at_;
    const at::Tensor x = fixed({4, 4}, 1).to(input.tokens().device());
    return {.token_losses = (parted ? second_ : first_)->forward(x).sum().expand(input.tokens().sizes())};
  }
  int64_t vocab_size() const override { return 200; }

 private:
  std::shared_ptr<Formula> first_ = std::make_shared<Formula>(Sizes{{4, 4}}, linear);
  std::shared_ptr<Formula> second_ = std::make_shared<Formula>(Sizes{{4, 4}}, linear);
  int forwards_ = 0, parts_at_;
};

/// What ends a training of six steps whose ranks part in that one; empty: nothing does.
std::string end_of_training(std::optional<int64_t> check, int parts_at) {
  std::string ends;
  Arguments arguments = small_run();
  arguments.train_iters = 6;
  arguments.check_collective_order = check;
  arguments.use_torch_fsdp2 = true;
  CollectedDiagnostics told;
  validate_arguments(arguments, {.world_size = 2}, told.sink());
  run_ranks(2, [&](const ProcessGroupPtr& world) {
    Arguments of_rank = arguments;
    of_rank.rank = world->rank();
    TwoUnits model(world, parts_at);
    DataOptions data;
    data.data_path = of_rank.data_path;
    data.split = *of_rank.split;
    data.seq_length = *of_rank.seq_length;
    data.vocab_size = model.vocab_size();
    const auto print = [](const std::string&) {};
    Trainer trainer(plan_training(of_rank, data), model, world, world->device(),
                    {.print_on_first_rank = print,
                     .stop_request = [] { return StopRequest::kNone; },
                     .peak_memory_bytes = [] { return int64_t{1}; },
                     .program_start = std::chrono::steady_clock::now(),
                     .peak_tflops = {}});
    try {
      trainer.train();
    } catch (const c10::Error& error) {
      if (world->rank() == 0) ends = error.what_without_backtrace();
    }
  });
  return ends;
}

TEST(CheckCollectiveOrder, StepsThatAreLookedAt) {
  const auto parts_in = [](int step) { return HasSubstr("the ranks part in step " + std::to_string(step) + ": "); };
  EXPECT_THAT(end_of_training(std::nullopt, 2), parts_in(2));  // one of the first three
  EXPECT_EQ(end_of_training(std::nullopt, 4), "");
  EXPECT_THAT(end_of_training(5, 4), parts_in(5));
  EXPECT_THAT(end_of_training(5, 1), parts_in(1));
  EXPECT_EQ(end_of_training(0, 1), "");
}

}  // namespace
}  // namespace megashard::testing
