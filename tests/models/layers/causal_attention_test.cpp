#include "models/layers/causal_attention.h"

#include <ATen/Functions.h>
#include <gmock/gmock.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "tests/support/attention_formula.h"
#include "tests/support/formula.h"
#include "tests/support/message_of.h"
#include "tests/support/simulated_device.h"

namespace megashard {
namespace {

using testing::attention_by_formula;
using testing::fixed;
using ::testing::HasSubstr;
using testing::Heads;
using testing::message_of;

struct Case {
  std::vector<int64_t> documents{};  // empty: each row is one document
  int64_t window = 0;
  int64_t rows = 1, length = 24;
  int64_t heads = 4, kv_heads = 4, width = 8;
  at::ScalarType dtype = at::kFloat;
  std::optional<double> scale{};
  double softcap = 0;
  std::vector<std::pair<int64_t, int64_t>> wholes{};  // begin and end of tokens that see each other, of all rows
};

/// KeySpan::key_ends; undefined without wholes.
at::Tensor ends_of(const Case& c) {
  if (c.wholes.empty()) return {};
  const auto cpu = at::TensorOptions(at::kLong).device(at::kCPU);
  const at::Tensor ends = at::arange(1, c.length + 1, cpu) + at::zeros({c.rows, 1}, cpu);
  for (const auto& [begin, end] : c.wholes) ends.view(-1).slice(0, begin, end).fill_((end - 1) % c.length + 1);
  return ends;
}

at::Tensor lengths_of(const std::vector<int64_t>& lengths) {
  return lengths.empty() ? at::Tensor() : at::tensor(lengths, at::TensorOptions(at::kLong).device(at::kCPU));
}

/// Mask of the keys that each query sees, over all rows.
at::Tensor seen_by(const Case& c) {
  auto documents = c.documents;
  if (documents.empty()) documents.assign(static_cast<size_t>(c.rows), c.length);
  const int64_t tokens = c.rows * c.length;
  const at::Tensor seen = at::zeros({tokens, tokens}, at::TensorOptions(at::kBool).device(at::kCPU));
  int64_t begin = 0;
  for (const int64_t length : documents) {
    for (int64_t query = begin; query < begin + length; ++query) {
      const int64_t first = c.window == 0 ? begin : std::max(begin, query - c.window + 1);
      seen[query].narrow(0, first, query - first + 1).fill_(true);
    }
    begin += length;
  }
  const auto ends = c.wholes.empty() ? at::Tensor() : ends_of(c).view(-1);
  for (int64_t query = 0; ends.defined() && query < tokens; ++query) {
    const int64_t end = query / c.length * c.length + ends[query].item<int64_t>();
    seen[query].narrow(0, query, end - query).fill_(true);
  }
  return seen;
}

void expect_formula(const Case& c) {
  SCOPED_TRACE(c10::str("documents ", c.documents, ", window ", c.window, ", ", c.rows, " rows of ", c.length, ", ",
                        c.kv_heads, " key heads of ", c.width, ", ", c.dtype));
  const auto random = [&](int64_t heads, uint64_t seed) {
    return fixed({c.rows, c.length, heads, c.width}, seed).to(c.dtype).cpu();
  };
  const Heads given{random(c.heads, 1), random(c.kv_heads, 2), random(c.kv_heads, 3)};
  const at::Tensor weight = random(c.heads, 4);
  const auto wide = [](const at::Tensor& x) { return x.to(at::kDouble).requires_grad_(); };
  const Heads exact{wide(given.q), wide(given.k), wide(given.v)};
  const auto in_one_row = [](const at::Tensor& x) { return x.flatten(0, 1).unsqueeze(0); };
  const Heads as_one{in_one_row(exact.q), in_one_row(exact.k), in_one_row(exact.v)};
  const at::Tensor expected = attention_by_formula(as_one, seen_by(c), c.scale, c.softcap).view(exact.q.sizes());
  (expected * weight.to(at::kDouble)).sum().backward();

  const auto device = testing::device_of_tests();
  const auto here = [&](const at::Tensor& x) { return x.to(device).clone().requires_grad_(); };
  const Heads mine{here(given.q), here(given.k), here(given.v)};
  KeySpan span{
      .documents = Documents::of(lengths_of(c.documents), c.rows, c.length, /*in_ring=*/false, mine.q.device()),
      .window = c.window,
      .key_ends = ends_of(c)};
  const at::Tensor out = causal_attention(mine.q, mine.k, mine.v, span, {.scale = c.scale, .softcap = c.softcap});
  EXPECT_EQ(out.scalar_type(), c.dtype);
  (out * weight.to(device)).sum().backward();
  // The kernels' exponentials are accurate to 1e-6, and gradients add a few of them; bf16 rounds by 2^-9.
  const double bar = c.dtype == at::kBFloat16 ? 1e-2 : 3e-6;
  const auto compare = [&](const char* name, const at::Tensor& got, const at::Tensor& wanted) {
    // Gradients of queries and keys are differences of sums near 1.
    const double largest = std::max(wanted.abs().max().item<double>(), 1.0);
    EXPECT_LE((got.detach().cpu().to(at::kDouble) - wanted.detach()).abs().max().item<double>(), bar * largest) << name;
  };
  compare("out", out, expected);
  compare("q", mine.q.grad(), exact.q.grad());
  compare("k", mine.k.grad(), exact.k.grad());
  compare("v", mine.v.grad(), exact.v.grad());
}

TEST(CausalAttention, DocumentsSeeNothingOfEachOther) {
  expect_formula({.documents = {}, .rows = 2});
  expect_formula({.documents = {24}});
  expect_formula({.documents = {5, 1, 18}});
  expect_formula({.documents = {5, 19, 24, 1, 22, 1}, .rows = 3, .kv_heads = 2, .scale = 0.5});
  expect_formula({.documents = {7, 17}, .kv_heads = 1, .width = 6});
}

TEST(CausalAttention, AQuerySeesTheLastKeysOfItsDocument) {
  for (const int64_t window : {1, 2, 7, 23, 24, 100}) expect_formula({.window = window, .rows = 2, .kv_heads = 2});
  for (const int64_t window : {1, 4, 16}) expect_formula({.documents = {5, 19, 24}, .window = window, .rows = 2});
}

TEST(CausalAttention, LongWindowsAreTakenInParts) {
  for (const int64_t window : {257, 300, 512}) {  // blocks of 256 queries, with one or two blocks before them
    expect_formula({.window = window, .length = 900, .heads = 2, .kv_heads = 1});
    expect_formula({.documents = {100, 800}, .window = window, .length = 900, .heads = 2, .kv_heads = 1});
  }
}

TEST(CausalAttention, HeadsOfEveryWidth) {  // the CPU's kernel processes 64, 32 and 16 channels at a time
  for (const int64_t width : {16, 24, 32, 48, 64, 80, 128}) {
    expect_formula({.rows = 2, .length = 130, .heads = 2, .kv_heads = 1, .width = width});
    expect_formula({.documents = {60, 3, 67}, .window = 40, .length = 130, .heads = 2, .kv_heads = 2, .width = width});
  }
}

TEST(CausalAttention, ScoresAreCapped) {  // at most 256 queries at a time
  expect_formula({.documents = {}, .rows = 2, .kv_heads = 2, .softcap = 0.7});
  expect_formula({.documents = {5, 19, 24, 1, 22, 1}, .rows = 3, .kv_heads = 1, .scale = 0.5, .softcap = 0.3});
  expect_formula({.documents = {5, 19, 24}, .window = 4, .rows = 2, .softcap = 50});
  expect_formula({.window = 300, .length = 600, .heads = 2, .kv_heads = 1, .softcap = 0.5});
  expect_formula({.documents = {5, 19, 24}, .rows = 2, .kv_heads = 2, .dtype = at::kBFloat16, .softcap = 0.5});
}

TEST(CausalAttention, TokensOfAPictureSeeEachOther) {  // within a block of 64 queries, and over several
  expect_formula({.rows = 2, .kv_heads = 2, .wholes = {{3, 9}, {9, 12}, {24, 26}, {40, 48}}});
  expect_formula({.documents = {10, 14, 24}, .window = 3, .rows = 2, .wholes = {{2, 10}, {11, 20}}});
  expect_formula({.length = 300, .heads = 2, .kv_heads = 1, .wholes = {{20, 90}, {130, 290}}});
  expect_formula({.window = 70, .length = 600, .heads = 2, .kv_heads = 2, .wholes = {{5, 250}, {300, 599}}});
  expect_formula({.rows = 2, .wholes = {{3, 9}, {30, 40}}});
}

TEST(CausalAttention, InBf16) {  // a GPU needs one call for all documents
  expect_formula({.documents = {5, 19, 24}, .rows = 2, .kv_heads = 2, .dtype = at::kBFloat16});
  expect_formula({.documents = {5, 19, 24}, .window = 4, .rows = 2, .width = 6, .dtype = at::kBFloat16});
  expect_formula({.window = 7, .rows = 2, .dtype = at::kBFloat16, .scale = 0.5});
}

TEST(Documents, AreCutIntoChunks) {
  const auto cut = [](const std::vector<int64_t>& lengths, int64_t chunk) {
    const auto pieces = chunked_lengths(lengths_of(lengths), 2, 6, chunk);
    return std::vector<int64_t>(pieces.const_data_ptr<int64_t>(), pieces.const_data_ptr<int64_t>() + pieces.numel());
  };
  EXPECT_EQ(cut({}, 4), (std::vector<int64_t>{4, 2, 4, 2}));
  EXPECT_EQ(cut({1, 5, 6}, 3), (std::vector<int64_t>{1, 3, 2, 3, 3}));
  EXPECT_EQ(cut({2, 4, 6}, 6), (std::vector<int64_t>{2, 4, 6}));
}

TEST(Documents, EndWithTheirRows) {
  const auto of = [](const std::vector<int64_t>& lengths, bool in_ring) {
    return Documents::of(lengths_of(lengths), 2, 6, in_ring, testing::device_of_tests());
  };
  EXPECT_EQ(Documents::of(at::Tensor(), 2, 6, false, testing::device_of_tests()), nullptr);
  EXPECT_TRUE(of({2, 4, 6}, true)
                  ->begins.cpu()
                  .equal(at::tensor({0, 0, 2, 2, 2, 2, 0, 0, 0, 0, 0, 0}, at::TensorOptions(at::kLong).device(at::kCPU))
                             .view({2, 6})));
  EXPECT_THAT(message_of([&] { of({2, 5, 5}, false); }), HasSubstr("a document ends with its row"));
  EXPECT_THAT(message_of([&] { of({6}, false); }), HasSubstr("of 6 tokens, but there are 2 rows of 6"));
  EXPECT_THAT(message_of([&] { of({0, 6, 6}, false); }), HasSubstr("a document ends with its row"));
}

}  // namespace
}  // namespace megashard
