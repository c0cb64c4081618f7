#include "parallel/sequence_parallel/ring_attention.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "parallel/sequence_parallel/ring_blocks.h"
#include "parallel/sequence_parallel/ulysses.h"
#include "tests/support/attention_formula.h"
#include "tests/support/default_device.h"
#include "tests/support/formula.h"
#include "tests/support/recording_group.h"
#include "tests/support/run_ranks.h"
#include "tests/support/simulated_device.h"

namespace megashard {
namespace {

using testing::attention_by_formula;
using testing::fixed;
using ::testing::HasSubstr;
using testing::Heads;
using testing::message_of;
using testing::run_ranks;

/// Mask [length, length] of the keys that queries attend to: causal, windowed, within documents of `document` tokens.
at::Tensor seen_of(int64_t length, int64_t window, int64_t document) {
  const auto places = at::arange(length, at::kLong);
  const at::Tensor query = places.unsqueeze(1), key = places.unsqueeze(0);
  at::Tensor seen = query.ge(key);
  if (window > 0) seen = seen.logical_and((query - key).lt(window));
  if (document > 0) seen = seen.logical_and(query.div(document, "floor").eq(key.div(document, "floor")));
  return seen;
}

/// First row of each row's document.
at::Tensor begins_of(int64_t length, int64_t document) {
  return at::arange(length, at::kLong).div(document, "floor").mul(document).unsqueeze(0);
}

TEST(RingBlocks, EveryPairThatIsSeenIsInOneBlock) {
  constexpr int64_t kRows = 6;
  for (const int64_t places : {2, 3, 4}) {
    const int64_t length = places * kRows, chunk = kRows / 2;
    for (const auto& [window, document] : {std::pair{0, 0}, {1, 0}, {3, 0}, {4, 0}, {5, 0}, {100, 0}, {0, 5}, {4, 7}}) {
      const at::Tensor seen = seen_of(length, window, document).to(at::kLong);
      const auto rows_of = [&](int64_t place) {
        return at::cat({at::arange(place * chunk, (place + 1) * chunk, at::kLong),
                        at::arange(length - (place + 1) * chunk, length - place * chunk, at::kLong)});
      };
      const at::Tensor found = at::zeros({length, length}, at::kLong);
      int64_t taken = 0;
      for (int64_t place = 0; place < places; ++place) {
        RingMask mask{.window = window};
        if (document > 0) mask.document_begins = begins_of(length, document);
        for (int64_t source = 0; source < places; ++source) {
          for (const auto& block : ring_blocks(mask, places, place, source, kRows, found.device())) {
            at::Tensor pairs = at::ones({block.queries.size, block.keys.size}, at::kLong);
            taken += pairs.numel();
            if (block.mask.causal) pairs = pairs.tril();
            if (block.mask.allowed.defined()) pairs = block.mask.allowed[0][0].to(at::kLong);
            const auto queries = rows_of(place).narrow(0, block.queries.begin, block.queries.size);
            const auto keys = rows_of(source).narrow(0, block.keys.begin, block.keys.size);
            found.index_put_({queries.unsqueeze(1), keys.unsqueeze(0)}, pairs, /*accumulate=*/true);
          }
        }
      }
      EXPECT_TRUE(found.equal(seen)) << places << " places, window " << window << ", documents of " << document;
      if (window == 1) {  // blocks outside of the window are left out
        EXPECT_EQ(taken, length * chunk);
      }
    }
  }
}

struct RingCase {
  int ranks = 2;
  int64_t ring = 2;
  int64_t heads = 4, kv_heads = 4, width = 8;
  int64_t window = 0, document = 0;
  at::ScalarType dtype = at::kFloat;
  int64_t length = 24;
  std::optional<double> scale{};
  bool causal = true;
  std::vector<int64_t> keys{};  // not causal: number of keys of each row, at its begin; empty: all

  std::string text() const {
    return c10::str(ranks, " ranks, ring of ", ring, ", ", kv_heads, " key heads of ", width, ", window ", window,
                    ", documents of ", document, ", ", dtype, causal ? "" : ", not causal, keys ", keys);
  }
  at::Tensor key_mask() const {  // [B, T]
    if (keys.empty()) return {};
    const testing::MadeOnTheHost on_host;
    return at::arange(length).unsqueeze(0).lt(at::tensor(keys).unsqueeze(1));
  }
  at::Tensor seen() const {  // [T, T] or [B, 1, 1, T]
    if (causal) return seen_of(length, window, document);
    return keys.empty() ? at::ones({length, length}, at::kBool) : key_mask().unsqueeze(1).unsqueeze(1);
  }
};

double distance(const at::Tensor& got, const at::Tensor& expected) {
  const double largest = expected.abs().max().item<double>();  // 0 for queries with a single key
  return (got.to(at::kDouble) - expected).abs().max().item<double>() / (largest == 0 ? 1 : largest);
}

void expect_whole_attention(const RingCase& c) {
  SCOPED_TRACE(c.text());
  // In host memory, which all ranks can read.
  const auto random = [&](int64_t heads, uint64_t seed) {
    return fixed({2, c.length, heads, c.width}, seed).to(c.dtype).cpu();
  };
  const Heads given{random(c.heads, 1), random(c.kv_heads, 2), random(c.kv_heads, 3)};
  const at::Tensor weight = random(c.heads, 4);
  const auto wide = [](const at::Tensor& x) { return x.to(at::kDouble).requires_grad_(); };
  const Heads whole{wide(given.q), wide(given.k), wide(given.v)};
  const at::Tensor expected = attention_by_formula(whole, c.seen(), c.scale);
  (expected * weight.to(at::kDouble)).sum().backward();
  // In fp32 the kernels' exponentials are accurate to 1e-6, and gradients are sums of `length` of them. In bf16 each
  // part is rounded, by 2^-9, before the sum.
  const double bar = c.dtype == at::kBFloat16 ? 1e-2 : c.dtype == at::kDouble ? 1e-13 : 3e-6;
  run_ranks(c.ranks, [&](const ProcessGroupPtr& world) {
    const SequenceShard shard = share_sequences(world, c.ring).with_length(c.length);
    const auto mine = [&](const at::Tensor& x) {
      return shard.rows_of(x.detach(), 1).to(testing::device_of_tests()).clone().requires_grad_();
    };
    const Heads rows{mine(given.q), mine(given.k), mine(given.v)};
    RingMask mask{.window = c.window, .causal = c.causal};
    if (c.document > 0) mask.document_begins = begins_of(c.length, c.document).to(testing::device_of_tests());
    if (!c.keys.empty()) mask.keys = c.key_mask().to(testing::device_of_tests());
    const auto at_place = gather_sequence({rows.q, rows.k, rows.v}, shard.of_place());
    const at::Tensor out =
        scatter_sequence(ring_attention(at_place[0], at_place[1], at_place[2], mask, c.scale, shard), shard.of_place());
    EXPECT_EQ(out.scalar_type(), c.dtype);
    (out * mine(weight).detach()).sum().backward();
    const auto compare = [&](const char* name, const at::Tensor& got, const at::Tensor& wanted) {
      const at::Tensor gathered = whole_of_rows(got, 1, shard).cpu();
      EXPECT_LE(distance(gathered, wanted), bar) << name;
    };
    compare("out", out.detach(), expected.detach());
    compare("q", rows.q.grad(), whole.q.grad());
    compare("k", rows.k.grad(), whole.k.grad());
    compare("v", rows.v.grad(), whole.v.grad());
  });
}

TEST(RingAttention, IsWholeAttentionAndItsGradients) {
  for (const int ranks : {2, 3, 4}) expect_whole_attention({.ranks = ranks, .ring = ranks});
  expect_whole_attention({.kv_heads = 2, .scale = 0.5});
  expect_whole_attention({.ranks = 3, .ring = 3, .kv_heads = 1});
  expect_whole_attention({.kv_heads = 2, .dtype = at::kBFloat16});
}

TEST(RingAttention, FollowsDocumentsAndWindows) {
  for (const auto& [window, document] : {std::pair{0, 7}, {1, 0}, {3, 0}, {9, 0}, {100, 0}, {5, 7}}) {
    for (const int ranks : {2, 4})
      expect_whole_attention({.ranks = ranks, .ring = ranks, .kv_heads = 2, .window = window, .document = document});
  }
  expect_whole_attention({.document = 7, .dtype = at::kBFloat16});
}

TEST(RingAttention, WithoutCausalityAllKeysOrThoseOfTheMaskAreSeen) {
  for (const int ranks : {2, 3, 4}) expect_whole_attention({.ranks = ranks, .ring = ranks, .causal = false});
  // The second row's keys end within the first chunk: whole places see none of theirs.
  expect_whole_attention({.ranks = 3, .ring = 3, .causal = false, .keys = {24, 3}});
  expect_whole_attention({.ranks = 4, .ring = 2, .causal = false, .keys = {17, 24}});
  expect_whole_attention({.dtype = at::kBFloat16, .causal = false, .keys = {24, 9}});
}

TEST(RingAttention, HeadsAreSharedInEachOfItsPlaces) {
  expect_whole_attention({.ranks = 4, .ring = 2});
  expect_whole_attention({.ranks = 4, .ring = 2, .kv_heads = 2, .window = 5, .document = 7});
}

TEST(RingAttention, HeadsOfAnyWidthAndManyRows) {
  expect_whole_attention({.width = 6, .length = 80});
  expect_whole_attention({.kv_heads = 2, .width = 6, .document = 30, .length = 80});
  if (!testing::on_simulated_device()) expect_whole_attention({.document = 5, .dtype = at::kDouble});
}

TEST(RingAttention, KeyHeadsTravelAsTheyAre) {
  run_ranks(4, [](const ProcessGroupPtr& world) {
    std::vector<testing::CollectiveCall> calls;
    SequenceShard shard = share_sequences(world, 4).with_length(16);
    Ring ring = *shard.ring;
    ring.group = std::make_shared<testing::RecordingGroup>(ring.group, calls);
    shard.ring = std::make_shared<const Ring>(std::move(ring));
    const auto leaf = [](int64_t heads) {
      return fixed({1, 4, heads, 8}, 1).to(testing::device_of_tests()).to(at::kBFloat16).requires_grad_();
    };
    const auto q = leaf(6), k = leaf(2), v = leaf(2);
    const at::Tensor out = ring_attention(q, k, v, {}, std::nullopt, shard);
    ASSERT_EQ(calls.size(), 3U);  // to all other ranks
    for (const auto& call : calls) {
      EXPECT_EQ(call.operation, "shift");
      EXPECT_EQ(call.dtype, at::kBFloat16);
      EXPECT_EQ(call.numel, 2 * k.numel());
    }
    calls.clear();
    out.sum().backward();
    ASSERT_EQ(calls.size(), 3U + 4U);  // keys again, and their gradients back
    EXPECT_EQ(std::count_if(calls.begin(), calls.end(), [](const auto& call) { return call.dtype == at::kFloat; }), 4);
    const c10::NoGradGuard no_grad;
    EXPECT_FALSE(ring_attention(q, k, v, {}, std::nullopt, shard).requires_grad());
  });
}

TEST(RingAttention, WrongSizesAreNamed) {
  run_ranks(2, [](const ProcessGroupPtr& world) {
    const SequenceShard shard = share_sequences(world, 2).with_length(8);
    const auto of = [](int64_t rows, int64_t heads) { return at::zeros({1, rows, heads, 8}); };
    EXPECT_THAT(message_of([&] { ring_attention(of(8, 2), of(8, 2), of(8, 2), {}, std::nullopt, shard); }),
                HasSubstr("ring attention of 4 rows a place takes queries [B, 4, H, D]"));
    EXPECT_THAT(message_of([&] { ring_attention(of(4, 3), of(4, 2), of(4, 2), {}, std::nullopt, shard); }),
                HasSubstr("with G a divisor of H"));
    const RingMask of_place{.document_begins = at::zeros({1, 4}, at::kLong)};
    EXPECT_THAT(message_of([&] { ring_attention(of(4, 2), of(4, 2), of(4, 2), of_place, std::nullopt, shard); }),
                HasSubstr("the documents of ring attention are [B, 8], those of the whole sequence; got [1, 4]"));
    const RingMask keys_of_place{.causal = false, .keys = at::ones({1, 4}, at::kBool)};
    EXPECT_THAT(message_of([&] { ring_attention(of(4, 2), of(4, 2), of(4, 2), keys_of_place, std::nullopt, shard); }),
                HasSubstr("the keys of ring attention are [B, 8], those of the whole sequence; got [1, 4]"));
  });
}

}  // namespace
}  // namespace megashard
