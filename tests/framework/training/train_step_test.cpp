#include "framework/training/train_step.h"

#include <ATen/Functions.h>
#include <c10/util/StringUtil.h>
#include <gmock/gmock.h>

#include "framework/objectives/objectives.h"
#include "framework/objectives/sequences.h"
#include "tests/support/default_device.h"
#include "tests/support/formula.h"
#include "tests/support/run_ranks.h"
#include "tests/support/simulated_device.h"

namespace megashard::testing {
namespace {

constexpr int64_t kWords = 11, kRows = 4, kLength = 6;
constexpr double kAuxCoefficient = 0.5, kBeta = 0.3, kNll = 0.7;
constexpr double kAuxTokens = 7, kSumCoefficient = 0.01;

/// Counts the words of each step, and keeps those of the last.
class WordCounter : public torch::nn::Module, public EndsSteps {
 public:
  WordCounter() : last(register_buffer("last", at::zeros({kWords}))) {}
  void count(const at::Tensor& tokens) {
    if (!counts_.defined()) counts_ = at::zeros_like(last);
    const at::Tensor words = tokens.flatten();
    counts_.scatter_add_(0, words, at::ones_like(words, counts_.options()));
  }
  at::Tensor take_counts() override { return std::exchange(counts_, {}); }
  void end_step(const at::Tensor& sums) override { last.copy_(sums); }

  at::Tensor last;

 private:
  at::Tensor counts_;
};

/// Predicts a token from the one before it. Its aux terms are sizes of its weights; the second is said to be a mean
/// over kAuxTokens.
class Bigrams : public MultiModalModule {
 public:
  Bigrams()
      : weight(register_parameter("weight", fixed({kWords, kWords}, 1))),
        counter(register_module("counter", std::make_shared<WordCounter>())) {}
  ModelOutput forward(Batch input) override {
    const at::Tensor tokens = input.tokens();
    if (is_training()) counter->count(tokens);
    const at::Tensor logits = weight.index_select(0, tokens.flatten());
    const at::Tensor losses = at::cross_entropy_loss(logits, input.labels().flatten(), {}, at::Reduction::None);
    const at::Tensor size = weight.square().mean();
    return {.token_losses = losses.view(tokens.sizes()),
            .aux = {{.name = "size", .value = size * kAuxCoefficient, .metric = size.detach()},
                    {.name = "sum",
                     .value = weight.sum() * kSumCoefficient,
                     .metric = size.detach(),
                     .tokens = at::full({}, kAuxTokens, size.options())}}};
  }
  int64_t vocab_size() const override { return kWords; }
  void check_sequence_ranks(int64_t /*ranks*/) const override {}

  at::Tensor weight;
  std::shared_ptr<WordCounter> counter;
};

struct Case {
  const char* objective = kNextToken;
  bool per_token = false;
  int64_t micro_batches = 1;
  bool scales = false;
  int replicas = 2, sequence_ranks = 1;
  bool by_weights = false;
  double nll = 0;  // weight of a second mean
};

std::ostream& operator<<(std::ostream& out, const Case& each) {
  return out << each.objective << (each.per_token ? ", over all tokens" : "") << ", " << each.micro_batches
             << " micro batches" << (each.scales ? ", scaled" : "") << (each.by_weights ? ", by weights" : "")
             << (each.nll == 0 ? "" : ", two means") << ", " << each.replicas << " x " << each.sequence_ranks
             << " ranks";
}

Batch batch_of(int64_t replica, int64_t micro_batch) {
  const MadeOnTheHost on_host;
  const auto seed = static_cast<uint64_t>(10 * replica + micro_batch + 3);
  Batch batch;
  const auto words = [](uint64_t of) { return fixed({kRows, kLength}, of).mul(1e3).abs().to(at::kLong) % kWords; };
  batch.set(kTokens, words(seed));
  batch.set(kLabels, words(seed + 100));
  const at::Tensor mask = fixed({kRows, kLength}, seed + 200).gt(-0.5).to(at::kFloat);
  batch.set(kLossMask, mask, Axis::kToken, /*is_input=*/false);
  batch.set("ref_log_probs", fixed({kRows, kLength}, seed + 300) - 2, Axis::kToken, /*is_input=*/false);
  return batch;
}

struct Expected {
  at::Tensor gradient, words;
  double loss = 0;
};

/// The whole step on one rank, in fp64, from the formulas.
Expected expected_of(const Case& of) {
  const MadeOnTheHost on_host;
  const at::Tensor weight = Bigrams().weight.detach().to(at::kDouble).requires_grad_();
  const double parts = static_cast<double>(of.replicas * of.micro_batches);
  at::Tensor total = weight.square().mean() * kAuxCoefficient, sum = at::zeros({}, at::kDouble);
  at::Tensor nll_sum = at::zeros({}, at::kDouble), of_micro_batches = at::zeros({}, at::kDouble);
  double terms = 0, nll_terms = 0;
  at::Tensor words = at::zeros({kWords});
  for (int64_t replica = 0; replica < of.replicas; ++replica) {
    for (int64_t micro = 0; micro < of.micro_batches; ++micro) {
      const Batch batch = batch_of(replica, micro);
      words += at::bincount(batch.tokens().flatten(), {}, kWords);
      const at::Tensor log_probs =
          at::log_softmax(weight.index({batch.tokens()}), -1).gather(-1, batch.labels().unsqueeze(-1)).squeeze(-1);
      const at::Tensor mask = batch.at(kLossMask).to(at::kDouble);
      at::Tensor of_batch = -(log_probs * mask).sum(), nll = at::zeros({}, at::kDouble);
      double count = mask.sum().item<double>(), nll_count = 1;
      if (std::string(of.objective) == "dpo") {
        const at::Tensor rewards = ((log_probs - batch.at("ref_log_probs")) * mask).sum(1) * kBeta;
        const at::Tensor margins = rewards.view({-1, 2}).select(1, 0) - rewards.view({-1, 2}).select(1, 1);
        of_batch = at::log1p(at::exp(-margins)).sum();
        count = static_cast<double>(margins.numel());
        const at::Tensor chosen = mask.slice(0, 0, std::nullopt, 2);
        nll = -(log_probs.slice(0, 0, std::nullopt, 2) * chosen).sum() * of.nll;
        nll_count = chosen.sum().item<double>();
      }
      sum = sum + of_batch;
      terms += count;
      nll_sum = nll_sum + nll;
      nll_terms += nll_count;
      of_micro_batches = of_micro_batches + (of_batch / count + nll / nll_count) / parts;
    }
  }
  const at::Tensor over_all = sum / terms + nll_sum / nll_terms;
  total = total + (of.per_token ? over_all : of_micro_batches);
  const double loss = (of.nll == 0 || of.per_token ? over_all : of_micro_batches).item<double>();
  total = total + weight.sum() * kSumCoefficient * (of.per_token ? kAuxTokens * parts / terms : 1);
  total.backward();
  return {.gradient = weight.grad(), .words = words, .loss = loss};
}

class TrainStepCases : public ::testing::TestWithParam<Case> {};

TEST_P(TrainStepCases, GivesTheGradientOfTheWholeBatch) {
  const Case& of = GetParam();
  const Expected expected = expected_of(of);
  run_ranks(of.replicas * of.sequence_ranks, [&](const ProcessGroupPtr& world) {
    Bigrams model;
    const at::Tensor before = model.weight.detach().cpu().clone();
    model.to(device_of_tests());
    fully_shard(model, {.mesh = flat_mesh(world)});
    const auto optimizer =
        make_optimizer({{"weight", model.weight}}, {.kind = OptimizerKind::kSgd, .lr = 1, .weight_decay = 0});
    std::optional<GradScaler> scaler;
    if (of.scales) scaler.emplace(GradScaler::Options{.initial_scale = 1024}, world->device());
    SequenceShard sequence;
    if (of.sequence_ranks > 1) {
      std::vector<int> members;
      for (int i = 0; i < of.sequence_ranks; ++i)
        members.push_back(world->rank() / of.sequence_ranks * of.sequence_ranks + i);
      sequence = share_sequences(world->split(members, "sequence"), 1);
    }
    const auto objective = make_objective(of.objective, {{"--dpo-beta", kBeta}, {"--dpo-nll-weight", of.nll}});
    TrainStep step(model, *objective, *optimizer, world, world->device(),
                   {.clip_grad = 0,
                    .calculate_per_token_loss = of.per_token,
                    .loss_by_weights = of.by_weights,
                    .scaler = scaler ? &*scaler : nullptr,
                    .sequence = sequence});
    std::vector<Batch> batches;
    for (int64_t i = 0; i < of.micro_batches; ++i) batches.push_back(batch_of(world->rank() / of.sequence_ranks, i));
    const DeviceStats stats = step.clip(step.backward(batches));
    step.update();

    const double largest = expected.gradient.abs().max().item<double>();
    const at::Tensor part = part_like(before, model.weight), wanted = part_like(expected.gradient, model.weight);
    const at::Tensor gradient = (part - reshard_and_view(model.weight).local.cpu()).to(at::kDouble);
    // Weights of some units lose the gradient's last digits.
    if (part.numel() > 0) {
      EXPECT_LE((gradient - wanted).abs().max().item<double>(), 2e-6 * std::max(1.0, largest));
    }
    EXPECT_NEAR(stats.grad_norm.item<double>(), expected.gradient.norm().item<double>(), 1e-6);
    at::Tensor sums = stats.sums.clone();
    world->all_reduce(sums, ReduceOp::kSum).wait();
    EXPECT_TRUE(model.counter->last.cpu().equal(expected.words)) << model.counter->last;
    EXPECT_EQ(step.metric_names().front(), std::string(of.objective) == "dpo" ? "dpo loss" : "lm loss");
    EXPECT_EQ(step.metric_names().back(), "sum");
    EXPECT_NEAR((sums[0] / sums[1]).item<double>(), expected.loss, 1e-6);
    EXPECT_NEAR((sums[-2] / sums[-1]).item<double>(), before.square().mean().item<double>(), 1e-6);
  });
}

std::vector<Case> all_cases() {
  std::vector<Case> cases;
  for (const char* objective : {kNextToken, "dpo"}) {
    for (const bool per_token : {false, true}) {
      for (const int64_t micro_batches : {1, 3}) {
        for (const bool scales : {false, true}) {
          for (const auto& [replicas, ranks] : {std::pair{2, 1}, std::pair{1, 2}, std::pair{2, 2}})
            cases.push_back({objective, per_token, micro_batches, scales, replicas, ranks});
        }
      }
    }
  }
  for (const bool per_token : {false, true}) {
    for (const double nll : {0.0, kNll}) {
      for (const bool by_weights : {false, true}) {
        if (by_weights || nll != 0) cases.push_back({"dpo", per_token, 3, true, 2, 2, by_weights, nll});
      }
    }
  }
  return cases;
}

TEST(Objectives, WeightsAreTheGradientOfTheSum) {
  const MadeOnTheHost on_host;
  int with_weights = 0;
  for (const ObjectiveKind& kind : objectives()) {
    const auto objective = make_objective(kind.name, {});
    Batch batch = batch_of(0, 0);
    add_sequences(batch);
    if (objective->needs().latents) {
      batch.set(kLatents, fixed({2, kRows, kLength}, 3));
      batch.set(kNoiseSeeds, at::arange(kRows), Axis::kRow);
      objective->prepare(batch);
    }
    const at::Tensor weights = objective->weights(batch);
    if (!weights.defined()) continue;
    ++with_weights;
    for (const uint64_t seed : {1, 2}) {
      const at::Tensor losses = fixed({kRows, kLength}, seed).abs().requires_grad_();
      (*objective)({.token_losses = losses, .batch = batch, .mean_over_ranks = nullptr}).sum.backward();
      EXPECT_TRUE(losses.grad().equal(weights)) << kind.name;
    }
  }
  EXPECT_EQ(with_weights, 3) << "next-token, flow-matching, ddpm";
}

INSTANTIATE_TEST_SUITE_P(TrainStep, TrainStepCases, ::testing::ValuesIn(all_cases()));

}  // namespace
}  // namespace megashard::testing
