// The torch_dist format, written and read by this project; tests/interop/test_torch_dist.py tests it with
// megatron-core.
#include <ATen/ops/arange.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>

#include "checkpoint/checkpoint.h"
#include "checkpoint/convert/folder_writer.h"
#include "checkpoint/steps/checkpoint_directory.h"
#include "checkpoint/steps/find_step.h"
#include "checkpoint/torch_dist/torch_dist_keys.h"
#include "checkpoint/torch_dist/torch_dist_writer.h"
#include "checkpoint/values/tensor_info.h"
#include "parallel/collectives/device_mesh.h"
#include "parallel/collectives/process_group.h"
#include "tests/checkpoint/files/temporary_folder.h"
#include "tests/support/message_of.h"
#include "tests/support/run_ranks.h"

namespace megashard {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::message_of;

at::Tensor counting(std::vector<int64_t> sizes, int64_t first, at::ScalarType dtype = at::kFloat) {
  int64_t numel = 1;
  for (const auto size : sizes) numel *= size;
  return at::arange(first, first + numel, at::TensorOptions(at::kFloat)).view(sizes).to(dtype);
}

ShardedTensor shard_of(const at::Tensor& whole, const DeviceMeshPtr& mesh) {
  auto piece = ShardedTensor::replicated(whole.clone());
  const auto range = chunk_range(whole.size(0), mesh->size(), mesh->coordinate(0));
  piece.local = whole.narrow(0, range.offset, range.size).clone();
  piece.offsets[0] = range.offset;
  piece.mesh = mesh;
  piece.placements = {Placement::shard(0)};
  return piece;
}

/// Three layers and the tensors around them. With `zero`: the same, to be loaded into.
ShardedTensors state_of(const DeviceMeshPtr& mesh, bool zero = false) {
  ShardedTensors tensors;
  const auto add = [&](const std::string& key, const at::Tensor& whole) {
    tensors.emplace_back(key, shard_of(zero ? at::zeros_like(whole) : whole, mesh));
  };
  add("model.embed.weight", counting({10, 3}, 0));
  for (int64_t i = 0; i < 3; ++i) {
    const auto layer = "layers." + std::to_string(i);
    add("model.decoder." + layer + ".mlp.weight", counting({7, 2}, 100 * i, at::kBFloat16));
    add("optimizer.state.decoder." + layer + ".mlp.weight.exp_avg", counting({7, 2}, 1000 * i));
    tensors.emplace_back("optimizer.state.decoder." + layer + ".mlp.weight.step",
                         ShardedTensor::replicated(at::full({}, zero ? 0 : 5, at::kFloat)));
  }
  return tensors;
}

Dict values_of(int rank) {
  Dict generators;
  Dict mine;
  mine.set("torch_rng_state", Bytes{"state of " + std::to_string(rank)});
  generators.set(std::to_string(rank), mine);
  Dict group;
  group.set("lr", 0.5);
  group.set("params", List{{"decoder.layers.0.mlp.weight"}});
  Dict optimizer;
  optimizer.set("param_groups", List{{group}});
  Dict arguments;
  arguments.set("params_dtype", at::kBFloat16);
  Dict values;
  values.set("args", make_namespace(arguments));
  values.set("iteration", 3);
  values.set("optimizer", optimizer);
  values.set("rng_state", generators);
  return values;
}

DeviceMeshPtr mesh_of(const ProcessGroupPtr& group) {
  return std::make_shared<const DeviceMesh>(group, std::vector<int>{group->size()});
}

void save(const std::string& folder, int world) {
  testing::run_ranks(world, [&](const ProcessGroupPtr& group) {
    save_checkpoint(folder, 3, state_of(mesh_of(group)), values_of(group->rank()), group,
                    {.format = CheckpointFormat::kTorchDist});
  });
}

TEST(TorchDist, AnyWorldSizeReadsAnyOther) {
  for (const int saved : {1, 2, 3}) {
    TemporaryFolder folder;
    save(folder.path(), saved);
    for (const int loaded : {1, 4}) {
      testing::run_ranks(loaded, [&](const ProcessGroupPtr& group) {
        const auto mesh = mesh_of(group);
        const auto tensors = state_of(mesh, /*zero=*/true);
        const auto step = find_step(folder.path(), group);
        const auto checkpoint = load_checkpoint(*step, tensors, group);
        const auto expected = state_of(mesh);
        for (size_t i = 0; i < tensors.size(); ++i) {
          TORCH_CHECK(at::equal(tensors[i].second.local, expected[i].second.local), tensors[i].first, " of ", saved,
                      " to ", loaded);
        }
        const auto& ranks = checkpoint.values.at("rng_state").as_dict();
        TORCH_CHECK(ranks.entries.size() == static_cast<size_t>(saved));
        TORCH_CHECK(ranks.at("0") == values_of(0).at("rng_state").as_dict().at("0"));
        TORCH_CHECK(checkpoint.values.at("args") == values_of(0).at("args"));
        TORCH_CHECK(checkpoint.values.at("optimizer") == values_of(0).at("optimizer"));
      });
    }
  }
}

std::vector<std::string> keys_of(const std::vector<TensorInfo>& infos) {
  std::vector<std::string> keys;
  for (const auto& place : torch_dist_places(infos)) keys.push_back(place.key);
  return keys;
}

TEST(TorchDist, OnlyLayersThatAgreeAreStacked) {
  const auto layer = [](int i, const char* rest, std::vector<int64_t> sizes) {
    return TensorInfo{"model.a.layers." + std::to_string(i) + "." + rest, at::kFloat, sizes};
  };
  EXPECT_THAT(keys_of({layer(0, "w", {2}), layer(1, "w", {2}), {"model.layers.7", at::kFloat, {1}}}),
              ElementsAre("a.layers.w", "a.layers.w", "layers.7"));
  EXPECT_THAT(keys_of({layer(0, "w", {2}), layer(1, "w", {3})}), ElementsAre("a.layers.0.w", "a.layers.1.w"));  // sizes
  EXPECT_THAT(keys_of({layer(0, "w", {2}), layer(1, "w", {2}), layer(1, "b", {2})}),
              ElementsAre("a.layers.0.w", "a.layers.1.w", "a.layers.1.b"));  // one has more
  EXPECT_THAT(keys_of({layer(0, "w", {2}), layer(2, "w", {2})}), ElementsAre("a.layers.0.w", "a.layers.2.w"));  // a gap
  EXPECT_THAT(keys_of({layer(0, "w", {2}), {"model.a.layers.w", at::kFloat, {2}}}),
              ElementsAre("a.layers.0.w", "a.layers.w"));  // the key is taken
  const auto stack = torch_dist_places({layer(1, "w", {2}), layer(0, "w", {2})});
  EXPECT_EQ(stack[0].layer, 1);
  EXPECT_EQ(stack[0].layers, 2);
}

TEST(TorchDist, AWeightWithFewerRowsThanRanksIsRefusedBeforeAnythingIsWritten) {
  TemporaryFolder folder;
  testing::run_ranks(4, [&](const ProcessGroupPtr& group) {
    const auto mesh = mesh_of(group);
    const auto refused = message_of([&] {
      save_checkpoint(folder.path(), 1, {{"model.few", shard_of(counting({3, 5}, 0), mesh)}}, {}, group,
                      {.format = CheckpointFormat::kTorchDist});
    });
    for (const char* part : {"model.few", "[3, 5]", "4 ranks", "--ckpt-format torch_dcp"})
      TORCH_CHECK(refused.find(part) != std::string::npos, refused);
    const auto warning = check_torch_dist_shards(
        {{"model.a", shard_of(counting({6}, 0), mesh)}, {"model.b", shard_of(counting({8}, 0), mesh)}});
    TORCH_CHECK(warning.find("1 tensors are cut unevenly (model.a [6] over 4 ranks)") == 0, warning);
    TORCH_CHECK(check_torch_dist_shards({{"model.b", shard_of(counting({8}, 0), mesh)}}).empty());
  });
  EXPECT_FALSE(latest_step(folder.path()));
}

TEST(TorchDist, StepsThatDifferAreTensors) {
  TemporaryFolder folder;
  const auto steps = [](float a, float b) {
    return ShardedTensors{{"optimizer.state.layers.0.w.step", ShardedTensor::replicated(at::full({}, a, at::kFloat))},
                          {"optimizer.state.layers.1.w.step", ShardedTensor::replicated(at::full({}, b, at::kFloat))}};
  };
  save_checkpoint(folder.path(), 1, steps(4, 6), {}, nullptr, {.format = CheckpointFormat::kTorchDist});
  const auto loaded = steps(0, 0);
  load_checkpoint(folder.path(), loaded, nullptr);
  EXPECT_EQ(loaded[0].second.local.item<float>(), 4);
  EXPECT_EQ(loaded[1].second.local.item<float>(), 6);
}

TEST(TorchDist, ATensorAtATimeWritesEitherFormat) {
  for (const auto format : {CheckpointFormat::kTorchDist, CheckpointFormat::kTorchDcp}) {
    TemporaryFolder folder;
    const std::vector<TensorInfo> infos{{"model.layers.0.w", at::kHalf, {2, 3}},
                                        {"model.layers.1.w", at::kHalf, {2, 3}},
                                        {"optimizer.state.layers.0.w.step", at::kFloat, {}}};
    FolderWriter writer(folder.path(), format, infos);
    EXPECT_THAT(message_of([&] {
                  writer.write("model.layers.0.w", counting({2, 4}, 0, at::kHalf));
                }),
                HasSubstr("announced as Half[2, 3]"));
    writer.write("model.layers.1.w", counting({2, 3}, 6, at::kHalf));
    writer.next_file();
    writer.write("model.layers.0.w", counting({2, 3}, 0, at::kHalf));
    EXPECT_THAT(message_of([&] { writer.finish({}); }), HasSubstr("written"));
    writer.write("optimizer.state.layers.0.w.step", at::full({}, 9, at::kFloat));
    writer.finish(values_of(0));
    const auto reader = open_step(folder.path());
    EXPECT_EQ(reader->format(), format_name(format));
    const auto read = reader->read_tensor("model.layers.1.w");
    EXPECT_TRUE(at::equal(read, counting({2, 3}, 6, at::kHalf).cpu()));
    EXPECT_EQ(reader->read_value("iteration"), Value(3));
  }
}

TEST(TorchDist, FoldersOfOtherFormatsSayWhatToDo) {
  TemporaryFolder folder;
  save(folder.path(), 1);
  const auto step = latest_step(folder.path());
  EXPECT_EQ(detect_format(step->folder), CheckpointFormat::kTorchDist);
  EXPECT_THAT(message_of([&] {
                load_checkpoint(*step, {}, nullptr,
                                {.strict = false, .wanted = {}, .format = CheckpointFormat::kTorchDcp});
              }),
              HasSubstr("is a torch_dist checkpoint, not torch_dcp; give --ckpt-format torch_dist, or "
                        "--auto-detect-ckpt-format"));
  const auto say = [&](const std::string& text) {
    std::ofstream(step->folder + "/metadata.json") << text;
    return message_of([&] { detect_format(step->folder); });
  };
  EXPECT_THAT(say(R"({"sharded_backend": "zarr"})"), HasSubstr("of Megatron's format zarr"));
  EXPECT_THAT(say("[1]"), HasSubstr("metadata.json is no JSON object"));
  EXPECT_THAT(say(R"({"sharded_backend": "zarr", "sharded_backend": "torch_dist"})"),
              HasSubstr("metadata.json has the key \"sharded_backend\" twice"));
  std::filesystem::remove(step->folder + "/metadata.json");
  EXPECT_THAT(message_of([&] { detect_format(step->folder); }), HasSubstr("the save was cut short"));
  std::filesystem::create_directory(folder.path() + "/mp_rank_00");
  EXPECT_THAT(message_of([&] { detect_format(folder.path()); }), HasSubstr("legacy format torch"));
}

}  // namespace
}  // namespace megashard
