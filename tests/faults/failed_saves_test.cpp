// Trainings whose saves fail: training goes on, the last complete save stays, and the failure is reported.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <utility>
#include <vector>

#include "checkpoint/steps/checkpoint_directory.h"
#include "checkpoint/steps/find_step.h"
#include "checkpoint/steps/run_lock.h"
#include "framework/training/metrics_file.h"
#include "tests/checkpoint/files/temporary_folder.h"
#include "tests/faults/failing_io.h"
#include "tests/framework/training/small_training.h"
#include "tests/support/run_ranks.h"

namespace megashard::testing {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::SizeIs;

constexpr int kRanks = 2;

class FourWeights : public MultiModalModule {
 public:
  FourWeights() : weight(register_parameter("weight", at::full({4}, 1.0))) {}
  ModelOutput forward(Batch input) override {
    return {.token_losses = (weight * weight).sum().expand(input.tokens().sizes())};
  }
  int64_t vocab_size() const override { return 200; }

  at::Tensor weight;
};

struct Outcome {
  std::string threw{};  ///< error of train(), the same on all ranks; empty: none
  std::string last{};   ///< error of check_last_save(), likewise
  std::vector<std::string> warnings{};
  double loss = 0;  ///< of the last step
  std::vector<nlohmann::json> events{}, steps{};
};

std::vector<nlohmann::json> json_lines(const std::string& path) {
  std::ifstream file(path);
  std::vector<nlohmann::json> lines;
  for (std::string line; std::getline(file, line);) lines.push_back(nlohmann::json::parse(line));
  return lines;
}

std::string failure_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  }
  return "";
}

struct LastLoss : Listener {
  explicit LastLoss(double& loss) : loss_(loss) {}
  void step_complete(const StepReport& step, const Requests&) override { loss_ = step.step.loss; }

 private:
  double& loss_;
};

class FailedSaves : public ::testing::TestWithParam<bool> {
 protected:
  /// Trains eight steps and saves every second one. The first rank calls `before_save` before each save.
  Outcome train(const std::function<void(int64_t iteration)>& before_save, int64_t max_failed = 3) {
    auto arguments = small_run();
    arguments.train_iters = 8;
    arguments.use_torch_fsdp2 = true;
    arguments.save = arguments.load = save_;
    arguments.save_interval = 2;
    arguments.ckpt_format = CheckpointFormat::kTorchDcp;
    arguments.async_save = GetParam();
    arguments.max_failed_saves = max_failed;
    arguments.metrics_file = folder_.file("metrics.jsonl");
    const SmallTraining training(arguments, kRanks);
    Outcome outcome;
    std::vector<std::string> threw(kRanks), last(kRanks);
    run_ranks(kRanks, [&](const ProcessGroupPtr& world) {
      const auto rank = static_cast<size_t>(world->rank());
      FourWeights model;
      TrainerCallbacks callbacks = quiet_callbacks();
      callbacks.print_on_first_rank = [&, rank](const std::string& line) {
        constexpr std::string_view kSaving = "saving checkpoint at iteration";
        if (rank == 0 && line.starts_with(kSaving)) before_save(std::stoll(line.substr(kSaving.size())));
      };
      callbacks.sink = [&, rank](Severity severity, const std::string& line) {
        if (rank == 0 && severity == Severity::kWarning) outcome.warnings.push_back(line);
      };
      if (rank == 0) callbacks.listeners = {std::make_shared<LastLoss>(outcome.loss)};
      training.on_rank(world, model, callbacks, [&](Trainer& trainer) {
        if (const auto step = find_step(save_, world)) trainer.load(*step);
        threw[rank] = failure_of([&] { trainer.train(); });
        last[rank] = failure_of([&] { trainer.check_last_save(); });
      });
    });
    EXPECT_EQ(threw[0], threw[1]);
    EXPECT_EQ(last[0], last[1]);
    outcome.threw = threw[0];
    outcome.last = last[0];
    outcome.steps = json_lines(*arguments.metrics_file);
    for (const auto& event : json_lines(*arguments.metrics_file + ".events"))
      if (event["event"] == "save_failed") outcome.events.push_back(event);
    return outcome;
  }

  std::vector<int64_t> saved() const {
    std::vector<int64_t> iterations;
    for (const auto& step : list_steps(save_)) {
      verify_step(step.folder, VerifyDepth::kBytes);
      iterations.push_back(step.iteration);
    }
    return iterations;
  }

  const TemporaryFolder folder_;
  const std::string save_ = folder_.file("save");
};

TEST_P(FailedSaves, AreToldAndTriedAgainAndTrainingGoesOn) {
  const double undisturbed = train([](int64_t) {}).loss;
  std::filesystem::remove_all(save_);
  // Number of disk calls before the one that fails.
  for (const auto& [error, calls] : std::vector<std::pair<int, int64_t>>{{ENOSPC, 0}, {EIO, 5}, {ENOSPC, 9}}) {
    SCOPED_TRACE(std::string(std::strerror(error)) + " after " + std::to_string(calls));
    FailingDisk disk(save_);
    const auto outcome = train([&](int64_t iteration) {
      if (iteration == 4) disk.fail_after(calls, error, /*and_all_later=*/true);
      if (iteration == 6) {
        EXPECT_TRUE(disk.has_failed());
        disk.recover();
      }
    });
    EXPECT_EQ(outcome.threw + outcome.last, "");
    EXPECT_EQ(outcome.loss, undisturbed);
    EXPECT_THAT(saved(), ElementsAre(8, 6, 2));
    ASSERT_THAT(outcome.warnings, SizeIs(1));
    EXPECT_THAT(outcome.warnings[0],
                AllOf(HasSubstr("the checkpoint of iteration 4 was not saved: rank "), HasSubstr(std::strerror(error)),
                      HasSubstr("; the last whole one in " + save_ + " is of iteration 2"),
                      HasSubstr("(1 of --max-failed-saves 3 in a row)")));
    ASSERT_THAT(outcome.events, SizeIs(1));
    EXPECT_THAT(outcome.events[0]["why"].get<std::string>(), HasSubstr("iteration 4 was not saved"));
    ASSERT_THAT(outcome.steps, SizeIs(8));
    if (!GetParam()) {  // an asynchronous writer's failure may be reported later
      EXPECT_EQ(outcome.steps[5].value("failed_saves", 0), 1) << "step 6";
      EXPECT_FALSE(outcome.steps[6].contains("failed_saves"));
    }
    std::filesystem::remove_all(save_);
  }
}

TEST_P(FailedSaves, AFullDiskTakesNeitherTheMetricsOfItsTimeNorTheRun) {
  FailingDisk disk(folder_.path());
  const auto outcome = train([&](int64_t iteration) {
    if (iteration == 4) disk.fail_after(0, ENOSPC, /*and_all_later=*/true);
    if (iteration == 6) disk.recover();
  });
  EXPECT_EQ(outcome.threw + outcome.last, "");
  EXPECT_THAT(saved(), ElementsAre(8, 6, 2));
  std::vector<int64_t> steps;
  for (const auto& step : outcome.steps) steps.push_back(step["step"]);
  EXPECT_THAT(steps, ElementsAre(1, 2, 3, 4, 7, 8));
  EXPECT_THAT(outcome.warnings, ::testing::UnorderedElementsAre(
                                    HasSubstr("the checkpoint of iteration 4 was not saved"),
                                    HasSubstr("metrics.jsonl could not be written: No space left on device")));
}

TEST(AppendedFile, LeavesNoHalfOfWhatTheDiskDidNotTake) {
  const TemporaryFolder folder;
  FailingDisk disk(folder.path());
  AppendedFile file;
  ASSERT_TRUE(file.open(folder.file("lines"), /*anew=*/true));
  EXPECT_TRUE(file.append("first\n"));
  disk.fail_after(0, ENOSPC, /*and_all_later=*/false);
  EXPECT_FALSE(file.append("second\n"));
  EXPECT_EQ(errno, ENOSPC);
  disk.fail_after(0, 0, /*and_all_later=*/false);  // writes half; the caller then writes the rest
  EXPECT_TRUE(file.append("third\n"));
  std::ifstream written(folder.file("lines"));
  EXPECT_EQ(std::string(std::istreambuf_iterator<char>(written), {}), "first\nthird\n");
}

TEST_P(FailedSaves, EndTheRunAfterSoManyInARow) {
  FailingDisk disk(save_);
  const auto fails = [&](int64_t iteration) {
    if (iteration == 4) disk.fail_after(0, ENOSPC, /*and_all_later=*/true);
  };
  const int64_t limit = GetParam() ? 1 : 2;  // an asynchronous writer's failure may be reported at the next save
  const auto outcome = train(fails, limit);
  EXPECT_THAT(outcome.threw, AllOf(HasSubstr("as many saves in a row have failed as --max-failed-saves allows (" +
                                             std::to_string(limit) + "); the last: the checkpoint of iteration " +
                                             (GetParam() ? "4" : "6") + " was not saved: rank 0: "),
                                   HasSubstr("No space left on device"), HasSubstr("is of iteration 2")));
  EXPECT_THAT(outcome.events, SizeIs(limit));
  disk.recover();
  EXPECT_THAT(saved(), ElementsAre(2));
  EXPECT_THAT(train([](int64_t) {}).steps, SizeIs(8)) << "it goes on from there";
}

TEST_P(FailedSaves, OfTheLastStepAreTriedTwiceAndAFailureOfTheRun) {
  for (const bool recovers : {true, false}) {
    FailingDisk disk(save_);
    int tries = 0;
    const auto outcome = train([&](int64_t iteration) {
      if (iteration != 8) return;
      if (++tries == 1) disk.fail_after(0, ENOSPC, /*and_all_later=*/true);
      if (tries == 2 && recovers) disk.recover();
    });
    EXPECT_EQ(outcome.threw, "");
    EXPECT_EQ(tries, 2);
    EXPECT_EQ(outcome.last.empty(), recovers) << outcome.last;
    if (!recovers) {
      EXPECT_THAT(outcome.last, HasSubstr("training has ended without its last checkpoint: the checkpoint of iteration "
                                          "8 was not saved: rank 0: "));
    }
    disk.recover();
    std::filesystem::remove_all(save_);
  }
}

TEST_P(FailedSaves, AFolderThatIsRemovedIsMadeAnewUnlessAnotherRunHasIt) {
  const auto removed = train([&](int64_t iteration) {
    if (iteration == 4) std::filesystem::remove_all(save_);
  });
  EXPECT_EQ(removed.threw + removed.last, "");
  ASSERT_THAT(removed.warnings, SizeIs(1));
  EXPECT_THAT(removed.warnings[0], HasSubstr("--save " + save_ + " was removed or renamed while this run saves to it"));
  EXPECT_THAT(saved(), ElementsAre(8, 6, 4));
  std::filesystem::remove_all(save_);

  std::unique_ptr<RunLock> other;
  const auto taken = train(
      [&](int64_t iteration) {
        if (iteration != 4) return;
        std::filesystem::remove_all(save_);
        other = std::make_unique<RunLock>(save_);
      },
      /*max_failed=*/2);
  EXPECT_THAT(taken.threw, HasSubstr("the checkpoint of iteration 6 was not saved: rank 0: --save " + save_ +
                                     " is in use by another run"));
  EXPECT_THAT(saved(), ElementsAre());
}

INSTANTIATE_TEST_SUITE_P(Manners, FailedSaves, ::testing::Values(false, true),
                         [](const auto& info) { return info.param ? "BesideTraining" : "TrainingWaits"; });

}  // namespace
}  // namespace megashard::testing
