// Recompute of units as PyTorch's FSDP2 suite pins it down (there: activation checkpointing):
// inside a unit, around it, nested, reentrant or not; the events are those without it, and the
// numbers too.

#include <ATen/ops/arange.h>
#include <ATen/ops/cross_entropy_loss.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/log_sigmoid.h>
#include <ATen/ops/randint.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>
#include <torch/optim/adam.h>

#include "framework/modules/weight_init_mixin.h"
#include "framework/recompute/recompute.h"
#include "tests/support/formula.h"
#include "tests/support/run_ranks.h"
#include "tests/support/simulated_device.h"
#include "tests/support/small_model.h"

namespace megashard::testing {
namespace {

namespace nn = torch::nn;
using HookedLinear = Hooked<nn::LinearImpl>;
using HookedNorm = Hooked<nn::LayerNormImpl>;
using HookedEmbedding = Hooked<nn::EmbeddingImpl>;
using Events = std::vector<std::string>;
constexpr int64_t kWidth = 6, kVocabulary = 11, kLength = 5;

std::shared_ptr<HookedLinear> make_linear(int64_t in, int64_t out) {
  return std::make_shared<HookedLinear>(nn::LinearOptions(in, out).bias(false));
}
std::shared_ptr<HookedNorm> make_norm() { return std::make_shared<HookedNorm>(nn::LayerNormOptions({kWidth})); }

/// Its dropout draws from the rank's own generator: ranks are threads here.
struct FeedForwardImpl : nn::Module {
  explicit FeedForwardImpl(at::Generator given)
      : w1(register_module("w1", make_linear(kWidth, 7))),
        w2(register_module("w2", make_linear(7, kWidth))),
        noise(std::move(given)) {}
  at::Tensor forward(at::Tensor x) {
    const auto hidden = at::gelu(w1->forward(x));
    return w2->forward(hidden * at::empty_like(hidden).bernoulli_(0.75, noise));
  }
  std::shared_ptr<HookedLinear> w1, w2;
  at::Generator noise;
};

struct LayerImpl : nn::Module {
  explicit LayerImpl(const at::Generator& noise)
      : norm(register_module("norm", make_norm())),
        feed_forward(register_module("feed_forward", std::make_shared<Hooked<FeedForwardImpl>>(noise))) {}
  at::Tensor forward(at::Tensor x) { return x + feed_forward->forward(norm->forward(x)); }
  std::shared_ptr<HookedNorm> norm;
  std::shared_ptr<Hooked<FeedForwardImpl>> feed_forward;
};
using Layer = Hooked<LayerImpl>;

/// Where a recompute around a unit sits.
struct RegionImpl : nn::Module {
  explicit RegionImpl(std::shared_ptr<Layer> given) : layer(register_module("layer", std::move(given))) {}
  at::Tensor forward(at::Tensor x) { return layer->forward(x); }
  std::shared_ptr<Layer> layer;
};

enum class Place { kNowhere, kInUnits, kAroundUnits, kInUnitsAndTheirParts };
enum class Grouping { kLayers, kLists, kTied };

struct TransformerImpl : nn::Module {
  TransformerImpl(int depth, Grouping given, uint64_t seed) : grouping(given), noise(generator_of_tests(seed)) {
    tokens = register_module("tokens", std::make_shared<HookedEmbedding>(kVocabulary, kWidth));
    places = register_module("places", std::make_shared<HookedEmbedding>(kLength, kWidth));
    nn::ModuleList list;
    for (int i = 0; i < depth; ++i) {
      regions.push_back(std::make_shared<Hooked<RegionImpl>>(std::make_shared<Layer>(noise)));
      list->push_back(regions.back());
    }
    register_module("layers", list);
    norm = register_module("norm", make_norm());
    output = register_module("output", make_linear(kWidth, kVocabulary));
    if (grouping == Grouping::kTied) tie_parameter(*output, output->weight, tokens->weight);
    uint64_t number = 1;
    const c10::NoGradGuard no_grad;
    for (auto& parameter : parameters()) parameter.copy_(fixed(parameter.sizes(), number++) * 0.3);
  }

  at::Tensor forward(at::Tensor ids) {
    at::Tensor x = tokens->forward(ids) + places->forward(at::arange(kLength));
    for (auto& region : regions) x = region->forward(x);
    return output->forward(norm->forward(x));
  }

  void recompute_layers(Place place, bool reentrant) {
    RecomputeOptions options;
    options.use_reentrant = reentrant;
    options.generators = {noise};
    for (auto& region : regions) {
      if (place == Place::kAroundUnits) recompute(*region, options);
      if (place == Place::kInUnits || place == Place::kInUnitsAndTheirParts) recompute(*region->layer, options);
      if (place == Place::kInUnitsAndTheirParts) recompute(*region->layer->feed_forward, options);
    }
  }

  std::shared_ptr<HookedEmbedding> tokens, places;
  std::vector<std::shared_ptr<Hooked<RegionImpl>>> regions;
  std::shared_ptr<HookedNorm> norm;
  std::shared_ptr<HookedLinear> output;
  Grouping grouping;
  at::Generator noise;
};
using Transformer = Hooked<TransformerImpl>;

void shard(Transformer& model, const FullyShardOptions& options, bool nested = false) {
  nn::Module* const first[] = {model.tokens.get(), model.places.get()};
  nn::Module* const last[] = {model.norm.get(), model.output.get()};
  if (model.grouping == Grouping::kLists) fully_shard(first, options);
  for (auto& region : model.regions) {
    if (nested) fully_shard(*region->layer->feed_forward->w1, options);
    fully_shard(*region->layer, options);
  }
  if (model.grouping == Grouping::kLists) fully_shard(last, options);
  fully_shard(model, options);
}

at::Tensor batch(uint64_t seed) {
  auto generator = at::detail::createCPUGenerator(seed);
  return at::randint(kVocabulary, {2, kLength}, generator, at::kLong);
}

at::Tensor loss_of(Transformer& model, const at::Tensor& ids) {
  return at::cross_entropy_loss(model.forward(ids).flatten(0, 1), ids.flip({1}).flatten());
}

const std::vector<std::pair<Place, bool>> kStyles = {{Place::kInUnits, false},
                                                     {Place::kInUnits, true},
                                                     {Place::kAroundUnits, false},
                                                     {Place::kAroundUnits, true},
                                                     {Place::kInUnitsAndTheirParts, false},
                                                     {Place::kInUnitsAndTheirParts, true}};

std::string describe(Place place, bool reentrant) {
  static const std::vector<std::string> names = {"nowhere", "in units", "around units", "in units and their parts"};
  return names[static_cast<size_t>(place)] + (reentrant ? ", reentrant" : "");
}

void expect_rows_of(Transformer& model, const Transformer& plain, bool gradients) {
  const auto expected = plain.named_parameters();
  for (const auto& item : model.named_parameters()) {
    const at::Tensor own = gradients ? item.value().grad() : reshard_and_view(item.value()).local;
    const at::Tensor whole = gradients ? expected[item.key()].grad() : expected[item.key()];
    ASSERT_TRUE(own.defined()) << item.key();
    EXPECT_TRUE(at::equal(own, part_like(whole, item.value()))) << item.key();
  }
}

TEST(FullyShardTraining, test_train_parity_with_activation_checkpointing) {
  run_ranks(2, [](const ProcessGroupPtr& world) {
    for (const auto grouping : {Grouping::kLayers, Grouping::kLists, Grouping::kTied}) {
      for (const auto& [place, reentrant] : kStyles) {
        SCOPED_TRACE(describe(place, reentrant));
        const auto rank = static_cast<uint64_t>(world->rank());
        Transformer plain(2, grouping, 70 + rank), model(2, grouping, 70 + rank);
        model.recompute_layers(place, reentrant);
        shard(model, {.mesh = flat_mesh(world)});
        torch::optim::Adam plain_adam(plain.parameters(), 1e-2), adam(model.parameters(), 1e-2);
        for (uint64_t step = 0; step < 3; ++step) {
          const at::Tensor ids = batch(10 * step + rank);
          plain_adam.zero_grad();
          adam.zero_grad();
          const at::Tensor expected = loss_of(plain, ids), loss = loss_of(model, ids);
          ASSERT_TRUE(at::equal(loss, expected)) << "step " << step;
          expected.backward();
          loss.backward();
          for (auto& parameter : plain.parameters()) {  // DistributedDataParallel
            world->all_reduce(parameter.mutable_grad(), ReduceOp::kSum).wait();
            parameter.mutable_grad().div_(2);
          }
          expect_rows_of(model, plain, /*gradients=*/true);
          plain_adam.step();
          adam.step();
        }
        expect_rows_of(model, plain, /*gradients=*/false);
      }
    }
  });
}

TEST(FullyShardTraining, test_double_forward_with_nested_fsdp_and_checkpoint) {
  run_ranks(2, [](const ProcessGroupPtr& world) {
    for (const auto& [place, reentrant] : kStyles) {
      SCOPED_TRACE(describe(place, reentrant));
      Transformer plain(2, Grouping::kLayers, 7), model(2, Grouping::kLayers, 7);
      model.recompute_layers(place, reentrant);
      shard(model, resharding(world), /*nested=*/true);
      for (uint64_t step = 0; step < 2; ++step) {
        plain.zero_grad();
        model.zero_grad();
        for (auto* each : {&plain, &model}) {  // preferred and rejected answers
          const at::Tensor better = loss_of(*each, batch(20 + step));
          at::log_sigmoid(loss_of(*each, batch(30 + step)) - better).neg().backward();
        }
        // The same data on both ranks: the average is exact, however often a unit reduces.
        expect_rows_of(model, plain, /*gradients=*/true);
      }
    }
  });
}

/// A reentrant recompute around a unit: gradients reach the unit when its second forward has run,
/// so "pre_backward", and what an explicit list then prefetches, come after its gathers.
bool follows_forward(Place place, bool reentrant) { return place == Place::kAroundUnits && reentrant; }

/// The events of one step, of those kinds that are named (all: none are named).
Events events_of(Transformer& model, const std::function<void()>& step, const Events& kinds = {}) {
  Events events;
  set_schedule_observer(model, [&](const char* event, const std::string& group) {
    if (kinds.empty() || std::find(kinds.begin(), kinds.end(), event) != kinds.end())
      events.push_back(event + (" " + group));
  });
  step();
  set_schedule_observer(model, {});
  return events;
}

TEST(FullyShardComm, test_fully_shard_backward_prefetch) {
  run_fake_ranks(4, [](const ProcessGroupPtr& world) {
    const auto record = [&](const ReshardAfterForward& reshard, Place place, bool reentrant) {
      Transformer model(3, Grouping::kLayers, 7);
      model.recompute_layers(place, reentrant);
      shard(model, {.mesh = flat_mesh(world), .reshard_after_forward = reshard});
      std::vector<Events> steps;
      for (int i = 0; i < 2; ++i) {
        steps.push_back(events_of(model, [&] { loss_of(model, batch(1)).backward(); }));
      }
      steps.push_back(events_of(model, [&] {  // two forwards, then their backward
        const at::Tensor first = loss_of(model, batch(1));
        (first + loss_of(model, batch(2))).backward();
      }));
      steps.push_back(events_of(model, [&] {  // a backward for one of two forwards
        const at::Tensor unused = loss_of(model, batch(1));
        loss_of(model, batch(2)).backward();
      }));
      return steps;
    };
    const ReshardAfterForward reshards[] = {true, false, ReshardAfterForward::to(2), {}};
    for (const auto& reshard : reshards) {
      auto expected = record(reshard, Place::kNowhere, false);
      for (const auto& [place, reentrant] : kStyles) {
        if (!follows_forward(place, reentrant)) {
          SCOPED_TRACE(describe(place, reentrant));
          EXPECT_EQ(record(reshard, place, reentrant), expected);
        }
      }
      auto around = record(reshard, Place::kAroundUnits, true);
      for (auto* steps : {&expected, &around}) {
        for (auto& events : *steps) {
          std::erase_if(events, [](const std::string& event) { return event.starts_with("pre_"); });
        }
      }
      EXPECT_EQ(around, expected);
    }
    Transformer model(3, Grouping::kLayers, 7);
    model.recompute_layers(Place::kInUnits, false);
    shard(model, resharding(world));
    EXPECT_EQ(events_of(model, [&] { loss_of(model, batch(1)).backward(); }, {"unshard", "post_backward"}),
              (Events{"unshard Transformer", "unshard layers.0.layer", "unshard layers.1.layer",
                      "unshard layers.2.layer", "unshard Transformer", "unshard layers.2.layer",
                      "unshard layers.1.layer", "post_backward layers.2.layer", "unshard layers.0.layer",
                      "post_backward layers.1.layer", "post_backward layers.0.layer", "post_backward Transformer"}));
  });
}

/// Several modules as one group are known by the first one.
TEST(FullyShardComm, test_set_modules_to_backward_prefetch_inside_ac) {
  run_fake_ranks(2, [](const ProcessGroupPtr& world) {
    const auto record = [&](Place place, bool reentrant, bool explicit_lists) {
      Transformer model(3, Grouping::kLists, 7);
      model.recompute_layers(place, reentrant);
      shard(model, resharding(world), /*nested=*/true);
      if (explicit_lists) {
        nn::Module* const last[] = {model.regions[2]->layer.get()};
        set_modules_to_backward_prefetch(*model.output, last);
        for (size_t i = 2; i > 0; --i) {
          const auto& before = model.regions[i - 1]->layer;
          nn::Module* const both[] = {before.get(), before->feed_forward->w1.get()};
          set_modules_to_backward_prefetch(*model.regions[i]->layer, both);
        }
        nn::Module* const first[] = {model.tokens.get()};
        set_modules_to_backward_prefetch(*model.regions[0]->layer, first);
      }
      const at::Tensor loss = loss_of(model, batch(1));
      auto events = events_of(model, [&] { loss.backward(); }, {"unshard", "reshard"});
      for (auto& event : events) {  // shorter: "unshard 2.w1"
        for (const std::string part : {"layers.", ".layer", ".feed_forward"}) {
          if (const auto at = event.find(part); at != event.npos) event.erase(at, part.size());
        }
      }
      return events;
    };
    const Events by_default = {"unshard norm",   "unshard 2",    "reshard norm", "unshard 2.w1",
                               "unshard 1",      "reshard 2.w1", "reshard 2",    "unshard 1.w1",
                               "unshard 0",      "reshard 1.w1", "reshard 1",    "unshard 0.w1",
                               "unshard tokens", "reshard 0.w1", "reshard 0",    "reshard tokens"};
    const Events by_lists = {"unshard norm",   "unshard 2",    "reshard norm", "unshard 1",
                             "unshard 1.w1",   "unshard 2.w1", "reshard 2.w1", "reshard 2",
                             "unshard 0",      "unshard 0.w1", "reshard 1.w1", "reshard 1",
                             "unshard tokens", "reshard 0.w1", "reshard 0",    "reshard tokens"};
    Events by_lists_late = by_lists;
    std::rotate(by_lists_late.begin() + 3, by_lists_late.begin() + 5, by_lists_late.begin() + 6);
    EXPECT_EQ(record(Place::kNowhere, false, false), by_default);
    EXPECT_EQ(record(Place::kNowhere, false, true), by_lists);
    for (const auto& [place, reentrant] : kStyles) {
      SCOPED_TRACE(describe(place, reentrant));
      EXPECT_EQ(record(place, reentrant, false), by_default);
      EXPECT_EQ(record(place, reentrant, true), follows_forward(place, reentrant) ? by_lists_late : by_lists);
    }
  });
}

/// A unit in bf16 inside a region that works in fp32 and may recompute, alone or with the unit.
struct CastCase {
  CastCase(const ProcessGroupPtr& world, Place place, bool reentrant, std::optional<at::ScalarType> output_dtype)
      : unit(std::make_shared<Formula>(Sizes{{6, 6}},
                                       [this](const Weights& w, at::Tensor x) {
                                         seen_inputs.push_back(x.scalar_type());
                                         return at::linear(x, w[0]).exp();
                                       })),
        region({{6}}, [this](const Weights& w, at::Tensor x) {
          const at::Tensor y = unit->forward(x * w[0]);
          seen_outputs.push_back(y.scalar_type());
          return (y * w[0]).sin();
        }) {
    region.register_module("unit", unit);
    const RecomputeOptions options{.use_reentrant = reentrant, .preserve_rng_state = false};
    if (place == Place::kInUnits) recompute(*unit, options);
    if (place == Place::kAroundUnits) recompute(region, options);
    FullyShardOptions sharding{.mesh = flat_mesh(world), .reshard_after_forward = true};
    fully_shard(region, sharding_of_region(sharding, *unit, output_dtype));
  }

  static FullyShardOptions sharding_of_region(const FullyShardOptions& plain, Formula& unit,
                                              std::optional<at::ScalarType> output_dtype) {
    FullyShardOptions half = plain;
    half.mixed_precision.param_dtype = at::kBFloat16;
    half.mixed_precision.reduce_dtype = at::kFloat;
    half.mixed_precision.output_dtype = output_dtype;
    fully_shard(unit, half);
    return plain;
  }

  std::vector<at::Tensor> train() {
    const at::Tensor x = fixed({4, 6}, 5).requires_grad_();
    region.forward(x).to(at::kFloat).sum().backward();
    return {x.grad(), region.w[0].grad(), unit->w[0].grad()};
  }

  std::shared_ptr<Formula> unit;
  Formula region;
  std::vector<at::ScalarType> seen_inputs, seen_outputs;
};

void expect_same_casts(std::optional<at::ScalarType> output_dtype) {
  run_ranks(2, [&](const ProcessGroupPtr& world) {
    const auto expected = CastCase(world, Place::kNowhere, false, output_dtype).train();
    for (const auto& [place, reentrant] : kStyles) {
      if (place == Place::kInUnitsAndTheirParts) continue;
      SCOPED_TRACE(describe(place, reentrant));
      CastCase recomputed(world, place, reentrant, output_dtype);
      const auto results = recomputed.train();
      for (size_t i = 0; i < expected.size(); ++i) EXPECT_TRUE(at::equal(results[i], expected[i])) << "gradient " << i;
      const size_t outputs = place == Place::kAroundUnits ? 2 : 1;
      EXPECT_EQ(recomputed.seen_inputs, (std::vector<at::ScalarType>(2, at::kBFloat16)));
      EXPECT_EQ(recomputed.seen_outputs, (std::vector<at::ScalarType>(outputs, output_dtype.value_or(at::kBFloat16))));
    }
  });
}

TEST(FullyShardMixedPrecision, test_checkpoint_recompute_casts_forward_inputs) { expect_same_casts({}); }

TEST(FullyShardMixedPrecision, test_checkpoint_recompute_casts_outputs) { expect_same_casts(at::kFloat); }

}  // namespace
}  // namespace megashard::testing
