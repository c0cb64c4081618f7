// test_fully_shard_autograd.py: hooks on finished gradients, and an optimizer in backward.

#include <torch/optim/adam.h>

#include <map>

#include "tests/support/parity.h"
#include "tests/support/run_ranks.h"
#include "tests/support/small_model.h"

namespace megashard::testing {
namespace {

TEST(FullyShardAutograd, test_post_acc_grad_hook_runs) {
  run_ranks(2, [](const ProcessGroupPtr& world) {
    Stack model(2, 5, 7);
    fill_weights(model);
    shard_stack(model, {.mesh = flat_mesh(world), .reshard_after_forward = true});
    std::map<std::string, int> runs;
    for (const auto& item : model.named_parameters()) {
      register_post_accumulate_grad_hook(item.value(), [&runs, name = item.key()](const at::Tensor& parameter) {
        ++runs[name];
        EXPECT_EQ(parameter.grad().sizes(), parameter.sizes()) << name;
      });
    }
    for (int step = 1; step <= 2; ++step) {
      model.forward(fixed({4, 5}, 1)).sum().backward();
      EXPECT_EQ(runs.size(), model.named_parameters().size());
      for (const auto& [name, times] : runs) EXPECT_EQ(times, step) << name;
    }
  });
}

TEST(FullyShardAutograd, test_post_acc_grad_hook_optim_parity) {
  run_ranks(2, [](const ProcessGroupPtr& world) {
    StackImpl start(2, 5, 7);
    Stack reference(2, 5, 7), model(2, 5, 7);
    fill_weights(start);
    for (Stack* each : {&reference, &model}) {
      copy_weights(start, *each);
      shard_stack(*each, {.mesh = flat_mesh(world), .reshard_after_forward = true});
    }
    const torch::optim::AdamOptions options(1e-2);
    torch::optim::Adam usual(reference.parameters(), options);
    std::vector<std::unique_ptr<torch::optim::Adam>> each_its_own;
    for (const auto& parameter : model.parameters()) {
      each_its_own.push_back(std::make_unique<torch::optim::Adam>(std::vector<at::Tensor>{parameter}, options));
      register_post_accumulate_grad_hook(parameter, [optimizer = each_its_own.back().get()](const at::Tensor&) {
        optimizer->step();
        optimizer->zero_grad();
      });
    }
    for (uint64_t step = 0; step < 5; ++step) {
      const at::Tensor x = fixed({4, 5}, 10 * step + static_cast<uint64_t>(world->rank()));
      const at::Tensor expected = reference.forward(x).pow(2).sum();
      const at::Tensor loss = model.forward(x).pow(2).sum();
      ASSERT_TRUE(at::equal(loss, expected)) << "step " << step;
      expected.backward();
      usual.step();
      usual.zero_grad();
      loss.backward();
      for (const auto& parameter : model.parameters()) EXPECT_FALSE(parameter.grad().defined());
    }
    const auto expected = reference.named_parameters();
    for (const auto& item : model.named_parameters()) {
      EXPECT_TRUE(at::equal(reshard_and_view(item.value()).local, reshard_and_view(expected[item.key()]).local))
          << item.key();
    }
  });
}

}  // namespace
}  // namespace megashard::testing
