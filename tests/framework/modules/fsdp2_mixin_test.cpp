// What the FSDP2 file and Megatron's flags make of recompute and offload.

#include "framework/modules/fsdp2_mixin.h"

#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/randn.h>
#include <gmock/gmock.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/linear.h>

#include "framework/modules/freeze.h"
#include "framework/modules/multi_modal_module.h"
#include "framework/modules/weight_init_mixin.h"
#include "framework/training/replicated_gradients.h"
#include "tests/support/diagnostics.h"
#include "tests/support/formula.h"
#include "tests/support/run_ranks.h"

namespace megashard::testing {
namespace {

using ::testing::HasSubstr;

struct PartImpl : torch::nn::Module {
  PartImpl() : linear(register_module("linear", torch::nn::Linear(6, 6))) {}
  at::Tensor forward(at::Tensor x) {
    ++runs;
    return linear(x).tanh();
  }
  torch::nn::Linear linear;
  int runs = 0;
};

struct PlannedLayerImpl : torch::nn::Module {
  PlannedLayerImpl() : mlp(register_module("mlp", std::make_shared<Hooked<PartImpl>>())) {}
  at::Tensor forward(at::Tensor x) {
    ++runs;
    return x + mlp->forward(x);
  }
  std::shared_ptr<Hooked<PartImpl>> mlp;
  int runs = 0;
};
using PlannedLayer = Hooked<PlannedLayerImpl>;

class PlannedModel : public MultiModalModule, public FSDP2Mixin {
 public:
  PlannedModel() {
    torch::nn::ModuleList list;
    for (int i = 0; i < 3; ++i) {
      layers.push_back(std::make_shared<PlannedLayer>());
      list->push_back(layers.back());
    }
    register_module("layers", list);
    uint64_t seed = 1;
    for (auto& parameter : parameters()) parameter.set_data(fixed(parameter.sizes(), seed++) * 0.3);
  }
  ModelOutput forward(Batch input) override {
    at::Tensor x = input.tokens();
    for (auto& layer : layers) x = layer->forward(x);
    return {.logits = x};
  }
  int64_t vocab_size() const override { return 6; }
  std::vector<std::string> groups() const {
    std::vector<std::string> found;
    for (const auto& item : named_modules("", /*include_self=*/false)) {
      if (is_fsdp_module(*item.value())) found.push_back(item.key());
    }
    return found;
  }

  std::vector<std::shared_ptr<PlannedLayer>> layers;

 protected:
  std::vector<std::string> default_modules_to_wrap() const override { return {"layers.{*}"}; }
  std::vector<std::string> patterns_of_part(const std::string& part) const override {
    if (part == "mlp" || part == "tower_layer") return {"layers.{*}.mlp"};
    return FSDP2Mixin::patterns_of_part(part);
  }
};

struct Step {
  std::vector<int> layer_runs, mlp_runs;
  std::vector<at::Tensor> gradients;
  std::string told;
};

Step run(const ProcessGroupPtr& world, const Fsdp2Config& config, const ActivationPlan& plan,
         const std::vector<std::string>& frozen = {}) {
  PlannedModel model;
  freeze_parameters(model, frozen);
  CollectedDiagnostics told;
  model.FSDP2Mixin::fully_shard({.process_group = world, .config = config, .sink = told.sink(), .activations = plan});
  Batch input;
  input.set(kTokens, fixed({4, 6}, 9));
  model(input).logits.pow(2).sum().backward();
  Step result;
  for (const auto& layer : model.layers) {
    result.layer_runs.push_back(layer->runs);
    result.mlp_runs.push_back(layer->mlp->runs);
  }
  for (const auto& parameter : model.parameters()) result.gradients.push_back(parameter.grad());
  result.told = told.text();
  return result;
}

TEST(Fsdp2Mixin, FlagsAndFileChooseWhatIsRecomputedAndOffloaded) {
  run_ranks(1, [](const ProcessGroupPtr& world) {
    const Step plain = run(world, {}, {});
    EXPECT_EQ(plain.layer_runs, (std::vector<int>{1, 1, 1}));
    const auto check = [&](const Fsdp2Config& config, const ActivationPlan& plan, const std::vector<int>& layer_runs,
                           const std::vector<int>& mlp_runs) {
      const Step other = run(world, config, plan);
      EXPECT_EQ(other.layer_runs, layer_runs);
      EXPECT_EQ(other.mlp_runs, mlp_runs);
      for (size_t i = 0; i < plain.gradients.size(); ++i)
        EXPECT_TRUE(at::equal(other.gradients[i], plain.gradients[i])) << i;
      return other.told;
    };
    const std::vector<int> once(3, 1), twice(3, 2);
    check({}, {.recompute = {"layer"}}, twice, twice);
    check({}, {.recompute = {"layer"}, .recompute_layers = 2}, {2, 2, 1}, {2, 2, 1});
    check({}, {.recompute = {"mlp"}}, once, twice);
    EXPECT_THAT(check({}, {.recompute_towers = true}, once, twice), HasSubstr("recompute: also 3 layers of the tower"));
    EXPECT_EQ(run(world, {}, {.recompute_towers = true}, {"layers.1.mlp"}).mlp_runs, (std::vector<int>{2, 1, 2}));
    EXPECT_THAT(run(world, {}, {.recompute_towers = true}, {"layers.0.m", "layers.1.m", "layers.2.mlp.linear.w"}).told,
                HasSubstr("also the layer of the tower (layers.2.mlp), which is trained"));
    const auto told = check({}, {.offload = {"layer"}, .offload_layers = 2, .min_offloaded_elements = 1}, once, once);
    EXPECT_THAT(told, HasSubstr("activation offload layer: layers.{*} -> 3 modules"));
    EXPECT_EQ(told.find("on CPUs this costs time and memory") != told.npos, world->device().is_cpu());
    Fsdp2Config in_file;
    in_file.recompute_modules = in_file.offload_modules = {"layers.{0-1}"};
    in_file.min_offloaded_tensor_size = 1;
    check(in_file, {}, {2, 2, 1}, {2, 2, 1});
    in_file.use_reentrant = false;
    in_file.recompute_save_ops = {"aten::addmm"};
    check(in_file, {}, {2, 2, 1}, {2, 2, 1});

    EXPECT_THAT(usage_error([&] { run(world, in_file, {.recompute = {"layer"}}); }), HasSubstr("exclude each other"));
    EXPECT_THAT(usage_error([&] { run(world, in_file, {.offload = {"layer"}}); }), HasSubstr("exclude each other"));
    EXPECT_THAT(usage_error([&] { run(world, {}, {.recompute = {"core_attn"}}); }), HasSubstr("has no core_attn"));
    Fsdp2Config alone;
    alone.recompute_save_ops = {"aten::mm"};
    EXPECT_THAT(usage_error([&] { run(world, alone, {}); }), HasSubstr("needs recompute_modules"));
  });
}

/// A model of named classes with the group of each module that is one.
struct EmbeddingImpl : torch::nn::Module {
  EmbeddingImpl() : weight(register_parameter("weight", fixed({8, 6}, 3))) {}
  at::Tensor forward(const at::Tensor& x) { return x + weight.select(0, 0); }
  at::Tensor weight;
};
struct HeadImpl : torch::nn::Module {
  HeadImpl() : weight(register_parameter("weight", fixed({8, 6}, 4))) {}
  at::Tensor forward(const at::Tensor& x) { return x.matmul(weight.t()); }
  at::Tensor weight;
};

class ClassedModel : public PlannedModel {
 public:
  explicit ClassedModel(bool tied) {
    embedding = register_module("embed_tokens", std::make_shared<Hooked<EmbeddingImpl>>());
    head = register_module("lm_head", std::make_shared<Hooked<HeadImpl>>());
    if (tied) tie_parameter(*head, head->weight, embedding->weight);
  }
  ModelOutput forward(Batch input) override {
    input.set(kTokens, embedding->forward(input.tokens()));
    return {.logits = head->forward(PlannedModel::forward(std::move(input)).logits)};
  }
  std::shared_ptr<Hooked<EmbeddingImpl>> embedding;
  std::shared_ptr<Hooked<HeadImpl>> head;
};

TEST(Fsdp2Mixin, WrapsByClass) {
  run_ranks(2, [](const ProcessGroupPtr& world) {
    std::string told;
    const auto groups = [&](bool tied, const WrapPolicy& policy) {
      ClassedModel model(tied);
      CollectedDiagnostics diagnostics;
      Fsdp2Config config;
      config.wrap_policy = policy;
      model.FSDP2Mixin::fully_shard({.process_group = world, .config = config, .sink = diagnostics.sink()});
      Batch input;
      input.set(kTokens, fixed({4, 6}, 9));
      model(input).logits.sum().backward();
      told = diagnostics.text();
      return model.groups();
    };
    const std::vector<std::string> layers = {"layers.0", "layers.1", "layers.2"};
    const auto with = [&](std::vector<std::string> others) {
      others.insert(others.begin(), layers.begin(), layers.end());
      return others;
    };
    EXPECT_EQ(groups(false, {}), with({"embed_tokens"}));
    EXPECT_EQ(groups(false, {.layer_classes = {}, .lm_output = true}), with({"embed_tokens", "lm_head"}));
    EXPECT_EQ(groups(true, {.layer_classes = {}, .embeddings = true, .lm_output = true}), layers);
    EXPECT_THAT(told, HasSubstr("embed_tokens stays in the root group, because its weight is tied"));
    EXPECT_EQ(groups(true, {.layer_classes = {{"Part", "PlannedLayer"}}}),
              (std::vector<std::string>{"layers.0.mlp", "layers.1.mlp", "layers.2.mlp"}))
        << "of nested matches the inner ones";
    EXPECT_THAT(told, HasSubstr("wrap_policy: Part -> 3 modules (layers.0.mlp .. layers.2.mlp)"));
    EXPECT_THAT(usage_error([&] { groups(true, {.layer_classes = {{"PlannedLayr"}}}); }),
                HasSubstr("no module of class PlannedLayr; did you mean PlannedLayer?"));
  });
}

/// A model with its own choices: the middle layer is recomputed, mlps are units, and two gathers go ahead.
class ChoosingModel : public PlannedModel {
 protected:
  void set_recompute_modules_to_wrap() override { recompute_matching({"layers.1"}); }
  void set_fullyshard_modules_to_wrap() override { shard_matching({"layers.{*}.mlp"}); }
  void set_modules_to_prefetch(int forward, int backward) override {
    EXPECT_EQ(forward, 0);
    FSDP2Mixin::set_modules_to_prefetch(2, backward);
  }
};

TEST(Fsdp2Mixin, OverriddenHooksChooseWhatIsRecomputedWrappedAndPrefetched) {
  run_ranks(2, [](const ProcessGroupPtr& world) {
    ChoosingModel model;
    model.FSDP2Mixin::fully_shard({.process_group = world});
    EXPECT_EQ(model.groups(), (std::vector<std::string>{"layers.0.mlp", "layers.1.mlp", "layers.2.mlp"}));
    std::vector<std::string> events;
    set_schedule_observer(model, [&](const char* event, const std::string& group) {
      if (group.starts_with("layers")) events.push_back(event + (" " + group));
    });
    Batch input;
    input.set(kTokens, fixed({4, 6}, 9));
    const at::Tensor loss = model(input).logits.sum();
    ASSERT_GE(events.size(), 4U);
    events.resize(4);
    EXPECT_EQ(events, (std::vector<std::string>{"unshard layers.0.mlp", "unshard layers.1.mlp", "unshard layers.2.mlp",
                                                "reshard layers.0.mlp"}));
    loss.backward();
    std::vector<int> runs;
    for (const auto& layer : model.layers) runs.push_back(layer->runs);
    EXPECT_EQ(runs, (std::vector<int>{1, 2, 1}));
  });
}

TEST(Fsdp2Mixin, FrozenParametersGetNothing) {
  run_ranks(2, [](const ProcessGroupPtr& world) {
    const auto gradients = [&](const std::vector<std::string>& prefixes, int64_t* frozen) {
      PlannedModel model;
      *frozen = freeze_parameters(model, prefixes);
      model.FSDP2Mixin::fully_shard({.process_group = world, .config = {}, .sink = {}});
      Batch input;
      input.set(kTokens, fixed({4, 6}, 9));
      model(input).logits.pow(2).sum().backward();
      std::vector<at::Tensor> result;
      for (const auto& parameter : model.parameters()) result.push_back(parameter.grad());
      return result;
    };
    int64_t frozen = 0;
    const auto all = gradients({}, &frozen);
    // A whole group, and half of another.
    const auto some = gradients({"layers.0", "layers.1.mlp.linear.b"}, &frozen);
    EXPECT_EQ(frozen, 42 + 6);
    for (size_t i = 0; i < all.size(); ++i) {
      const bool trained = i == 2 || i > 3;
      ASSERT_EQ(some[i].defined(), trained) << i;
      if (!trained) continue;
      EXPECT_TRUE(at::equal(some[i], all[i])) << i;
    }
    EXPECT_THAT(usage_error([&] { gradients({"layer.0"}, &frozen); }),
                HasSubstr("begins with \"layer.0\"; did you mean layers.0?"));
    EXPECT_THAT(usage_error([&] { gradients({"layers."}, &frozen); }), HasSubstr("freezes every parameter"));
  });
}

TEST(Fsdp2Mixin, IgnoredModulesAreNotTrainedApart) {
  run_ranks(2, [](const ProcessGroupPtr& world) {
    const auto shard = [&](PlannedModel& model, bool replicated, bool trains = true) {
      Fsdp2Config config;
      config.ignored_modules = {"layers.1.mlp", "layers.2"};
      config.ignored_modules_replicated = replicated;
      model.FSDP2Mixin::fully_shard({.process_group = world, .config = config, .trains = trains});
    };
    PlannedModel refused, frozen, evaluated;
    EXPECT_THAT(usage_error([&] { shard(refused, false); }),
                HasSubstr("leaves 4 trainable parameters out of every reduction "
                          "(layers.1.mlp.linear.weight, layers.1.mlp.linear.bias, "
                          "layers.2.mlp.linear.weight and 1 more), so each of the 2 ranks"));
    freeze_parameters(frozen, {"layers.1", "layers.2"});
    shard(frozen, false);
    shard(evaluated, false, /*trains=*/false);

    // The mean of both ranks' gradients, and rank 0's values to begin with.
    PlannedModel model, whole;
    const auto backward = [](PlannedModel& of, uint64_t seed) {
      Batch input;
      input.set(kTokens, fixed({4, 6}, seed));
      of(input).logits.pow(2).sum().backward();
    };
    for (uint64_t seed : {7, 8}) backward(whole, seed);
    for (const char* ignored : {"layers.1", "layers.2"}) {
      for (const auto& item : model.named_parameters()) {
        if (item.key().starts_with(ignored)) item.value().detach().add_(world->rank());
      }
    }
    shard(model, true);
    backward(model, 7 + static_cast<uint64_t>(world->rank()));
    const auto replicated = replicated_parameters(model.parameters());
    ASSERT_EQ(replicated.size(), 4u);
    reduce_replicated_gradients(replicated, *world);
    const auto expected = whole.parameters();
    for (size_t i = 0; i < replicated.size(); ++i) {
      EXPECT_TRUE(at::equal(replicated[i], expected[2 + i])) << i;
      EXPECT_TRUE(at::allclose(replicated[i].grad(), expected[2 + i].grad() / 2)) << i;
    }
  });
}

TEST(Fsdp2Mixin, GradientsOfReplicatedParametersAreMeans) {
  run_ranks(3, [](const ProcessGroupPtr& world) {
    const float rank = static_cast<float>(world->rank());
    std::vector<at::Tensor> parameters;
    for (const auto dtype : {at::kFloat, at::kBFloat16, at::kFloat})
      parameters.push_back(at::ones({2, 2}, dtype).set_requires_grad(true));
    parameters[0].mutable_grad() = at::full({2, 2}, 3 * rank);
    if (world->rank() == 1) parameters[1].mutable_grad() = at::full({2, 2}, 6, at::kBFloat16);
    reduce_replicated_gradients(parameters, *world);
    EXPECT_TRUE(at::equal(parameters[0].grad(), at::full({2, 2}, 3.f)));
    EXPECT_TRUE(at::equal(parameters[1].grad(), at::full({2, 2}, 2, at::kBFloat16)));
    EXPECT_FALSE(parameters[2].grad().defined());
  });
}

TEST(Fsdp2Mixin, ContradictionsOfTheFileAreRefused) {
  run_ranks(2, [](const ProcessGroupPtr& world) {
    const auto shard = [&](const Fsdp2Config& config) {
      PlannedModel model;
      model.FSDP2Mixin::fully_shard({.process_group = world, .config = config});
      Batch input;
      input.set(kTokens, fixed({4, 6}, 9));
      return model(input).logits.scalar_type();
    };
    Fsdp2Config config;
    config.mixed_precision.output_dtype = at::kBFloat16;
    EXPECT_EQ(usage_error([&] { shard(config); }),
              "output_dtype: bf16 in the FSDP2 file makes layers.0 return bf16, but "
              "layers.1.mlp.linear behind it computes in fp32; set param_dtype: bf16 as well, or "
              "leave output_dtype out.");
    config.sub_modules_to_wrap.emplace();  // nothing is behind the root
    EXPECT_EQ(shard(config), at::kBFloat16);
    config.mixed_precision = {.param_dtype = at::kBFloat16, .output_dtype = at::kFloat};
    config.sub_modules_to_wrap = {"layers.{*}"};  // each casts what it gets
    EXPECT_EQ(shard(config), at::kFloat);
    config.sub_modules_to_wrap = {"layers.0"};
    EXPECT_THAT(usage_error([&] { shard(config); }),
                HasSubstr("behind it computes in bf16; wrap that too (sub_modules_to_wrap)"));
    config = {};
    config.reshard_after_forward = ReshardAfterForward::to(3);
    EXPECT_THAT(usage_error([&] { shard(config); }),
                HasSubstr("reshard_after_forward: 3 in the FSDP2 file does not divide the 2 ranks"));
  });
}

TEST(Fsdp2Mixin, KeysWithoutEffectAreTold) {
  run_ranks(2, [](const ProcessGroupPtr& world) {
    CollectedDiagnostics told;
    Fsdp2Config config;
    config.offload_to_cpu = true;
    config.mixed_precision.cast_forward_inputs = false;
    config.min_offloaded_tensor_size = 5;
    config.use_reentrant = false;
    config.ignored_modules_replicated = true;
    config.expert_shard_size = 2;
    PlannedModel model;
    model.FSDP2Mixin::fully_shard({.process_group = world, .config = config, .sink = told.sink()});
    const auto told_of = [&](const std::string& key) {
      return told.text().find("FSDP2: " + key + " has no effect: ") != std::string::npos;
    };
    for (const char* key : {"cast_forward_inputs", "min_offloaded_tensor_size", "use_reentrant",
                            "ignored_modules_replicated", "expert_fully_shard_parallel_size"}) {
      EXPECT_TRUE(told_of(key)) << key << " in " << told.text();
    }
    EXPECT_EQ(told_of("offload_to_cpu"), world->device().is_cpu());
  });
}

}  // namespace
}  // namespace megashard::testing
