// Each part of a layer with switches combined at random, against its formula in fp64: outputs and all gradients.

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/einsum.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/relu.h>
#include <ATen/ops/rsqrt.h>
#include <ATen/ops/silu.h>
#include <ATen/ops/softmax.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/topk.h>
#include <ATen/ops/zeros_like.h>
#include <gtest/gtest.h>

#include <functional>
#include <map>
#include <random>

#include "models/layers/attention.h"
#include "models/layers/mlp.h"
#include "models/moe/moe.h"
#include "tests/models/kernels/against_fp64.h"
#include "tests/support/formula.h"
#include "tests/support/simulated_device.h"

namespace megashard::testing {
namespace {

using Weights = std::map<std::string, at::Tensor>;
/// Hidden states [B, T, C] and the part's weights by name -> its output.
using Formula = std::function<at::Tensor(const at::Tensor& x, const Weights& weights)>;

constexpr int64_t kHidden = 24, kRows = 2, kLength = 7;

/// Draws of one spec.
struct Draw {
  std::mt19937 random;
  bool coin() { return random() % 2 == 0; }
  template <class T>
  T one_of(std::initializer_list<T> values) {
    return values.begin()[random() % values.size()];
  }
};

void expect_as_formula(const PartSpec& spec, const BuildContext& context, const Pass& pass, const Formula& formula) {
  const auto part = spec.build(context);
  const auto module = part->module();
  const auto device = device_of_tests();
  uint64_t seed = 10;
  Tensors leaves{fixed({kRows, kLength, kHidden}, 3).to(device).requires_grad_()};
  Tensors wide{leaves[0].detach().cpu().to(at::kDouble).requires_grad_()};
  Weights weights;
  module->to(device);
  for (auto& item : module->named_parameters()) {
    const at::Tensor values = (fixed(item.value().sizes(), ++seed) * 0.3).cpu();
    {
      const at::NoGradGuard no_grad;
      item.value().copy_(values);
    }
    leaves.push_back(item.value());
    wide.push_back(values.to(at::kDouble).requires_grad_());
    weights[item.key()] = wide.back();
  }
  const auto got = part->run(leaves[0], pass).hidden;
  const auto want = formula(wide[0], weights);
  EXPECT_LT(error(got.detach().cpu(), want.detach()), 2e-6);  // fp32
  const auto grad = fixed(want.sizes(), 99).cpu();
  const auto grads = torch::autograd::grad({got}, leaves, {grad.to(device)}, {}, false, true);
  const auto wanted = torch::autograd::grad({want}, wide, {grad.to(at::kDouble)}, {}, false, true);
  const auto names = module->named_parameters();
  double largest = 0;
  for (const auto& each : wanted) largest = std::max(largest, each.defined() ? each.abs().max().item<double>() : 0.0);
  for (size_t i = 0; i < wanted.size(); ++i) {
    ASSERT_EQ(grads[i].defined(), wanted[i].defined());
    if (!wanted[i].defined()) continue;
    // fp32, of sums in which values as large as the largest gradient cancel: softmax does not see a bias of all keys.
    EXPECT_LT((grads[i].cpu() - wanted[i]).abs().max().item<double>(), 5e-6 * largest)
        << (i == 0 ? "input" : names[i - 1].key());
  }
}

at::Tensor optional(const Weights& weights, const std::string& name) {
  const auto found = weights.find(name);
  return found == weights.end() ? at::Tensor() : found->second;
}

at::Tensor projected(const at::Tensor& x, const Weights& weights, const std::string& layer) {
  const auto bias = optional(weights, layer + ".bias");
  return at::linear(x, weights.at(layer + ".weight"), bias.defined() ? std::optional(bias) : std::nullopt);
}

at::Tensor activation_of(const at::Tensor& x, Activation activation) {
  switch (activation) {
    case Activation::kSilu:
      return x * x.sigmoid();
    case Activation::kGelu:
      return 0.5 * x * (1 + (x / std::sqrt(2.0)).erf());
    case Activation::kGeluTanh:
      return 0.5 * x * (1 + (std::sqrt(2 / M_PI) * (x + 0.044715 * x.pow(3))).tanh());
    case Activation::kRelu:
      return x.clamp_min(0);
    case Activation::kSquaredRelu:
      return x.clamp_min(0).square();
    case Activation::kQuickGelu:
      return x * (1.702 * x).sigmoid();
  }
  return {};
}

at::Tensor norm_of(const at::Tensor& x, const NormSpec& spec, const at::Tensor& weight, const at::Tensor& bias) {
  const auto scale = spec.zero_centered ? weight + 1 : weight;
  const auto centred = spec.kind == NormKind::kLayerNorm ? x - x.mean(-1, true) : x;
  const auto y = centred * at::rsqrt(centred.square().mean(-1, true) + spec.eps) * scale;
  return bias.defined() ? y + bias : y;
}

/// Rotates pairs of channels (i, i + R/2), or neighbours (2i, 2i + 1).
at::Tensor rotated(const at::Tensor& x, const RotaryTables& tables, bool interleaved) {
  const auto cos = tables.cos.cpu().to(at::kDouble).unsqueeze(1), sin = tables.sin.cpu().to(at::kDouble).unsqueeze(1);
  const int64_t pairs = cos.size(-1);
  const auto turning = x.narrow(-1, 0, 2 * pairs), still = x.narrow(-1, 2 * pairs, x.size(-1) - 2 * pairs);
  const auto both =
      interleaved ? turning.unflatten(-1, {pairs, 2}).transpose(-1, -2) : turning.unflatten(-1, {2, pairs});
  const auto a = both.select(-2, 0), b = both.select(-2, 1);
  const auto turned = at::stack({a * cos - b * sin, b * cos + a * sin}, interleaved ? -1 : -2).flatten(-2);
  return at::cat({turned, still}, -1);
}

TEST(Parts, AttentionIsItsFormula) {
  for (unsigned seed = 0; seed < 24; ++seed) {
    SCOPED_TRACE(seed);
    Draw draw{std::mt19937(seed)};
    AttentionSpec spec{.hidden_size = kHidden, .head_dim = draw.one_of<int64_t>({4, 8, 16})};
    spec.num_kv_heads = draw.one_of<int64_t>({1, 2, 3});
    spec.num_heads = spec.num_kv_heads * draw.one_of<int64_t>({1, 2, 4});
    spec.qkv_bias = draw.coin();
    spec.out_bias = draw.coin();
    if (draw.coin()) {
      spec.head_norm = NormSpec{.width = spec.head_dim,
                                .kind = draw.one_of({NormKind::kRmsNorm, NormKind::kLayerNorm}),
                                .zero_centered = draw.coin()};
    }
    if (draw.coin()) spec.rotary = 0;
    spec.rotary_interleaved = draw.coin();
    spec.window = draw.one_of<int64_t>({0, 1, 3, 100});
    if (draw.coin()) spec.scale = 0.7;
    const double fraction = draw.one_of({1.0, 0.5});
    RotaryEmbedding rotary("", spec.head_dim, {.theta = 50, .fraction = fraction});
    Pass pass;
    pass.rotary.push_back(rotary.forward(fixed({1}, 1).to(device_of_tests()), {}, kLength));
    expect_as_formula(*attention_part(spec), {}, pass, [&](const at::Tensor& x, const Weights& weights) {
      const auto heads = [&](const char* layer, int64_t count) {
        return projected(x, weights, layer).view({kRows, kLength, count, spec.head_dim});
      };
      auto q = heads("q_proj", spec.num_heads), k = heads("k_proj", spec.num_kv_heads);
      const auto v = heads("v_proj", spec.num_kv_heads);
      if (spec.head_norm) {
        q = norm_of(q, *spec.head_norm, weights.at("q_norm.weight"), optional(weights, "q_norm.bias"));
        k = norm_of(k, *spec.head_norm, weights.at("k_norm.weight"), optional(weights, "k_norm.bias"));
      }
      if (spec.rotary) {
        q = rotated(q, pass.rotary[0], spec.rotary_interleaved);
        k = rotated(k, pass.rotary[0], spec.rotary_interleaved);
      }
      const int64_t each = spec.num_heads / spec.num_kv_heads;
      const auto scores = at::einsum("bqhd,bkhd->bhqk", {q, k.repeat_interleave(each, 2)}) *
                          spec.scale.value_or(1 / std::sqrt(static_cast<double>(spec.head_dim)));
      const auto place = at::arange(kLength, x.options().dtype(at::kLong)), distance = place.unsqueeze(1) - place;
      auto hidden = distance.lt(0);
      if (spec.window > 0) hidden = hidden.logical_or(distance.ge(spec.window));
      const auto mixed = at::einsum(
          "bhqk,bkhd->bqhd", {at::softmax(scores.masked_fill(hidden, -INFINITY), -1), v.repeat_interleave(each, 2)});
      return projected(mixed.flatten(2), weights, "o_proj");
    });
  }
}

MlpSpec random_mlp(Draw& draw) {
  return {.hidden_size = kHidden,
          .intermediate_size = draw.one_of<int64_t>({5, 16, 40}),
          .activation = draw.one_of({Activation::kSilu, Activation::kGelu, Activation::kGeluTanh, Activation::kRelu,
                                     Activation::kSquaredRelu}),
          .gated = draw.coin()};
}

TEST(Parts, AnMlpIsItsFormula) {
  for (unsigned seed = 0; seed < 24; ++seed) {
    SCOPED_TRACE(seed);
    Draw draw{std::mt19937(seed)};
    MlpSpec spec = random_mlp(draw);
    spec.bias = draw.coin();
    const BuildContext context{.mlp_tiles = draw.one_of<int64_t>({1, 3})};
    expect_as_formula(*mlp_part(spec), context, {}, [&](const at::Tensor& x, const Weights& weights) {
      const auto up = projected(x, weights, "up_proj");
      const auto wide = spec.gated ? activation_of(projected(x, weights, "gate_proj"), spec.activation) * up
                                   : activation_of(up, spec.activation);
      return projected(wide, weights, "down_proj");
    });
  }
}

TEST(Parts, ExpertsAreTheirFormula) {
  for (unsigned seed = 0; seed < 24; ++seed) {
    SCOPED_TRACE(seed);
    Draw draw{std::mt19937(seed)};
    MoeSpec spec{.hidden_size = kHidden, .expert = random_mlp(draw)};
    spec.moe.num_experts = draw.one_of<int64_t>({1, 4, 9});
    spec.moe.experts_per_token = std::min(spec.moe.num_experts, draw.one_of<int64_t>({1, 2, 4}));
    spec.moe.router.normalise_weights = draw.coin();
    spec.router = top_k_router("", spec.moe.router);
    expect_as_formula(*experts_part(spec), {}, {}, [&](const at::Tensor& x, const Weights& weights) {
      const auto tokens = x.view({-1, kHidden});
      const auto probabilities = at::softmax(at::linear(tokens, weights.at("gate.weight")), -1);
      auto [shares, chosen] = at::topk(probabilities, spec.moe.experts_per_token, -1);
      if (spec.moe.router.normalise_weights) shares = shares / shares.sum(-1, true);
      auto sum = at::zeros_like(tokens);
      for (int64_t expert = 0; expert < spec.moe.num_experts; ++expert) {
        const auto wide = [&](int64_t half) {
          const auto& all = weights.at(spec.expert.gated ? "experts.gate_up_proj" : "experts.up_proj");
          return at::linear(tokens, spec.expert.gated ? all.select(0, expert).select(0, half) : all.select(0, expert));
        };
        const auto first = activation_of(wide(0), spec.expert.activation);
        const auto y =
            at::linear(spec.expert.gated ? first * wide(1) : first, weights.at("experts.down_proj").select(0, expert));
        sum = sum + y * (shares * chosen.eq(expert)).sum(-1, true);
      }
      return sum.view(x.sizes());
    });
  }
}

}  // namespace
}  // namespace megashard::testing
