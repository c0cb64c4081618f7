#include <ATen/ops/arange.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/zeros.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <filesystem>
#include <fstream>

#include "checkpoint/checkpoint.h"
#include "checkpoint/dcp/dcp_metadata.h"
#include "checkpoint/dcp/dcp_writer.h"
#include "checkpoint/files/file_io.h"
#include "checkpoint/files/output_file.h"
#include "checkpoint/steps/checkpoint_directory.h"
#include "checkpoint/steps/find_step.h"
#include "parallel/collectives/process_group.h"
#include "tests/checkpoint/files/temporary_folder.h"
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
        const auto whole = counting({5, 3}).to(at::kDouble);  // not the dtype of the saved tensor
        const ShardedTensors tensors{{"model.w", shard_of(at::zeros({5, 3}, at::TensorOptions(at::kDouble)), group)},
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
  const auto loaded = load_checkpoint(folder.path(), some, nullptr, {.strict = false, .wanted = {}});
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
    const ShardedTensors tensors{{"model.w", shard}, {"model.new", ShardedTensor::replicated(at::zeros({1}))}};
    const auto step = *find_step(folder.path(), group);
    bool refused = false;
    try {
      load_checkpoint(step, tensors, group, options);
    } catch (const std::domain_error&) {  // the exception keeps its type
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

TEST(Dcp, WhatOneRankMissesIsJudgedByAll) {
  TemporaryFolder folder;
  save_checkpoint(folder.path(), 1, {{"model.e.0", ShardedTensor::replicated(counting({2}))}}, {}, nullptr);
  const auto step = *latest_step(folder.path());
  testing::run_ranks(2, [&](const ProcessGroupPtr& group) {
    const auto mine = "model.e." + std::to_string(group->rank());  // each rank has some of the experts
    const ShardedTensors tensors{{mine, ShardedTensor::replicated(at::zeros({2}))}};
    LoadOptions options{.strict = false, .wanted = [&](const std::string& key) { return key == mine; }};
    options.accept = [&](const Dict&, const LoadReport& report) {
      TORCH_CHECK(report.missing == std::vector<std::string>{"model.e.1"}, group->rank());
    };
    load_checkpoint(step, tensors, group, options);
    options.accept = [&](const Dict&, const LoadReport&) {
      if (group->rank() == 1) throw std::domain_error("not here");
    };
    std::string refused;
    try {
      load_checkpoint(step, tensors, group, options);
    } catch (const c10::Error& error) {
      refused = error.what_without_backtrace();
    } catch (const std::domain_error& error) {
      refused = error.what();
    }
    TORCH_CHECK(refused == (group->rank() == 1 ? "not here" : "rank 1: not here"), refused);
    options.strict = true;
    const auto strict = message_of([&] { load_checkpoint(step, tensors, group, options); });
    TORCH_CHECK(strict.find("missing keys (1): model.e.1") != std::string::npos, strict);
  });
}

TEST(Dcp, WhatDoesNotFitOnOneRankChangesNothingOnTheOthers) {
  TemporaryFolder folder;
  Dict values;
  values.set("note", "text");
  save_checkpoint(folder.path(), 1,
                  {{"model.e.0", ShardedTensor::replicated(counting({2}))},
                   {"model.e.1", ShardedTensor::replicated(counting({2}))}},
                  values, nullptr);
  const auto step = *latest_step(folder.path());
  testing::run_ranks(2, [&](const ProcessGroupPtr& group) {
    const auto refused_with = [&](const ShardedTensors& odd) {
      auto mine = at::zeros({2});
      ShardedTensors tensors{{"model.e." + std::to_string(group->rank()), ShardedTensor::replicated(mine)}};
      if (group->rank() == 1) tensors.insert(tensors.end(), odd.begin(), odd.end());
      const LoadOptions loose{.strict = false, .wanted = {}};
      const auto refused = message_of([&] { load_checkpoint(step, tensors, group, loose); });
      TORCH_CHECK(mine.sum().item<float>() == 0, "changed, and then refused: ", refused);
      return refused;
    };
    const auto sizes = refused_with({{"model.e.0", ShardedTensor::replicated(at::zeros({3}))}});
    TORCH_CHECK(sizes.find("model.e.0 has sizes [2] in") != std::string::npos, sizes);
    for (const int64_t count : {1, 2}) {
      const auto kind = refused_with({{"note", ShardedTensor::replicated(at::zeros({count}))}});
      TORCH_CHECK(kind.find("rank 1: ") == 0, kind);
    }
  });
}

TEST(Dcp, ChunksThatLeaveAHoleAreRefusedBeforeAnythingChanges) {
  TemporaryFolder folder;
  save(folder.path(), 2);
  const auto step = *latest_step(folder.path());
  auto metadata = read_dcp_metadata(step.folder);
  for (auto& entry : metadata.entries) {
    if (entry.key == "model.w") entry.tensor()->chunks.at(1).offsets[0] = 1;  // shards are rows 0 to 2 and 3 to 4
  }
  write_dcp_metadata(step.folder, metadata);
  auto kept = at::zeros({5, 3});
  auto few = at::zeros({2});
  const ShardedTensors tensors{{"model.few", ShardedTensor::replicated(few)},
                               {"model.w", ShardedTensor::replicated(kept)}};
  const auto refused = message_of([&] { load_checkpoint(step, tensors, nullptr, {.strict = false, .wanted = {}}); });
  EXPECT_THAT(refused, HasSubstr("tensor model.w has shards that overlap, at [0, 0] and [1, 0]"));
  EXPECT_THAT(refused, HasSubstr(step.folder + "/.metadata"));
  EXPECT_EQ(kept.sum().item<float>() + few.sum().item<float>(), 0);
  const auto reader = open_step(step.folder);
  EXPECT_THAT(message_of([&] { reader->read_tensor("model.w"); }), HasSubstr("overlap"));
}

void check_boxes(std::vector<int64_t> sizes, const std::vector<std::array<int64_t, 4>>& boxes) {
  DcpTensor tensor{.sizes = std::move(sizes)};
  for (const auto& [row, column, rows, columns] : boxes)
    tensor.chunks.push_back({.offsets = {row, column}, .sizes = {rows, columns}});
  check_tiling("w", tensor);
}

TEST(Dcp, ChunksTileATensor) {
  std::vector<std::array<int64_t, 4>> grid;
  for (int64_t row = 0; row < 300; ++row) {
    for (int64_t column = 299; column >= 0; --column) grid.push_back({2 * row, column, 2, 1});
  }
  check_boxes({600, 300}, grid);  // fast: does not compare all pairs
  grid[7][1] = grid[8][1];
  EXPECT_THAT(message_of([&] { check_boxes({600, 300}, grid); }), HasSubstr("overlap"));
  std::vector<std::array<int64_t, 4>> wheel{{0, 0, 1, 2}, {0, 2, 2, 1}, {2, 1, 1, 2}, {1, 0, 2, 1}, {1, 1, 1, 1}};
  check_boxes({3, 3}, wheel);  // no plane separates these boxes
  wheel[4] = {1, 0, 1, 1};
  EXPECT_THAT(message_of([&] { check_boxes({3, 3}, wheel); }), HasSubstr("overlap"));
  wheel.pop_back();
  EXPECT_THAT(message_of([&] { check_boxes({3, 3}, wheel); }), HasSubstr("hold 8 of its 9"));
  check_boxes({0, 3}, {});
}

TEST(Dcp, ChunksThatNoPlaneReachesAreRefusedInTime) {
  // A row from the top, a column from the left, and so on inwards: each plane separates only one.
  std::vector<std::array<int64_t, 4>> spiral;
  constexpr int64_t kTurns = 20000;
  for (int64_t i = 0; i < kTurns; ++i) {
    spiral.push_back({i, i, 1, kTurns - i});
    if (i + 1 < kTurns) spiral.push_back({i + 1, i, kTurns - i - 1, 1});
  }
  EXPECT_THAT(message_of([&] { check_boxes({kTurns, kTurns}, spiral); }), HasSubstr("shards that no plane parts"));
}

/// Number of bytes that the process has read so far, from files and from caches.
int64_t bytes_read() {
  std::ifstream counts("/proc/self/io");
  std::string name;
  int64_t bytes = 0;
  counts >> name >> bytes;
  EXPECT_EQ(name, "rchar:");
  return bytes;
}

TEST(Dcp, ALoadReadsOnlyTheRowsThatItNeeds) {
  TemporaryFolder folder;
  const auto whole = counting({400, 1000});
  save_checkpoint(folder.path(), 1, {{"model.w", ShardedTensor::replicated(whole)}}, {}, nullptr);
  const auto step = *latest_step(folder.path());
  for (const auto dtype : {at::kFloat, at::kDouble}) {  // directly into its place, and through a buffer
    auto mine = ShardedTensor::replicated(whole);
    mine.local = at::zeros({100, 1000}, at::TensorOptions(dtype));
    mine.offsets = {300, 0};
    const auto before = bytes_read();
    load_checkpoint(step, {{"model.w", mine}}, nullptr);
    const auto share = whole.nbytes() / 4;
    EXPECT_GE(bytes_read() - before, static_cast<int64_t>(share));
    EXPECT_LT(bytes_read() - before, static_cast<int64_t>(share + share / 10));  // and the metadata
    EXPECT_TRUE(at::equal(mine.local, whole.narrow(0, 300, 100).to(dtype)));
  }
}

TEST(Dcp, OneRanksFailureIsEveryRanksAndLeavesNoStep) {
  TemporaryFolder folder;
  testing::run_ranks(3, [&](const ProcessGroupPtr& group) {
    auto shard = shard_of(counting({6}), group);
    if (group->rank() == 1) shard.offsets[0] = 3;  // overlaps with the other shard
    const auto refused = message_of([&] { save_checkpoint(folder.path(), 1, {{"model.w", shard}}, {}, group); });
    TORCH_CHECK(refused.find("overlap") != std::string::npos, refused);
    if (group->rank() == 2) shard.offsets.clear();
    const auto on_one = message_of([&] { save_checkpoint(folder.path(), 1, {{"model.w", shard}}, {}, group); });
    TORCH_CHECK(on_one.find("rank 2: ") == 0, on_one);
  });
  EXPECT_FALSE(latest_step(folder.path()).has_value());
  EXPECT_FALSE(std::filesystem::exists(folder.file("iter_0000001")));
}

TEST(Dcp, ReplicasAreSpreadOverTheRanks) {
  std::vector<RankPlan> plans;
  for (int rank = 0; rank < 4; ++rank) {
    ShardedTensors tensors;
    for (int i = 0; i < 8; ++i) tensors.emplace_back(std::to_string(i), ShardedTensor::replicated(counting({4})));
    auto items = make_rank_plan(tensors, {});
    for (auto& item : items) item.is_unsharded = false;  // like tensors that a mesh keeps equal
    plans.push_back(plan_of(plan_value(items)));
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
  const auto refused = [&] { return message_of([&] { load_checkpoint(step, tensors, nullptr, loose); }); };
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
    step.commit({file.sync_and_close()});
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
  EXPECT_THAT(message_of([&] { latest_step(folder.path()); }), HasSubstr("iter_0000013, which is not there"));
  std::ofstream(folder.file("latest_checkpointed_iteration.txt")) << "twelve";
  EXPECT_THAT(message_of([&] { latest_step(folder.path()); }), HasSubstr("it holds \"twelve\""));
  auto release = StepWriter::release(folder.path());
  release.begin();
  release.commit({});
  EXPECT_TRUE(latest_step(folder.path())->is_release);
}

TEST(CheckpointDirectory, WhatIsBeingWrittenIsLeftAlone) {
  TemporaryFolder folder;
  const auto dead = folder.file(".iter_0000005.tmp");
  std::filesystem::create_directory(dead);
  StepWriter training(folder.path(), 12);
  training.begin();
  EXPECT_FALSE(path_exists(dead));
  std::filesystem::create_directory(dead);
  StepWriter converter(folder.path(), 7);
  for (int round = 0; round < 2; ++round) {  // the second starts where the first was interrupted
    converter.begin_converted();
    EXPECT_TRUE(path_exists(converter.folder()));
    if (round == 0) converter.abandon();
    EXPECT_EQ(path_exists(converter.folder()), round == 1);
    EXPECT_TRUE(path_exists(dead) && path_exists(training.folder()));
  }
  StepWriter next(folder.path(), 13);
  next.begin();
  EXPECT_FALSE(path_exists(dead));
  EXPECT_TRUE(path_exists(converter.folder()) && path_exists(training.folder()));
  StepWriter twin(folder.path(), 12);
  EXPECT_THAT(message_of([&] { twin.begin(); }), HasSubstr(training.folder() + " is being written by another process"));
  twin.abandon();
  EXPECT_TRUE(path_exists(training.folder()));
  training.commit({});
  EXPECT_EQ(latest_step(folder.path())->iteration, 12);
}

TEST(CheckpointDirectory, AConvertedStepReplacesNoneAndSetsNoTrackerBack) {
  TemporaryFolder folder;
  const auto convert = [&](StepWriter step) {
    step.refuse_existing();
    step.begin_converted();
    return step.commit_converted({});
  };
  const auto tracker = [&] { return read_tracker(folder.path()); };
  EXPECT_EQ(convert(StepWriter::release(folder.path())), "");
  EXPECT_TRUE(tracker()->is_release);
  EXPECT_EQ(convert({folder.path(), 20}), "");  // an iteration counts as newer than a release
  EXPECT_EQ(tracker()->iteration, 20);
  EXPECT_EQ(convert({folder.path(), 10}),
            folder.file("iter_0000020") + " is newer and stays the step that a run loads; write 10 into " +
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
  EXPECT_THAT(message_of([&] { convert({folder.path(), 20}); }), HasSubstr("iter_20 exists already"));
  std::ofstream(folder.file("latest_checkpointed_iteration.txt")) << "twelve";
  EXPECT_THAT(convert({folder.path(), 15}), HasSubstr("iter_20 is newer"));
  EXPECT_THAT(message_of(tracker), HasSubstr("it holds \"twelve\""));
  EXPECT_EQ(convert({folder.path(), 30}), "");
  EXPECT_EQ(tracker()->iteration, 30);
  EXPECT_EQ(list_steps(folder.path()).size(), 5U);
}

}  // namespace
}  // namespace megashard
