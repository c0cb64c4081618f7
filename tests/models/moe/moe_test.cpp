#include "models/moe/moe.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <nlohmann/json.hpp>

#include "framework/modules/wrap_policy.h"
#include "models/decoder/decoder_model.h"
#include "models/families/model_family.h"
#include "models/lora/lora.h"
#include "parallel/fsdp/detail/fsdp_state.h"
#include "parallel/fsdp/fully_shard.h"
#include "tests/support/diagnostics.h"
#include "tests/support/message_of.h"
#include "tests/support/model_results.h"
#include "tests/support/run_ranks.h"
#include "tests/support/seeded_init.h"
#include "tests/support/simulated_device.h"

namespace megashard::testing {
namespace {

using ::testing::HasSubstr;

constexpr int64_t kExperts = 10, kPerToken = 2, kLength = 2;

DecoderConfig moe_config(const nlohmann::ordered_json& changes = {}) {
  nlohmann::ordered_json json = {{"model_type", "qwen3_moe"},
                                 {"vocab_size", 40},
                                 {"hidden_size", 16},
                                 {"intermediate_size", 24},
                                 {"num_hidden_layers", 3},
                                 {"num_attention_heads", 2},
                                 {"num_key_value_heads", 1},
                                 {"head_dim", 8},
                                 {"moe_intermediate_size", 7},
                                 {"num_experts", kExperts},
                                 {"num_experts_per_tok", kPerToken},
                                 {"mlp_only_layers", {1}},
                                 {"initializer_range", 0.1}};
  if (!changes.is_null()) json.update(changes);
  return decoder_config_from_hf(HfConfig(json, "config.json"));
}

std::shared_ptr<DecoderModel> make_moe(const nlohmann::ordered_json& changes = {}, int ep_size = 1, int ep_rank = 0) {
  auto model = std::make_shared<DecoderModel>(decoder_network(moe_config(changes)),
                                              BuildContext{.experts = {.ranks = ep_size, .rank = ep_rank}});
  testing::init_weights(*model, 3);
  model->to(device_of_tests());
  return model;
}

/// One sequence for each rank. It has two tokens with two experts each, so that at least six of the ten experts of a
/// rank have no row.
at::Tensor tokens_of(int64_t first, int64_t sequences) {
  const auto all = at::arange(4 * kLength, at::kLong).view({4, kLength}) * 11;
  return all.narrow(0, first, sequences).remainder(40);
}

struct Trained {
  std::vector<double> losses;
  std::map<std::string, at::Tensor> gradients, weights;  // whole tensors, or this rank's parts
  std::map<std::string, std::vector<int64_t>> offsets;   // of a part in the whole
};

const nlohmann::ordered_json kBalanced = {
    {"output_router_logits", true}, {"router_aux_loss_coef", 0.3}, {"num_attention_heads", 4}};

/// Without `world`: trains on one rank, with as many sequences as the compared world has `ranks`. With `length`: one
/// sequence of that length, which the ranks share.
Trained train(const ProcessGroupPtr& world, int ranks, const Fsdp2Config* config = nullptr,
              const ActivationPlan& plan = {}, int ep_size = 1, int64_t length = 0) {
  const auto model =
      make_moe(length > 0 ? kBalanced : nlohmann::ordered_json(), ep_size, world ? world->rank() % ep_size : 0);
  CollectedDiagnostics told;
  const bool sharded = config != nullptr;
  if (sharded) {
    model->FSDP2Mixin::fully_shard({.process_group = world,
                                    .config = *config,
                                    .strictness = Strictness::kStrict,
                                    .sink = told.sink(),
                                    .activations = plan});
  }
  Batch input;
  input.set(kTokens, sharded ? tokens_of(world->rank(), 1) : tokens_of(0, ranks));
  double scale = 1.0 / static_cast<double>(input.tokens().numel());
  if (length > 0) {
    scale = (sharded ? world->size() : 1) / static_cast<double>(length);
    input.set(kTokens, (at::arange(length, at::kLong) * 7).remainder(40).view({1, length}));
    if (sharded) input.sequence = {world, length};
    input.set(kTokens, input.sequence.rows_of(input.tokens(), 1));
  }
  input.set(kLabels, (input.tokens() + 1).remainder(40));
  Trained trained;
  for (int step = 0; step < 2; ++step) {
    auto loss = testing::result_of(*model, input).sum() * scale;
    loss.backward();
    auto shared = loss.detach().to(at::kDouble);
    if (sharded) world->all_reduce(shared, ReduceOp::kSum).wait();
    trained.losses.push_back(shared.item<double>() / (sharded ? world->size() : 1));
    for (const auto& item : model->named_parameters()) {
      auto& parameter = item.value();
      EXPECT_TRUE(parameter.grad().defined()) << item.key();
      const auto piece = reshard_and_view(parameter);
      trained.offsets[item.key()] = piece.offsets;
      trained.gradients[item.key()] = parameter.grad().clone();
      const at::NoGradGuard no_grad;
      auto local = piece.local;
      local.sub_(parameter.grad(), 0.05);
      trained.weights[item.key()] = local.clone();
      parameter.mutable_grad().reset();
    }
  }
  return trained;
}

void expect_parts_of(const std::map<std::string, at::Tensor>& parts, const std::map<std::string, at::Tensor>& wholes,
                     const std::map<std::string, std::vector<int64_t>>& offsets, const std::string& what) {
  // fp32 sums over tokens and ranks in another order, of values near 1, after an optimizer step. Gradients of experts
  // are 1e-3 to 1e-2, so a wrong factor shows.
  constexpr double kMost = 2e-6;
  for (const auto& [name, mine] : parts) {
    auto expected = wholes.at(name);
    if (mine.numel() == 0) continue;
    for (int64_t dim = 0; dim < mine.dim(); ++dim)
      expected = expected.narrow(dim, offsets.at(name)[static_cast<size_t>(dim)], mine.size(dim));
    expected = expected.to(mine.device());
    const auto error = (mine - expected).abs().max();
    EXPECT_LE(error.item<double>(), kMost) << what << " " << name;
  }
}

TEST(Moe, TwoRanksTrainAsOneWhateverIsAUnit) {
  const Trained whole = train(nullptr, 2);
  struct Case {
    std::vector<std::string> units;
    int prefetch;
    ActivationPlan plan;
    std::optional<WrapPolicy> policy{};
  };
  // Classes as in ROLL's files: of one expert, which stands for all of a block, or of all.
  const auto by_class = [](const std::string& experts) {
    return WrapPolicy{.layer_classes = {{"Qwen3MoeAttention", "Qwen3MoeSparseMoeBlock"}}, .expert_classes = {experts}};
  };
  const std::string layers = "model.layers.{*}", experts = "model.layers.{0,2}.mlp.experts";
  const std::vector<Case> cases = {{{layers}, 0, {}},
                                   {{experts}, 0, {}},
                                   {{layers, experts}, 2, {}},
                                   {{layers, experts}, 0, {.recompute = {"moe"}}},
                                   {{experts, layers}, 0, {.recompute = {"layer"}}},
                                   {{}, 0, {}, by_class("Qwen3MoeMLP")},
                                   {{}, 0, {.recompute = {"layer"}}, by_class("Qwen3MoeExperts")}};
  for (size_t i = 0; i < cases.size(); ++i) {
    run_ranks(2, [&](const ProcessGroupPtr& world) {
      Fsdp2Config config;
      config.sub_modules_to_wrap = cases[i].units;
      config.wrap_policy = cases[i].policy;
      config.num_to_forward_prefetch = config.num_to_backward_prefetch = cases[i].prefetch;
      const Trained ours = train(world, 2, &config, cases[i].plan);
      for (size_t step = 0; step < whole.losses.size(); ++step)
        EXPECT_NEAR(ours.losses[step], whole.losses[step], 2e-6 * whole.losses[step]) << i;
      expect_parts_of(ours.gradients, whole.gradients, ours.offsets, c10::str("case ", i));
      expect_parts_of(ours.weights, whole.weights, ours.offsets, c10::str("case ", i));
    });
  }
}

TEST(Moe, RanksWithDifferentExpertsTrainAsOne) {
  const std::string layers = "model.layers.{*}", experts = "model.layers.{0,2}.mlp.experts";
  struct Case {
    int ranks;
    std::optional<int> shard, expert_shard;  // shard sizes: of experts, and of all other parameters
  };
  const std::vector<Case> cases = {{2, {}, {}}, {4, {}, {}}, {4, 2, {}}, {4, {}, 1}, {4, 2, 2}};
  for (size_t i = 0; i < cases.size(); ++i) {
    const auto& [ranks, shard, expert_shard] = cases[i];
    const Trained whole = train(nullptr, ranks);
    for (const int units : {0, 1, 2}) {
      // On the simulated device each layout has one kind of unit: all would take half a minute.
      if (on_simulated_device() && units != static_cast<int>(i % 3)) continue;
      std::map<std::string, int64_t> elements;  // on all ranks
      std::mutex mutex;
      run_ranks(ranks, [&](const ProcessGroupPtr& world) {
        Fsdp2Config config;
        config.sharding_size = shard;
        config.expert_shard_size = expert_shard;
        config.sub_modules_to_wrap = {layers};
        config.moe_modules = {"model.layers.{0,2}.mlp.experts"};
        if (units == 1) config.sub_modules_to_wrap->push_back(experts);
        if (units == 2)
          config.wrap_policy = {.layer_classes = {{"Qwen3MoeSparseMoeBlock"}}, .expert_classes = {"Qwen3MoeExperts"}};
        config.num_to_forward_prefetch = units == 1;
        const ActivationPlan plan{.recompute = std::vector<std::string>(units == 1, "layer")};
        const Trained ours = train(world, ranks, &config, plan, /*ep_size=*/2);
        const auto what = c10::str(ranks, " ranks ", shard.value_or(0), " ", units);
        for (size_t step = 0; step < whole.losses.size(); ++step)
          EXPECT_NEAR(ours.losses[step], whole.losses[step], 2e-6 * whole.losses[step]) << what;
        expect_parts_of(ours.gradients, whole.gradients, ours.offsets, what);
        expect_parts_of(ours.weights, whole.weights, ours.offsets, what);
        const std::scoped_lock lock(mutex);
        for (const auto& [name, part] : ours.weights) elements[name] += part.numel();
      });
      EXPECT_EQ(elements.size(), whole.weights.size());
      const int replicas = ranks / 2 / expert_shard.value_or(std::max(1, shard.value_or(ranks) / 2));
      const std::string up = "model.layers.0.mlp.experts.gate_up_proj";
      EXPECT_EQ(elements.at(up), replicas * whole.weights.at(up).numel());
    }
  }
}

TEST(Moe, RanksWithoutRowsOfASequenceTrainAsOne) {
  constexpr int64_t kRows = 9;  // 4 ranks have 3 3 3 0
  const Trained whole = train(nullptr, 1, nullptr, {}, /*ep_size=*/1, kRows);
  for (const int ep_size : {1, 2}) {
    run_ranks(4, [&](const ProcessGroupPtr& world) {
      Fsdp2Config config;
      config.sub_modules_to_wrap = {"model.layers.{*}"};
      const Trained ours = train(world, 4, &config, {}, ep_size, kRows);
      for (size_t step = 0; step < whole.losses.size(); ++step)
        EXPECT_NEAR(ours.losses[step], whole.losses[step], 2e-6 * whole.losses[step]) << ep_size;
      expect_parts_of(ours.gradients, whole.gradients, ours.offsets, c10::str(ep_size, " parts"));
    });
  }
}

TEST(Moe, ModulesOfExpertsAreAllOfThem) {
  run_ranks(2, [&](const ProcessGroupPtr& world) {
    const auto shard = [&](const std::string& name, int ep_size) {
      Fsdp2Config config;
      config.sub_modules_to_wrap.emplace();
      config.moe_modules = {name};
      CollectedDiagnostics told;
      make_moe({}, ep_size, world->rank() % ep_size)
          ->FSDP2Mixin::fully_shard({.process_group = world, .config = config, .sink = told.sink()});
      return told.text();
    };
    EXPECT_THAT(usage_error([&] { shard("model.layers.{0}.mlp.experts", 2); }),
                HasSubstr("moe_modules leaves out model.layers.2.mlp.experts."));
    EXPECT_THAT(usage_error([&] { shard("model.layers.{0,2}.mlp", 2); }),
                HasSubstr("moe_modules names model.layers.0.mlp, which is more than experts"));
    EXPECT_THAT(shard("model.layers.{0}.mlp.experts", 1), HasSubstr("expert_parallel_size is 1"));
  });
}

TEST(Moe, ExpertsOfABlockAreOneGroup) {
  run_ranks(2, [&](const ProcessGroupPtr& world) {
    Fsdp2Config config;
    config.wrap_policy.emplace().expert_classes = {"Qwen3MoeExperts"};
    const auto model = make_moe();
    model->FSDP2Mixin::fully_shard({.process_group = world, .config = config});
    std::map<std::string, const FsdpState*> groups;
    for (const auto& item : model->named_modules("", /*include_self=*/false))
      groups[item.key()] = fsdp_state(*item.value()).get();
    EXPECT_NE(groups.at("model.layers.0.mlp.experts"), nullptr);
    EXPECT_NE(groups.at("model.layers.2.mlp.experts"), nullptr);
    EXPECT_NE(groups.at("model.layers.0"), nullptr);
    EXPECT_EQ(groups.at("model.layers.0.mlp"), nullptr);
  });
}

TEST(Moe, ClassesOfExpertsThatNoBlockHas) {
  const auto model = make_moe();
  EXPECT_THAT(usage_error([&] { experts_of_policy(*model, {"Qwen3MoeExpert"}, {}); }),
              HasSubstr("moe_experts: the model has no module of class Qwen3MoeExpert"));
  EXPECT_EQ(experts_of_policy(*model, {"Qwen3MoeExperts"}, {}).size(), 2u);
  CollectedDiagnostics told;
  EXPECT_EQ(experts_of_policy(*model, {"Qwen3MoeMLP"}, told.sink()).size(), 2u);
  EXPECT_THAT(told.text(), HasSubstr("moe_experts: Qwen3MoeMLP is Qwen3MoeExperts in this model"));
}

/// Ranks get whole experts, or if there are more ranks, equal parts of one.
TEST(Moe, RanksHaveWholeExpertsOrPartsOfOne) {
  for (const auto& [ranks, sizes, offset] :
       {std::tuple{2, std::vector<int64_t>{5, 2, 8, 16}, std::vector<int64_t>{5, 0, 0, 0}},
        std::tuple{4, std::vector<int64_t>{1, 1, 4, 16}, std::vector<int64_t>{0, 0, 4, 0}}}) {
    run_ranks(ranks, [&](const ProcessGroupPtr& world) {
      const auto model = make_moe(
          {{"moe_intermediate_size", 8}, {"num_experts", world->size() == 2 ? 10 : 1}, {"num_experts_per_tok", 1}});
      model->FSDP2Mixin::fully_shard({.process_group = world, .config = {}});
      const auto view = reshard_and_view(model->named_parameters()["model.layers.0.mlp.experts.gate_up_proj"]);
      EXPECT_EQ(view.local.sizes(), at::IntArrayRef(sizes));
      if (world->rank() == 1) {
        EXPECT_EQ(view.offsets, offset);
      }
    });
  }
}

TEST(Moe, RanksThatShareAnExpert) {
  EXPECT_EQ(expert_shard_size(8, 8, 2, {}), 4);  // one copy, as for other parameters
  EXPECT_EQ(expert_shard_size(8, 4, 2, {}), 2);
  EXPECT_EQ(expert_shard_size(8, 2, 4, {}), 1);
  EXPECT_EQ(expert_shard_size(8, 8, 2, 2), 2);
  const auto message = [](int shard, int ep_size, std::optional<int> wanted) {
    return message_of([&] { expert_shard_size(12, shard, ep_size, wanted); });
  };
  EXPECT_THAT(message(12, 5, {}), HasSubstr("does not divide the 12 ranks; change one"));
  EXPECT_THAT(message(12, 2, 4), HasSubstr("is 4, which does not divide the 6 ranks"));
  EXPECT_THAT(message(4, 6, {}), HasSubstr("one must divide the other, or give expert_fully"));
}

TEST(Moe, ExpertsWithoutRowsHaveGradientsOfZeros) {
  const auto model = make_moe();
  Batch input;
  input.set(kTokens, tokens_of(0, 1));
  input.set(kLabels, input.tokens());
  testing::result_of(*model, input).sum().backward();
  int64_t without = 0;
  for (const auto& item : model->named_parameters()) {
    ASSERT_TRUE(item.value().grad().defined()) << item.key();
    if (!item.key().ends_with("experts.down_proj")) continue;
    for (const auto& expert : item.value().grad().unbind(0)) without += expert.abs().max().item<double>() == 0;
  }
  const int64_t most_used = kLength * kPerToken;  // for each of the two layers with experts
  EXPECT_GE(without, 2 * (kExperts - most_used));
  EXPECT_LT(without, 2 * kExperts);
}

TEST(Moe, AllLinearLayersButTheOutputsGetAdapters) {
  const auto model = make_moe();
  const int64_t count = add_lora(*model, {.rank = 2, .target_modules = {"all-linear"}});
  EXPECT_EQ(count, 3 * 4 + 3 + 2 * 3 * kExperts) << "attention, a dense MLP, experts";
  for (const auto& item : model->named_parameters())
    EXPECT_EQ(item.value().requires_grad(), is_lora_parameter(item.key())) << item.key();
}

TEST(Moe, AnAdapterOfATiedHeadIsRefused) {
  const LoraOptions options{.rank = 2, .target_modules = {"q_proj", "lm_head"}};
  EXPECT_THAT(message_of([&] {
                add_lora(*make_moe({{"tie_word_embeddings", true}}), options);
              }),
              HasSubstr("lm_head shares its weight with the embeddings"));
  EXPECT_EQ(add_lora(*make_moe(), options), 3 + 1);
}

TEST(Moe, NamesClassesAndArithmetic) {
  const auto model = make_moe();
  std::map<std::string, std::string> classes;
  for (const auto& item : model->named_modules("", /*include_self=*/false)) {
    const auto* hooked = dynamic_cast<HookedModule*>(item.value().get());
    const bool list = item.key().ends_with("layers");
    ASSERT_EQ(hooked == nullptr, list) << item.key();
    if (hooked != nullptr) classes[item.key()] = hooked->class_name();
  }
  EXPECT_EQ(classes.at("model.layers.0.mlp"), "Qwen3MoeSparseMoeBlock");
  EXPECT_EQ(classes.at("model.layers.0.mlp.gate"), "Qwen3MoeTopKRouter");
  EXPECT_EQ(classes.at("model.layers.2.mlp.experts"), "Qwen3MoeExperts");
  EXPECT_EQ(classes.at("model.layers.1.mlp"), "Qwen3MoeMLP");

  // A token's two experts count, however many there are: three products, once in forward and twice in backward.
  const double flops = model->training_flops(1, 5);
  EXPECT_EQ(make_moe({{"num_experts", 20}})->training_flops(1, 5), flops);
  EXPECT_DOUBLE_EQ(make_moe({{"num_experts_per_tok", 3}})->training_flops(1, 5) - flops,
                   2 * 5 * (3 * 2.0 * 16 * 7) * 3);

  EXPECT_THAT(
      [] {
        moe_config({{"num_experts_per_tok", 11}});
      },
      ::testing::ThrowsMessage<c10::Error>(HasSubstr("more experts than there are")));
}

}  // namespace
}  // namespace megashard::testing
