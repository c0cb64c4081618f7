#include "framework/training/training_checkpoint.h"

#include <ATen/ops/all.h>
#include <ATen/ops/eq.h>
#include <ATen/ops/zeros.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/linear.h>

#include <algorithm>
#include <filesystem>
#include <map>
#include <set>
#include <thread>

#include "checkpoint/dcp/dcp_metadata.h"
#include "checkpoint/steps/checkpoint_directory.h"
#include "checkpoint/torch_dist/torch_dist_keys.h"
#include "parallel/fsdp/fully_shard.h"
#include "parallel/fsdp/hooked_module.h"
#include "tests/checkpoint/files/temporary_folder.h"
#include "tests/support/formula.h"
#include "tests/support/message_of.h"
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
  arguments.ckpt_format = CheckpointFormat::kTorchDcp;
  arguments.most_recent_k = 1;
  arguments.no_save_rng = true;
  testing::run_ranks(1, [&](const ProcessGroupPtr& group) {
    OneWeight model;
    TrainingState state{arguments, model, nullptr, nullptr};
    state.progress.step = 2;
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

/// Two layers that are alike, and a weight beside them.
struct LayersImpl : MegatronModule {
  LayersImpl() {
    auto layers = register_module("layers", std::make_shared<torch::nn::Module>());
    for (const char* number : {"0", "1"})
      layers->register_module(number, std::make_shared<torch::nn::LinearImpl>(3, 5));
    register_parameter("head", at::zeros({7, 3}));
  }
  at::Tensor forward(at::Tensor x) { return x; }
};

TEST(TrainingCheckpoint, TorchDistHoldsTheShardedStateDict) {
  TemporaryFolder folder;
  Arguments arguments;
  arguments.save = folder.path();
  arguments.ckpt_format = CheckpointFormat::kTorchDist;
  arguments.no_save_rng = true;
  testing::run_ranks(2, [&](const ProcessGroupPtr& group) {
    Hooked<LayersImpl> model;
    fully_shard(model, {.mesh = testing::flat_mesh(group)});
    TrainingState state{arguments, model, nullptr, nullptr};
    state.progress.step = 1;
    save_training_checkpoint(state, group, [](const std::string&) {});
    std::map<std::string, DcpTensor> stored;
    for (auto& entry : read_dcp_metadata(folder.file("iter_0000001")).entries)
      if (entry.tensor() != nullptr) stored.emplace(entry.key, std::move(*entry.tensor()));
    std::set<std::string> keys;
    for (const auto& [key, piece] : stack_layers(model.sharded_state_dict())) {
      keys.insert(key);
      TORCH_CHECK(stored.count(key) == 1, key, " is not stored");
      const auto& entry = stored.at(key);
      const auto chunk = std::find_if(entry.chunks.begin(), entry.chunks.end(), [&](const auto& chunk) {
        return chunk.offsets == piece.offsets && piece.local.sizes() == at::IntArrayRef(chunk.sizes);
      });
      TORCH_CHECK(entry.sizes == piece.global_sizes && chunk != entry.chunks.end(), key,
                  " is stored with other sizes or chunks");
    }
    TORCH_CHECK(keys == (std::set<std::string>{"head", "layers.weight", "layers.bias"}));
    TORCH_CHECK(stored.size() == keys.size());
  });
}

/// Would lose its head in a checkpoint.
struct ForgetfulImpl : LayersImpl {
  ShardedTensors state_dict_for_save_checkpoint() override {
    auto tensors = state_dict();
    std::erase_if(tensors, [](const auto& entry) { return entry.first == "head"; });
    return tensors;
  }
};

TEST(TrainingCheckpoint, BothFormatsRefuseAModelThatForgetsAWeight) {
  testing::run_ranks(1, [&](const ProcessGroupPtr& group) {
    for (const auto format : {CheckpointFormat::kTorchDcp, CheckpointFormat::kTorchDist}) {
      Arguments arguments;
      arguments.ckpt_format = format;
      Hooked<ForgetfulImpl> model;
      fully_shard(model, {.mesh = testing::flat_mesh(group)});
      TrainingState state{arguments, model, nullptr, nullptr};
      const auto message = testing::message_of([&] { check_save_format(state); });
      TORCH_CHECK(message.find("is not saved") != std::string::npos, format_name(format), ": ", message);
    }
  });
}

/// Its torch_dist checkpoints have Megatron's name for the head and a tensor more, and lack one.
struct OwnNamesImpl : LayersImpl {
  OwnNamesImpl() { register_parameter("scratch", at::zeros({2})); }
  ShardedTensors sharded_state_dict() override {
    auto tensors = MegatronModule::sharded_state_dict();
    std::erase_if(tensors, [](const auto& entry) { return entry.first == "scratch"; });
    for (auto& [name, tensor] : tensors)
      if (name == "head") name = "output_layer.weight";
    tensors.emplace_back("seen", ShardedTensor::replicated(seen));
    return tensors;
  }
  void fill(double value) {
    const at::NoGradGuard no_grad;
    for (auto& [name, tensor] : state_dict()) tensor.local.fill_(value);
    seen.fill_(value);
  }
  at::Tensor seen = at::zeros({3});
};

TEST(TrainingCheckpoint, AModelsOwnNamesAreStoredInTorchDistAndLoaded) {
  TemporaryFolder folder;
  Arguments arguments;
  arguments.save = arguments.load = folder.path();
  arguments.no_save_rng = true;
  OptimizerParamScheduler schedule({.decay_steps = 1});
  testing::run_ranks(2, [&](const ProcessGroupPtr& group) {
    for (const auto format : {CheckpointFormat::kTorchDcp, CheckpointFormat::kTorchDist}) {
      const bool is_dist = format == CheckpointFormat::kTorchDist;
      Arguments mine = arguments;
      mine.ckpt_format = format;
      Hooked<OwnNamesImpl> model;
      model.fill(1);
      fully_shard(model, {.mesh = testing::flat_mesh(group)});
      TrainingState state{mine, model, nullptr, &schedule};
      state.progress.step = is_dist ? 2 : 1;
      save_training_checkpoint(state, group, [](const std::string&) {});
      const auto step = step_at(folder.path(), state.progress.step);
      std::set<std::string> keys;
      for (const auto& entry : read_dcp_metadata(step.folder).entries)
        if (entry.tensor() != nullptr) keys.insert(entry.key);
      if (is_dist)
        TORCH_CHECK(keys == (std::set<std::string>{"output_layer.weight", "layers.weight", "layers.bias", "seen"}));
      TORCH_CHECK(is_dist || (keys.count("model.head") == 1 && keys.count("model.scratch") == 1));
      model.fill(0);
      mine.auto_detect_ckpt_format = true;
      load_training_checkpoint(state, step, group);
      for (const auto& [name, tensor] : model.state_dict()) {
        const double expected = is_dist && name == "scratch" ? 0 : 1;
        TORCH_CHECK(at::all(at::eq(tensor.local, expected)).item<bool>(), name, " in ", format_name(format));
      }
      TORCH_CHECK(model.seen.sum().item<double>() == (is_dist ? 3 : 0));
    }
  });
}

struct TwoEndsImpl : MegatronModule {
  explicit TwoEndsImpl(bool tied, int64_t head_rows = 7) {
    const auto rows = at::arange(21, at::kFloat).view({7, 3});
    const auto shared = register_parameter("embedding", rows.clone());
    register_parameter("head", tied ? shared : rows.narrow(0, 0, head_rows) + 1);
  }
  at::Tensor forward(at::Tensor x) { return x; }
};

TEST(TrainingCheckpoint, ASharedWeightIsStoredOnceUnderAllItsNames) {
  TemporaryFolder folder;
  Arguments arguments;
  arguments.save = folder.path();
  arguments.load = folder.path() + "/";
  arguments.ckpt_format = CheckpointFormat::kTorchDcp;
  arguments.no_save_rng = true;
  OptimizerParamScheduler schedule({.decay_steps = 1});
  const auto save = [&](const ProcessGroupPtr& group, bool tied, int64_t iteration, int64_t head_rows = 7) {
    Hooked<TwoEndsImpl> model(tied, head_rows);
    fully_shard(model, {.mesh = testing::flat_mesh(group)});
    TrainingState state{arguments, model, nullptr, &schedule};
    state.progress.step = iteration;
    save_training_checkpoint(state, group, [](const std::string&) {});
  };
  const auto load_tied = [&](const ProcessGroupPtr& group, int64_t iteration) {
    Hooked<TwoEndsImpl> model(true);
    {
      const at::NoGradGuard no_grad;
      for (auto& parameter : model.parameters()) parameter.zero_();
    }
    fully_shard(model, {.mesh = testing::flat_mesh(group)});
    TrainingState state{arguments, model, nullptr, &schedule};
    try {
      load_training_checkpoint(state, step_at(folder.path(), iteration), group);
    } catch (const c10::Error&) {
      if (iteration == 3) TORCH_CHECK(model.state_dict()[0].second.local.sum().item<float>() == 0);
      throw;
    }
    const auto loaded = model.state_dict();
    TORCH_CHECK(loaded.size() == 1 && loaded[0].first == "embedding");
    const auto first = loaded[0].second.offsets[0] * 3;
    const auto& local = loaded[0].second.local;
    TORCH_CHECK(local.equal(at::arange(first, first + local.numel(), at::kFloat).view_as(local)));
  };
  testing::run_ranks(2, [&](const ProcessGroupPtr& group) {
    save(group, true, 1);
    save(group, false, 2);
    save(group, false, 3, /*head_rows=*/6);
    load_tied(group, 1);
    EXPECT_THAT([&] { load_tied(group, 2); },
                ::testing::ThrowsMessage<c10::Error>(HasSubstr("other values for model.head than")));
    // Other sizes are seen before anything changes.
    EXPECT_THAT([&] { load_tied(group, 3); },
                ::testing::ThrowsMessage<c10::Error>(HasSubstr("model.head has sizes [6, 3] in")));
  });
  std::map<std::string, DcpTensor> stored;
  for (auto& entry : read_dcp_metadata(folder.file("iter_0000001")).entries)
    if (entry.tensor() != nullptr) stored.emplace(entry.key, std::move(*entry.tensor()));
  const auto& head = stored.at("model.head");
  const auto& embedding = stored.at("model.embedding");
  ASSERT_EQ(head.chunks.size(), 2U);
  for (size_t i = 0; i < head.chunks.size(); ++i) {
    EXPECT_EQ(head.chunks[i].location.file, embedding.chunks[i].location.file);
    EXPECT_EQ(head.chunks[i].location.range.offset, embedding.chunks[i].location.range.offset);
  }
}

}  // namespace
}  // namespace megashard
