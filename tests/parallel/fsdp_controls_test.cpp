// Controls that are called between forward and backward.

#include <functional>
#include <vector>

#include "parallel/fsdp/fully_shard.h"
#include "tests/support/parity.h"
#include "tests/support/run_ranks.h"
#include "tests/support/small_model.h"

namespace megashard::testing {
namespace {

/// Two layers of weights that backward needs again; each a unit.
struct TwoLayers {
  TwoLayers() : first({{6, 4}}, linear), second({{6, 6}}, linear) {}
  at::Tensor forward(const at::Tensor& x) { return second.forward(first.forward(x)).sum(); }
  Formula first, second;
};

TEST(FsdpControls, ReductionsMayChangeBetweenForwardAndBackward) {
  using Control = std::function<void(torch::nn::Module&)>;
  const std::vector<Control> controls = {
      [](torch::nn::Module& unit) { set_gradient_divide_factor(unit, 2); },
      [](torch::nn::Module& unit) { set_force_sum_reduction(unit, true); },
      [](torch::nn::Module& unit) { set_all_reduce_hook(unit, [](at::Tensor& reduced) { reduced.mul_(1); }); }};
  for (const bool reshard : {true, false}) {
    for (const auto& control : controls) {
      run_ranks(2, [&](const ProcessGroupPtr& world) {
        TwoLayers plain, layers;
        for (Formula* unit : {&layers.first, &layers.second}) {
          fully_shard(*unit, {.mesh = flat_mesh(world), .reshard_after_forward = reshard});
        }
        const at::Tensor x = fixed({3, 4}, static_cast<uint64_t>(10 + world->rank())).requires_grad_();
        const at::Tensor loss = layers.forward(x);
        for (Formula* unit : {&layers.first, &layers.second}) control(*unit);
        loss.backward();
        plain.forward(x.detach()).backward();
        average_gradients(plain.first, *world);
        average_gradients(plain.second, *world);
        expect_gradients_of(plain.first, layers.first, 1e-6);
        expect_gradients_of(plain.second, layers.second, 1e-6);
      });
    }
  }
}

}  // namespace
}  // namespace megashard::testing
