#include "checkpoint/weights/weight_map.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

namespace megashard {
namespace {

at::Tensor counting(int64_t rows, int64_t columns) {
  const auto on_host = at::TensorOptions(at::kFloat).device(at::kCPU);
  return at::arange(rows * columns, on_host).view({rows, columns});
}

/// q, k and v one after the other in one tensor, as Phi-3 has them: 4, 2 and 2 rows.
StoredForm fused_form() {
  const std::vector<int64_t> sizes{8, 3};
  return {"fused",
          {rows_part("q", 0, 4, "qkv", sizes, 0), rows_part("k", 0, 2, "qkv", sizes, 4),
           rows_part("v", 0, 2, "qkv", sizes, 6)}};
}

TEST(WeightMap, FusedRowsAreReadAndWrittenInPlace) {
  const auto form = fused_form();
  const auto stored = counting(8, 3);
  // Rows 1 and 2 of q and all of v, as a rank may have them.
  auto q = ShardedTensor::replicated(at::zeros({2, 3}, stored.options()));
  q.global_sizes = {4, 3};
  q.offsets = {1, 0};
  const auto v = ShardedTensor::replicated(at::zeros({2, 3}, stored.options()));
  for (const auto& part : form.parts) {
    if (part.tensor == "q") read_part(part, stored, q);
    if (part.tensor == "v") read_part(part, stored, v);
  }
  EXPECT_TRUE(at::equal(q.local, stored.narrow(0, 1, 2)));
  EXPECT_TRUE(at::equal(v.local, stored.narrow(0, 6, 2)));
  const auto pieces = stored_pieces(form, "q", q);
  ASSERT_EQ(pieces.size(), 1U);
  EXPECT_EQ(pieces[0].first, "qkv");
  EXPECT_EQ(pieces[0].second.global_sizes, (std::vector<int64_t>{8, 3}));
  EXPECT_EQ(pieces[0].second.offsets, (std::vector<int64_t>{1, 0}));
  EXPECT_EQ(stored_pieces(form, "v", v)[0].second.offsets, (std::vector<int64_t>{6, 0}));
}

TEST(WeightMap, HeadsThatAreInterleavedHaveAPartEach) {
  // Megatron's linear_qkv of two groups: 2 query rows, a key row, a value row each.
  StoredForm form{"interleaved", {}};
  for (int64_t group = 0; group < 2; ++group) {
    form.parts.push_back(rows_part("q", 2 * group, 2, "qkv", {8, 3}, 4 * group));
    form.parts.push_back(rows_part("k", group, 1, "qkv", {8, 3}, 4 * group + 2));
  }
  const auto stored = counting(8, 3);
  const auto q = ShardedTensor::replicated(at::zeros({4, 3}, stored.options()));
  for (const auto& part : form.parts) {
    if (part.tensor == "q") read_part(part, stored, q);
  }
  EXPECT_TRUE(at::equal(q.local, at::cat({stored.narrow(0, 0, 2), stored.narrow(0, 4, 2)})));
  std::vector<int64_t> first_rows;
  for (const auto& [name, piece] : stored_pieces(form, "q", q)) first_rows.push_back(piece.offsets[0]);
  EXPECT_EQ(first_rows, (std::vector<int64_t>{0, 4}));
}

TEST(WeightMap, PiecesAliasTheShardAndEveryRankCanNameAll) {
  StoredForm form{"separate", {}};
  for (int64_t i = 0; i < 3; ++i)
    form.parts.push_back(indexed_part("experts", {i}, "expert" + std::to_string(i), {2, 3}));
  auto shard = ShardedTensor::replicated(at::zeros({1, 1, 3}, at::TensorOptions(at::kFloat).device(at::kCPU)));
  shard.global_sizes = {3, 2, 3};
  shard.offsets = {1, 1, 0};
  const auto own = stored_pieces(form, "experts", shard);
  ASSERT_EQ(own.size(), 1U);
  EXPECT_EQ(own[0].first, "expert1");
  EXPECT_EQ(own[0].second.global_sizes, (std::vector<int64_t>{2, 3}));
  EXPECT_EQ(own[0].second.offsets, (std::vector<int64_t>{1, 0}));
  own[0].second.local.fill_(7);
  EXPECT_EQ(shard.local.sum().item<float>(), 21.0F);
  const auto all = stored_pieces(form, "experts", shard, EmptyPieces::kKeep);
  ASSERT_EQ(all.size(), 3U);
  EXPECT_EQ(all[0].second.local.numel(), 0);
  EXPECT_EQ(all[0].second.global_sizes, (std::vector<int64_t>{2, 3}));
}

TEST(WeightMap, NamesGoThereAndBack) {
  const WeightMap map{.renamings = {{"model.visual.", "visual."}, {"model.language_model.", "model."}}};
  for (const auto& [ours, published] :
       {std::pair<const char*, const char*>{"model.visual.merger.ln_q.weight", "visual.merger.ln_q.weight"},
        {"model.language_model.norm.weight", "model.norm.weight"},
        {"lm_head.weight", "lm_head.weight"}}) {
    EXPECT_EQ(map.published_name(ours), published);
    EXPECT_EQ(map.published_name(published), published);
    EXPECT_EQ(map.model_name(published), ours);
    EXPECT_EQ(map.model_name(ours), ours);
  }
}

TEST(WeightMap, ANameOfFilesMayEndInTheModels) {
  const WeightMap map{
      .renamings = {{"model.language_model.", "language_model.model."}, {"lm_head.", "language_model.lm_head."}}};
  for (const auto& [ours, published] :
       {std::pair<const char*, const char*>{"lm_head.weight", "language_model.lm_head.weight"},
        {"model.language_model.norm.weight", "language_model.model.norm.weight"}}) {
    EXPECT_EQ(map.published_name(ours), published);
    EXPECT_EQ(map.published_name(published), published);
    EXPECT_EQ(map.model_name(published), ours);
    EXPECT_EQ(map.model_name(ours), ours);
  }
}

}  // namespace
}  // namespace megashard
