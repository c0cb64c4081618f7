#include "parallel/fsdp/fully_shard.h"

#include "tests/support/formula.h"
#include "tests/support/parity.h"
#include "tests/support/run_ranks.h"
#include "tests/support/small_model.h"

namespace megashard::testing {
namespace {

void fill(torch::nn::Module& model, uint64_t seed) {
  for (auto& item : model.named_parameters()) item.value().set_data(fixed(item.value().sizes(), seed++) * 0.3);
}

/// Gradients of the plain model on this rank's data, averaged over all ranks in rank order.
void average_gradients(torch::nn::Module& model, ProcessGroup& group) {
  for (auto& parameter : model.parameters()) {
    group.all_reduce(parameter.mutable_grad(), ReduceOp::kAvg).wait();
  }
}

struct WorldCase {
  int world;
  ReshardAfterForward reshard;
  const char* name;
};

class FullyShardTest : public ::testing::TestWithParam<WorldCase> {};

TEST_P(FullyShardTest, LossAndGradientsAreBitEqualToThePlainModel) {
  run_ranks(GetParam().world, [](const ProcessGroupPtr& world) {
    StackImpl plain(3, 5, 7);
    fill(plain, 1);
    Stack model(3, 5, 7);
    copy_weights(plain, model);
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
        const auto view = reshard_and_view(item.value());
        ASSERT_TRUE(item.value().grad().defined()) << item.key();
        ASSERT_TRUE(at::equal(item.value().grad(), part_like(reference[item.key()].grad(), item.value())))
            << item.key();
        ASSERT_EQ(item.value().sizes(), view.local.sizes());
        view.local.sub_(item.value().grad(), 0.01);
      }
      for (auto& parameter : plain.parameters()) parameter.data().sub_(parameter.grad(), 0.01);
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Worlds, FullyShardTest,
                         ::testing::Values(WorldCase{1, true, "one"}, WorldCase{2, true, "two"},
                                           WorldCase{3, true, "three"}, WorldCase{4, true, "four"},
                                           WorldCase{2, {}, "root_kept"}, WorldCase{3, false, "all_kept"},
                                           WorldCase{4, ReshardAfterForward::to(2), "to_two"}),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace megashard::testing
