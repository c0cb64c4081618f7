#include "models/moe/experts.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/full_like.h>
#include <gtest/gtest.h>

#include <map>

namespace megashard {
namespace {

constexpr int64_t kExperts = 4, kHidden = 5, kWide = 3;
const std::string kPath = "model.layers.0.mlp.experts.";

using Files = std::map<std::string, at::Tensor>;

/// The model's two tensors.
struct Weights {
  explicit Weights(bool gated = true)
      : up(counting(gated ? std::vector<int64_t>{kExperts, 2, kWide, kHidden}
                          : std::vector<int64_t>{kExperts, kWide, kHidden})),
        down(counting({kExperts, kHidden, kWide}).add(1000)) {}
  static at::Tensor counting(const std::vector<int64_t>& sizes) {
    return at::arange(c10::multiply_integers(sizes), at::TensorOptions(at::kFloat).device(at::kCPU)).view(sizes);
  }
  at::Tensor up, down;
};

/// As transformers has them, by its rules.
Files expected(const std::string& kind, const Weights& weights) {
  Files files;
  const bool gated = weights.up.dim() == 4;
  const auto packed = gated ? at::cat({weights.up.select(1, 0), weights.up.select(1, 1)}, 1) : weights.up;
  const std::string up = kPath + (gated ? "gate_up_proj" : "up_proj"), down = kPath + "down_proj";
  if (kind == "packed") return {{up, packed}, {down, weights.down}};
  if (kind == "transposed") return {{up, packed.transpose(1, 2)}, {down, weights.down.transpose(1, 2)}};
  for (int64_t e = 0; e < kExperts; ++e) {
    const auto one = kPath + std::to_string(e) + ".";
    if (gated) files[one + "gate_proj.weight"] = packed[e].narrow(0, 0, kWide);
    files[one + "up_proj.weight"] = packed[e].narrow(0, gated ? kWide : 0, kWide);
    files[one + "down_proj.weight"] = weights.down[e];
  }
  return files;
}

/// Boxes of both tensors that a rank can have: offsets and sizes; -1: all.
struct RankBox {
  const char* what;
  std::vector<int64_t> up_offsets, up_sizes, down_offsets, down_sizes;
};
const std::vector<RankBox> kBoxes = {
    {"all", {0, 0, 0, 0}, {4, 2, 3, 5}, {0, 0, 0}, {4, 5, 3}},
    {"experts of a part", {2, 0, 0, 0}, {2, 2, 3, 5}, {2, 0, 0}, {2, 5, 3}},
    {"half an expert", {1, 1, 0, 0}, {1, 1, 3, 5}, {1, 2, 0}, {1, 3, 3}},
    {"rows of an expert", {3, 1, 1, 0}, {1, 1, 2, 5}, {3, 4, 0}, {1, 1, 3}},
    {"tensor-parallel channels", {0, 0, 1, 0}, {4, 2, 1, 5}, {0, 0, 1}, {4, 5, 1}},
    {"both", {2, 0, 1, 0}, {2, 2, 2, 5}, {2, 0, 1}, {2, 5, 2}},
    {"nothing", {4, 0, 0, 0}, {0, 2, 3, 5}, {4, 0, 0}, {0, 5, 3}},
};

ShardedTensor shard_of(const at::Tensor& whole, const std::vector<int64_t>& offsets,
                       const std::vector<int64_t>& sizes) {
  auto local = whole;
  for (size_t i = 0; i < sizes.size(); ++i) {
    const auto dim = static_cast<int64_t>(i);
    local = local.narrow(dim, offsets[i], sizes[i]);
  }
  return {.local = local.clone(at::MemoryFormat::Contiguous),
          .global_sizes = whole.sizes().vec(),
          .offsets = offsets,
          .mesh = nullptr,
          .placements = {}};
}

void expect_same(const at::Tensor& one, const at::Tensor& other, const std::string& what) {
  EXPECT_EQ(one.sizes(), other.sizes()) << what;
  EXPECT_TRUE(at::equal(one, other)) << what;
}

/// Writes a shard's pieces into `files`.
void write(Files& files, const StoredForm& form, const std::string& tensor, const ShardedTensor& shard) {
  for (const auto& [name, piece] : stored_pieces(form, tensor, shard)) {
    auto& whole = files[name];
    if (!whole.defined()) whole = at::full(piece.global_sizes, -1.0, piece.local.options());
    auto box = whole;
    for (int64_t dim = 0; dim < box.dim(); ++dim)
      box = box.narrow(dim, piece.offsets[static_cast<size_t>(dim)], piece.local.size(dim));
    EXPECT_TRUE(box.eq(-1).all().item<bool>()) << name << " is written twice";
    box.copy_(piece.local);
  }
}

class ExpertForms : public ::testing::TestWithParam<ExpertFiles::Form> {
 protected:
  WeightGroup group(bool gated = true) const {
    return expert_forms(kPath, {kExperts, kHidden, kWide, gated}, {.form = GetParam()});
  }
};

TEST_P(ExpertForms, WhatIsWrittenIsAsInTransformers) {
  for (const bool gated : {true, false}) {
    const Weights weights(gated);
    const auto all = group(gated);
    const auto& form = all.forms.front();
    Files written;
    write(written, form, all.tensors[0].name, ShardedTensor::replicated(weights.up));
    write(written, form, all.tensors[1].name, ShardedTensor::replicated(weights.down));
    const auto wanted = expected(form.kind, weights);
    ASSERT_EQ(written.size(), wanted.size());
    for (const auto& [name, tensor] : wanted) expect_same(written.at(name), tensor, name);
  }
}

TEST_P(ExpertForms, EveryShardReadsAndWritesItsOwn) {
  const Weights weights;
  const auto all = group();
  const auto& form = all.forms.front();
  const auto files = expected(form.kind, weights);
  for (const auto& box : kBoxes) {
    for (const bool is_up : {true, false}) {
      const auto& tensor = all.tensors[is_up ? 0 : 1].name;
      const auto shard = is_up ? shard_of(weights.up, box.up_offsets, box.up_sizes)
                               : shard_of(weights.down, box.down_offsets, box.down_sizes);
      const auto what = form.kind + ", " + box.what + " of " + tensor;
      auto read = shard;
      read.local = at::full_like(shard.local, -1);
      for (const auto& part : form.parts) {
        if (part.tensor == tensor) read_part(part, files.at(part.stored), read);
      }
      expect_same(read.local, shard.local, what);

      Files written;
      write(written, form, tensor, shard);
      int64_t elements = 0;
      for (const auto& [name, whole] : written) {
        const auto mine = whole.ne(-1);
        elements += mine.sum().item<int64_t>();
        EXPECT_TRUE(whole.eq(files.at(name)).eq(mine).all().item<bool>()) << what << ": " << name;
      }
      EXPECT_EQ(elements, shard.local.numel()) << what;
    }
  }
}

TEST_P(ExpertForms, TheFormOfAFileFollowsFromItsNamesAndSizes) {
  // Of square experts, one tensor fits both stacked forms, and the other one does not.
  for (const auto& [hidden, wide] : {std::pair<int64_t, int64_t>{5, 3}, {6, 3}, {4, 4}}) {
    const auto all = expert_forms(kPath, {kExperts, hidden, wide}, {.form = GetParam()});
    for (const auto& form : all.forms) {
      std::map<std::string, std::vector<int64_t>> sizes;
      for (const auto& part : form.parts) sizes[part.stored] = part.stored_sizes;
      const auto* found = fitting_form(all, [&](const std::string& name) {
        const auto there = sizes.find(name);
        return there == sizes.end() ? nullptr : &there->second;
      });
      ASSERT_NE(found, nullptr) << form.kind;
      EXPECT_EQ(found->kind, form.kind) << hidden << " and " << wide;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, ExpertForms,
                         ::testing::Values(ExpertFiles::Form::kPacked, ExpertFiles::Form::kTransposed,
                                           ExpertFiles::Form::kSeparate));

TEST(ExpertFormsOfFamilies, SquareExpertsAreNotTransposed) {
  const auto kind = [](int64_t hidden, int64_t wide) {
    return expert_forms(kPath, {kExperts, hidden, wide}, {.form = ExpertFiles::Form::kTransposed}).forms.front().kind;
  };
  EXPECT_EQ(kind(5, 3), "transposed");
  EXPECT_EQ(kind(6, 3), "packed");
  EXPECT_EQ(kind(4, 4), "packed");
}

TEST(ExpertFormsOfFamilies, MixtralsNames) {
  const WeightMap map{.groups = {expert_forms(kPath, {2, kHidden, kWide}, {.gate = "w1", .up = "w3", .down = "w2"})},
                      .renamings = {{"mlp.", "block_sparse_moe."}}};
  const auto* group = map.group_of(kPath + "gate_up_proj");
  ASSERT_NE(group, nullptr);
  std::vector<std::string> names;
  for (const auto& part : group->forms.front().parts) names.push_back(map.published_name(part.stored));
  const auto one = [](const std::string& rest) {
    return "model.layers.0.block_sparse_moe.experts." + rest + ".weight";
  };
  EXPECT_EQ(names, (std::vector{one("0.w1"), one("0.w3"), one("0.w2"), one("1.w1"), one("1.w3"), one("1.w2")}));
  EXPECT_EQ(map.model_name(names[0]), kPath + "0.w1.weight");
}

}  // namespace
}  // namespace megashard
