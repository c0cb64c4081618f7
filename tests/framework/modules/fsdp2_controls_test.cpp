// Keys of the FSDP2 file that reach fully_shard's options and controls: each shows an effect.

#include "framework/modules/fsdp2_controls.h"

#include <ATen/Functions.h>
#include <gmock/gmock.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/linear.h>

#include "framework/modules/fsdp2_mixin.h"
#include "framework/modules/multi_modal_module.h"
#include "parallel/fsdp/detail/fsdp_state.h"
#include "tests/support/diagnostics.h"
#include "tests/support/formula.h"
#include "tests/support/recording_group.h"
#include "tests/support/run_ranks.h"
#include "tests/support/simulated_device.h"

namespace megashard::testing {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

struct ScaledImpl : torch::nn::Module {
  ScaledImpl()
      : inner(register_module("inner", torch::nn::Linear(8, 6))),
        outer(register_module("outer", torch::nn::Linear(6, 8))),
        scale(register_buffer("scale", at::full({8}, 1.0 + 1.0 / 1024))) {}
  at::Tensor forward(at::Tensor x) {
    if (!is_used) return x * scale;
    return x * scale + outer(inner(x).tanh());
  }
  torch::nn::Linear inner, outer;
  at::Tensor scale;
  bool is_used = true;
};
using Scaled = Hooked<ScaledImpl>;

class ScaledModel : public MultiModalModule, public FSDP2Mixin {
 public:
  ScaledModel() {
    torch::nn::ModuleList list;
    for (int i = 0; i < 3; ++i) {
      layers.push_back(std::make_shared<Scaled>());
      list->push_back(layers.back());
    }
    register_module("layers", list);
    output_layer = register_module("output_layer", torch::nn::Linear(8, 8));
    uint64_t seed = 1;
    for (auto& parameter : parameters()) parameter.set_data(fixed(parameter.sizes(), seed++) * 0.3);
  }
  ModelOutput forward(Batch input) override {
    at::Tensor x = input.tokens();
    for (auto& layer : layers) x = layer->forward(x);
    return {.logits = output_layer(x)};
  }
  int64_t vocab_size() const override { return 8; }

  std::vector<std::shared_ptr<Scaled>> layers;
  torch::nn::Linear output_layer{nullptr};

 protected:
  std::vector<std::string> default_modules_to_wrap() const override { return {"layers.{*}"}; }
};

std::string shard(ScaledModel& model, const ProcessGroupPtr& world, const Fsdp2Config& config) {
  CollectedDiagnostics told;
  model.FSDP2Mixin::fully_shard({.process_group = world, .config = config, .sink = told.sink()});
  return told.text();
}

at::Tensor output_of(ScaledModel& model, c10::Device device) {
  Batch input;
  input.set(kTokens, fixed({4, 8}, 9).to(device));
  return model(input).logits;
}

void expect_gradients_of(ScaledModel& plain, ScaledModel& sharded) {
  const auto theirs = plain.named_parameters(), ours = sharded.named_parameters();
  for (const auto& item : ours) {
    const at::Tensor whole = theirs[item.key()].grad().cpu();
    EXPECT_TRUE(at::allclose(item.value().grad().cpu(), part_like(whole, item.value()), 1e-5, 1e-6)) << item.key();
  }
}

TEST(Fsdp2Controls, GradientsAndBuffersHaveTheDtypesOfTheFile) {
  run_ranks(2, [](const ProcessGroupPtr& world) {
    Fsdp2Config config;
    config.mixed_precision.grad_dtype = at::kBFloat16;
    config.mixed_precision.buffer_dtype = at::kHalf;
    ScaledModel model;
    shard(model, world, config);
    output_of(model, world->device()).sum().backward();
    for (const auto& parameter : model.parameters()) {
      EXPECT_EQ(parameter.scalar_type(), at::kFloat);
      EXPECT_EQ(parameter.grad().scalar_type(), at::kBFloat16);
    }
    for (const auto& buffer : model.buffers()) EXPECT_EQ(buffer.scalar_type(), at::kHalf);
  });
}

TEST(Fsdp2Controls, AParameterThatARankDoesNotUseIsZeroOrAnError) {
  for (const auto unused : {UnusedParameters::kZeroFill, UnusedParameters::kError}) {
    run_ranks(2, [=](const ProcessGroupPtr& world) {
      Fsdp2Config config;
      config.unused_parameters = unused;
      ScaledModel model;
      shard(model, world, config);
      model.layers[1]->is_used = world->rank() == 0;
      const at::Tensor loss = output_of(model, world->device()).sum();
      if (unused == UnusedParameters::kZeroFill) {
        loss.backward();
        EXPECT_GT(model.layers[1]->inner->weight.grad().abs().sum().item<double>(), 0);
      } else {
        EXPECT_THAT(message_of([&] { loss.backward(); }), HasSubstr("layers.1.inner.weight"));
      }
    });
  }
}

TEST(Fsdp2Controls, ParametersAreCutWhereTheFileSays) {
  run_ranks(4, [](const ProcessGroupPtr& world) {
    ScaledModel plain;
    output_of(plain, world->device()).sum().backward();
    const auto sizes_with = [&](const ShardDimRule& rule) {
      Fsdp2Config config;
      config.shard_placement = rule;
      ScaledModel model;
      shard(model, world, config);
      output_of(model, world->device()).sum().backward();
      expect_gradients_of(plain, model);
      return std::vector{model.layers[0]->inner->weight.sizes().vec(), model.layers[0]->outer->weight.sizes().vec()};
    };
    using Size = std::vector<int64_t>;
    // Of 6 rows, two ranks have two, one has none: with auto all have a part of the 8 columns.
    const int64_t rows = world->rank() < 3 ? 2 : 0;
    EXPECT_THAT(sizes_with({}), ElementsAre(Size{rows, 8}, Size{2, 6}));
    EXPECT_THAT(sizes_with({.divisible = true}), ElementsAre(Size{6, 2}, Size{2, 6}));
    EXPECT_THAT(sizes_with({.dims = {{"layers.{*}.inner", -1}}}), ElementsAre(Size{6, 2}, Size{2, 6}));
    EXPECT_THAT(sizes_with({.dims = {{"layers.{*}.inner", 1}, {"layers.0.inner", 0}}}),
                ElementsAre(Size{rows, 8}, Size{2, 6}));
    EXPECT_EQ(usage_error([&] {
                sizes_with({.dims = {{"layers.{1-2}", 1}}});
              }),
              "shard_placement in the FSDP2 file cuts layers.1.outer.weight of sizes [8, 6] along dimension 1, which "
              "the 4 ranks that share it do not divide; choose another dimension, or auto.");
  });
}

TEST(Fsdp2Controls, MatricesAreGatheredInFp8) {
  run_ranks(2, [](const ProcessGroupPtr& world) {
    const auto run = [&](const std::optional<Float8Scale>& scale, const std::vector<std::string>& modules) {
      std::vector<CollectiveCall> calls;
      Fsdp2Config config;
      config.fp8_all_gather = scale;
      config.fp8_all_gather_modules = modules;
      ScaledModel model;
      const auto told = shard(model, std::make_shared<RecordingGroup>(world, calls), config);
      const at::Tensor output = output_of(model, world->device());
      int64_t bytes = 0;
      for (const auto& call : calls) bytes += call.numel * (call.operation == "all_gather");
      output.sum().backward();
      return std::tuple{told, output.detach().cpu(), bytes};
    };
    const auto [nothing, exact, all_bytes] = run(std::nullopt, {});
    EXPECT_THAT(nothing, Not(HasSubstr("fp8")));
    const auto [amax_told, amax, bytes] = run(Float8Scale::kAmax, {});
    EXPECT_THAT(amax_told, HasSubstr("fp8_all_gather: 6 matrices are gathered as float8_e4m3fn"));  // no output layer
    EXPECT_LT(bytes, all_bytes * 2 / 3);  // biases and the output layer are as they were
    const double distance = ((amax - exact).abs().max() / exact.abs().max()).item<double>();
    EXPECT_GT(distance, 0);
    EXPECT_LT(distance, 0.1);  // three digits of the weights are left
    EXPECT_FALSE(at::equal(std::get<1>(run(Float8Scale::kPowerOfTwo, {})), amax));
    const auto [one_told, one, one_bytes] = run(Float8Scale::kAmax, {"layers.1.inner"});
    EXPECT_THAT(one_told, HasSubstr("fp8_all_gather: 1 matrix is gathered"));
    EXPECT_TRUE(bytes < one_bytes && one_bytes < all_bytes) << one_bytes;
    EXPECT_THAT(std::get<0>(run(std::nullopt, {"layers.1.inner"})),
                HasSubstr("fp8_all_gather_modules has no effect: it belongs to fp8_all_gather"));
  });
}

TEST(Fsdp2Controls, SeveralReductionsMayBeInFlight) {
  run_ranks(2, [](const ProcessGroupPtr& world) {
    for (const int buffers : {1, 3}) {
      Fsdp2Config config;
      config.reduce_scatter_max_input_buffers = buffers;
      ScaledModel model;
      shard(model, world, config);
      output_of(model, world->device()).sum().backward();
      EXPECT_EQ(fsdp_state(*model.layers[2])->ensure_context().comm->max_reducing, static_cast<size_t>(buffers));
    }
  });
}

TEST(Fsdp2Controls, BuffersAreOfTheGroupsMemoryOnADevice) {
  for (const auto& [memory, operation] :
       {std::pair{GroupMemory::kRegistered, "allocate"}, std::pair{GroupMemory::kSymmetric, "allocate_symmetric"}}) {
    run_ranks(2, [memory = memory, operation = operation](const ProcessGroupPtr& world) {
      std::vector<CollectiveCall> calls;
      Fsdp2Config config;
      config.communication_memory = memory;
      ScaledModel model;
      const auto told = shard(model, std::make_shared<RecordingGroup>(world, calls), config);
      output_of(model, world->device()).sum().backward();
      const bool on_cpu = world->device().is_cpu();
      EXPECT_EQ(count(calls, operation), on_cpu ? 0 : count(calls, "all_gather") + 2 * count(calls, "reduce_scatter"));
      EXPECT_THAT(told, on_cpu ? HasSubstr("communication_memory has no effect: it is NCCL's, which needs GPUs")
                               : HasSubstr("FSDP2"));
    });
  }
}

}  // namespace
}  // namespace megashard::testing
