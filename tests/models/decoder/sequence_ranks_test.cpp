#include "parallel/sequence_parallel/ulysses.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros_like.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>

#include "models/decoder/decoder_model.h"
#include "models/vision/picture_encoder.h"
#include "tests/models/vision/small_vl.h"
#include "tests/support/message_of.h"
#include "tests/support/model_results.h"
#include "tests/support/run_ranks.h"
#include "tests/support/seeded_init.h"
#include "tests/support/simulated_device.h"

namespace megashard {
namespace {

using ::testing::HasSubstr;
using testing::message_of;
using testing::run_ranks;

TEST(Ulysses, SomeHeadsOfAllRowsAndBack) {
  for (const int64_t length : {8, 7, 5}) {  // rows of 4 ranks: 2 2 2 2, 2 2 2 1, 2 2 1 0
    run_ranks(4, [length](const ProcessGroupPtr& world) {
      const SequenceShard shard{world, length};
      const auto numbers = [length](int64_t heads) {
        return at::arange(3 * length * heads * 2, at::kFloat).view({3, length, heads, 2});
      };
      const auto q = numbers(8), k = numbers(4) + 0.5;
      const auto mine = [&](const at::Tensor& whole) {
        return shard.rows_of(whole, 1).detach().clone().requires_grad_();
      };
      const auto q_rows = mine(q), k_rows = mine(k);
      ASSERT_EQ(q_rows.size(1), shard.rows());
      const auto heads = gather_sequence({q_rows, k_rows}, shard);
      EXPECT_TRUE(heads[0].equal(q.narrow(2, 2 * world->rank(), 2)));
      EXPECT_TRUE(heads[1].equal(k.narrow(2, world->rank(), 1)));
      const auto back = scatter_sequence(heads[0] * 2, shard);
      EXPECT_TRUE(back.equal(q_rows * 2));
      (back * q_rows.detach()).sum().backward();  // k takes part without a gradient
      EXPECT_TRUE(q_rows.grad().equal(2 * q_rows));
      EXPECT_TRUE(k_rows.grad().eq(0).all().item<bool>());
    });
  }
}

/// A sequence of 12 is longer than original_max_positions, but a rank's half of it is not.
const RotaryConfig kLongerThan6{.kind = RotaryConfig::Kind::kLongrope,
                                .original_max_positions = 6,
                                .magnitude = 1.2,
                                .short_factor = {1, 1, 1, 1},
                                .long_factor = {2, 3, 5, 7}};

const RotaryConfig kDynamicFrom6{.kind = RotaryConfig::Kind::kDynamic, .factor = 4, .original_max_positions = 6};
const RotaryConfig kYarnFrom6{
    .kind = RotaryConfig::Kind::kYarn, .factor = 4, .original_max_positions = 6, .magnitude = 1.2};

DecoderConfig grouped_network(int64_t kv_heads, const RotaryConfig& rotary = {}, int64_t predicted = 0) {
  DecoderConfig config;
  config.prediction.depth = predicted;
  config.rotary = rotary;
  config.names.model = "GPTModel";
  config.vocab_size = 40;
  config.hidden_size = 32;
  config.intermediate_size = 48;
  config.num_layers = 2;
  config.num_heads = 4;
  config.num_kv_heads = kv_heads;
  config.head_dim = 8;
  config.max_positions = 16;
  config.qk_norm = true;
  config.sliding_window = 4;
  config.sliding_layers = {1};
  return config;
}

struct LossAndGradients {
  at::Tensor losses;
  std::map<std::string, at::Tensor> gradients;
};

/// Losses and gradients of an input in host memory. A rank that shares the sequence takes its rows.
LossAndGradients of_model(MultiModalModule& model, const Batch& whole) {
  LossAndGradients result;
  result.losses = testing::result_of(model, testing::rows_on(model, whole, testing::device_of_tests()));
  result.losses.sum().backward();
  for (const auto& item : model.named_parameters()) {
    const auto& gradient = item.value().grad();
    result.gradients[item.key()] = gradient.defined() ? gradient : at::zeros_like(item.value());
  }
  return result;
}

/// The ranks and the size of their ring; the network and the batch.
struct SharedCase {
  int ranks = 2;
  int64_t ring = 1;
  int64_t kv_heads = 4, length = 12;
  bool masked = false;
  RotaryConfig rotary{};
  bool gives_positions = false;
  int64_t predicted = 0;  // prediction layers
};

LossAndGradients of_decoder(const SharedCase& shared, const Batch& whole) {
  DecoderModel model(decoder_network(grouped_network(shared.kv_heads, shared.rotary, shared.predicted)));
  testing::init_weights(model, 1);
  model.to(testing::device_of_tests());
  return of_model(model, whole);
}

/// Copies to the host, so that no GPU's memory is read while another works on it.
LossAndGradients copied_to_host(LossAndGradients result) {
  result.losses = result.losses.detach().cpu();
  for (auto& [name, gradient] : result.gradients) gradient = gradient.cpu();
  return result;
}

/// Compares `got` on each rank of a sequence with a single rank's results in host memory. Collective.
void expect_same(const LossAndGradients& got, const LossAndGradients& expected, const SequenceShard& shard) {
  // Other shapes use other kernels: tolerance of PyTorch's fp32 tests, 1.3e-6 relative.
  const auto here = got.losses.device();
  EXPECT_TRUE(got.losses.allclose(shard.rows_of(expected.losses, 1).to(here), 1.3e-6, 1e-6));
  for (const auto& [name, gradient] : expected.gradients) {
    const auto sum = got.gradients.at(name).clone();
    shard.group->all_reduce(sum, ReduceOp::kSum).wait();
    const double largest = gradient.abs().max().item<double>();
    // Gradients of the vision tower pass all layers of the decoder: a few more roundings.
    EXPECT_TRUE(sum.allclose(gradient.to(here), 0, 4e-6 * largest)) << name;
  }
}

void expect_losses_of_one_rank(std::initializer_list<SharedCase> cases) {
  for (const SharedCase& shared : cases) {
    const auto& [ranks, ring, kv_heads, length, masked, rotary, gives_positions, predicted] = shared;
    SCOPED_TRACE(c10::str(ranks, " ranks, ring of ", ring, ", ", kv_heads, " key heads, length ", length, ", ",
                          predicted, " predicted"));
    Batch whole;
    const auto on_host = at::TensorOptions(at::kLong).device(at::kCPU);
    whole.set(kTokens, at::randint(0, 40, {2, length}, on_host));
    whole.set(kLabels, whole.tokens().roll(1, 1));
    if (gives_positions) whole.set(kPositionIds, at::arange(length, on_host).expand({2, length}).contiguous());
    if (masked) {  // documents of 5 tokens
      std::vector<int64_t> lengths;
      for (int64_t row = 0; row < 2; ++row) {
        for (int64_t begin = 0; begin < length; begin += 5) lengths.push_back(std::min<int64_t>(5, length - begin));
      }
      whole.document_lengths = at::tensor(lengths, on_host);
    }
    const auto expected = copied_to_host(of_decoder(shared, whole));
    run_ranks(ranks, [&](const ProcessGroupPtr& world) {
      Batch mine = whole;
      mine.sequence = share_sequences(world, shared.ring).with_length(shared.length);
      expect_same(of_decoder(shared, mine), expected, mine.sequence);
    });
  }
}

TEST(Ulysses, LossesAndGradientsAreThoseOfOneRank) {
  expect_losses_of_one_rank({{.ranks = 2},
                             {.ranks = 2, .kv_heads = 2, .length = 11, .masked = true},
                             {.ranks = 4, .kv_heads = 2},
                             {.ranks = 4, .kv_heads = 1, .length = 9, .masked = true},
                             {.rotary = kLongerThan6},
                             {.rotary = kLongerThan6, .gives_positions = true},
                             {.rotary = kDynamicFrom6},
                             {.rotary = kDynamicFrom6, .gives_positions = true},
                             {.rotary = kYarnFrom6},
                             {.ranks = 4, .length = 9, .masked = true, .predicted = 2}});
}

TEST(Ring, LossesAndGradientsAreThoseOfOneRank) {
  expect_losses_of_one_rank({{.ranks = 2, .ring = 2},
                             {.ranks = 3, .ring = 3, .kv_heads = 2, .masked = true},
                             {.ranks = 4, .ring = 2, .kv_heads = 1, .length = 16, .masked = true},
                             {.ring = 2, .rotary = kLongerThan6, .gives_positions = true},
                             {.ring = 2, .rotary = kDynamicFrom6, .gives_positions = true},
                             {.ring = 2, .rotary = kYarnFrom6},
                             {.ring = 2, .masked = true, .predicted = 2}});
}

at::Tensor grids(std::initializer_list<int64_t> values) {
  return at::tensor(at::ArrayRef<int64_t>(values)).view({-1, 3});
}

/// 13 tokens: 4 ranks have 4 4 4 1, 2 ranks have 7 6. 9 tokens: 3 3 3 0, and 5 4. An image crosses the first border, a
/// video the second; a second image follows. The last row has no picture and ends before the others. In host memory.
Batch pictures_over_borders(int64_t length = 13) {
  auto generator = at::detail::createCPUGenerator(5);
  const auto on_host = at::TensorOptions(at::kCPU);
  Batch input;
  input.set(kTokens, at::randint(0, 50, {4, length}, generator, on_host.dtype(at::kLong)));
  input.set(kLabels, at::randint(0, 60, {4, length}, generator, on_host.dtype(at::kLong)));
  input.set(kTokenMask, at::ones({4, length}, on_host.dtype(at::kBool)));
  input.token_mask()[3].narrow(0, 4, length - 4).fill_(false);
  input.tokens()[0].narrow(0, 2, 3).fill_(testing::kImage);
  input.tokens()[1].narrow(0, 5, 4).fill_(testing::kVideo);
  input.tokens()[2].narrow(0, 6, 2).fill_(testing::kImage);
  input.set("image_grid_thw", grids({1, 6, 2, 1, 2, 4}), Axis::kItem);
  input.set("video_grid_thw", grids({2, 2, 4}), Axis::kItem);
  input.set("pixel_values", at::randn({20, 3 * 2 * 2 * 2}, generator, on_host), Axis::kItem);
  input.set("pixel_values_videos", at::randn({16, 3 * 2 * 2 * 2}, generator, on_host), Axis::kItem);
  return input;
}

class UlyssesOfPictures : public ::testing::TestWithParam<const char*> {};
INSTANTIATE_TEST_SUITE_P(All, UlyssesOfPictures, ::testing::Values("qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"));

TEST_P(UlyssesOfPictures, LossesAndGradientsAreThoseOfOneRank) {
  using Patches = std::vector<int64_t>;
  for (const auto& [length, ranks, patches] :
       {std::tuple{13, 2, Patches{36, 24}}, {13, 4, Patches{12, 36, 16, 0}}, {9, 4, Patches{12, 28, 24, 0}}}) {
    // On the simulated device the other two cases suffice: all of them take too long.
    if (testing::on_simulated_device() && length == 13 && ranks == 4) continue;
    SCOPED_TRACE(c10::str(length, " tokens on ", ranks, " ranks"));
    const auto whole = pictures_over_borders(length);
    const auto expected = copied_to_host(of_model(*testing::make_vl(GetParam()), whole));
    run_ranks(ranks, [&, patches = patches](const ProcessGroupPtr& world) {
      const SequenceShard shard{world, whole.tokens().size(1)};
      const auto model = testing::make_vl(GetParam());
      model->check_sequence_ranks(world->size());
      Batch mine = whole;
      mine.sequence = shard;
      const Batch prepared = model->prepared(mine);
      const auto* plan = dynamic_cast<const PicturePlan*>(prepared.plan.get());
      ASSERT_NE(plan, nullptr);
      EXPECT_EQ(plan->vision.patches, patches[static_cast<size_t>(world->rank())]);
      expect_same(of_model(*model, mine), expected, shard);
    });
  }
}

TEST(Ulysses, PicturesArePlacedInWholeSequences) {
  run_ranks(2, [](const ProcessGroupPtr& world) {
    auto input = pictures_over_borders();
    input.sequence = {world, input.tokens().size(1)};
    input.set(kTokens, input.sequence.rows_of(input.tokens(), 1));
    const auto model = testing::make_vl("qwen3_vl");
    EXPECT_THAT(message_of([&] { model->prepare(input); }), HasSubstr("of 13 tokens here, and got"));
  });
}

TEST(Ring, ModelsThatHaveNoneAreNamed) {
  EXPECT_THAT(message_of([] { testing::make_vl("qwen2_5_vl")->check_sequence_ring(); }),
              HasSubstr("Qwen2_5_VLForConditionalGeneration has no ring attention; give --context-parallel-algo "
                        "ulysses_cp_algo"));
  auto config = grouped_network(4);
  config.attention_dropout = 0.1;
  DecoderModel model(decoder_network(config));
  EXPECT_THAT(message_of([&] { model.check_sequence_ring(); }), HasSubstr("give --attention-dropout 0"));
  model.eval();
  model.check_sequence_ring();
}

TEST(Ulysses, HeadsThatRanksCannotShareAreNamed) {
  DecoderModel model(decoder_network(grouped_network(4)));
  EXPECT_THAT(message_of([&] { model.check_sequence_ranks(3); }),
              HasSubstr("GPTModel has 4 attention heads, which 3 ranks of a sequence cannot share evenly"));
  EXPECT_THAT(message_of([] { testing::make_vl("qwen2_5_vl")->check_sequence_ranks(3); }),
              HasSubstr("Qwen2_5_VLForConditionalGeneration has 4 attention heads, which 3 ranks"));
  EXPECT_THAT(message_of([] { check_ulysses_heads("M", 12, 3, 2); }),
              HasSubstr("M has 3 key and value heads, and 2 ranks share a sequence"));
}

}  // namespace
}  // namespace megashard
