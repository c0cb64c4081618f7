#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cstdlib>
#include <filesystem>
#include <future>

#include "checkpoint/checkpoint.h"
#include "checkpoint/dcp/dcp_writer.h"
#include "checkpoint/files/file_io.h"
#include "checkpoint/steps/async_saver.h"
#include "checkpoint/steps/checkpoint_directory.h"
#include "checkpoint/steps/find_step.h"
#include "parallel/collectives/agreement.h"
#include "parallel/collectives/noted_progress.h"
#include "parallel/collectives/process_group.h"
#include "tests/checkpoint/files/temporary_folder.h"
#include "tests/support/message_of.h"
#include "tests/support/refuse_threads.h"
#include "tests/support/run_ranks.h"
#include "tests/support/simulated_device.h"

namespace megashard {
namespace {

using ::testing::HasSubstr;
using testing::message_of;

at::Tensor numbers(int64_t rows, at::ScalarType dtype = at::kFloat) {
  return at::arange(rows * 3, at::TensorOptions(at::kFloat)).view({rows, 3}).to(dtype);
}

/// Two sharded weights, one of them not contiguous, and a replicated scalar.
ShardedTensors shards_of(const ProcessGroupPtr& group) {
  ShardedTensors tensors{{"model.a", ShardedTensor::replicated(numbers(7))},
                         {"model.b", ShardedTensor::replicated(numbers(5, at::kBFloat16))},
                         {"model.step", ShardedTensor::replicated(at::full({}, 4.0))}};
  for (size_t i = 0; i < 2; ++i) {
    auto& tensor = tensors[i].second;
    const auto range = chunk_range(tensor.global_sizes[0], group->size(), group->rank());
    tensor.local = tensor.local.narrow(0, range.offset, range.size).clone();
    tensor.offsets[0] = range.offset;
  }
  tensors[0].second.local = tensors[0].second.local.t().contiguous().t();
  return tensors;
}

Dict some_values() {
  Dict values;
  values.set("iteration", 3);
  return values;
}

AsyncSaver::Write save_into(const std::string& directory) {
  return [directory](const ShardedTensors& copies, const ProcessGroupPtr& group) {
    save_checkpoint(directory, 3, copies, some_values(), group);
  };
}

std::string content_of(const std::string& path) { return read_small_file(path, 1 << 20); }

TEST(AsyncSaver, WritesTheShardsAsTheyWereByteForByte) {
  TemporaryFolder folder;
  testing::run_ranks_of_both(2, [&](const ProcessGroupPtr& group) {
    auto tensors = shards_of(group);
    save_checkpoint(folder.file("sync"), 3, tensors, some_values(), group);
    AsyncSaver saver(group);
    for (const auto* name : {"first", "again"}) {
      std::promise<void> changed;
      const auto save = save_into(folder.file(name));
      saver.start("iteration 3", tensors, [&](const auto& copies, const auto& writers) {
        changed.get_future().wait();
        save(copies, writers);
      });
      saver.before_changes();
      for (auto& [key, tensor] : tensors) tensor.local.fill_(-1);
      changed.set_value();
      saver.wait();
      tensors = shards_of(group);
    }
  });
  for (const auto* name : {"first", "again"}) {
    for (const auto* file : {".metadata", "__0_0.distcp", "__1_0.distcp", "manifest.json"}) {
      const auto path = std::string("/iter_0000003/") + file;
      EXPECT_EQ(content_of(folder.file(name) + path), content_of(folder.file("sync") + path)) << path;
    }
    EXPECT_EQ(latest_step(folder.file(name))->iteration, 3);
  }
}

TEST(AsyncSaver, AloneWritesWhatTheShardsWere) {
  TemporaryFolder folder;
  const ShardedTensors tensors{{"model.a", ShardedTensor::replicated(numbers(7))}};
  save_checkpoint(folder.file("sync"), 3, tensors, some_values(), nullptr);
  AsyncSaver saver(nullptr);
  saver.start("iteration 3", tensors, save_into(folder.file("async")));
  saver.before_changes();
  tensors[0].second.local.fill_(-1);
  saver.wait();
  const std::string path = "/iter_0000003/__0_0.distcp";
  EXPECT_EQ(content_of(folder.file("async") + path), content_of(folder.file("sync") + path));
}

TEST(AsyncSaver, AFailureIsTheSameMessageOnEveryRankAndLeavesNoStep) {
  TemporaryFolder folder;
  testing::run_ranks_of_both(3, [&](const ProcessGroupPtr& group) {
    AsyncSaver saver(group);
    auto tensors = shards_of(group);
    std::vector<std::thread::id> told;
    EXPECT_EQ(saver.state(), AsyncSaver::State::kIdle);
    saver.start(
        "iteration 3", tensors,
        [&](const auto&, const auto& writers) {
          all_or_throw(writers, [&] { TORCH_CHECK(writers->rank() != 1, "the disk is full"); });
        },
        [&told] { told.push_back(std::this_thread::get_id()); });
    const auto failed = message_of([&] { saver.start("iteration 4", tensors, save_into(folder.path())); });
    EXPECT_EQ(failed, "the checkpoint of iteration 3 was not saved: rank 1: the disk is full");
    EXPECT_EQ(told, std::vector{std::this_thread::get_id()});
    EXPECT_EQ(saver.state(), AsyncSaver::State::kIdle);

    if (group->rank() == 2) tensors[1].second.local = at::Tensor();  // this shard cannot be copied
    saver.start("iteration 5", tensors, save_into(folder.path()));
    while (saver.state() == AsyncSaver::State::kWriting) std::this_thread::yield();
    EXPECT_EQ(saver.state(), AsyncSaver::State::kFailed);
    EXPECT_THAT(message_of([&] { saver.wait(); }), HasSubstr("the checkpoint of iteration 5 was not saved: rank 2: "));
    saver.wait();  // an error is thrown once

    saver.start("iteration 3", shards_of(group), save_into(folder.path()));
    saver.wait();
  });
  EXPECT_EQ(latest_step(folder.path())->iteration, 3);
}

TEST(AsyncSaver, OneSaveIsUnderWayAndTheEndWaitsForIt) {
  std::atomic<int> writing = 0, most = 0, written = 0, lines = 0;
  const auto tensors = ShardedTensors{{"a", ShardedTensor::replicated(numbers(2))}};
  {
    AsyncSaverOptions options;
    options.say = [&](const std::string& line) {
      EXPECT_THAT(line, HasSubstr("the checkpoint of iteration"));
      ++lines;
    };
    AsyncSaver saver(nullptr, options);
    for (int i = 0; i < 3; ++i) {
      saver.start("iteration " + std::to_string(i), tensors, [&, i](const auto&, const auto& group) {
        EXPECT_EQ(group, nullptr);
        most = std::max<int>(most, ++writing);
        while (lines <= i) std::this_thread::yield();  // waits until wait() has said that it waits
        --writing;
        ++written;
      });
    }
    EXPECT_EQ(saver.state(), AsyncSaver::State::kWriting);
  }
  EXPECT_EQ(most, 1);
  EXPECT_EQ(written, 3);
  EXPECT_EQ(lines, 3);
}

TEST(AsyncSaver, ASaveThatHangsIsGivenUpAtTheDeadline) {
  std::promise<void> end;
  std::shared_future<void> ended = end.get_future().share();
  std::promise<void> gone;
  {
    AsyncSaverOptions options;
    options.deadline = std::chrono::milliseconds(20);
    AsyncSaver saver(nullptr, options);
    const ShardedTensors tensors{{"a", ShardedTensor::replicated(numbers(2))}};
    saver.start("iteration 7", tensors, [&gone, ended](const auto& copies, const auto&) {
      ended.wait();
      EXPECT_TRUE(at::equal(copies[0].second.local, numbers(2).cpu()));  // the copies still exist
      gone.set_value();
    });
    EXPECT_THAT(message_of([&] { saver.wait(); }), HasSubstr("the checkpoint of iteration 7 is not written"));
  }
  end.set_value();
  gone.get_future().wait();
}

TEST(AsyncSaver, RanksMayWriteLongerApartThanTheTrainingsDeadline) {
  TemporaryFolder folder;
  const auto deadline = std::chrono::seconds(1);
  testing::run_ranks_of_both(
      2,
      [&](const ProcessGroupPtr& group) {
        AsyncSaver saver(group);
        const auto save = save_into(folder.path());
        saver.start("iteration 3", shards_of(group), [&](const auto& copies, const auto& writers) {
          all_or_throw(writers, [&] {
            for (int part = 0; group->rank() == 1 && part < 12; ++part) {
              std::this_thread::sleep_for(deadline / 4);
              note_progress();
            }
          });
          save(copies, writers);
        });
        saver.wait();
      },
      deadline);
  EXPECT_TRUE(find_step(folder.path(), nullptr).has_value());
}

TEST(AsyncSaver, SavesAtOnceWhereNoThreadCanBeHad) {
  TemporaryFolder folder;
  const auto save = [&] {
    testing::refuse_threads();
    AsyncSaver saver(nullptr);
    saver.start("iteration 3", {{"model.a", ShardedTensor::replicated(numbers(7))}}, save_into(folder.path()));
    saver.wait();
    std::_Exit(find_step(folder.path(), nullptr).has_value() ? 0 : 1);
  };
  EXPECT_EXIT(save(), ::testing::ExitedWithCode(0), "");
}

TEST(SavePlanCache, IsUsedWhileNothingChangesOnAnyRank) {
  TemporaryFolder folder;
  testing::run_ranks_of_both(2, [&](const ProcessGroupPtr& group) {
    const auto plans = std::make_shared<SavePlanCache>();
    auto tensors = shards_of(group);
    save_checkpoint(folder.path(), 1, tensors, some_values(), group, {.plans = plans});
    const auto first = plans->plan;
    tensors[2].second.local.fill_(5);
    save_checkpoint(folder.path(), 2, tensors, some_values(), group, {.plans = plans});
    EXPECT_EQ(plans->plan, first);
    if (group->rank() == 1) tensors.emplace_back("model.more", ShardedTensor::replicated(numbers(1)));
    save_checkpoint(folder.path(), 3, tensors, some_values(), group, {.plans = plans});
    EXPECT_NE(plans->plan, first);
  });
  const auto step = at::full({}, 0.0);
  const auto more = at::full({1, 3}, 0.0);
  load_checkpoint(step_at(folder.path(), 2), {{"model.step", ShardedTensor::replicated(step)}}, nullptr,
                  {.strict = false, .wanted = {}});
  EXPECT_EQ(step.item<float>(), 5);
  load_checkpoint(step_at(folder.path(), 3), {{"model.more", ShardedTensor::replicated(more)}}, nullptr,
                  {.strict = false, .wanted = {}});
  EXPECT_TRUE(at::equal(more, numbers(1)));
}

}  // namespace
}  // namespace megashard

namespace megashard::testing {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;

ShardedTensors on_simulated_gpu(std::vector<int64_t> sizes) {
  ShardedTensors tensors;
  for (const int64_t size : sizes) {
    tensors.emplace_back("model." + std::to_string(size),
                         ShardedTensor::replicated(at::full({size}, 7.0, at::TensorOptions(at::kCUDA))));
  }
  return tensors;
}

TEST(ShardSnapshot, AGpuTrainsOnWhileItCopiesAndChangesNothingBefore) {
  if (!on_simulated_device()) GTEST_SKIP() << "without a GPU the host copies";
  const auto tensors = on_simulated_gpu({1000, 3});
  const at::Tensor weight = tensors[0].second.local;
  ShardSnapshot snapshot;
  simulated_cuda().take_host_syncs();
  const auto copies = snapshot.take(tensors);
  const at::Tensor read = weight + 1;  // a forward that overlaps with the copies
  snapshot.before_changes();
  weight.fill_(-1);
  EXPECT_THAT(simulated_cuda().take_host_syncs(), IsEmpty());
  EXPECT_THAT(simulated_cuda().take_findings(), IsEmpty());
  snapshot.wait();
  EXPECT_EQ(copies[0].second.local[999].item<float>(), 7);

  snapshot.take(tensors);
  weight.fill_(-2);  // without before_changes(), nothing waits for the copies
  const auto found = simulated_cuda().take_findings();
  ASSERT_EQ(found.size(), 1u);
  EXPECT_THAT(found[0], HasSubstr("race: aten::fill_ on the default stream writes"));
  snapshot.wait();
}

TEST(ShardSnapshot, ShardsThatAreDroppedAreCopiedFirst) {
  if (!on_simulated_device()) GTEST_SKIP() << "without a GPU the host copies";
  ShardSnapshot snapshot;
  auto tensors = on_simulated_gpu({1 << 20});
  const auto copies = snapshot.take(tensors);
  tensors.clear();
  const at::Tensor other = at::full({1 << 20}, 3.0, at::TensorOptions(at::kCUDA));
  snapshot.wait();
  EXPECT_EQ(copies[0].second.local[0].item<float>(), 7);
}

TEST(ShardSnapshot, PinsWhatItHoldsAndNoMore) {
  if (!on_simulated_device()) GTEST_SKIP() << "without a GPU nothing is pinned";
  const auto pinned = [] { return simulated_device().counts().pinned_bytes; };
  const int64_t before = pinned(), floats = (1 << 20) + (1 << 18);  // 5 MiB: not a power of two
  {
    ShardSnapshot snapshot;
    snapshot.take(on_simulated_gpu({floats}));
    snapshot.wait();
    EXPECT_LE(pinned() - before, floats * 4 + (64 << 10));
  }
  EXPECT_EQ(pinned(), before);
}

}  // namespace
}  // namespace megashard::testing
