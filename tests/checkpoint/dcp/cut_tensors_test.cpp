// Checkpoints of weights that are sharded over several leading dimensions together. Saved shards are boxes of the whole
// tensor, so any other sharding can load them (test_fully_shard_block_shard.py).
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "checkpoint/checkpoint.h"
#include "checkpoint/dcp/dcp_writer.h"
#include "checkpoint/steps/find_step.h"
#include "parallel/sharded_tensor.h"
#include "parallel/tensor_parallel_layout.h"
#include "tests/checkpoint/files/temporary_folder.h"
#include "tests/support/parity.h"
#include "tests/support/run_ranks.h"
#include "tests/support/tensor_parallel_model.h"

namespace megashard::testing {
namespace {

const Sizes kExpertSizes{{2, 8, 3}, {5}};

/// This rank's shards of weights that depend on the seed, sharded over the first `leading` dimensions.
ShardedTensors experts_of(Formula& unit, const ProcessGroupPtr& world, int64_t leading) {
  FullyShardOptions options{.mesh = flat_mesh(world)};
  options.shard_placement_fn = [leading](const at::Tensor& parameter) {
    return ShardPlacement{.leading_dims = std::min(leading, std::max<int64_t>(parameter.dim() - 1, 1))};
  };
  fully_shard(unit, options);
  return {{"model.w0", reshard_and_view(unit.w[0])}, {"model.w1", reshard_and_view(unit.w[1])}};
}

TEST(FullyShardBlockShard, test_dcp_round_trip) {
  struct Layout {
    int ranks;
    int64_t leading;
  };
  const FormulaImpl expected(kExpertSizes, linear);
  for (const Layout from : {Layout{4, 2}, Layout{2, 1}}) {
    TemporaryFolder folder;
    run_ranks(from.ranks, [&](const ProcessGroupPtr& world) {
      Formula unit(kExpertSizes, linear);
      save_checkpoint(folder.path(), 1, experts_of(unit, world, from.leading), Dict(), world);
    });
    for (const Layout to : {Layout{4, 2}, Layout{8, 2}, Layout{2, 2}, Layout{3, 1}}) {
      run_ranks(to.ranks, [&](const ProcessGroupPtr& world) {
        Formula unit(kExpertSizes, linear, at::kFloat, /*seed=*/50);
        load_checkpoint(*find_step(folder.path(), world), experts_of(unit, world, to.leading), world);
        expect_weights_of(expected, unit);
      });
    }
  }
}

TEST(FullyShardBlockShardExperts, test_checkpoint) {
  TemporaryFolder folder;
  const FormulaImpl expected({{4, 6, 3}}, linear);
  run_ranks(8, [&](const ProcessGroupPtr& world) {  // two experts for each of two ranks, sharded over four
    const auto mesh =
        std::make_shared<DeviceMesh>(world, std::vector<int>{4, 2}, std::vector<std::string>{"fsdp", "ep"});
    const auto ep = mesh->submesh({"ep"});
    Formula unit({{2, 6, 3}}, linear);
    unit.w[0].set_data(expected.w[0].detach().narrow(0, 2 * ep->group(0)->rank(), 2).clone());
    set_tensor_parallel(unit.w[0], ep, Placement::shard(0));
    FullyShardOptions options{.mesh = mesh->submesh({"fsdp"})};
    options.shard_placement_fn = [](const at::Tensor&) { return ShardPlacement{.leading_dims = 2}; };
    fully_shard(unit, options);
    save_checkpoint(folder.path(), 1, {{"model.w0", reshard_and_view(unit.w[0])}}, Dict(), world);
  });
  run_ranks(1, [&](const ProcessGroupPtr& world) {
    Formula unit({{4, 6, 3}}, linear, at::kFloat, /*seed=*/50);
    load_checkpoint(*find_step(folder.path(), world), {{"model.w0", ShardedTensor::replicated(unit.w[0].detach())}},
                    world);
    EXPECT_TRUE(at::equal(unit.w[0], expected.w[0]));
  });
}

struct Shape {
  std::vector<int> mesh;  // [shard, tp], or [replicate, shard, tp]
  int ranks() const {
    int product = 1;
    for (const int extent : mesh) product *= extent;
    return product;
  }
};

using Model = ParallelStack<ParallelMlp>;

/// A model over `shape`. Four FSDP ranks of two tensor-parallel ranks share 10 hidden features as 2, 2, 1 and 0.
std::unique_ptr<Model> model_over(const ProcessGroupPtr& world, const Shape& shape) {
  std::vector<std::string> names{"shard", "tp"}, fsdp{"shard"};
  if (shape.mesh.size() == 3) {
    names.insert(names.begin(), "replicate");
    fsdp.insert(fsdp.begin(), "replicate");
  }
  const auto mesh = std::make_shared<DeviceMesh>(world, shape.mesh, names);
  auto model = std::make_unique<Model>(6, 10, mesh->submesh({"tp"}));
  shard_units(*model, {.mesh = mesh->submesh(fsdp)});
  return model;
}

ShardedTensors tensors_of(Model& model) {
  ShardedTensors tensors;
  for (const auto& item : model.named_parameters())
    tensors.emplace_back("model." + item.key(), reshard_and_view(item.value()));
  return tensors;
}

void expect_filled(Model& model, uint64_t seed, const std::string& what) {
  for (const auto& item : model.named_parameters()) {
    const at::Tensor whole = fixed(global_sizes(item.value()), seed++) * 0.5;
    EXPECT_TRUE(at::equal(reshard_and_view(item.value()).local, part_like(whole, item.value())))
        << item.key() << " " << what;
  }
}

void save_and_load(const Shape& saved, const std::vector<Shape>& loaded) {
  TemporaryFolder folder;
  run_ranks(saved.ranks(), [&](const ProcessGroupPtr& world) {
    const auto model = model_over(world, saved);
    fill_whole(*model, 11);
    save_checkpoint(folder.path(), 1, tensors_of(*model), {}, world);
  });
  for (const Shape& shape : loaded) {
    run_ranks(shape.ranks(), [&](const ProcessGroupPtr& world) {
      const auto model = model_over(world, shape);
      load_checkpoint(folder.path(), tensors_of(*model), world);
      expect_filled(*model, 11, c10::str("at ", at::ArrayRef<int>(shape.mesh)));
    });
  }
}

TEST(FullyShardStateDict, test_2d_state_dict_correctness) {
  run_ranks(4, [](const ProcessGroupPtr& world) {
    const auto model = model_over(world, {{2, 2}});
    fill_whole(*model, 11);
    Model plain(6, 10, mesh_of_one());
    fill_whole(plain, 11);
    const auto expected = plain.named_parameters();
    const auto tensors = tensors_of(*model);
    ASSERT_EQ(tensors.size(), expected.size());
    for (const auto& [key, tensor] : tensors) {
      const auto& whole = expected[key.substr(6)];
      EXPECT_EQ(at::IntArrayRef(tensor.global_sizes), whole.sizes()) << key;
      EXPECT_TRUE(at::equal(assembled(tensor, *world), whole)) << key;
    }
  });
}

TEST(FullyShardStateDict, test_dp_tp_state_dict_save_load) {
  save_and_load({{2, 2}}, {{{1, 2}}, {{4, 1}}, {{1, 1}}});
  save_and_load({{4, 2}}, {{{2, 2}}});  // with ranks that have no rows
  save_and_load({{3, 1}}, {{{4, 2}}});
}

TEST(FullyShardStateDict, test_hsdp_tp_state_dict_save_load) {
  save_and_load({{2, 2, 2}}, {{{1, 2}}, {{2, 1, 1}}});
  save_and_load({{2, 1}}, {{{2, 2, 2}}});
}

}  // namespace

}  // namespace megashard::testing

namespace megashard {
namespace {

using ::testing::ElementsAre;

ShardedTensors statistics(double value) {
  ShardedTensors tensors;
  for (const char* name : {"model.first.mean", "model.first.variance", "model.second.mean", "model.second.variance"})
    tensors.emplace_back(name, ShardedTensor::replicated(at::full({4}, value)));
  tensors.emplace_back("model.count", ShardedTensor::replicated(at::zeros({})));
  return tensors;
}

class DifferingCopies : public ::testing::TestWithParam<CheckpointFormat> {};

TEST_P(DifferingCopies, AreThoseOfTheFirstRankAndToldOnce) {
  TemporaryFolder folder;
  std::vector<std::string> told;
  testing::run_ranks(3, [&](const ProcessGroupPtr& group) {
    SaveOptions options{.format = GetParam(), .plans = std::make_shared<SavePlanCache>()};
    options.notice = [&](const std::string& line) {
      TORCH_CHECK(group->rank() == 0);
      told.push_back(line);
    };
    for (const int64_t step : {1, 2})
      save_checkpoint(folder.path(), step, statistics(1.0 + group->rank()), {}, group, options);
    const auto loaded = statistics(0);
    load_checkpoint(*find_step(folder.path(), group), loaded, group);
    for (size_t i = 0; i < 4; ++i) TORCH_CHECK(at::equal(loaded[i].second.local, at::full({4}, 1.0)), loaded[i].first);
  });
  EXPECT_THAT(told, ElementsAre("these differ between the ranks, and no sharding keeps them equal: model.first.mean, "
                                "model.first.variance, model.second.mean, model.second.variance; a checkpoint has "
                                "those of the first rank, which every rank gets when it is loaded"));
}

INSTANTIATE_TEST_SUITE_P(Formats, DifferingCopies,
                         ::testing::Values(CheckpointFormat::kTorchDcp, CheckpointFormat::kTorchDist));

}  // namespace
}  // namespace megashard
