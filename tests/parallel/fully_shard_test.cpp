#include "parallel/fully_shard.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/randn.h>
#include <gtest/gtest.h>

#include "tests/support/run_ranks.h"
#include "tests/support/small_model.h"

namespace megashard::testing {
namespace {

at::Tensor fixed(at::IntArrayRef sizes, uint64_t seed) {
  auto generator = at::detail::createCPUGenerator(seed);
  return at::randn(sizes, generator);
}

void fill(torch::nn::Module& model, uint64_t seed) {
  for (auto& item : model.named_parameters())
    item.value().set_data(fixed(item.value().sizes(), seed++) * 0.3);
}

at::Tensor my_rows(const at::Tensor& whole, const ShardedTensor& view) {
  return whole.narrow(0, std::min(view.offsets[0], whole.size(0)), view.local.size(0));
}

/// Gradients of the plain model on this rank's data, averaged over all ranks in rank order.
void average_gradients(torch::nn::Module& model, ProcessGroup& group) {
  for (auto& parameter : model.parameters()) {
    group.all_reduce(parameter.mutable_grad(), ReduceOp::kAvg).wait();
  }
}

struct Case {
  int world;
  ReshardAfterForward reshard;
  const char* name;
};

class FullyShardTest : public ::testing::TestWithParam<Case> {};

TEST_P(FullyShardTest, LossAndGradientsAreBitEqualToThePlainModel) {
  run_ranks(GetParam().world, [](const ProcessGroupPtr& world) {
    StackImpl plain(3, 5, 7);
    fill(plain, 1);
    Stack model(3, 5, 7);
    copy_parameters(plain, model);
    const auto mesh = std::make_shared<DeviceMesh>(world, std::vector<int>{world->size()});
    shard_stack(model, {.mesh = mesh, .reshard_after_forward = GetParam().reshard});
    for (int step = 0; step < 3; ++step) {
      const auto x = fixed({4, 5}, 100 + 10 * step + world->rank());
      const auto expected = plain.forward(x).pow(2).sum();
      const auto loss = model.forward(x).pow(2).sum();
      ASSERT_TRUE(at::equal(loss, expected)) << "step " << step;
      plain.zero_grad();
      expected.backward();
      average_gradients(plain, *world);
      model.zero_grad();
      loss.backward();
      auto reference = plain.named_parameters();
      for (auto& item : model.named_parameters()) {
        const auto view = sharded_view(item.value());
        ASSERT_TRUE(item.value().grad().defined()) << item.key();
        ASSERT_TRUE(at::equal(item.value().grad(), my_rows(reference[item.key()].grad(), view)))
            << item.key();
        ASSERT_EQ(item.value().sizes(), view.local.sizes());
        view.local.sub_(item.value().grad(), 0.01);
      }
      for (auto& parameter : plain.parameters()) parameter.data().sub_(parameter.grad(), 0.01);
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Worlds, FullyShardTest,
                         ::testing::Values(Case{1, true, "one"}, Case{2, true, "two"},
                                           Case{3, true, "three"}, Case{4, true, "four"},
                                           Case{2, {}, "root_kept"}, Case{3, false, "all_kept"},
                                           Case{4, ReshardAfterForward::to(2), "to_two"}),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace megashard::testing
