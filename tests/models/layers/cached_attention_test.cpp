#include "models/layers/cached_attention.h"

#include <ATen/Functions.h>
#include <gmock/gmock.h>

#include <cmath>
#include <limits>
#include <vector>

#include "models/layers/key_cache.h"
#include "tests/support/formula.h"
#include "tests/support/message_of.h"

namespace megashard {
namespace {

using testing::fixed;
using ::testing::HasSubstr;
using testing::message_of;

struct Case {
  int64_t kv_heads = 2, width = 8, value_width = 8;
  int64_t window = 0, chunk = 0;
  double softcap = 0;
  bool sinks = false;
  at::ScalarType dtype = at::kFloat;
};

constexpr int64_t kRows = 3, kLength = 13, kHeads = 4;

/// One query by the formula, over the keys [begin, place].
at::Tensor by_formula(const at::Tensor& q, const at::Tensor& keys, const at::Tensor& values, int64_t place,
                      const Case& c, const at::Tensor& sinks) {
  int64_t begin = 0;
  if (c.window > 0) begin = std::max<int64_t>(0, place - c.window + 1);
  if (c.chunk > 0) begin = place / c.chunk * c.chunk;
  const auto seen = [&](const at::Tensor& x) {
    return x.narrow(0, begin, place + 1 - begin).repeat_interleave(kHeads / c.kv_heads, 1).transpose(0, 1);
  };
  auto scores = at::matmul(seen(keys), q.unsqueeze(-1)).squeeze(-1) / std::sqrt(static_cast<double>(c.width));
  if (c.softcap > 0) scores = at::tanh(scores / c.softcap) * c.softcap;
  if (sinks.defined()) scores = at::cat({scores, sinks.unsqueeze(1)}, 1);
  const auto weights = at::softmax(scores, -1).narrow(1, 0, place + 1 - begin);
  return at::matmul(weights.unsqueeze(1), seen(values)).squeeze(1);
}

void expect_formula(const Case& c) {
  SCOPED_TRACE(c10::str(c.kv_heads, " key heads, window ", c.window, ", chunk ", c.chunk, ", ", c.dtype));
  const auto heads = [&](int64_t count, int64_t width, uint64_t seed) {
    return fixed({kRows, kLength, count, width}, seed).to(c.dtype);
  };
  const auto q = heads(kHeads, c.width, 1).narrow(1, 0, 1), keys = heads(c.kv_heads, c.width, 2),
             values = heads(c.kv_heads, c.value_width, 3);
  const auto places = at::tensor({4, 12, 0}, q.options().dtype(at::kLong)).unsqueeze(1);
  const auto sinks = c.sinks ? fixed({kHeads}, 4).to(c.dtype) : at::Tensor();
  const auto out =
      cached_attention(q, {keys, values, places, c.window, c.chunk}, {.softcap = c.softcap, .sinks = sinks});
  EXPECT_EQ(out.scalar_type(), c.dtype);
  const auto exact = [](const at::Tensor& x) { return x.defined() ? x.cpu().to(at::kDouble) : x; };
  const double bar = c.dtype == at::kBFloat16 ? 1e-2 : 1e-6;  // bf16 rounds the result
  for (int64_t row = 0; row < kRows; ++row) {
    const auto wanted = by_formula(exact(q[row][0]), exact(keys[row]), exact(values[row]), places[row].item<int64_t>(),
                                   c, exact(sinks));
    EXPECT_LE((exact(out[row][0]) - wanted).abs().max().item<double>(), bar) << "row " << row;
  }
}

TEST(CachedAttention, EachRowSeesTheKeysUpToItsPlace) {
  for (const int64_t kv_heads : {1, 2, 4}) expect_formula({.kv_heads = kv_heads});
  expect_formula({.width = 6, .value_width = 10});
  expect_formula({.dtype = at::kBFloat16});
}

TEST(CachedAttention, WindowsAndChunks) {
  for (const int64_t keys : {1, 3, 5, 12, 20}) {
    expect_formula({.window = keys});
    expect_formula({.chunk = keys});
  }
}

TEST(CachedAttention, CapsAndSinks) {
  expect_formula({.softcap = 0.4});
  expect_formula({.sinks = true});
  expect_formula({.window = 4, .softcap = 0.7, .sinks = true, .dtype = at::kBFloat16});
}

TEST(KeyCache, ShorterRowsTakeTheirOwnPlaces) {
  KeyCache cache(5);
  const int layer = 0;
  const auto keys = fixed({2, 3, 1, 2}, 1);
  cache.begin(3, at::Tensor());
  EXPECT_TRUE(cache.is_first());
  EXPECT_TRUE(cache.add(&layer, keys, keys).first.is_same(keys));
  const auto longs = keys.options().dtype(at::kLong);
  const auto step = [&](const std::vector<int64_t>& places, double value) {
    cache.begin(1, at::tensor(places, longs).unsqueeze(1));
    const auto added = at::full({2, 1, 1, 2}, value, keys.options());
    return cache.add(&layer, added, added + 1);
  };
  step({3, 1}, 7);  // the second row's tokens 1 and 2 were none
  const auto [all, values] = step({4, 2}, 8);
  EXPECT_EQ(all.sizes(), (std::vector<int64_t>{2, 5, 1, 2}));
  const auto first = [](const at::Tensor& x) {
    const auto row = x.select(-1, 0).flatten().cpu().contiguous();
    return std::vector<float>(row.const_data_ptr<float>(), row.const_data_ptr<float>() + row.numel());
  };
  const auto given = first(keys[0]);
  EXPECT_EQ(first(all[0]), (std::vector<float>{given[0], given[1], given[2], 7, 8}));
  EXPECT_EQ(first(all[1]), (std::vector<float>{first(keys[1])[0], 7, 8, 0, 0}));
  EXPECT_EQ(first(values[1])[2], 9);
  EXPECT_THAT(message_of([&] { step({5, 3}, 9); }), HasSubstr("room for 5 tokens of a row, not for 6"));
  EXPECT_THAT(message_of([&] { cache.begin(1, at::Tensor()); }), HasSubstr("needs the positions of its tokens"));
}

}  // namespace
}  // namespace megashard
