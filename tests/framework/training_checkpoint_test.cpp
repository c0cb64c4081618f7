#include "framework/training/training_checkpoint.h"

#include <ATen/ops/zeros.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <thread>

#include "tests/checkpoint/temporary_folder.h"
#include "tests/support/run_ranks.h"

namespace megashard {
namespace {

using ::testing::HasSubstr;

struct OneWeight : MegatronModule {
  OneWeight() { register_parameter("w", at::zeros({4, 3})); }
};

TEST(TrainingCheckpoint, WhatASaveBesideTheTrainingNoticesIsSaidByTheTrainingThread) {
  TemporaryFolder folder;
  // An old step that cannot be removed: its hidden name would be too long for the file system.
  std::filesystem::create_directory(folder.file("iter_" + std::string(244, '0') + "1"));
  Arguments arguments;
  arguments.save = folder.path();
  arguments.ckpt_format = "torch_dcp";
  arguments.most_recent_k = 1;
  arguments.no_save_rng = true;
  testing::run_ranks(1, [&](const ProcessGroupPtr& group) {
    OneWeight model;
    TrainingState state{arguments, model, nullptr, nullptr};
    state.iteration = 2;
    std::vector<std::string> lines;
    std::vector<std::thread::id> threads;
    const auto note = [&](const std::string& line) {
      lines.push_back(line);
      threads.push_back(std::this_thread::get_id());
    };
    AsyncSaver saver(group);
    save_training_checkpoint(state, group, note, &saver);
    while (saver.state() == AsyncSaver::State::kWriting) std::this_thread::yield();
    EXPECT_TRUE(lines.empty());
    saver.wait();
    ASSERT_EQ(lines.size(), 1U);
    EXPECT_THAT(lines[0], HasSubstr("old checkpoints are kept: "));
    EXPECT_THAT(lines[0], HasSubstr("File name too long"));
    EXPECT_EQ(threads[0], std::this_thread::get_id());
    save_training_checkpoint(state, group, note);  // the training itself says it at once
    EXPECT_EQ(lines.size(), 2U);
  });
}

}  // namespace
}  // namespace megashard
