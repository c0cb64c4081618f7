#include <ATen/ops/arange.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/zeros.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

#include "checkpoint/checkpoint.h"
#include "checkpoint/dcp/dcp_plan.h"
#include "checkpoint/files/file_io.h"
#include "tests/checkpoint/temporary_folder.h"
#include "tests/support/message_of.h"
#include "tests/support/run_ranks.h"

namespace megashard {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::message_of;

at::Tensor counting(std::vector<int64_t> sizes, at::ScalarType dtype = at::kFloat) {
  int64_t numel = 1;
  for (const auto size : sizes) numel *= size;
  return at::arange(numel, at::TensorOptions(at::kFloat)).view(sizes).to(dtype);
}

ShardedTensor shard_of(const at::Tensor& whole, const ProcessGroupPtr& group) {
  auto tensor = ShardedTensor::replicated(whole);
  const auto range = chunk_range(whole.size(0), group->size(), group->rank());
  tensor.local = whole.narrow(0, range.offset, range.size).clone();
  tensor.offsets[0] = range.offset;
  return tensor;
}

Dict values_of(int rank) {
  Dict generators;
  generators.set(std::to_string(rank), Bytes{std::string(1, static_cast<char>(rank))});
  Dict values;
  values.set("iteration", 3);
  values.set("rng_state", generators);
  return values;
}

void save(const std::string& folder, int world) {
  testing::run_ranks(world, [&](const ProcessGroupPtr& group) {
    const ShardedTensors tensors{
        {"model.w", shard_of(counting({5, 3}), group)},
        {"model.few", shard_of(counting({2}, at::kBFloat16), group)},
        {"optimizer.state.w.step", ShardedTensor::replicated(counting(std::vector<int64_t>()))}};
    save_checkpoint(folder, 3, tensors, values_of(group->rank()), group);
  });
}

TEST(Dcp, AnyWorldSizeReadsAnyOther) {
  for (const int saved : {1, 2, 3, 4}) {
    TemporaryFolder folder;
    save(folder.path(), saved);
    for (const int loaded : {1, 3, 4}) {
      testing::run_ranks(loaded, [&](const ProcessGroupPtr& group) {
        const auto whole = counting({5, 3}).to(at::kDouble);  // another dtype than the saved one
        const ShardedTensors tensors{
            {"model.w", shard_of(at::zeros({5, 3}, at::TensorOptions(at::kDouble)), group)},
            {"model.few", shard_of(at::zeros({2}, at::TensorOptions(at::kBFloat16)), group)},
            {"optimizer.state.w.step", ShardedTensor::replicated(at::zeros({}))}};
        const auto step = find_step(folder.path(), group);
        const auto checkpoint = load_checkpoint(*step, tensors, group);
        TORCH_CHECK(at::equal(tensors[0].second.local, shard_of(whole, group).local), saved, " to ", loaded);
        TORCH_CHECK(at::equal(tensors[1].second.local, shard_of(counting({2}, at::kBFloat16), group).local));
        TORCH_CHECK(step->iteration == 3 && checkpoint.values.at("iteration") == Value(3));
        TORCH_CHECK(checkpoint.values.at("rng_state").as_dict().entries.size() == static_cast<size_t>(saved));
      });
    }
  }
}

TEST(Dcp, WhatDoesNotFitIsNamedBeforeAnythingChanges) {
  TemporaryFolder folder;
  save(folder.path(), 2);
  auto kept = at::zeros({5, 3});
  const ShardedTensors some{{"model.w", ShardedTensor::replicated(kept)},
                            {"model.new", ShardedTensor::replicated(at::zeros({1}))}};
  const auto step = *latest_step(folder.path());
  const auto refused = message_of([&] { load_checkpoint(step, some, nullptr); });
  EXPECT_THAT(refused, HasSubstr("missing keys (1): model.new"));
  EXPECT_THAT(refused, HasSubstr("unexpected keys (2): model.few, optimizer.state.w.step"));
  EXPECT_EQ(kept.sum().item<float>(), 0);
  const auto loaded =
      load_checkpoint(folder.path(), some, nullptr, {.strict = false, .wanted = {}});
  EXPECT_THAT(loaded.report.missing, ElementsAre("model.new"));
  EXPECT_TRUE(at::equal(kept, counting({5, 3})));
  const ShardedTensors wrong{{"model.w", ShardedTensor::replicated(at::zeros({4, 3}))}};
  EXPECT_THAT(message_of([&] { load_checkpoint(step, wrong, nullptr); }), HasSubstr("[5, 3]"));
}

TEST(Dcp, ALoadIsAcceptedBeforeAnythingChanges) {
  TemporaryFolder folder;
  save(folder.path(), 2);
  testing::run_ranks(3, [&](const ProcessGroupPtr& group) {
    auto shard = shard_of(at::zeros({5, 3}), group);
    LoadOptions options{.strict = false, .wanted = [](const std::string& key) {
                          return !key.starts_with("optimizer.") && key != "rng_state.1";
                        }};
    Dict seen;
    options.accept = [&](const Dict& values, const LoadReport& report) {
      seen = values;
      TORCH_CHECK(report.missing == std::vector<std::string>{"model.new"});
      TORCH_CHECK(report.unexpected == std::vector<std::string>{"model.few"});
      throw std::domain_error("not this one");
    };
    const ShardedTensors tensors{{"model.w", shard},
                                 {"model.new", ShardedTensor::replicated(at::zeros({1}))}};
    const auto step = *find_step(folder.path(), group);
    bool refused = false;
    try {
      load_checkpoint(step, tensors, group, options);
    } catch (const std::domain_error&) {  // as it was thrown
      refused = true;
    }
    TORCH_CHECK(refused && shard.local.sum().item<float>() == 0);
    TORCH_CHECK(seen.at("iteration") == Value(3));
    TORCH_CHECK(seen.at("rng_state").as_dict().entries.size() == 1);
    options.accept = {};
    load_checkpoint(step, tensors, group, options);
    TORCH_CHECK(at::equal(shard.local, shard_of(counting({5, 3}), group).local));
  });
}

TEST(Dcp, OneRanksFailureIsEveryRanksAndLeavesNoStep) {
  TemporaryFolder folder;
  testing::run_ranks(3, [&](const ProcessGroupPtr& group) {
    auto shard = shard_of(counting({6}), group);
    if (group->rank() == 1) shard.offsets[0] = 3;  // overlaps with its neighbour
    const auto refused = message_of([&] {
      save_checkpoint(folder.path(), 1, {{"model.w", shard}}, {}, group);
    });
    TORCH_CHECK(refused.find("overlap") != std::string::npos, refused);
    if (group->rank() == 2) shard.offsets.clear();
    const auto on_one = message_of([&] {
      save_checkpoint(folder.path(), 1, {{"model.w", shard}}, {}, group);
    });
    TORCH_CHECK(on_one.find("rank 2: ") == 0, on_one);
  });
  EXPECT_FALSE(latest_step(folder.path()).has_value());
  EXPECT_FALSE(std::filesystem::exists(folder.file("iter_0000001")));
}

TEST(Dcp, ReplicasAreSpreadOverTheRanks) {
  std::vector<RankPlan> plans;
  for (int rank = 0; rank < 4; ++rank) {
    ShardedTensors tensors;
    for (int i = 0; i < 8; ++i)
      tensors.emplace_back(std::to_string(i), ShardedTensor::replicated(counting({4})));
    plans.push_back(decode_plan(encode_plan(make_rank_plan(tensors, {}))));
  }
  const auto plan = make_save_plan(plans);
  for (const auto& writes : plan.writes) EXPECT_EQ(writes.size(), 2U);
  EXPECT_EQ(plan.metadata.entries.size(), 8U);
}

TEST(Dcp, TruncatedAndForeignFilesAreRefused) {
  TemporaryFolder folder;
  save(folder.path(), 1);
  const auto data = folder.file("iter_0000003/__0_0.distcp");
  const ShardedTensors tensors{{"model.w", ShardedTensor::replicated(at::zeros({5, 3}))}};
  const LoadOptions loose{.strict = false, .wanted = {}};
  const auto step = *latest_step(folder.path());
  const auto refused = [&] {
    return message_of([&] { load_checkpoint(step, tensors, nullptr, loose); });
  };
  std::filesystem::resize_file(data, std::filesystem::file_size(data) / 2);
  EXPECT_THAT(refused(), HasSubstr("__0_0.distcp"));
  std::filesystem::resize_file(data, std::filesystem::file_size(data) * 2);
  EXPECT_THAT(refused(), HasSubstr("no torch archive"));
  std::filesystem::remove(data);
  EXPECT_THAT(refused(), HasSubstr("cannot read"));
  std::filesystem::resize_file(folder.file("iter_0000003/.metadata"), 100);
  EXPECT_THAT(refused(), HasSubstr("truncated"));
  std::filesystem::remove(folder.file("iter_0000003/.metadata"));
  EXPECT_THAT(refused(), HasSubstr("save was cut short"));
}

TEST(CheckpointDirectory, StepsAppearWholeAndTheTrackerLast) {
  TemporaryFolder folder;
  EXPECT_FALSE(latest_step(folder.path()).has_value());
  for (int round = 0; round < 2; ++round) {  // the second replaces the first
    StepWriter step(folder.path(), 12);
    step.begin();
    OutputFile file(step.folder() + "/round");
    file.write(std::to_string(round));
    file.sync_and_close();
    step.commit({manifest_entry(file)});
  }
  const auto step = latest_step(folder.path());
  EXPECT_EQ(step->folder, folder.file("iter_0000012"));
  std::string round;
  std::ifstream(step->folder + "/round") >> round;
  EXPECT_EQ(round, "1");
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(folder.path()), {}),
            2);  // no hidden folder is left
  EXPECT_THAT(message_of([&] { step_at(folder.path(), 13); }), HasSubstr("it has iter_0000012"));
  std::ofstream(folder.file("latest_checkpointed_iteration.txt")) << "13\n";
  EXPECT_THAT(message_of([&] { latest_step(folder.path()); }),
              HasSubstr("iter_0000013, which is not there"));
  std::ofstream(folder.file("latest_checkpointed_iteration.txt")) << "twelve";
  EXPECT_THAT(message_of([&] { latest_step(folder.path()); }), HasSubstr("it holds \"twelve\""));
  auto release = StepWriter::release(folder.path());
  release.begin();
  release.commit({});
  EXPECT_TRUE(latest_step(folder.path())->is_release);
}

TEST(CheckpointDirectory, AConvertedStepReplacesNoneAndSetsNoTrackerBack) {
  TemporaryFolder folder;
  const auto convert = [&](StepWriter step) {
    step.refuse_existing();
    step.begin();
    return step.commit_beside_others({});
  };
  const auto tracker = [&] { return read_tracker(folder.path()); };
  EXPECT_EQ(convert(StepWriter::release(folder.path())), "");
  EXPECT_TRUE(tracker()->is_release);
  EXPECT_EQ(convert({folder.path(), 20}), "");  // an iteration is newer than any release
  EXPECT_EQ(tracker()->iteration, 20);
  EXPECT_EQ(convert({folder.path(), 10}),
            folder.file("iter_0000020") +
                " is newer and stays the step that a run loads; write 10 into " +
                folder.file("latest_checkpointed_iteration.txt") + " to load iter_0000010");
  std::filesystem::remove(folder.file("release/manifest.json"));
  std::filesystem::remove(folder.file("release"));
  EXPECT_THAT(convert(StepWriter::release(folder.path())), HasSubstr("write release into"));
  EXPECT_EQ(tracker()->iteration, 20);
  EXPECT_THAT(message_of([&] {
                convert({folder.path(), 20});
              }),
              HasSubstr("iter_0000020 exists already, and a converter replaces no step"));
  std::filesystem::rename(folder.file("iter_0000020"), folder.file("iter_20"));  // the same step
  EXPECT_THAT(message_of([&] {
                convert({folder.path(), 20});
              }),
              HasSubstr("iter_20 exists already"));
  std::ofstream(folder.file("latest_checkpointed_iteration.txt")) << "twelve";
  EXPECT_THAT(convert({folder.path(), 15}), HasSubstr("iter_20 is newer"));
  EXPECT_THAT(message_of(tracker), HasSubstr("it holds \"twelve\""));
  EXPECT_EQ(convert({folder.path(), 30}), "");
  EXPECT_EQ(tracker()->iteration, 30);
  EXPECT_EQ(list_steps(folder.path()).size(), 5U);
}

}  // namespace
}  // namespace megashard
