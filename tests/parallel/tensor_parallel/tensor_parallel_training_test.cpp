// Training with FSDP over tensor-parallel layers, compared to the same model on one rank. Names are those of PyTorch's
// tests.

#include <ATen/ops/arange.h>
#include <ATen/ops/zeros_like.h>
#include <torch/nn/utils/clip_grad.h>

#include <limits>

#include "parallel/fsdp/grad_norm.h"
#include "parallel/tensor_parallel/tensor_parallel_regions.h"
#include "parallel/tensor_parallel_layout.h"
#include "tests/support/recording_group.h"
#include "tests/support/run_ranks.h"
#include "tests/support/simulated_device.h"
#include "tests/support/tensor_parallel_model.h"

namespace megashard::testing {
namespace {

using Names = std::vector<std::string>;

struct MeshCase {
  std::vector<int> shape;
  Names names;
  Names fsdp;  // the dimensions for fully_shard
};

const MeshCase kFsdpTp{{2, 2}, {"dp", "tp"}, {"dp"}};

FullyShardOptions resharded(ReshardAfterForward when) {
  FullyShardOptions options;
  options.reshard_after_forward = when;
  return options;
}

/// The same model twice: unsharded, with gradients averaged over the data-parallel ranks explicitly, and sharded over
/// `mesh`.
template <class Unit>
struct ParallelTwins {
  ParallelTwins(DeviceMeshPtr given, const Names& fsdp, const FullyShardOptions& options = FullyShardOptions())
      : mesh(std::move(given)), plain(8, 12, mesh_of_one()), model(8, 12, mesh->submesh({"tp"})) {
    plain.to(at::kDouble);  // in fp64 the order of additions hardly matters, so a wrong term shows
    model.to(at::kDouble);
    fill_whole(plain);
    fill_whole(model);
    FullyShardOptions with_mesh = options;
    with_mesh.mesh = mesh->submesh(fsdp);
    shard_units(model, with_mesh);
    for (const auto& name : fsdp) {
      data_rank = data_rank * mesh->group(name)->size() + mesh->group(name)->rank();
      groups.push_back(mesh->group(name));
    }
  }

  /// One forward and backward of both on this data rank's batch; losses and gradients must agree.
  void step_and_compare(int step) {
    const at::Tensor x = fixed({2, 3, 8}, 1000 + 10 * static_cast<uint64_t>(step) + data_rank).to(at::kDouble);
    const at::Tensor expected = plain.forward(x).pow(2).sum();
    const at::Tensor loss = model.forward(x).pow(2).sum();
    expect_near(loss.detach(), expected.detach(), c10::str("loss of step ", step));
    plain.zero_grad();
    expected.backward();
    for (auto& parameter : plain.parameters()) {
      for (const auto& group : groups) group->all_reduce(parameter.mutable_grad(), ReduceOp::kAvg).wait();
    }
    model.zero_grad();
    loss.backward();
    const auto reference = plain.named_parameters();
    for (const auto& item : model.named_parameters()) {
      const at::Tensor gradient = item.value().grad();
      ASSERT_TRUE(gradient.defined()) << item.key();
      expect_near(gradient.detach().clone(), part_like(reference[item.key()].grad(), item.value()),
                  c10::str("gradient of ", item.key(), ", step ", step));
    }
  }
  void descend() {
    for (auto& parameter : plain.parameters()) parameter.data().sub_(parameter.grad(), 0.001);
    for (auto& parameter : model.parameters()) reshard_and_view(parameter).local.sub_(parameter.grad(), 0.001);
  }

  DeviceMeshPtr mesh;
  ParallelStack<Unit> plain, model;
  std::vector<ProcessGroupPtr> groups;
  uint64_t data_rank = 0;
};

template <class Unit>
void train_and_compare(const MeshCase& on, const FullyShardOptions& options = FullyShardOptions()) {
  int ranks = 1;
  for (const int extent : on.shape) ranks *= extent;
  run_ranks(ranks, [&](const ProcessGroupPtr& world) {
    const auto mesh = std::make_shared<DeviceMesh>(world, on.shape, on.names);
    ParallelTwins<Unit> twins(mesh, on.fsdp, options);
    for (int step = 0; step < 3; ++step) {
      twins.step_and_compare(step);
      twins.descend();
    }
  });
}

TEST(FullyShardTraining, test_2d_mlp_with_nd_mesh) {
  train_and_compare<ParallelMlp>({{2, 2, 2}, {"pp", "dp", "tp"}, {"dp"}});
  train_and_compare<ParallelMlp>(kFsdpTp, resharded(true));
  train_and_compare<ParallelMlp>(kFsdpTp, resharded(false));
}

TEST(FullyShardTraining, test_3d_mlp_with_nd_mesh) {
  train_and_compare<ParallelMlp>({{2, 2, 2}, {"replicate", "shard", "tp"}, {"replicate", "shard"}});
}

/// A tensor-parallel MLP, then four whole experts distributed over the same ranks (expert parallelism): token t belongs
/// to expert t % 4.
struct ExpertBlockImpl : torch::nn::Module {
  static constexpr int64_t kExperts = 4;

  ExpertBlockImpl(int64_t width, int64_t hidden, const DeviceMeshPtr& tp)
      : group(tp->group(0)),
        mlp(register_module("mlp", std::make_shared<ParallelMlpImpl>(width, hidden, tp))),
        experts(register_parameter("experts", at::zeros({kExperts / group->size(), width, width}))) {
    set_tensor_parallel(experts, tp, Placement::shard(0));
  }
  at::Tensor forward(at::Tensor x) {
    const at::Tensor y = mlp->forward(x);
    const at::Tensor tokens = copy_to_tensor_parallel_region(y.flatten(0, 1), group);
    at::Tensor out = at::zeros_like(tokens);
    const int64_t mine = experts.size(0);
    for (int64_t i = 0; i < mine; ++i) {
      const at::Tensor rows = at::arange(group->rank() * mine + i, tokens.size(0), kExperts, at::kLong);
      out = out.index_add(0, rows, at::linear(tokens.index_select(0, rows), experts.select(0, i)));
    }
    return y + reduce_from_tensor_parallel_region(out, group).view_as(y);
  }

  ProcessGroupPtr group;
  std::shared_ptr<ParallelMlpImpl> mlp;
  at::Tensor experts;
};
using ExpertBlock = Hooked<ExpertBlockImpl>;

TEST(FullyShardTraining, test_shard_placement_fn_tp_ep) {
  for (const bool reshard : {true, false}) {
    run_ranks(4, [&](const ProcessGroupPtr& world) {
      const std::vector<int> shape{2, 2};
      const auto mesh = std::make_shared<DeviceMesh>(world, shape, Names{"dp", "tp"});
      const auto experts = std::make_shared<DeviceMesh>(world, shape, Names{"efsdp", "ep"})->submesh({"efsdp"});
      auto options = resharded(reshard);
      options.shard_placement_fn = [&](const at::Tensor& parameter) {
        return parameter.dim() == 3 ? ShardPlacement{.dim = 1, .mesh = experts} : ShardPlacement{};
      };
      ParallelTwins<ExpertBlock> twins(mesh, {"dp"}, options);
      for (const auto& unit : twins.model.units)
        EXPECT_EQ(reshard_and_view(unit->experts).mesh->dim_names(), (Names{"efsdp", "tp"}));
      for (int step = 0; step < 3; ++step) {
        twins.step_and_compare(step);
        twins.descend();
      }
    });
  }
}

TEST(FullyShardComposability, test_train_parity_2d_mlp) {
  train_and_compare<ParallelMlp>({{1, 4}, {"dp", "tp"}, {"dp"}});
  train_and_compare<ParallelMlp>({{4, 1}, {"dp", "tp"}, {"dp"}});
}

TEST(FullyShardComposability, test_train_parity_2d_transformer) {
  train_and_compare<ParallelBlock>(kFsdpTp, resharded(true));
  auto last_dim = resharded(true);
  last_dim.shard_placement_fn = [](const at::Tensor&) { return ShardPlacement{.dim = -1}; };
  train_and_compare<ParallelBlock>(kFsdpTp, last_dim);
}

TEST(FullyShardComposability, test_tp_with_fsdp_offloading) {
  MEGASHARD_SIM_ONLY();
  auto options = resharded(true);
  options.cpu_offload = CpuOffloadPolicy{.pin_memory = false};
  train_and_compare<ParallelMlp>(kFsdpTp, options);
}

TEST(FullyShardDtensor, test_dtensor_train_parity) {
  // FSDP, DDP (shards of one rank, replicated) and HSDP over dimensions of one mesh.
  const Names names{"replicate", "shard", "tp"};
  train_and_compare<ParallelMlp>({{1, 2, 2}, names, {"shard"}});
  train_and_compare<ParallelMlp>({{2, 1, 2}, names, {"replicate", "shard"}});
  train_and_compare<ParallelMlp>({{2, 2, 1}, names, {"replicate", "shard"}});
}

// An error in PyTorch; here reshard_after_forward takes any divisor of FSDP's ranks, independent of tensor parallelism.
TEST(FullyShardDtensor, test_validation_reshard_after_forward_int_spmd) {
  train_and_compare<ParallelMlp>({{4, 2}, {"dp", "tp"}, {"dp"}}, resharded(ReshardAfterForward::to(2)));
}

// An error in PyTorch; here FSDP simply shards a plain parameter next to tensor-parallel ones.
TEST(FullyShardDtensor, test_validation_spmd_mesh_non_dtensor_params) {
  run_ranks(4, [](const ProcessGroupPtr& world) {
    ParallelTwins<ParallelMlp> twins(std::make_shared<DeviceMesh>(world, kFsdpTp.shape, kFsdpTp.names), kFsdpTp.fsdp);
    const auto& norm = twins.model.units[0]->norm->weight;
    EXPECT_EQ(reshard_and_view(norm).mesh->describe(), "(dp=2)");
    twins.step_and_compare(0);
  });
}

TEST(FullyShardDtensor, test_reduce_scatter_unused_dtensor_param) {
  run_ranks(4, [](const ProcessGroupPtr& world) {
    const auto mesh = std::make_shared<DeviceMesh>(world, kFsdpTp.shape, kFsdpTp.names);
    const auto tp = mesh->submesh({"tp"});
    const auto build = [&] {
      return ColumnParallelLinear(
          ColumnParallelLinearOptions{.in_features = 6, .out_features = 8, .mesh = tp, .gather_output = true});
    };
    auto used = build(), unused = build();
    bool uses_both = true;
    Formula unit({{1}}, [&](const Weights& w, at::Tensor x) {
      const at::Tensor y = used(x) * w[0];
      return uses_both ? y + unused(x) : y;
    });
    unit.register_module("used", used.ptr());
    unit.register_module("unused", unused.ptr());
    fully_shard(unit, {.mesh = mesh->submesh({"dp"})});
    const at::Tensor x = fixed({2, 6}, 1);
    unit.forward(x).sum().backward();
    const at::Tensor on_all = unused->weight.grad().detach().clone();
    unit.zero_grad();
    uses_both = mesh->coordinate(0) == 0;  // the second data-parallel rank skips it
    unit.forward(x).sum().backward();
    EXPECT_TRUE(at::equal(unused->weight.grad().detach().clone(), on_all * 0.5));
    EXPECT_TRUE(used->weight.grad().defined());
  });
}

TEST(FullyShardComposability, ReplicatedParametersHaveEqualGradientsOnAllTensorParallelRanks) {
  run_ranks(4, [](const ProcessGroupPtr& world) {
    const auto mesh = std::make_shared<DeviceMesh>(world, kFsdpTp.shape, kFsdpTp.names);
    ParallelTwins<ParallelBlock> twins(mesh, kFsdpTp.fsdp);
    twins.step_and_compare(0);
    int replicated = 0;
    for (const auto& item : twins.model.named_parameters()) {
      const auto view = reshard_and_view(item.value());
      if (view.mesh->ndim() == 2 && view.placements[1] != Placement::replicate()) continue;
      ++replicated;
      const at::Tensor mine = item.value().grad().detach().clone().reshape({-1});
      const at::Tensor all = at::empty({2 * mine.numel()}, mine.options());
      mesh->group("tp")->all_gather_into(all, mine).wait();
      EXPECT_TRUE(at::equal(all.narrow(0, 0, mine.numel()), all.narrow(0, mine.numel(), mine.numel()))) << item.key();
    }
    EXPECT_EQ(replicated, 2 * 5 + 2);  // two norms and a bias per block, and the head
  });
}

TEST(FullyShardClipGradNorm, test_clip_grad_norm_2d) {
  run_ranks(4, [](const ProcessGroupPtr& world) {
    std::vector<CollectiveCall> calls;
    const auto mesh = recording_mesh(world, kFsdpTp.shape, kFsdpTp.names, calls);
    ParallelTwins<ParallelMlp> twins(mesh, kFsdpTp.fsdp);
    for (const double norm_type : {1.0, 2.0, 3.0, std::numeric_limits<double>::infinity()}) {
      twins.step_and_compare(0);
      const auto plain_parameters = twins.plain.parameters();
      const double expected = torch::nn::utils::clip_grad_norm_(plain_parameters, 0.5, norm_type);
      ASSERT_GT(expected, 0.5);
      calls.clear();
      const double norm = clip_grad_norm_(twins.model.parameters(), 0.5, norm_type).item<double>();
      EXPECT_NEAR(norm, expected, 1e-5 * expected) << norm_type;
      EXPECT_EQ(calls.size(), 2U) << "one all-reduce a mesh dimension";
      const auto reference = twins.plain.named_parameters();
      for (const auto& item : twins.model.named_parameters()) {
        // Compared in fp32: gradients are scaled by a factor of that precision.
        const at::Tensor clipped = item.value().grad().detach().to(at::kFloat);
        expect_near(clipped, part_like(reference[item.key()].grad(), item.value()).to(at::kFloat), item.key());
      }
      EXPECT_NEAR(total_grad_norm(twins.model.parameters(), norm_type).item<double>(), 0.5, 1e-4);
    }
  });
}

TEST(FullyShardComposability, test_fully_shard_tp_2d_set_full_state_dict) {
  run_ranks(4, [](const ProcessGroupPtr& world) {
    const auto mesh = std::make_shared<DeviceMesh>(world, kFsdpTp.shape, kFsdpTp.names);
    ParallelTwins<ParallelMlp> twins(mesh, kFsdpTp.fsdp);
    uint64_t seed = 70;
    for (auto& item : twins.plain.named_parameters()) {
      const at::Tensor whole = fixed(item.value().sizes(), seed++) * 0.5;
      item.value().detach().copy_(whole);
      assign_full_parameter(twins.model.named_parameters()[item.key()], whole);
    }
    twins.step_and_compare(0);
  });
}

}  // namespace
}  // namespace megashard::testing
