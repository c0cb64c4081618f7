// Copies between parameters and communication buffers: test_fully_shard_prefix_copy.py, test_fully_shard_chunk_cat.py
// and their part of test_fully_shard_comm.py. Upstream has one fused operator per direction; here it is a table of
// strided copies (shard_geometry.h).

#include <ATen/ops/_chunk_cat.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>

#include "parallel/copies/copy_table.h"
#include "parallel/fsdp/detail/shard_geometry.h"
#include "tests/support/formula.h"
#include "tests/support/run_ranks.h"

namespace megashard::testing {
namespace {

/// A tensor in the packed buffer: sharded along `dim`, stored as `dtype`.
struct Packed {
  std::vector<int64_t> sizes;
  int64_t dim;
  at::ScalarType dtype;
};

at::Tensor numbers_of(const Packed& each, uint64_t seed) { return (fixed(each.sizes, seed) * 100).to(each.dtype); }

/// Each rank's padded chunks one after another: [ranks, sum of chunks].
at::Tensor packed_by_narrow_and_cat(const std::vector<at::Tensor>& wholes, const std::vector<Packed>& list, int ranks,
                                    at::ScalarType dtype) {
  std::vector<at::Tensor> parts;
  for (int rank = 0; rank < ranks; ++rank) {
    std::vector<at::Tensor> chunks;
    for (size_t i = 0; i < list.size(); ++i) {
      const auto range = chunk_range(list[i].sizes[list[i].dim], ranks, rank);
      const at::Tensor chunk = wholes[i].narrow(list[i].dim, range.offset, range.size).reshape({-1}).to(dtype);
      const ShardGeometry geometry(list[i].sizes, list[i].dim, ranks);
      chunks.push_back(at::cat({chunk, at::zeros({geometry.chunk_numel - chunk.numel()}, chunk.options())}));
    }
    parts.push_back(at::cat(chunks));
  }
  return at::stack(parts);
}

/// The same with the batched copies, which are returned in `copies`.
at::Tensor packed_by_copies(const std::vector<at::Tensor>& wholes, const std::vector<Packed>& list, int ranks,
                            at::ScalarType dtype, std::vector<RowsCopy>& copies) {
  std::vector<ShardGeometry> geometries;
  int64_t stride = 0;
  for (const auto& each : list) {
    geometries.emplace_back(each.sizes, each.dim, ranks);
    stride += geometries.back().chunk_numel;
  }
  const at::Tensor buffer = at::full({ranks, stride}, 7, dtype);
  auto* first = static_cast<char*>(buffer.data_ptr());
  int64_t offset = 0;
  for (size_t i = 0; i < list.size(); ++i) {
    add_chunk_cat(copies, geometries[i], wholes[i].const_data_ptr(), wholes[i].scalar_type(),
                  {first + offset * buffer.element_size(), dtype, stride});
    offset += geometries[i].chunk_numel;
  }
  copy_batch(copies, c10::kCPU);
  return buffer;
}

std::vector<at::Tensor> wholes_of(const std::vector<Packed>& list) {
  std::vector<at::Tensor> wholes;
  for (const auto& each : list) wholes.push_back(numbers_of(each, wholes.size() + 1));
  return wholes;
}

void expect_packs(const std::vector<Packed>& list, int ranks, at::ScalarType dtype) {
  const auto wholes = wholes_of(list);
  std::vector<RowsCopy> copies;
  EXPECT_TRUE(at::equal(packed_by_copies(wholes, list, ranks, dtype, copies),
                        packed_by_narrow_and_cat(wholes, list, ranks, dtype)))
      << ranks << " ranks, " << dtype;
}

/// Even, uneven, one row, none; and dimensions other than the first.
std::vector<Packed> all_kinds(at::ScalarType dtype) {
  return {{{8, 3}, 0, dtype}, {{5, 2}, 0, dtype},    {{1, 7}, 0, dtype},    {{0, 4}, 0, dtype},      {{3, 8}, 1, dtype},
          {{9}, 0, dtype},    {{2, 4, 5}, 1, dtype}, {{2, 3, 4}, 2, dtype}, {{2, 2, 4, 3}, 2, dtype}};
}

TEST(FullyShardPrefixCopy, test_reduce_scatter_preparation) {
  for (const int ranks : {1, 2, 4}) expect_packs(all_kinds(at::kFloat), ranks, at::kFloat);
}

TEST(FullyShardChunkCatMixedDtype, test_numerics) {
  auto mixed = all_kinds(at::kBFloat16);
  for (size_t i = 0; i < mixed.size(); i += 2) mixed[i].dtype = at::kFloat;
  mixed[1].dtype = at::kHalf;
  for (const int ranks : {2, 4}) {
    expect_packs(mixed, ranks, at::kFloat);
    expect_packs(mixed, ranks, at::kBFloat16);
  }
}

int launches_of(const std::vector<RowsCopy>& copies) {
  int launches = 0;
  make_copy_tables(copies, [&](const CopyTable&) { ++launches; });
  return launches;
}

TEST(FullyShardChunkCatMixedDtype, test_kernels) {
  auto mixed = all_kinds(at::kBFloat16);
  mixed[0].dtype = mixed[4].dtype = at::kFloat;
  std::vector<RowsCopy> copies;
  packed_by_copies(wholes_of(mixed), mixed, 4, at::kFloat, copies);
  EXPECT_EQ(launches_of(copies), 1);  // upstream: one per dtype
}

TEST(FullyShardChunkCat, test_numerics) {
  for (const auto dtype : {at::kFloat, at::kBFloat16}) {
    for (const int ranks : {1, 2, 3, 5}) {
      const std::vector<Packed> list{{{6, 2}, 0, dtype}, {{7, 3}, 0, dtype}, {{1}, 0, dtype}, {{4, 2, 2}, 0, dtype}};
      const auto wholes = wholes_of(list);
      std::vector<RowsCopy> copies;
      const at::Tensor packed = packed_by_copies(wholes, list, ranks, at::kFloat, copies);
      EXPECT_TRUE(at::equal(packed, at::_chunk_cat(wholes, 0, ranks).to(at::kFloat))) << dtype << " over " << ranks;
    }
  }
}

TEST(FullyShardChunkCat, test_kernels) {
  const std::vector<Packed> list(CopyTable::kCapacity, {{5, 2}, 0, at::kBFloat16});
  std::vector<RowsCopy> copies;
  packed_by_copies(wholes_of(list), list, 4, at::kFloat, copies);
  EXPECT_EQ(copies.size(), list.size());
  EXPECT_EQ(launches_of(copies), 1);
}

TEST(FullyShardChunkCat, test_invalid_inputs) {
  const std::vector<Packed> list{{{4, 2}, 0, at::kInt}};
  const std::vector<at::Tensor> whole{at::full({4, 2}, 3, at::kInt)};
  std::vector<RowsCopy> copies;
  contains(message_of([&] { packed_by_copies(whole, list, 2, at::kFloat, copies); }),
           "cannot convert Int: sharded parameters convert between floating dtypes only");
  contains(message_of([&] { make_copy_tables(copies, [](const CopyTable&) {}); }), "cannot convert Int");
}

/// Autograd refuses a saved tensor whose version has changed.
TEST(FullyShardChunkCat, test_version_counter) {
  run_ranks(2, [](const ProcessGroupPtr& world) {
    uint32_t in_forward = 0;
    Formula unit({{5, 3}, {3, 3}}, [&](const Weights& w, at::Tensor x) {
      in_forward = w[0]._version();
      return at::linear(at::linear(x, w[1]), w[0]);
    });
    fully_shard(unit, resharding(world));
    const uint32_t rows = reshard_and_view(unit.w[0]).local._version();
    const at::Tensor x = fixed({2, 3}, 1).requires_grad_();
    const uint32_t input = x._version();
    const at::Tensor loss = unit.forward(x).sum();
    unshard(unit);  // packs and unpacks again
    EXPECT_EQ(unit.w[0]._version(), in_forward);
    reshard(unit);
    loss.backward();
    EXPECT_EQ(reshard_and_view(unit.w[0]).local._version(), rows);
    EXPECT_EQ(x._version(), input);
  });
}

/// Records the inputs.
class WatchedAllGather final : public AllGather {
 public:
  at::Tensor allocate(int64_t numel, at::ScalarType dtype, c10::Device device) override {
    return at::full({numel}, 0xee, at::TensorOptions(dtype).device(device));
  }
  Work run(at::Tensor output, at::Tensor input, ProcessGroup& group) override {
    inputs.push_back(input.clone());
    return group.all_gather_into(output, input);
  }
  std::vector<at::Tensor> inputs;
};

/// A unit whose parameters share one all-gather.
struct Watched {
  Watched(const Sizes& sizes, const ProcessGroupPtr& world, at::ScalarType dtype = at::kFloat)
      : plain(sizes, linear, dtype), unit(sizes, linear, dtype) {
    fully_shard(unit, resharding(world));
    set_custom_all_gather(unit, watch);
  }
  void expect_whole() {
    unshard(unit);
    for (size_t i = 0; i < plain.w.size(); ++i) {
      ASSERT_EQ(unit.w[i].sizes(), plain.w[i].sizes());
      EXPECT_TRUE(at::equal(unit.w[i], plain.w[i])) << i;
    }
    reshard(unit);
  }
  std::shared_ptr<WatchedAllGather> watch = std::make_shared<WatchedAllGather>();
  FormulaImpl plain;
  Formula unit;
};

TEST(FullyShardPrefixCopy, test_all_gather_input_padding) {
  run_ranks(4, [](const ProcessGroupPtr& world) {
    Watched watched({{5, 3}, {3}}, world);  // rows 2, 2, 1, 0 and 1, 1, 1, 0
    watched.expect_whole();
    ASSERT_EQ(watched.watch->inputs.size(), 1);
    const at::Tensor& input = watched.watch->inputs[0];
    EXPECT_EQ(input.numel(), 32 + 16);  // two rows and one, each aligned to 16 bytes
    const at::Tensor rows = reshard_and_view(watched.unit.w[0]).local;
    const at::Tensor sent = input.narrow(0, 0, rows.numel() * 4).view(at::kFloat);
    EXPECT_TRUE(at::equal(sent, rows.reshape({-1})));
  });
}

/// Communication in the user's own buffers, with sizes given by the test.
class OwnBuffers final : public AllGather, public ReduceScatter {
 public:
  int64_t too_many = 0;
  at::Tensor allocate(int64_t numel, at::ScalarType dtype, c10::Device device) override {
    return at::empty({numel + too_many}, at::TensorOptions(dtype).device(device));
  }
  Work run(at::Tensor output, at::Tensor input, ProcessGroup& group) override {
    return group.all_gather_into(output, input);
  }
  Work run(at::Tensor output, at::Tensor input, ReduceOp op, ProcessGroup& group) override {
    return group.reduce_scatter_into(output, input, op);
  }
};

TEST(FullyShardPrefixCopy, test_legacy_all_gather_input_size) {
  const at::Tensor x = fixed({2, 6}, 1);
  for (const int ranks : {1, 2}) {
    run_ranks(ranks, [&](const ProcessGroupPtr& world) {
      const auto buffers = std::make_shared<OwnBuffers>();
      Formula unit({{4, 6}}, linear);
      fully_shard(unit, {.mesh = flat_mesh(world), .reshard_after_forward = true});
      set_custom_all_gather(unit, buffers);
      unit.forward(x).sum().backward();
      for (const int wrong : {-1, 1}) {
        buffers->too_many = wrong;
        if (world->size() == 1) {
          unit.forward(x);  // no communication
          continue;
        }
        contains(message_of([&] { unit.forward(x); }),
                 "the custom all-gather allocated Byte[" + std::to_string(96 + wrong) + "] on ");
      }
    });
  }
  run_ranks(2, [&](const ProcessGroupPtr& world) {
    const auto buffers = std::make_shared<OwnBuffers>();
    Formula unit({{4, 6}}, linear);
    fully_shard(unit, {.mesh = flat_mesh(world)});
    set_custom_reduce_scatter(unit, buffers);
    buffers->too_many = 1;  // 24 gradients and a flag per rank, rounded up to 128 bytes each
    contains(message_of([&] { unit.forward(x).sum().backward(); }),
             "the custom reduce-scatter allocated Float[65] on cpu where 64 contiguous elements");
  });
}

TEST(FullyShardPrefixCopy, test_empty_all_gather_inputs) {
  run_ranks(4, [](const ProcessGroupPtr& world) {
    Watched watched({{1, 3}}, world);
    watched.expect_whole();
    EXPECT_EQ(watched.watch->inputs.at(0).numel(), 16);  // from every rank
    const bool all_filler = (watched.watch->inputs[0] == 0xee).all().item<bool>();
    EXPECT_EQ(all_filler, world->rank() != 0);  // only the first rank has rows
  });
}

TEST(FullyShardPrefixCopy, test_all_gather_mixed_empty_inputs) {
  run_ranks(3, [](const ProcessGroupPtr& world) {
    Watched watched({{1, 3}, {7, 2}, {2}, {0, 5}}, world);
    watched.expect_whole();
    EXPECT_EQ(watched.watch->inputs.size(), 1);
  });
}

TEST(FullyShardPrefixCopy, test_all_gather_empty_output) {
  run_ranks(2, [](const ProcessGroupPtr& world) {
    Watched watched({{0, 3}}, world);
    watched.expect_whole();
    for (const auto& input : watched.watch->inputs) EXPECT_EQ(input.numel(), 0);
  });
}

/// Chunks as delivered by an all-gather become the whole, bit for bit.
void expect_joins(const Packed& each, int ranks) {
  const at::Tensor whole = numbers_of(each, 1);
  const ShardGeometry geometry(each.sizes, each.dim, ranks);
  const int64_t stride = geometry.chunk_numel + 5;  // other data of the group lies between
  const at::Tensor buffer = at::full({ranks, stride}, 1, each.dtype);
  for (int rank = 0; rank < ranks; ++rank) {
    const auto range = chunk_range(each.sizes[each.dim], ranks, rank);
    const at::Tensor chunk = whole.narrow(each.dim, range.offset, range.size).reshape({-1});
    buffer[rank].narrow(0, 0, chunk.numel()).copy_(chunk);
  }
  const at::Tensor joined = at::zeros(each.sizes, each.dtype);
  std::vector<RowsCopy> copies;
  add_copy_out(copies, geometry, {buffer.data_ptr(), each.dtype, stride}, joined.data_ptr());
  copy_batch(copies, c10::kCPU);
  EXPECT_TRUE(at::equal(joined.view(at::kByte), whole.view(at::kByte)))
      << at::IntArrayRef(each.sizes) << " along " << each.dim << " over " << ranks;
}

TEST(FullyShardPrefixCopy, test_all_gather_output) {
  for (const int ranks : {1, 2, 4}) {
    for (const auto& each : all_kinds(at::kFloat)) expect_joins(each, ranks);
    for (const auto& each : all_kinds(at::kBFloat16)) expect_joins(each, ranks);
  }
}

TEST(FullyShardPrefixCopy, test_all_gather_byte_input) {
  for (const auto dtype : {at::kByte, at::kFloat8_e4m3fn, at::kLong}) {
    for (const auto& each : all_kinds(dtype)) expect_joins(each, 2);
  }
  run_ranks(2, [](const ProcessGroupPtr& world) {
    const at::Tensor bytes = (at::arange(21, at::kFloat) * 12).to(at::kByte).view({7, 3});
    Formula unit({{4, 4}}, linear);
    const at::Tensor frozen = unit.register_parameter("frozen", bytes.clone(), false);
    fully_shard(unit, resharding(world));
    unshard(unit);
    EXPECT_TRUE(at::equal(frozen, bytes));
  });
}

TEST(FullyShardPrefixCopy, test_split_copy) {
  const auto copies_along = [](const std::vector<int64_t>& sizes, int64_t dim) {
    std::vector<RowsCopy> copies;
    const Packed each{sizes, dim, at::kFloat};
    packed_by_copies({numbers_of(each, 1)}, {each}, 4, at::kFloat, copies);
    return copies;
  };
  EXPECT_EQ(copies_along({8, 6}, 0).size(), 1);  // rows of all ranks
  const auto across = copies_along({6, 8}, 1);   // no split and cat: strided rows, rank by rank
  EXPECT_EQ(across.size(), 4);
  EXPECT_EQ(launches_of(across), 1);
  for (const auto& each : across) {
    EXPECT_EQ(each.rows, 6);
    EXPECT_EQ(each.row_numel, 2);
    EXPECT_EQ(each.from_stride, 8);
    EXPECT_EQ(each.to_stride, 2);
  }
}

}  // namespace
}  // namespace megashard::testing
