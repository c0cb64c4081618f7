#include "framework/training/listener.h"

#include <ATen/ops/full.h>
#include <gmock/gmock.h>

#include <memory>
#include <string>
#include <vector>

#include "framework/training/listener.h"
#include "tests/checkpoint/files/temporary_folder.h"
#include "tests/framework/training/small_training.h"
#include "tests/support/run_ranks.h"
#include "tests/support/simulated_device.h"

namespace megashard::testing {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

struct OneWeight : MultiModalModule {
  OneWeight() : weight(register_parameter("weight", at::full({1}, 1.0))) {}
  ModelOutput forward(Batch input) override { return {.token_losses = (weight * 2).expand(input.tokens().sizes())}; }
  int64_t vocab_size() const override { return 200; }
  at::Tensor weight;
};

/// Asks in one step, and reads another one.
struct Asks : Listener {
  Asks(Requests asked, int64_t at, int64_t read_at) : asked_(asked), at_(at), read_at_(read_at) {}
  bool reads(int64_t step) const override { return step == read_at_; }
  Requests requests(int64_t step) override { return step == at_ ? asked_ : Requests{}; }

 private:
  Requests asked_;
  int64_t at_, read_at_;
};

/// The log of six steps in which the last rank asks in step 2, and step 3 is read, as all are on a CPU.
std::string log_of(int ranks, Requests asked, Arguments arguments = small_run()) {
  arguments.use_torch_fsdp2 = true;
  arguments.global_batch_size = 2 * ranks;
  arguments.train_iters = 6;
  arguments.log_interval = 100;
  arguments.check_for_nan_in_loss_and_grad = false;
  const SmallTraining training(arguments, ranks);
  std::string log;
  run_ranks(ranks, [&](const ProcessGroupPtr& world) {
    OneWeight model;
    TrainerCallbacks callbacks = quiet_callbacks();
    if (world->rank() == 0) callbacks.print_on_first_rank = [&](const std::string& line) { log += line + "\n"; };
    const bool is_last = world->rank() == ranks - 1;
    callbacks.listeners = {std::make_shared<Asks>(is_last ? asked : Requests{}, 2, 3)};
    training.on_rank(world, model, callbacks);
  });
  return log;
}

TEST(Listener, ARequestOfOneRankCountsOnAllAndOnce) {
  for (const int ranks : {1, 2}) {
    // A device's numbers are read in step 3; the only rank need not ask it.
    const int step = on_simulated_device() && ranks > 1 ? 3 : 2;
    Arguments arguments = small_run();
    TemporaryFolder folder;
    arguments.save = folder.path();
    arguments.save_interval = 100;
    arguments.ckpt_format = CheckpointFormat::kTorchDcp;
    const std::string saved = "successfully saved checkpoint from iteration       ", last = saved + "6";
    const std::string asked = saved + std::to_string(step), log = log_of(ranks, {.save = true}, arguments);
    EXPECT_THAT(log, AllOf(HasSubstr(asked), HasSubstr(last)));
    EXPECT_EQ(log.find(saved, log.find(asked) + 1), log.find(last)) << log;
    EXPECT_THAT(log_of(ranks, {.exit = true}),
                HasSubstr("[exiting program at iteration " + std::to_string(step) + "]"));
  }
}

TEST(Listener, AnEvaluationThatIsRequestedTakesNoSamplesOfOthers) {
  Arguments arguments = small_run();
  arguments.split = "50,50,0";
  arguments.eval_iters = 1;
  arguments.eval_interval = 6;
  const std::string log = log_of(1, {.evaluate = true}, arguments), without = log_of(1, {}, arguments);
  EXPECT_THAT(log, HasSubstr(" validation loss at iteration 2 | "));
  EXPECT_THAT(without, Not(HasSubstr(" validation loss at iteration 2 | ")));
  const std::string due = " validation loss at iteration 6 | ";
  ASSERT_THAT(log, HasSubstr(due));
  EXPECT_EQ(log.substr(log.find(due)).substr(0, 60), without.substr(without.find(due)).substr(0, 60));
}

struct Notes : Listener {
  explicit Notes(std::vector<std::string>& notes) : notes_(notes) {}
  void training_starts(const TrainingRun& run) override { note("training", run.step); }
  void step_starts(int64_t step) override { note("starts", step); }
  void gradients_ready(int64_t step) override { note("gradients", step); }
  void weights_updated(int64_t step) override { note("weights", step); }
  void step_ended(const StepReport& step) override { note("ended", step.iteration); }
  void step_complete(const StepReport& step, const Requests& merged) override {
    note(step.validation_loss ? "evaluated" : merged.exit ? "exits" : "complete", step.iteration);
  }
  void steps_ended(int64_t step) override { note("steps", step); }
  void training_ended(TrainingEnd how, int64_t step) override { note(how == TrainingEnd::kDone ? "done" : "?", step); }

 private:
  void note(const std::string& what, int64_t step) { notes_.push_back(what + " " + std::to_string(step)); }

  std::vector<std::string>& notes_;
};

TEST(Listener, IsCalledInTheOrderOfTheLoop) {
  Arguments arguments = small_run();
  arguments.train_iters = 2;
  arguments.split = "50,50,0";
  arguments.eval_iters = 1;
  arguments.eval_interval = 2;
  const SmallTraining training(arguments, 1);
  std::vector<std::string> notes;
  run_ranks(1, [&](const ProcessGroupPtr& world) {
    OneWeight model;
    TrainerCallbacks callbacks = quiet_callbacks();
    callbacks.listeners = {std::make_shared<Notes>(notes)};
    training.on_rank(world, model, callbacks);
  });
  EXPECT_THAT(notes,
              ElementsAre("training 0", "starts 1", "gradients 1", "weights 1", "ended 1", "complete 1", "starts 2",
                          "gradients 2", "weights 2", "ended 2", "evaluated 2", "steps 2", "done 2"));
}

TEST(RegisterCallback, OneOfAnotherStampIsIgnored) {
  const auto is_known = [](const std::string& name) {
    return std::ranges::find(callbacks(), name, &CallbackKind::name) != callbacks().end();
  };
  const int64_t before = ignored_callbacks();
  const RegisterCallback old({.name = "old", .make = {}}, {.libtorch = "1.0"});
  EXPECT_EQ(ignored_callbacks(), before + 1);
  EXPECT_FALSE(is_known("old"));
  const RegisterCallback present({.name = "notes", .make = {}});
  EXPECT_TRUE(is_known("notes"));
}

}  // namespace
}  // namespace megashard::testing
