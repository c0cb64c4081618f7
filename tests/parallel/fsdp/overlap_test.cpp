// Overlap of communication and computation: test_fully_shard_overlap.py. One GPU is enough: the ranks belong to a fake
// group, and every collective takes as long as a kernel that does nothing useful. Skipped without a GPU; tests/gpu runs
// it.

#include <ATen/ops/cumsum.h>
#include <ATen/ops/zeros.h>

#include <chrono>

#include "parallel/collectives/fake_process_group.h"
#include "parallel/device/cuda_module.h"
#include "parallel/fsdp/detail/fsdp_context.h"
#include "tests/support/formula.h"
#include "tests/support/simulated_device.h"

namespace megashard::testing {
namespace {

double milliseconds_of(const std::function<void()>& enqueue) {
  const CommStreams streams(c10::Device(c10::kCUDA, 0));
  StreamEvent::record(streams.current()).synchronize();
  const auto begin = std::chrono::steady_clock::now();
  enqueue();
  StreamEvent::record(streams.current()).synchronize();
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - begin).count();
}

/// A scan down two long columns: keeps one block of the GPU busy and leaves the rest free. Long enough that host time
/// does not matter.
class Pause {
 public:
  Pause() {
    for (int64_t rows = 1 << 14; rows <= 1 << 24; rows *= 2) {
      columns_ = at::zeros({rows, 2}, at::Device(at::kCUDA, 0));
      enqueue();
      if (milliseconds_of([this] { enqueue(); }) > 3) break;
    }
  }
  void enqueue() const { at::cumsum(columns_, 0); }  ///< on the current stream

 private:
  at::Tensor columns_;
};

class SlowAllGather final : public AllGather {
 public:
  explicit SlowAllGather(std::shared_ptr<Pause> pause) : pause_(std::move(pause)) {}
  at::Tensor allocate(int64_t numel, at::ScalarType dtype, c10::Device device) override {
    return at::empty({numel}, at::TensorOptions(dtype).device(device));
  }
  Work run(at::Tensor output, at::Tensor input, ProcessGroup& group) override {
    pause_->enqueue();
    return group.all_gather_into(output, input);
  }

 private:
  std::shared_ptr<Pause> pause_;
};

class SlowReduceScatter final : public ReduceScatter {
 public:
  explicit SlowReduceScatter(std::shared_ptr<Pause> pause) : pause_(std::move(pause)) {}
  at::Tensor allocate(int64_t numel, at::ScalarType dtype, c10::Device device) override {
    return at::empty({numel}, at::TensorOptions(dtype).device(device));
  }
  Work run(at::Tensor output, at::Tensor input, ReduceOp op, ProcessGroup& group) override {
    pause_->enqueue();
    return group.reduce_scatter_into(output, input, op);
  }

 private:
  std::shared_ptr<Pause> pause_;
};

DeviceMeshPtr fake_gpus() { return flat_mesh(make_fake_group({.world_size = 2, .device_type = at::kCUDA})); }

/// Units whose forward and backward each take one pause, as does every all-gather and reduction of a mesh; the units'
/// parameters are on one mesh or two.
struct PausingUnits {
  static constexpr int kUnits = 8;

  explicit PausingUnits(bool two_meshes = false) : root(Sizes{}, Body()) {
    FullyShardOptions options{.mesh = fake_gpus(), .reshard_after_forward = true};
    if (two_meshes) {
      options.shard_placement_fn = [other = fake_gpus()](const at::Tensor& parameter) {
        return ShardPlacement{.mesh = parameter.dim() == 1 ? other : nullptr};
      };
    }
    for (int i = 0; i < kUnits; ++i) {
      units.push_back(std::make_shared<Formula>(
          Sizes{{8, 8}, {8}},
          [this](const Weights& w, at::Tensor x) {
            pause->enqueue();
            const at::Tensor y = at::linear(x, w[0], w[1]);
            y.register_hook([this](const at::Tensor& gradient) {
              pause->enqueue();
              return gradient;
            });
            return y;
          },
          at::kFloat, static_cast<uint64_t>(i + 1)));
      root.register_module("unit" + std::to_string(i), units.back());
      fully_shard(*units.back(), options);
      set_custom_all_gather(*units.back(), std::make_shared<SlowAllGather>(pause));
      set_custom_reduce_scatter(*units.back(), std::make_shared<SlowReduceScatter>(pause));
    }
    root.body = [this](const Weights&, at::Tensor x) {
      for (auto& unit : units) x = unit->forward(x);
      return x;
    };
    fully_shard(root, options);
  }
  PausingUnits(const PausingUnits&) = delete;  // bodies refer to this

  at::Tensor forward() { return root.forward(x).sum(); }

  std::shared_ptr<Pause> pause = std::make_shared<Pause>();
  at::Tensor x = fixed({4, 8}, 1).to(at::Device(at::kCUDA, 0));
  Formula root;
  std::vector<std::shared_ptr<Formula>> units;
};

class FullyShardOverlap : public ::testing::TestWithParam<int> {
 protected:
  void SetUp() override {
    MEGASHARD_NOT_ON_SIM("times mean nothing there");
#ifdef MEGASHARD_TEST_CUDA
    if (load_cuda_module().device_count() > 0) return;
#endif
    GTEST_SKIP() << "no GPU on this machine";
  }
};
INSTANTIATE_TEST_SUITE_P(Cuda, FullyShardOverlap, ::testing::Values(0));

/// Times of forward and backward as shares of the sequential time: computation, and for each of `meshes` an all-gather,
/// in backward also a reduction.
void expect_shares(PausingUnits& model, int meshes, double forward_share, double backward_share) {
  for (int step = 0; step < 2; ++step) model.forward().backward();  // allocates everything
  const double pause = milliseconds_of([&] {
                         for (int i = 0; i < 8; ++i) model.pause->enqueue();
                       }) /
                       8;
  ASSERT_GT(pause, 1) << "too short beside the host's own time";
  at::Tensor loss;
  const double forward = milliseconds_of([&] { loss = model.forward(); });
  const double backward = milliseconds_of([&] { loss.backward(); });
  EXPECT_LT(forward, forward_share * (1 + meshes) * PausingUnits::kUnits * pause);
  EXPECT_LT(backward, backward_share * (1 + 2 * meshes) * PausingUnits::kUnits * pause);
}

/// With overlap: the computation's time plus the first all-gather and the last reduction, which cannot be hidden.
TEST_P(FullyShardOverlap, test_fully_shard_training_overlap) {
  PausingUnits model;
  expect_shares(model, 1, 0.75, 0.6);
}

/// The time of one kind of communication, which here is twice the computation.
TEST_P(FullyShardOverlap, test_fully_shard_per_param_mesh_training_overlap) {
  PausingUnits model(/*two_meshes=*/true);
  model.x.requires_grad_();
  expect_shares(model, 2, 0.8, 0.6);
}

/// Inputs without gradients: the first unit's backward ends with the whole backward.
TEST_P(FullyShardOverlap, test_fully_shard_per_param_mesh_no_grad_input_overlap) {
  PausingUnits model(/*two_meshes=*/true);
  ASSERT_FALSE(model.x.requires_grad());
  expect_shares(model, 2, 0.8, 0.6);
}

/// Work after the optimizer step that no all-gather needs: with an event recorded before it, the first all-gather does
/// not wait for it.
TEST_P(FullyShardOverlap, test_fully_shard_post_optim_event_overlap) {
  PausingUnits model;
  for (int step = 0; step < 2; ++step) model.forward().backward();
  const auto step_with = [&](bool event) {
    return milliseconds_of([&] {
      const CommStreams streams(c10::Device(c10::kCUDA, 0));
      if (event) set_post_optim_event(model.root, StreamEvent::record(streams.current()));
      for (int i = 0; i < 4; ++i) model.pause->enqueue();
      model.forward();
    });
  };
  const double pause = milliseconds_of([&] { model.pause->enqueue(); });
  const double waits = step_with(false);
  EXPECT_LT(step_with(true), waits - 0.5 * pause);
}

}  // namespace
}  // namespace megashard::testing
