#include "models/layers/mlp.h"

#include <ATen/Context.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/rand.h>
#include <ATen/ops/randn.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>

#include "models/layers/linear.h"
#include "tests/support/counting_allocator.h"
#include "tests/support/message_of.h"
#include "tests/support/simulated_device.h"

namespace megashard {
namespace {

using ::testing::HasSubstr;
using testing::message_of;

constexpr int64_t kSeed = 11;

std::shared_ptr<Hooked<Mlp>> mlp_of(int64_t tiles, bool adapted = false) {
  auto mlp = std::make_shared<Hooked<Mlp>>(MlpSpec{.hidden_size = 32, .intermediate_size = 1024},
                                           BuildContext{.mlp_tiles = tiles});
  for (const auto& each : mlp->children()) {
    if (adapted) dynamic_cast<LinearLayers&>(*each).add_adapters({""}, /*rank=*/4, /*scale=*/2, /*dropout=*/0.5);
  }
  mlp->to(testing::device_of_tests());
  const at::NoGradGuard no_grad;
  int64_t seed = 0;
  for (auto& parameter : mlp->parameters()) {
    const auto values = at::arange(parameter.numel(), at::kDouble).add(++seed).sin() * 0.1;
    parameter.copy_(values.view(parameter.sizes()));
  }
  return mlp;
}

TEST(TiledMlp, OutputsAndGradientsAreThoseOfOnePiece) {
  for (const int64_t rows : {8, 7, 1}) {  // rows of 3 tiles: 3 3 2, 3 3 1, 1
    const auto x = at::randn({2, rows, 32}), weight = at::randn({2, rows, 32});
    std::map<std::string, at::Tensor> expected;
    for (const int64_t tiles : {1, 3, 100}) {
      const auto mlp = mlp_of(tiles);
      mlp->named_parameters()["up_proj.weight"].requires_grad_(rows != 7);  // frozen for one of them
      auto input = x.clone().requires_grad_();
      const auto out = mlp->forward(input);
      for (int pass = 0; pass < 2; ++pass)  // the second pass accumulates gradients
        (mlp->forward(input) * weight).sum().backward();
      std::map<std::string, at::Tensor> got{{"out", out.detach()}, {"x", input.grad()}};
      for (const auto& item : mlp->named_parameters()) {
        EXPECT_EQ(item.value().grad().defined(), item.value().requires_grad()) << item.key();
        if (item.value().requires_grad()) got[item.key()] = item.value().grad();
      }
      if (tiles == 1) expected = got;
      for (const auto& [name, value] : expected) {
        // Products of other shapes add 1,024 terms in another order: sqrt(1024) roundings.
        const double largest = value.abs().max().item<double>();
        EXPECT_TRUE(got.at(name).allclose(value, 0, 4e-6 * largest)) << name << " " << tiles;
      }
    }
  }
}

TEST(TiledMlp, DropsInBackwardWhatItDroppedInForward) {
  const auto x = at::randn({2, 7, 32}), weight = at::randn({2, 7, 32});
  std::map<std::string, at::Tensor> expected;
  for (const int64_t tiles : {1, 3}) {  // both draw the same random numbers, for pieces of 3 3 1 rows
    const auto mlp = mlp_of(tiles, /*adapted=*/true);
    auto input = x.clone().requires_grad_();
    auto generator = at::globalContext().defaultGenerator(testing::device_of_tests());
    generator.set_current_seed(kSeed);
    at::Tensor out;
    if (tiles == 3) {
      out = mlp->forward(input);
    } else {
      out = at::cat({mlp->forward(input.narrow(1, 0, 3)), mlp->forward(input.narrow(1, 3, 3)),
                     mlp->forward(input.narrow(1, 6, 1))},
                    1);
    }
    const auto drawn_next = at::rand({1});
    (out * weight).sum().backward();
    std::map<std::string, at::Tensor> got{{"out", out.detach()},
                                          {"x", input.grad()},
                                          {"the next number", drawn_next},
                                          {"that behind backward", at::rand({1})}};
    for (const auto& item : mlp->named_parameters()) got[item.key()] = item.value().grad();
    if (tiles == 1) expected = got;
    EXPECT_EQ(got.size(), expected.size());
    for (const auto& [name, value] : expected) {
      const double largest = value.abs().max().item<double>();  // sums in another order, as above
      EXPECT_TRUE(got.at(name).allclose(value, 0, 4e-6 * largest)) << name;
    }
  }
}

TEST(TiledMlp, OnlyOnePiecesActivationsExist) {
  MEGASHARD_NOT_ON_SIM("it counts what the CPU's allocator gives");
  auto& allocator = *new testing::CountingAllocator;
  std::map<int64_t, double> peaks;
  for (const int64_t tiles : {1, 4}) {
    const auto mlp = mlp_of(tiles);
    for (auto& parameter : mlp->parameters()) parameter.mutable_grad() = at::ones_like(parameter);
    auto input = at::randn({1, 2048, 32}).requires_grad_();
    input.mutable_grad() = at::ones_like(input);
    const auto before = allocator.live();
    allocator.reset_peak();
    mlp->forward(input).sum().backward();
    peaks[tiles] = static_cast<double>(allocator.peak() - before);
  }
  allocator.stop();
  EXPECT_LT(peaks[4], 1.3 / 4 * peaks[1]);
}

TEST(TiledMlp, ASecondDerivativeIsRefused) {
  const auto mlp = mlp_of(2);
  auto input = at::randn({1, 4, 32}).requires_grad_();
  const auto out = mlp->forward(input).sum();
  EXPECT_THAT(message_of([&] { out.backward(/*gradient=*/{}, /*retain_graph=*/true, /*create_graph=*/true); }),
              HasSubstr("a tiled MLP has no second derivative"));
}

}  // namespace
}  // namespace megashard
