#include "framework/training/optimizer_param_scheduler.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <nlohmann/json.hpp>

#include "tests/support/diagnostics.h"

namespace megashard {
namespace {

using testing::HasSubstr;
using OnLoad = SchedulerOptions::OnLoad;
using Json = nlohmann::json;

SchedulerOptions options_from(const Json& json) {
  return {.init_lr = json["init_lr"],
          .max_lr = json["max_lr"],
          .min_lr = json["min_lr"],
          .warmup_steps = json["lr_warmup_steps"],
          .decay_steps = json["lr_decay_steps"],
          .decay_style = LrDecayStyle{choice_value("lr_decay_style", json["lr_decay_style"])},
          .wsd_decay_steps = json.value("wsd_decay_steps", 0),
          .wsd_decay_style =
              WsdDecayStyle{choice_value("lr_wsd_decay_style", json.value("lr_wsd_decay_style", "exponential"))},
          .start_weight_decay = json["start_wd"],
          .end_weight_decay = json["end_wd"],
          .weight_decay_steps = json["wd_incr_steps"],
          .weight_decay_style = WeightDecayStyle{choice_value("weight_decay_incr_style", json["wd_incr_style"])}};
}

// tests/golden/make_lr_schedule.py wrote what megatron-core computes.
TEST(OptimizerParamScheduler, EqualsMegatronCore) {
  std::ifstream file(std::string(MEGASHARD_SOURCE_ROOT) + "/tests/golden/lr_schedule.json");
  const auto golden = Json::parse(file);
  ASSERT_EQ(golden["cases"].size(), 10u);
  for (const auto& expected : golden["cases"]) {
    OptimizerParamScheduler scheduler(options_from(expected["options"]));
    for (size_t step = 0; step < expected["lr"].size(); ++step) {
      const double lr = expected["lr"][step], weight_decay = expected["weight_decay"][step];
      EXPECT_NEAR(scheduler.lr(), lr, 1e-15 * lr) << expected["options"] << " step " << step;
      EXPECT_NEAR(scheduler.weight_decay(), weight_decay, 1e-15) << expected["options"] << " step " << step;
      scheduler.advance(golden["batch"]);
    }
    for (const auto& [key, value] : scheduler.state_dict()) {
      const auto& theirs = expected["state"].at(key);
      if (theirs.is_string()) {
        EXPECT_EQ(argument_text(value), theirs.get<std::string>()) << key;
      } else if (const auto* whole = std::get_if<int64_t>(&value)) {
        EXPECT_EQ(*whole, theirs.get<int64_t>()) << key;
      } else {
        EXPECT_EQ(std::get<double>(value), theirs.get<double>()) << key;
      }
    }
    EXPECT_EQ(scheduler.state_dict().size(), expected["state"].size());
  }
}

SchedulerOptions small(OnLoad on_load = OnLoad::kMustAgree) {
  return {.max_lr = 1.0, .min_lr = 0.1, .warmup_steps = 4, .decay_steps = 20, .on_load = on_load};
}

TEST(OptimizerParamScheduler, GoesOnWhereTheCheckpointStopped) {
  OptimizerParamScheduler first(small()), second(small());
  first.advance(12);
  second.load_state_dict(first.state_dict());
  EXPECT_EQ(second.num_steps(), 12);
  EXPECT_EQ(second.lr(), first.lr());
}

TEST(OptimizerParamScheduler, ChecksOrChoosesOnLoading) {
  OptimizerParamScheduler saved(small());
  saved.advance(12);
  auto other = small();
  other.max_lr = 2.0;
  EXPECT_THAT(usage_error([&] { OptimizerParamScheduler(other).load_state_dict(saved.state_dict()); }),
              HasSubstr("max_lr is 2.0 by the flags, but 1.0 in the checkpoint"));
  other.min_lr = 0.2;
  EXPECT_THAT(usage_error([&] { OptimizerParamScheduler(other).load_state_dict(saved.state_dict()); }),
              AllOf(HasSubstr("max_lr is 2.0"), HasSubstr("min_lr is 0.2")));
  other.min_lr = 0.1;
  other.on_load = OnLoad::kOptionsDecide;
  OptimizerParamScheduler by_flags(other);
  by_flags.load_state_dict(saved.state_dict());
  EXPECT_EQ(by_flags.lr(), 0.1 + 0.5 * 1.9);
  other.on_load = OnLoad::kCheckpointDecides;
  OptimizerParamScheduler by_checkpoint(other);
  by_checkpoint.load_state_dict(saved.state_dict());
  EXPECT_EQ(by_checkpoint.lr(), saved.lr());
}

// It was linear in silence.
TEST(OptimizerParamScheduler, RefusesStylesThatNobodyKnows) {
  OptimizerParamScheduler scheduler(small(OnLoad::kCheckpointDecides));
  EXPECT_THAT(usage_error([&] {
                scheduler.load_state_dict({{"lr_decay_style", std::string("polynomial")}});
              }),
              HasSubstr("--lr-decay-style takes one of constant, linear, cosine, inverse-square-root, WSD, got"));
}

TEST(OptimizerParamScheduler, RefusesImpossibleLengths) {
  auto options = small();
  options.warmup_steps = 20;
  EXPECT_THAT(usage_error([&] { OptimizerParamScheduler scheduler(options); }),
              HasSubstr("the warm-up lasts 20.0 samples, but the decay ends at 20"));
  options = small();
  options.decay_steps = 0;
  EXPECT_THAT(usage_error([&] { OptimizerParamScheduler scheduler(options); }), HasSubstr("decays over 0 samples"));
  options = small();
  options.decay_style = LrDecayStyle::kWsd;
  EXPECT_THAT(usage_error([&] { OptimizerParamScheduler scheduler(options); }), HasSubstr("the anneal of WSD lasts 0"));
}

TEST(SchedulerOptions, CountSamples) {
  Arguments arguments;
  arguments.lr = 1e-3;
  arguments.train_iters = 100;
  arguments.global_batch_size = 8;
  arguments.lr_warmup_iters = 3;
  auto options = scheduler_options(arguments);
  EXPECT_EQ(options.decay_steps, 800);
  EXPECT_EQ(options.warmup_steps, 24);
  EXPECT_EQ(options.weight_decay_steps, 800);
  EXPECT_EQ(options.end_weight_decay, 0.01);
  arguments.lr_warmup_fraction = 0.001;
  EXPECT_EQ(scheduler_options(arguments).warmup_steps, 0.8) << "not rounded";
  arguments.train_samples = 900;
  arguments.lr_warmup_fraction.reset();
  arguments.lr_warmup_samples = 5;
  options = scheduler_options(arguments);
  EXPECT_EQ(options.decay_steps, 900);
  EXPECT_EQ(options.warmup_steps, 5);
}

}  // namespace
}  // namespace megashard
