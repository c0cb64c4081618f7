// Models with a way of sharding of their own: hooks of FSDP2Mixin that they override, what becomes of their prefetch,
// and what is told of a mistake in them.

#include <ATen/ops/ones.h>
#include <gmock/gmock.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/linear.h>

#include "framework/modules/fsdp2_mixin.h"
#include "framework/modules/multi_modal_module.h"
#include "framework/modules/weight_init_mixin.h"
#include "tests/support/diagnostics.h"
#include "tests/support/formula.h"
#include "tests/support/run_ranks.h"

namespace megashard::testing {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

using Block = Hooked<torch::nn::LinearImpl>;

/// A plain layer, three blocks and a head.
class OwnModel : public MultiModalModule, public FSDP2Mixin {
 public:
  explicit OwnModel(double first_value = 0) {
    embed = register_module("embed", torch::nn::Linear(6, 6));
    blocks = register_module("blocks", torch::nn::ModuleList());
    for (int i = 0; i < 3; ++i) blocks->push_back(std::make_shared<Block>(6, 6));
    head = register_module("head", std::make_shared<Block>(6, 6));
    uint64_t seed = 1;
    for (auto& parameter : parameters()) parameter.set_data(fixed(parameter.sizes(), seed++) * 0.3 + first_value);
  }
  ModelOutput forward(Batch input) override {
    at::Tensor x = embed(input.tokens());
    for (const auto& block : *blocks) x = block->as<Block>()->forward(x).tanh();
    return {.logits = head->forward(x)};
  }
  int64_t vocab_size() const override { return 6; }
  std::string class_name() const override { return "Own"; }  // of the models below, too
  Block& block(size_t i) { return *blocks[i]->as<Block>(); }

  torch::nn::Linear embed{nullptr};
  torch::nn::ModuleList blocks{nullptr};
  std::shared_ptr<Block> head;

 protected:
  std::vector<std::string> default_modules_to_wrap() const override { return {"blocks.{*}", "head"}; }
};

struct TwoSelections : OwnModel {
  void set_fullyshard_modules_to_wrap() override {
    shard_matching({"head"});
    shard_matching({"blocks.{*}"});
  }
};

struct ByHand : OwnModel {
  void set_fullyshard_modules_to_wrap() override {
    megashard::fully_shard(*head, options());
    for (size_t i = 0; i < 3; ++i) megashard::fully_shard(block(i), options());
  }
};

/// As MindSpeed-MM's page has it.
struct ThreeCalls : OwnModel {
  void _fully_shard() override {
    set_recompute_modules_to_wrap();
    set_fullyshard_modules_to_wrap();
    const auto& config = request().config;
    set_modules_to_prefetch(config.num_to_forward_prefetch, config.num_to_backward_prefetch);
  }
};

struct WithoutRoot : OwnModel {
  using OwnModel::OwnModel;
  void _fully_shard() override { shard_matching({"blocks.{0-1}", "head"}); }
};

struct RootFirst : OwnModel {
  void _fully_shard() override {
    megashard::fully_shard(*this, options());
    shard_matching({"blocks.{*}"});
  }
};

struct TiedApart : OwnModel {
  TiedApart() { tie_parameter(*head, head->weight, block(0).weight); }
};

template <class Model>
std::string shard(Model& model, const ProcessGroupPtr& world, const Fsdp2Config& config = {}) {
  CollectedDiagnostics told;
  model.FSDP2Mixin::fully_shard({.process_group = world, .config = config, .sink = told.sink()});
  return told.text();
}

at::Tensor output_of(OwnModel& model, c10::Device device) {
  Batch input;
  input.set(kTokens, fixed({4, 6}, 9).to(device));
  return model(input).logits;
}

/// What a step gathers and frees, in order, and the gradients.
template <class Model>
std::pair<std::vector<std::string>, std::vector<at::Tensor>> step_of(const ProcessGroupPtr& world) {
  Model model;
  Fsdp2Config config;
  config.num_to_forward_prefetch = config.num_to_backward_prefetch = 2;
  EXPECT_THAT(shard(model, world, config), Not(HasSubstr("in no unit")));
  std::vector<std::string> events;
  set_schedule_observer(model,
                        [&](const char* event, const std::string& group) { events.push_back(event + (" " + group)); });
  output_of(model, world->device()).pow(2).sum().backward();
  std::vector<at::Tensor> gradients;
  for (const auto& parameter : model.parameters()) {
    EXPECT_TRUE(is_sharded(parameter));
    gradients.push_back(parameter.grad().cpu());
  }
  return {events, gradients};
}

TEST(OwnSharding, EveryWayPrefetchesAsTheDefault) {
  run_ranks(2, [](const ProcessGroupPtr& world) {
    const auto [events, gradients] = step_of<OwnModel>(world);
    const auto place = [&events = events](const char* event) { return std::ranges::find(events, event); };
    ASSERT_LT(place("unshard blocks.2"), place("reshard blocks.0")) << "two ahead";
    const auto expect_alike = [&, &events = events, &gradients = gradients](const auto& other) {
      EXPECT_EQ(other.first, events);
      for (size_t i = 0; i < gradients.size(); ++i) EXPECT_TRUE(at::equal(other.second[i], gradients[i])) << i;
    };
    expect_alike(step_of<TwoSelections>(world));
    expect_alike(step_of<ByHand>(world));
    expect_alike(step_of<ThreeCalls>(world));
  });
}

TEST(OwnSharding, WhatIsInNoUnitIsToldAndEqualOnAllRanks) {
  run_ranks(2, [](const ProcessGroupPtr& world) {
    WithoutRoot model(/*first_value=*/world->rank());
    EXPECT_THAT(shard(model, world),
                HasSubstr("4 parameters are in no unit (embed.weight, embed.bias, blocks.2.weight and 1 more): every "
                          "rank holds them whole"));
    EXPECT_TRUE(at::equal(model.embed->weight.cpu(), OwnModel().embed->weight.cpu())) << "the first rank's";
  });
}

TEST(OwnSharding, MistakesAreTheUsersOwn) {
  run_ranks(2, [](const ProcessGroupPtr& world) {
    RootFirst root_first;
    EXPECT_THAT(usage_error([&] { shard(root_first, world); }),
                HasSubstr("'weight' is 'blocks.2.weight' of a module around this one, which fully_shard took before: "
                          "call it on inner modules first, and on the whole model last"));
    OwnModel plain;
    Fsdp2Config config;
    config.sub_modules_to_wrap = {"embed"};
    EXPECT_THAT(usage_error([&] { shard(plain, world, config); }),
                HasSubstr("sub_modules_to_wrap names 'embed', which runs no hooks: make it a Hooked<M>."));
  });
}

TEST(OwnSharding, EndsOfATiedWeightStayInTheUnitAroundBoth) {
  run_ranks(2, [](const ProcessGroupPtr& world) {
    TiedApart tied;
    EXPECT_THAT(shard(tied, world), HasSubstr("blocks.0, head have one weight, so they stay in the unit around them"));
  });
}

TEST(OwnSharding, UnitsOfEveryCallTakeOutputsOfAnotherDtype) {
  run_ranks(2, [](const ProcessGroupPtr& world) {
    Fsdp2Config config;
    config.mixed_precision = {.param_dtype = at::kBFloat16, .output_dtype = at::kFloat};
    TwoSelections twice;
    EXPECT_THAT(shard(twice, world, config), Not(IsEmpty()));
    ByHand by_hand;
    shard(by_hand, world, config);
    for (OwnModel* model : {static_cast<OwnModel*>(&twice), static_cast<OwnModel*>(&by_hand)})
      EXPECT_EQ(output_of(*model, world->device()).scalar_type(), at::kFloat);
  });
}

struct NormedImpl : torch::nn::Module {
  NormedImpl() : norm(register_module("norm", torch::nn::BatchNorm1d(6))) {}
  at::Tensor forward(at::Tensor x) { return norm(x); }
  torch::nn::BatchNorm1d norm;
};
struct NormedModel : OwnModel {
  NormedModel() : normed(register_module("normed", std::make_shared<Hooked<NormedImpl>>())) {}
  ModelOutput forward(Batch input) override {
    return {.logits = normed->forward(OwnModel::forward(std::move(input)).logits)};
  }
  std::shared_ptr<Hooked<NormedImpl>> normed;
};

TEST(OwnSharding, BatchNormsTakeOneDtype) {
  run_ranks(2, [](const ProcessGroupPtr& world) {
    if (!world->device().is_cpu()) return;  // those of GPUs take both
    Fsdp2Config config;
    config.mixed_precision.param_dtype = at::kBFloat16;
    NormedModel refused, cast;
    EXPECT_THAT(
        usage_error([&] { shard(refused, world, config); }),
        HasSubstr("param_dtype: bf16 in the FSDP2 file does not go with normed.norm, a batch norm whose running "
                  "statistics are in fp32: on a CPU it takes weights and statistics of one dtype only; give "
                  "buffer_dtype: bf16 as well"));
    config.mixed_precision.buffer_dtype = at::kBFloat16;
    shard(cast, world, config);
    output_of(cast, world->device()).sum().backward();
    EXPECT_EQ(cast.normed->norm->running_mean.scalar_type(), at::kBFloat16);
    EXPECT_FALSE(at::equal(cast.normed->norm->running_var, at::ones({6}, at::kBFloat16)));
  });
}

/// MindSpeed-MM's names of modules, in a model of ours.
struct Translated : OwnModel {
  OtherPaths other_paths() const override { return {{"decoder.layers", "blocks"}, {"output_layer", "head"}}; }
};

TEST(OwnSharding, PatternsOfAnotherLayoutAreTranslated) {
  run_ranks(1, [](const ProcessGroupPtr& world) {
    Fsdp2Config config;
    config.sub_modules_to_wrap = {{"decoder.layers.{*}", "output_layer"}};
    config.shard_placement.dims = {{"decoder.layers.{*}", 1}};
    Translated model;
    EXPECT_THAT(shard(model, world, config),
                HasSubstr("FSDP2: sub_modules_to_wrap: decoder.layers.{*} is blocks.{*} in this model\n"));
    for (size_t i = 0; i < 3; ++i) EXPECT_TRUE(is_fsdp_module(model.block(i)));
    EXPECT_TRUE(is_fsdp_module(*model.head));
  });
}

TEST(OwnSharding, NoticesHaveTheKeysOfTheFile) {
  run_ranks(2, [](const ProcessGroupPtr& world) {
    Fsdp2Config roll, native;
    roll.wrap_policy.emplace();
    native.native_patterns = true;
    roll.offload_to_cpu = native.offload_to_cpu = true;
    OwnModel by_roll, by_plan, by_file;
    const auto of_roll = shard(by_roll, world, roll), of_plan = shard(by_plan, world, native);
    EXPECT_THAT(of_roll, HasSubstr("sharded over 2 ranks (all of them: fsdp_size is 1 or less, absent, or all ranks"));
    EXPECT_THAT(of_plan, HasSubstr("(all of them: fully_shard_parallel_size is auto, null or absent; 1 would"));
    EXPECT_THAT(shard(by_file, world),
                HasSubstr("(all of them: sharding_size is auto, null or absent; 1 would replicate)"));
    if (!world->device().is_cpu()) return;  // offload has an effect there
    EXPECT_THAT(of_roll, HasSubstr("FSDP2: offload_policy has no effect"));
    EXPECT_THAT(of_plan, HasSubstr("FSDP2: cpu_offload has no effect"));
  });
}

}  // namespace
}  // namespace megashard::testing
