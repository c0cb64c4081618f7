#include "framework/training/trainer.h"

#include <gmock/gmock.h>

#include <cmath>
#include <fstream>
#include <nlohmann/json.hpp>
#include <numeric>

#include "checkpoint/steps/find_step.h"
#include "tests/checkpoint/files/temporary_folder.h"
#include "tests/framework/training/small_training.h"
#include "tests/support/message_of.h"
#include "tests/support/run_ranks.h"
#include "tests/support/simulated_device.h"

namespace megashard::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

/// The loss of each token is a function of one weight and of how many forwards there were.
class OneWeight : public MultiModalModule {
 public:
  using Loss = std::function<at::Tensor(const at::Tensor& weight, int forwards)>;
  OneWeight(double value, Loss loss)
      : weight(register_parameter("weight", at::full({1}, value))), loss_(std::move(loss)) {}
  ModelOutput forward(Batch input) override {
    return {.token_losses = loss_(weight, ++forwards).expand(input.tokens().sizes())};
  }
  int64_t vocab_size() const override { return 200; }

  at::Tensor weight;
  int forwards = 0;

 private:
  Loss loss_;
};

/// Trains on one rank, in a program that has run for so long; what it printed.
std::string train(
    Arguments arguments, OneWeight& model, std::string* said = nullptr,
    std::function<StopRequest()> stop = [] { return StopRequest::kNone; },
    std::chrono::seconds running_for = std::chrono::seconds(0)) {
  std::string printed;
  const auto print = [&printed](const std::string& line) { printed += line + "\n"; };
  SmallTraining training(std::move(arguments), 1);
  training.data.eod_id = 7;
  TrainerCallbacks callbacks = quiet_callbacks();
  callbacks.print_on_first_rank = print;
  callbacks.sink = [&print](Severity, const std::string& warning) { print(warning); };
  callbacks.stop_request = std::move(stop);
  callbacks.program_start -= running_for;
  callbacks.progress_interval = std::chrono::milliseconds(0);
  run_fake_ranks(1, [&](const ProcessGroupPtr& world) {
    training.on_rank(world, model, callbacks, [&](Trainer& trainer) {
      if (const auto& load = training.arguments.load) trainer.load(*find_step(*load, world));
      if (said == nullptr) {
        trainer.train();
        return;
      }
      *said = message_of([&] {
        try {
          trainer.train();
        } catch (const UsageError& error) {
          throw std::runtime_error(std::string("usage: ") + error.what());
        }
      });
    });
  });
  return printed;
}

TEST(Trainer, AGradientThatIsNoNumberEndsItBeforeTheWeightsMove) {
  // The loss is finite, and its gradient at 0 is not.
  const auto root = [](const at::Tensor& weight, int) { return weight.sqrt(); };
  for (const double clip : {0.0, 1.0}) {
    OneWeight model(0, root);
    auto arguments = small_run();
    arguments.clip_grad = clip;
    std::string said;
    train(arguments, model, &said);
    EXPECT_THAT(said, HasSubstr("the norm of the gradients is inf at iteration 1"));
    EXPECT_THAT(said, HasSubstr("--no-check-for-nan-in-loss-and-grad"));
    EXPECT_EQ(model.weight.item<double>(), 0);
    EXPECT_EQ(model.forwards, 3);  // one step of two microbatches, and the first again to see where
  }
  OneWeight model(0, root);
  auto arguments = small_run();
  arguments.check_for_nan_in_loss_and_grad = false;
  train(arguments, model);
  EXPECT_EQ(model.forwards, 6);
}

TEST(Trainer, ADurationEndsItAfterTheStepInWhichItIsOver) {
  const auto constant = [](const at::Tensor& weight, int) { return weight * 1; };
  for (const int seconds : {59, 61}) {
    OneWeight model(1, constant);
    auto arguments = small_run();
    arguments.exit_duration_in_mins = 1;
    TemporaryFolder folder;
    arguments.save = folder.path();
    arguments.save_interval = 100;
    const auto no_request = [] { return StopRequest::kNone; };
    const auto printed = train(arguments, model, nullptr, no_request, std::chrono::seconds(seconds));
    EXPECT_EQ(model.forwards, seconds < 60 ? 6 : 2);
    EXPECT_EQ(printed.find("[exiting program at iteration 1]") != printed.npos, seconds > 60) << printed;
    EXPECT_THAT(printed, HasSubstr(seconds < 60 ? "iteration       3" : "saved checkpoint from iteration       1"));
  }
}

TEST(Trainer, LossesThatAreNoNumberAreCountedApart) {
  auto arguments = small_run();
  arguments.check_for_nan_in_loss_and_grad = false;
  const auto second_is_none = [](const at::Tensor& weight, int forwards) {
    return (forwards + 1) / 2 == 2 ? weight * 0 + NAN : weight * 0 + 2;
  };
  OneWeight each_line(1, second_is_none), one_line(1, second_is_none);
  const auto shown = train(arguments, each_line);
  EXPECT_THAT(shown, HasSubstr("lm loss: NAN | loss scale: 1.0 | grad norm: 0.000 | number of "
                               "skipped iterations:   0 | number of nan iterations:   1 |"));
  arguments.log_interval = 3;
  EXPECT_THAT(train(arguments, one_line), AllOf(HasSubstr("3/       3 | consumed"), Not(HasSubstr("lm loss: NAN"))));
}

/// Its steps could not be loaded.
struct Forgetful : OneWeight {
  using OneWeight::OneWeight;
  ShardedTensors state_dict_for_save_checkpoint() override { return {}; }
};

TEST(Trainer, AModelThatBreaksTheContractIsAMistakeOfTheUsers) {
  auto arguments = small_run();
  TemporaryFolder folder;
  arguments.save = folder.path() + "/saved";
  arguments.save_interval = 100;
  Forgetful model(1, [](const at::Tensor& weight, int) { return weight * 2; });
  std::string said;
  train(arguments, model, &said);
  EXPECT_THAT(said, HasSubstr("usage: the model's state_dict_for_save_checkpoint() and state_dict() must hold"));
}

TEST(Trainer, IterationsThatLearnNothingAreToldAndInNoMean) {
  auto arguments = small_run();
  arguments.eod_mask_loss = true;
  arguments.eval_iters = 1;
  arguments.save_best = true;
  arguments.split = "80,20,0";
  TemporaryFolder folder;
  arguments.save = folder.path() + "/saved";
  arguments.save_interval = 100;
  const auto prefix = fresh_prefix("masked");
  IndexedDatasetWriter writer(prefix, TokenType::kInt32);
  for (int document = 0; document < 5; ++document) writer.add_document(std::vector<int64_t>(40, 7));
  writer.finish();
  arguments.data_path = {prefix};
  OneWeight model(1, [](const at::Tensor& weight, int) { return weight * 2; });
  const auto printed = train(arguments, model);
  EXPECT_THAT(printed, HasSubstr("every label of this iteration's batch is masked: nothing is learnt from it"));
  EXPECT_THAT(printed, HasSubstr("nothing was learnt in 3 of the 3 iterations of this run"));
  EXPECT_THAT(printed, HasSubstr("no validation loss at iteration 3 on validation set: every label of"));
  EXPECT_THAT(printed, Not(HasSubstr("lm loss")));
  EXPECT_THAT(printed, Not(HasSubstr("best checkpoint")));
}

/// How often the hosts of all ranks wait for the simulated device in a training of so many steps
/// with a line every four.
int64_t host_syncs_of(int64_t steps, int ranks, bool checks, bool measures = false) {
  auto arguments = small_run();
  arguments.use_torch_fsdp2 = true;
  arguments.global_batch_size = 2 * ranks;
  arguments.train_iters = steps;
  arguments.log_interval = 4;
  arguments.check_for_nan_in_loss_and_grad = checks;
  arguments.log_params_norm = arguments.log_num_zeros_in_grad = measures;
  const SmallTraining training(arguments, ranks);
  simulated_cuda().take_host_syncs();
  run_ranks(ranks, [&](const ProcessGroupPtr& world) {
    OneWeight model(1, [](const at::Tensor& weight, int) { return weight * 2; });
    training.on_rank(world, model, quiet_callbacks());
  });
  int64_t count = 0;
  for (const HostSync& sync : simulated_cuda().take_host_syncs()) count += sync.count;
  return count;
}

TEST(Trainer, TheHostWaitsForADeviceOnceALine) {
  MEGASHARD_SIM_ONLY();
  for (const int ranks : {1, 2}) {
    // Lines of steps 8 and 12 more.
    EXPECT_EQ(host_syncs_of(13, ranks, false) - host_syncs_of(5, ranks, false), 2 * ranks);
    // And once for what else a line shows of gradients and weights.
    EXPECT_EQ(host_syncs_of(13, ranks, false, true) - host_syncs_of(5, ranks, false, true), 2 * 2 * ranks);
    // Every step asks whether its numbers are any.
    EXPECT_EQ(host_syncs_of(13, ranks, true) - host_syncs_of(5, ranks, true), 8 * ranks);
  }
}

TEST(Trainer, WhatWasLoadedFromTheFolderOfSavesIsNotSavedAgain) {
  auto arguments = small_run();
  TemporaryFolder folder;
  arguments.save = folder.path();
  arguments.save_interval = 2;
  arguments.ckpt_format = CheckpointFormat::kTorchDcp;
  const auto twice = [](const at::Tensor& weight, int) { return weight * 2; };
  OneWeight model(1, twice), again(1, twice);
  EXPECT_THAT(train(arguments, model), HasSubstr("saving checkpoint at iteration       3"));
  arguments.load = folder.path() + "/.";  // the same folder in other words
  const auto shown = train(arguments, again);
  EXPECT_THAT(shown, HasSubstr("loaded checkpoint"));
  EXPECT_THAT(shown, Not(HasSubstr("saving checkpoint")));
}

TEST(Trainer, MetricsHoldWhatIsMeasuredAfterTheStep) {
  auto arguments = small_run();
  arguments.split = "50,50,0";
  arguments.eval_iters = 1;
  arguments.eval_interval = 2;
  arguments.log_interval = 3;
  arguments.log_params_norm = arguments.log_num_zeros_in_grad = true;
  arguments.metrics_file = ::testing::TempDir() + "trainer_metrics.jsonl";
  arguments.overwrite_run = true;  // what an earlier test has left
  OneWeight model(1, [](const at::Tensor& weight, int) { return weight * 2; });
  train(arguments, model);
  std::ifstream file(*arguments.metrics_file);
  std::vector<nlohmann::json> steps;
  for (std::string line; std::getline(file, line);) steps.push_back(nlohmann::json::parse(line));
  ASSERT_EQ(steps.size(), 3u);
  EXPECT_FALSE(steps[0].contains("validation_loss") || steps[1].contains("params_norm"));
  EXPECT_TRUE(steps[0].contains("params_norm"));  // the first step has a line
  EXPECT_LT(steps[1].at("validation_loss"), steps[1].at("loss"));
  EXPECT_NEAR(steps[2].at("params_norm").get<double>(), model.weight.item<double>(), 1e-6);
  EXPECT_EQ(steps[2].at("zeros_in_grad"), 0);
}

/// Its FLOPs are the squares of the lengths of sequences or documents; `documents` are those that it has seen.
class SquaredLengths : public OneWeight {
 public:
  explicit SquaredLengths(double& documents)
      : OneWeight(1, [](const at::Tensor& weight, int) { return weight * 2; }), documents_(documents) {}
  ModelOutput forward(Batch input) override {
    if (input.document_lengths.defined()) documents_ += input.document_lengths.square().sum().item<double>();
    return OneWeight::forward(std::move(input));
  }
  double training_flops(int64_t sequences, int64_t length) const override {
    return static_cast<double>(sequences * length * length);
  }

 private:
  double& documents_;
};

/// FLOPs that the reports of a training add up to on the first rank.
struct CountedFlops : Listener {
  void step_ended(const StepReport& step) override {
    sum += step.flops - step.step.saved_flops;
    saved_of_lines += step.interval.saved_flops;
    whole = step.flops;
  }
  double sum = 0, saved_of_lines = 0, whole = 0;
};

TEST(Trainer, FlopsEndWithDocuments) {
  for (const int ranks : {1, 2}) {
    for (const bool ends : {false, true}) {
      auto arguments = small_run();
      arguments.global_batch_size = 4;
      arguments.reset_attention_mask = ends;
      arguments.use_torch_fsdp2 = ranks > 1;
      SmallTraining training(arguments, ranks);
      training.data.eod_id = 17;
      std::vector<double> documents(static_cast<size_t>(ranks));
      const auto counted = std::make_shared<CountedFlops>();
      run_ranks(ranks, [&](const ProcessGroupPtr& world) {
        SquaredLengths model(documents[static_cast<size_t>(world->rank())]);
        TrainerCallbacks callbacks = quiet_callbacks();
        if (world->rank() == 0) callbacks.listeners = {counted};
        training.on_rank(world, model, callbacks);
      });
      const double whole = 3 * 4 * 8 * 8, seen = std::accumulate(documents.begin(), documents.end(), 0.0);
      EXPECT_EQ(counted->whole, whole / 3);
      EXPECT_EQ(counted->sum, ends ? seen : whole);
      EXPECT_EQ(counted->saved_of_lines, ends ? whole - seen : 0);
      EXPECT_EQ(ends, counted->sum < whole);
    }
  }
}

TEST(MultiModalModule, CountsTheFlopsOfTiedWeightsOnce) {
  OneWeight model(1, [](const at::Tensor& weight, int) { return weight; });
  EXPECT_EQ(model.training_flops(2, 8), 6 * 16);
  model.register_parameter("again", model.weight);
  EXPECT_EQ(model.training_flops(2, 8), 6 * 16);
}

TEST(Trainer, ALongEvaluationSaysHowFarItIs) {
  auto arguments = small_run();
  arguments.split = "50,25,25";
  arguments.eval_iters = 3;
  arguments.eval_interval = 2;
  OneWeight model(1, [](const at::Tensor& weight, int) { return weight * 2; });
  const auto shown = train(arguments, model);
  const std::string progress = "Evaluating iter 1/3\nEvaluating iter 2/3\n---";
  EXPECT_THAT(shown, HasSubstr("\nEvaluating on 6 samples\n" + progress));  // the last ones
  EXPECT_THAT(shown, HasSubstr(" |\n" + progress));                         // that of step 2, behind its line
}

TEST(Trainer, AnInterruptionEndsItAfterTheStepOrWithinAnEvaluation) {
  auto arguments = small_run();
  arguments.split = "50,50,0";
  arguments.eval_iters = 4;
  arguments.eval_interval = 1;
  arguments.log_interval = 100;
  const auto twice = [](const at::Tensor& weight, int) { return weight * 2; };
  OneWeight after_step(1, twice), in_evaluation(1, twice);
  const auto asks_after = [](const OneWeight& model, int forwards) {
    return [&model, forwards] { return model.forwards >= forwards ? StopRequest::kInterrupt : StopRequest::kNone; };
  };
  const auto first = train(arguments, after_step, nullptr, asks_after(after_step, 1));
  EXPECT_EQ(after_step.forwards, 2);
  EXPECT_THAT(first, HasSubstr("lm loss: 2.000000E+00"));
  EXPECT_TRUE(first.ends_with("interrupted by SIGINT after iteration 1 of 3: nothing is saved, since "
                              "there is no --save\n"))
      << first;
  const auto second = train(arguments, in_evaluation, nullptr, asks_after(in_evaluation, 4));
  EXPECT_EQ(in_evaluation.forwards, 4);  // one of its iterations
  EXPECT_THAT(second, HasSubstr("interrupted by SIGINT in an evaluation after iteration 1 of 3"));
  EXPECT_THAT(second, Not(HasSubstr("validation loss")));
}

TEST(Trainer, AnExitThatIsAskedForInAnEvaluationSaves) {
  auto arguments = small_run();
  TemporaryFolder folder;
  arguments.save = folder.path();
  arguments.save_interval = 100;
  arguments.ckpt_format = CheckpointFormat::kTorchDcp;
  arguments.split = "50,50,0";
  arguments.eval_iters = 4;
  arguments.eval_interval = 1;
  OneWeight model(1, [](const at::Tensor& weight, int) { return weight * 2; });
  const auto shown =
      train(arguments, model, nullptr, [&] { return model.forwards >= 4 ? StopRequest::kExit : StopRequest::kNone; });
  EXPECT_EQ(model.forwards, 4);
  EXPECT_THAT(shown, HasSubstr("successfully saved checkpoint from iteration       1"));
  EXPECT_THAT(shown, HasSubstr("[exiting program at iteration 1]"));
}

}  // namespace
}  // namespace megashard::testing
