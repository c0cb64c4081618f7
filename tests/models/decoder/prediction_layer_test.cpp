#include "models/decoder/prediction_layer.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/tensor.h>
#include <gtest/gtest.h>

#include "models/decoder/decoder_model.h"
#include "tests/support/model_results.h"
#include "tests/support/parity.h"
#include "tests/support/run_ranks.h"
#include "tests/support/seeded_init.h"
#include "tests/support/simulated_device.h"

namespace megashard {
namespace {

const auto kOnHost = at::TensorOptions(at::kLong).device(at::kCPU);

at::Tensor numbers(std::initializer_list<int64_t> values) { return at::tensor(at::ArrayRef<int64_t>(values), kOnHost); }

TEST(LaterTokens, StayInTheirDocument) {
  Batch batch;
  batch.set(kTokens, at::arange(10, 20, kOnHost).view({2, 5}));
  batch.set(kLabels, at::arange(30, 40, kOnHost).view({2, 5}));
  batch.set(kLossMask, numbers({1, 1, 0, 1, 1, 1, 1, 1, 0, 1}).view({2, 5}).to(at::kFloat));
  batch.document_lengths = numbers({2, 3, 5});
  add_later_tokens(batch, 2);
  EXPECT_TRUE(batch.at(kLaterTokens)[0].equal(numbers({11, 0, 13, 14, 0, 16, 17, 18, 19, 0}).view({2, 5})));
  EXPECT_TRUE(batch.at(kLaterTokens)[1].equal(numbers({0, 0, 14, 0, 0, 17, 18, 19, 0, 0}).view({2, 5})));
  EXPECT_TRUE(
      batch.at(kLaterLabels)[1].equal(numbers({-100, -100, 34, -100, -100, 37, 38, 39, -100, -100}).view({2, 5})));
  EXPECT_TRUE(batch.at(kLaterMask)[0].to(at::kLong).equal(numbers({1, 0, 1, 1, 0, 1, 1, 0, 1, 0}).view({2, 5})));
  EXPECT_TRUE(batch.at(kLaterCounts).to(at::kLong).equal(numbers({3, 1, 3, 2}).view({2, 2})));
}

TEST(LaterTokens, WithoutDocumentsAndMaskThoseOfRowsAndLabels) {
  Batch batch;
  batch.set(kTokens, numbers({1, 2, 3}).view({1, 3}));
  batch.set(kLabels, numbers({2, -100, 4}).view({1, 3}));
  add_later_tokens(batch, 1);
  EXPECT_TRUE(batch.at(kLaterTokens)[0].equal(numbers({2, 3, 0}).view({1, 3})));
  EXPECT_TRUE(batch.at(kLaterMask)[0].to(at::kLong).equal(numbers({0, 1, 0}).view({1, 3})));
}

std::shared_ptr<DecoderModel> make() {
  DecoderConfig config;
  config.names.model = "GPTModel";
  config.vocab_size = 40;
  config.hidden_size = 16;
  config.intermediate_size = 24;
  config.num_layers = 2;
  config.num_heads = config.num_kv_heads = 2;
  config.head_dim = 8;
  config.max_positions = 12;
  config.init_std = 0.3;
  config.prediction = {.depth = 2, .loss_scale = 0.5};
  auto model = std::make_shared<DecoderModel>(decoder_network(config));
  testing::init_weights(*model, 1);
  model->to(testing::device_of_tests());
  return model;
}

Batch batch_of(int64_t seed, int64_t length = 12) {
  Batch batch;
  batch.set(kTokens, (at::arange(length, kOnHost).square() + 7 * seed).remainder(40).view({1, length}));
  batch.set(kLabels, batch.tokens().roll(-1, 1));
  return batch;
}

std::vector<AuxTerm> terms_of(DecoderModel& model, Batch batch) {
  return model(testing::rows_on(model, std::move(batch), testing::device_of_tests())).aux;
}

TEST(PredictionLayers, LossesArePartsOfTheLoss) {
  const auto model = make();
  const auto terms = terms_of(*model, batch_of(0));
  ASSERT_EQ(terms.size(), 2);
  EXPECT_EQ(terms[1].name, "mtp_2 loss");
  EXPECT_EQ(terms[1].tokens.item<double>(), 10);
  EXPECT_FLOAT_EQ(terms[0].value.item<float>(), 0.25F * terms[0].metric.item<float>());
  model->eval();
  EXPECT_TRUE(terms_of(*model, batch_of(0)).empty()) << "evaluation needs the next token alone";
}

TEST(PredictionLayers, PackedDocumentsAreThoseAlone) {
  const auto model = make();
  auto packed = batch_of(0);
  packed.document_lengths = numbers({5, 7});
  std::vector<Batch> alone(2);
  for (const char* name : {kTokens, kLabels}) {
    alone[0].set(name, packed.at(name).narrow(1, 0, 5));
    alone[1].set(name, packed.at(name).narrow(1, 5, 7));
  }
  const auto terms = terms_of(*model, packed);
  for (size_t k = 0; k < 2; ++k) {
    double sum = 0, tokens = 0;
    for (const auto& each : alone) {
      const auto term = terms_of(*model, each)[k];
      sum += term.metric.item<double>() * term.tokens.item<double>();
      tokens += term.tokens.item<double>();
    }
    EXPECT_EQ(terms[k].tokens.item<double>(), tokens);
    EXPECT_NEAR(terms[k].metric.item<double>() / (sum / tokens), 1, 2e-6);
  }
}

TEST(PredictionLayers, AreShardedAndRecomputedAsOthers) {
  testing::run_ranks(2, [](const ProcessGroupPtr& world) {
    const auto plain = make(), model = make();
    Fsdp2Config config;
    config.recompute_modules = {"model.layers.{*}", "model.mtp_layers.{*}"};
    dynamic_cast<FSDP2Mixin&>(*model).fully_shard(
        {.process_group = world, .config = config, .strictness = Strictness::kStrict});
    EXPECT_EQ(unit_plan_of(*model).units.size(), 4) << "two layers and two prediction layers";
    const auto device = testing::device_of_tests();
    const auto batch = batch_of(world->rank());
    const auto expected = testing::result_of(*plain, testing::rows_on(*plain, batch, device));
    const auto losses = testing::result_of(*model, testing::rows_on(*model, batch, device));
    EXPECT_TRUE(losses.equal(expected));
    expected.sum().backward();
    losses.sum().backward();
    testing::average_gradients(*plain, *world);
    testing::expect_gradients_of(*plain, *model, 2e-6);
  });
}

}  // namespace
}  // namespace megashard
