#include "models/decoder/decoder_model.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/full.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/tensor.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <string_view>

#include "framework/modules/freeze.h"
#include "models/vision/mrope_positions.h"
#include "models/vision/vision_plan.h"
#include "tests/models/vision/small_vl.h"
#include "tests/support/default_device.h"
#include "tests/support/model_results.h"
#include "tests/support/run_ranks.h"
#include "tests/support/simulated_device.h"

namespace megashard {
namespace {

using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

using testing::kImage;
using testing::make_vl;

/// Two rows in host memory; the first has an image of 3 x 1 features.
Batch picture_and_text() {
  Batch input;
  auto generator = at::detail::createCPUGenerator(5);
  const auto whole_numbers = at::TensorOptions(at::kLong).device(at::kCPU);
  input.set(kTokens, at::randint(0, 50, {2, 9}, generator, whole_numbers));
  input.set(kLabels, at::randint(0, 60, {2, 9}, generator, whole_numbers));
  input.tokens()[0].narrow(0, 2, 3).fill_(kImage);
  input.set("image_grid_thw", at::tensor({int64_t{1}, int64_t{6}, int64_t{2}}, whole_numbers).view({1, 3}),
            Axis::kItem);
  const auto pixels = at::TensorOptions(at::kFloat).device(at::kCPU);
  input.set("pixel_values", at::randn({12, 3 * 2 * 2 * 2}, generator, pixels), Axis::kItem);
  return input;
}

/// Copies the input to the device as a program does.
at::Tensor run(DecoderModel& model, const Batch& on_host) {
  return testing::result_of(model, testing::rows_on(model, on_host, testing::device_of_tests()));
}

using Gradients = std::map<std::string, at::Tensor>;

Gradients gradients_of(const torch::nn::Module& model) {
  Gradients gradients;
  for (const auto& item : model.named_parameters()) gradients[item.key()] = item.value().grad();
  return gradients;
}

class QwenVlFamilies : public ::testing::TestWithParam<const char*> {};
INSTANTIATE_TEST_SUITE_P(All, QwenVlFamilies, ::testing::Values("qwen2_5_vl", "qwen3_vl", "glm4v_moe"));

/// Expects gradients to be this rank's rows of those of a single rank.
void expect_rows_of(const torch::nn::Module& model, const Gradients& wanted) {
  for (const auto& item : model.named_parameters()) {
    const auto piece = reshard_and_view(item.value());
    const auto& grad = item.value().grad();
    ASSERT_EQ(grad.defined(), item.value().requires_grad()) << item.key();
    if (!grad.defined() || grad.numel() == 0) continue;
    auto want = wanted.at(item.key());
    for (int64_t dim = 0; dim < grad.dim(); ++dim)
      want = want.narrow(dim, piece.offsets[static_cast<size_t>(dim)], grad.size(dim));
    want = want.to(grad.device());
    // Sums over two ranks round in another order than those of one batch.
    EXPECT_LE((grad - want).abs().max().item<double>(), 2e-6 * std::max(1.0, want.abs().max().item<double>()))
        << item.key();
  }
}

TEST_P(QwenVlFamilies, ARankWithoutPicturesJoinsTheTower) {
  const auto whole = make_vl(GetParam());
  const auto all = picture_and_text();
  const auto losses = run(*whole, all).detach();
  run(*whole, all).mean().backward();
  const auto wanted = gradients_of(*whole);
  for (const auto* frozen : {"", "model.visual", "model.visual.blocks"}) {
    SCOPED_TRACE(frozen);
    testing::run_ranks(2, [&](const ProcessGroupPtr& world) {
      const auto model = make_vl(GetParam());
      if (*frozen != 0) freeze_parameters(*model, {frozen});
      model->fully_shard({.process_group = world});
      Batch own = world->rank() == 0 ? all : Batch{};
      own.set(kTokens, all.tokens().narrow(0, world->rank(), 1));
      own.set(kLabels, all.labels().narrow(0, world->rank(), 1));
      const auto loss = run(*model, own);
      const auto expected = losses.narrow(0, world->rank(), 1).to(loss.device());
      EXPECT_LT((loss - expected).abs().max().item<double>(), 2e-6);
      loss.mean().backward();
      expect_rows_of(*model, wanted);
    });
  }
}

TEST_P(QwenVlFamilies, TheHostWaitsForNoGpu) {
  if (!testing::on_simulated_device()) GTEST_SKIP() << "nobody waits for a CPU";
  if (std::string_view(GetParam()) == "glm4v_moe") GTEST_SKIP() << "experts wait for their numbers of rows";
  const auto model = make_vl(GetParam());
  const auto all = picture_and_text();
  const auto step = [&] { run(*model, all).sum().backward(); };
  step();
  testing::simulated_cuda().take_host_syncs();
  step();
  EXPECT_THAT(testing::simulated_cuda().take_host_syncs(), ::testing::IsEmpty());
}

/// Both rows packed into one, then the first row again.
Batch packed_row(const Batch& rows) {
  const testing::MadeOnTheHost on_host;
  Batch row;
  for (const char* name : {kTokens, kLabels})
    row.set(name, at::cat({rows.at(name).view({1, 18}), rows.at(name).narrow(0, 0, 1)}, 1));
  row.document_lengths = at::full({3}, 9, row.tokens().options());
  row.set(kPositionIds, at::arange(9, row.tokens().options()).repeat({3}).view({1, 27}));
  for (const auto* name : {"image_grid_thw", "pixel_values"}) row.set(name, rows.at(name).repeat({2, 1}), Axis::kItem);
  return row;
}

/// --neat-packing: two conversations with the same picture and one of text, in one row or in separate rows.
TEST_P(QwenVlFamilies, PackedConversationsTrainAsRowsOfTheirOwn) {
  const auto packed = make_vl(GetParam()), alone = make_vl(GetParam());
  const auto rows = picture_and_text();  // the second row has no picture
  const auto together = run(*packed, packed_row(rows)).view({3, 9});
  (together.sum() / 27).backward();
  const auto apart = run(*alone, rows);
  constexpr double kFloatOfLoss = 4e-6;  // losses of 4 to 8, whose last bit is 4.8e-7
  EXPECT_LE((apart - together.narrow(0, 0, 2)).abs().max().item<double>(), kFloatOfLoss);
  EXPECT_LE((apart[0] - together[2]).abs().max().item<double>(), kFloatOfLoss);
  ((apart.sum() + apart[0].sum()) / 27).backward();
  expect_rows_of(*packed, gradients_of(*alone));
  const Batch row = packed->prepared(packed_row(rows));
  const auto positions = row.position_ids().view({3, 3, 9});
  EXPECT_TRUE(positions.select(1, 0).equal(positions.select(1, 2))) << "rotation tells only their differences";
}

/// Runs each call as it is and records the dtypes of its inputs.
struct InputTypes : ForwardRunner {
  std::vector<at::ScalarType> types;
  std::vector<at::Tensor> run(const Body& body, const std::vector<at::Tensor>& inputs) override {
    for (const auto& input : inputs) types.push_back(input.scalar_type());
    return body(inputs);
  }
};

TEST_P(QwenVlFamilies, TablesOfTheTowerStayFp32InABf16Unit) {
  testing::run_ranks(2, [&](const ProcessGroupPtr& world) {
    const auto model = make_vl(GetParam());
    const auto seen = std::make_shared<InputTypes>();
    const auto modules = model->named_modules("", /*include_self=*/false);
    auto& attention = dynamic_cast<HookedModule&>(*modules["model.visual.blocks.1.attn"]);
    attention.set_forward_runner(seen);
    Fsdp2Config config;
    config.mixed_precision.param_dtype = at::kBFloat16;
    model->fully_shard({.process_group = world, .config = config});
    run(*model, picture_and_text());
    ASSERT_GE(seen->types.size(), 3u);
    EXPECT_EQ(seen->types[0], at::kBFloat16) << "hidden states";
    EXPECT_EQ(seen->types[1], at::kFloat) << "cosines";
    EXPECT_EQ(seen->types[2], at::kFloat) << "sines";
  });
}

TEST(QwenVision, RanksWithDifferentExpertsTrainAsOne) {
  const auto whole = make_vl("qwen3_vl_moe");
  const auto all = picture_and_text();
  run(*whole, all).mean().backward();
  const auto wanted = gradients_of(*whole);
  testing::run_ranks(2, [&](const ProcessGroupPtr& world) {  // both ranks have the whole batch
    const auto model = make_vl("qwen3_vl_moe", 2, world->rank());
    model->fully_shard({.process_group = world});
    run(*model, all).mean().backward();
    const auto experts = model->named_parameters()["model.language_model.layers.0.mlp.experts.down_proj"];
    EXPECT_EQ(experts.grad().numel() * 2, wanted.at("model.language_model.layers.0.mlp.experts.down_proj").numel());
    expect_rows_of(*model, wanted);
  });
}

TEST_P(QwenVlFamilies, EveryNamedSubmoduleCanBeWrapped) {
  const auto model = make_vl(GetParam());
  for (const auto& item : model->named_modules(/*name_prefix=*/"", /*include_self=*/false)) {
    const auto last = item.key().substr(item.key().rfind('.') + 1);
    if (last == "layers" || last == "blocks" || last == "deepstack_merger_list" ||
        item.key() == "model.visual.merger.mlp")
      continue;
    EXPECT_NE(dynamic_cast<HookedModule*>(item.value().get()), nullptr) << item.key();
  }
}

TEST(QwenVision, PublishedNamesOfTheFirstFamilyOnly) {
  const auto old = make_vl("qwen2_5_vl"), later = make_vl("qwen3_vl");
  EXPECT_EQ(old->weight_map().published_name("model.visual.merger.ln_q.weight"), "visual.merger.ln_q.weight");
  EXPECT_EQ(old->weight_map().published_name("model.language_model.norm.weight"), "model.norm.weight");
  EXPECT_EQ(old->weight_map().published_name("lm_head.weight"), "lm_head.weight");
  EXPECT_EQ(later->weight_map().published_name("model.visual.merger.norm.weight"), "model.visual.merger.norm.weight");
}

TEST(QwenVision, WrongPicturesAreAnError) {
  const auto model = make_vl("qwen2_5_vl");
  const auto refuses = [&](const std::string& message, const std::function<void(Batch&)>& spoil) {
    auto input = picture_and_text();
    spoil(input);
    EXPECT_THAT([&] { testing::result_of(*model, input); }, ThrowsMessage<c10::Error>(HasSubstr(message)));
  };
  refuses("image 0 of image_grid_thw has 3 features, but only 2 tokens 50 stand for it in row 0 at 2",
          [](Batch& input) { input.tokens()[0][4] = 1; });
  refuses("row 0 has a place for a further image (token 50) at 5, but image_grid_thw describes no more",
          [](Batch& input) { input.tokens()[0][5] = kImage; });
  refuses("image_grid_thw describes 1 image parts, but the tokens have places (50) for 0",
          [](Batch& input) { input.tokens().fill_(1); });
  refuses("image_grid_thw[0] is [1, 4, 3]: all must be positive, and rows and columns of patches "
          "multiples of the model's merge size 2",
          [](Batch& input) {
            input.set("image_grid_thw", at::tensor({int64_t{1}, int64_t{4}, int64_t{3}}).view({1, 3}), Axis::kItem);
          });
  refuses("pixel_values [12, 24] must be [16, 24]", [](Batch& input) {
    input.set("image_grid_thw", at::tensor({int64_t{1}, int64_t{8}, int64_t{2}}).view({1, 3}), Axis::kItem);
  });
  refuses("the input has pixel_values without image_grid_thw", [](Batch& input) { input.take("image_grid_thw"); });
}

TEST(VisionPlan, SegmentsOfALengthLieTogether) {
  const VisionConfig config{.patch_size = 2, .merge_size = 2, .window_size = 8};  // windows of 2 x 2 units
  // 3 x 2 units give windows of 4 and 2; two frames of 1 x 3 give windows of 2 and 1 each.
  const auto plan = plan_vision(
      config, at::tensor({int64_t{1}, int64_t{6}, int64_t{4}, int64_t{2}, int64_t{2}, int64_t{6}}).view({2, 3}));
  ASSERT_EQ(plan.windows.runs.size(), 3U);
  EXPECT_EQ(plan.windows.runs[0].length, 4);
  EXPECT_EQ(plan.windows.runs[0].count, 2);
  EXPECT_EQ(plan.windows.runs[1].count, 3);
  EXPECT_EQ(plan.windows.runs[2].length, 16);
  ASSERT_EQ(plan.frames.runs.size(), 2U);
  EXPECT_EQ(plan.frames.runs[0].length, 12);
  EXPECT_EQ(plan.frames.runs[0].count, 2);
  EXPECT_EQ(plan.patches, 48);
  EXPECT_TRUE(plan.frames.order.defined());
}

}  // namespace
}  // namespace megashard
