// A trainer that scales losses: what it skips, and what a step that is skipped leaves alone.

#include "framework/training/loss_scale.h"

#include <ATen/Functions.h>
#include <gmock/gmock.h>

#include <mutex>
#include <regex>

#include "tests/framework/training/small_training.h"
#include "tests/support/run_ranks.h"
#include "tests/support/simulated_device.h"

namespace megashard::testing {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

/// Four rows, whose factors in the loss are given for each step (of two forwards).
class Rows : public MultiModalModule {
 public:
  using Factors = std::function<std::vector<float>(int step)>;
  explicit Rows(Factors factors) : weight(register_parameter("weight", at::ones({4}))), factors_(std::move(factors)) {}
  ModelOutput forward(Batch input) override {
    const auto factors = factors_(1 + forwards_++ / 2);
    if (factors != last_) on_device_ = at::tensor(factors, at::kFloat).to(weight.device());
    last_ = factors;
    return {.token_losses = (weight * on_device_).sum().expand(input.tokens().sizes())};
  }
  int64_t vocab_size() const override { return 200; }

  at::Tensor weight;

 private:
  Factors factors_;
  std::vector<float> last_;
  at::Tensor on_device_;
  int forwards_ = 0;
};

constexpr float kInfinity = std::numeric_limits<float>::infinity();

std::vector<float> finite(int /*step*/) { return {1, 2, 3, 4}; }
/// In its second step the last row overflows, which is the last rank's.
std::vector<float> second_overflows(int step) { return {1, 2, 3, step == 2 ? kInfinity : 4}; }
/// The same of NaN.
std::vector<float> second_is_none(int step) { return {1, 2, 3, step == 2 ? std::nanf("") : 4}; }

struct Trained {
  std::vector<std::string> lines;  // of steps
  std::vector<at::Tensor> rows;    // by rank
  std::string told;
};

/// Of --fp16's scaling: the weights of these models are fp32.
Arguments scaled_run(int64_t steps) {
  Arguments arguments = small_run();
  arguments.use_torch_fsdp2 = arguments.fp16 = true;
  arguments.train_iters = steps;
  arguments.lr_decay_iters = 100;
  arguments.lr = 0.5;
  arguments.initial_loss_scale = 64;
  arguments.hysteresis = 1;
  return arguments;
}

Trained train(Arguments arguments, int ranks, const Rows::Factors& factors) {
  arguments.global_batch_size = 2 * ranks;
  const SmallTraining training(arguments, ranks);
  Trained trained{.lines = {}, .rows = std::vector<at::Tensor>(static_cast<size_t>(ranks)), .told = training.told};
  std::mutex mutex;
  run_ranks(ranks, [&](const ProcessGroupPtr& world) {
    Rows model(factors);
    TrainerCallbacks callbacks = quiet_callbacks();
    callbacks.print_on_first_rank = [&](const std::string& line) {
      if (world->rank() == 0 && line.find("iteration") != line.npos) trained.lines.push_back(line);
    };
    training.on_rank(world, model, callbacks);
    const at::Tensor rows = reshard_and_view(model.weight).local.detach().cpu();
    const std::scoped_lock lock(mutex);
    trained.rows[static_cast<size_t>(world->rank())] = rows;
  });
  return trained;
}

/// What each line says between `name` and the next bar.
std::vector<std::string> field(const Trained& trained, const std::string& name) {
  std::vector<std::string> values;
  for (const auto& line : trained.lines) {
    std::smatch found;
    values.push_back(std::regex_search(line, found, std::regex(name + ": *([^ ]*)")) ? found[1].str() : "-");
  }
  return values;
}

TEST(LossScale, AnOverflowOnOneRankSkipsTheStepOnAll) {
  for (const int ranks : {1, 2, 3}) {
    for (const auto& overflows : {second_overflows, second_is_none}) {
      const Trained skips = train(scaled_run(4), ranks, overflows), whole = train(scaled_run(3), ranks, finite);
      for (size_t rank = 0; rank < skips.rows.size(); ++rank)  // without the second step: the same, and the same rates
        EXPECT_TRUE(at::equal(skips.rows[rank], whole.rows[rank])) << "rank " << rank << " of " << ranks;
      EXPECT_THAT(field(skips, "loss scale"), ElementsAre("64.0", "32.0", "32.0", "32.0"));
      EXPECT_THAT(field(skips, "grad norm"), ElementsAre("5.477", "-", "5.477", "5.477"));
      EXPECT_THAT(field(skips, "number of skipped iterations"), ElementsAre("0", "1", "0", "0"));
      EXPECT_THAT(field(skips, "number of nan iterations"), ElementsAre("0", "1", "0", "0"));
      EXPECT_EQ(field(skips, "lm loss")[1], "-");
      EXPECT_THAT(skips.told, HasSubstr("skips the step and lowers the scale"));
      const auto rates = field(skips, "learning rate");
      EXPECT_EQ(rates[1], rates[0]);
      EXPECT_THAT((std::vector<std::string>{rates[0], rates[2], rates[3]}), field(whole, "learning rate"));
    }
  }
}

// On a device the host hears of a step when it has enqueued the next one's backward.
TEST(LossScale, StepsThatAreReadLateHaveTheirOwnRates) {
  Arguments late = scaled_run(6), whole = scaled_run(5);
  late.log_interval = whole.log_interval = 100;
  const Trained skips = train(late, 2, second_overflows), all = train(whole, 2, finite);
  for (size_t rank = 0; rank < 2; ++rank) EXPECT_TRUE(at::equal(skips.rows[rank], all.rows[rank]));
  EXPECT_THAT(field(skips, "number of skipped iterations"), ElementsAre("0", "1"));  // of the first and the last step
  EXPECT_EQ(field(skips, "learning rate").back(), field(all, "learning rate").back());
}

TEST(LossScale, OneThatIsConstantStays) {
  Arguments arguments = scaled_run(4);
  arguments.loss_scale = 8;
  arguments.check_for_nan_in_loss_and_grad = false;
  const Trained skips = train(arguments, 2, second_overflows), whole = train(scaled_run(3), 2, finite);
  for (size_t rank = 0; rank < 2; ++rank) EXPECT_TRUE(at::equal(skips.rows[rank], whole.rows[rank]));
  EXPECT_THAT(field(skips, "loss scale"), ElementsAre("8.0", "8.0", "8.0", "8.0"));
  EXPECT_THAT(field(skips, "number of skipped iterations"), ElementsAre("0", "1", "0", "0"));
}

TEST(LossScale, AScaleThatIsNoPowerOfTwoIsTakenOutAgain) {
  Arguments arguments = scaled_run(3);
  arguments.loss_scale = 3;
  const Trained by_three = train(arguments, 2, finite), whole = train(scaled_run(3), 2, finite);
  EXPECT_EQ(field(by_three, "grad norm"), field(whole, "grad norm"));
  for (size_t rank = 0; rank < 2; ++rank) EXPECT_TRUE(at::allclose(by_three.rows[rank], whole.rows[rank], 1e-6));
}

TEST(LossScale, TheHostWaitsForADeviceOnceAStep) {
  MEGASHARD_SIM_ONLY();
  const auto waits = [](int64_t steps) {
    Arguments arguments = scaled_run(steps);
    arguments.log_interval = 100;
    simulated_cuda().take_host_syncs();
    train(arguments, 2, finite);
    int64_t count = 0;
    for (const HostSync& sync : simulated_cuda().take_host_syncs()) count += sync.count;
    return count;
  };
  EXPECT_EQ(waits(13) - waits(5), 2 * 8);
}

}  // namespace
}  // namespace megashard::testing
