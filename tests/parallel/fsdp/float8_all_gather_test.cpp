// Extensions that define what a parameter sends in its group's all-gather.

#include "parallel/fsdp/custom_comm.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <torch/optim/sgd.h>

#include "parallel/fsdp/float8_all_gather.h"
#include "tests/support/formula.h"
#include "tests/support/recording_group.h"
#include "tests/support/run_ranks.h"
#include "tests/support/simulated_device.h"

namespace megashard::testing {
namespace {

/// Rank `rank`'s rows of the whole.
at::Tensor part_of(const at::Tensor& whole, const GatherShape& shape, int rank) {
  const int64_t length = whole.size(shape.shard_dim);
  const int64_t chunk = shape.chunk_sizes[shape.shard_dim];
  const int64_t begin = std::min(rank * chunk, length);
  return whole.narrow(shape.shard_dim, begin, std::min(chunk, length - begin));
}

/// Sends fp32 as its upper and lower 16 bits: two payloads, lossless.
class Halves final : public AllGatherExtension {
 public:
  std::vector<Payload> payloads(const GatherShape& shape) override {
    seen = shape;
    const int64_t numel = c10::multiply_integers(shape.chunk_sizes);
    return {{at::kShort, numel}, {at::kBFloat16, numel}};
  }
  void pack(const GatherShape&, const at::Tensor& rows, at::ArrayRef<at::Tensor> payloads) override {
    rows_sizes = rows.sizes().vec();
    payload_numel = payloads[0].numel();
    const at::Tensor halves = rows.reshape({-1}).view(at::kShort).view({-1, 2});
    payloads[0].narrow(0, 0, rows.numel()).copy_(halves.select(1, 0));
    payloads[1].view(at::kShort).narrow(0, 0, rows.numel()).copy_(halves.select(1, 1));
  }
  void unpack(const GatherShape& shape, at::ArrayRef<at::Tensor> payloads, const at::Tensor& whole) override {
    for (int rank = 0; rank < shape.ranks; ++rank) {
      const at::Tensor part = part_of(whole, shape, rank);
      const at::Tensor rows = at::empty({part.numel(), 2}, at::kShort);
      for (int half : {0, 1}) {
        rows.select(1, half).copy_(payloads[half][rank].view(at::kShort).narrow(0, 0, part.numel()));
      }
      part.copy_(rows.view({-1}).view(at::kFloat).view(part.sizes()));
    }
  }

  GatherShape seen;
  std::vector<int64_t> rows_sizes;
  int64_t payload_numel = 0;
};

/// Sends bf16, whatever the stored dtype.
class InBFloat16 final : public AllGatherExtension {
 public:
  std::vector<Payload> payloads(const GatherShape& shape) override {
    return {{at::kBFloat16, c10::multiply_integers(shape.chunk_sizes)}};
  }
  void pack(const GatherShape&, const at::Tensor& rows, at::ArrayRef<at::Tensor> payloads) override {
    payloads[0].narrow(0, 0, rows.numel()).copy_(rows.reshape({-1}));
  }
  void unpack(const GatherShape& shape, at::ArrayRef<at::Tensor> payloads, const at::Tensor& whole) override {
    for (int rank = 0; rank < shape.ranks; ++rank) {
      const at::Tensor part = part_of(whole, shape, rank);
      part.copy_(payloads[0][rank].narrow(0, 0, part.numel()).view(part.sizes()));
    }
  }
};

at::Tensor affine(const Weights& w, at::Tensor x) { return at::linear(x, w[0], w[1]).tanh(); }

struct AffineOnMetaImpl : torch::nn::Module {
  AffineOnMetaImpl(int64_t out, int64_t in)
      : w{register_parameter("weight", at::empty({out, in}, at::kMeta)),
          register_parameter("bias", at::empty({out}, at::kMeta))} {}
  at::Tensor forward(at::Tensor x) { return affine(w, x); }

  Weights w;
};
using AffineOnMeta = Hooked<AffineOnMetaImpl>;

/// Whole weights after an all-gather with Float8AllGather.
at::Tensor through_float8(const at::Tensor& whole, int ranks, at::ScalarType dtype) {
  std::vector<at::Tensor> parts;
  for (int rank = 0; rank < ranks; ++rank) {
    const auto rows = chunk_range(whole.size(0), ranks, rank);
    const at::Tensor part = whole.narrow(0, rows.offset, rows.size).contiguous();
    const at::Tensor payload = at::empty({1, part.numel()}, at::kFloat8_e4m3fn);
    const at::Tensor scale = at::empty({1, 1});
    quantise_float8(part, payload[0], scale[0]);
    parts.push_back(at::empty(part.sizes(), dtype));
    dequantise_float8(payload, scale, 0, rows.size, parts.back());
  }
  return at::cat(parts);
}

TEST(FullyShardExtensions, test_all_gather_extensions_train_parity) {
  for (const bool reshard : {true, false}) {
    run_ranks(3, [reshard](const ProcessGroupPtr& world) {
      const FullyShardOptions options{.mesh = flat_mesh(world), .reshard_after_forward = reshard};
      Formula plain({{7, 5}, {7}}, affine), unit({{7, 5}, {7}}, affine);
      fully_shard(plain, options);
      fully_shard(unit, options);
      for (const auto& w : unit.w) set_all_gather_extension(w, std::make_shared<Halves>());
      torch::optim::SGD plain_sgd(plain.w, 0.1), sgd(unit.w, 0.1);
      for (int step = 0; step < 3; ++step) {
        const at::Tensor x = fixed({4, 5}, 10 * step + world->rank());
        const at::Tensor expected = plain.forward(x), actual = unit.forward(x);
        EXPECT_TRUE(at::equal(actual, expected)) << "step " << step;
        expected.pow(2).sum().backward();
        actual.pow(2).sum().backward();
        plain_sgd.step();
        sgd.step();
        for (size_t i = 0; i < unit.w.size(); ++i) {
          EXPECT_TRUE(at::equal(reshard_and_view(unit.w[i]).local, reshard_and_view(plain.w[i]).local));
        }
        plain.zero_grad();
        unit.zero_grad();
      }
    });
  }
}

TEST(FullyShardExtensions, test_all_gather_extensions_end_to_end) {
  run_ranks(2, [](const ProcessGroupPtr& world) {
    FullyShardOptions options = resharding(world);
    options.mixed_precision.param_dtype = at::kBFloat16;
    options.mixed_precision.reduce_dtype = at::kFloat;
    AffineOnMeta unit(6, 8);
    fully_shard(unit, options);
    set_all_gather_extension(unit.w[0], std::make_shared<Float8AllGather>());
    std::vector<at::Tensor> whole{fixed({6, 8}, 1), fixed({6}, 2)};
    for (size_t i = 0; i < whole.size(); ++i) assign_full_parameter(unit.w[i], whole[i]);
    torch::optim::SGD sgd(unit.w, 0.1);
    for (int step = 0; step < 3; ++step) {
      const at::Tensor x = fixed({4, 8}, 10 * step).to(at::kBFloat16);
      const Weights seen{through_float8(whole[0], 2, at::kBFloat16).requires_grad_(),
                         whole[1].to(at::kBFloat16).requires_grad_()};
      const at::Tensor expected = affine(seen, x), actual = unit.forward(x);
      EXPECT_TRUE(at::equal(actual, expected)) << "step " << step;
      expected.pow(2).sum().backward();
      actual.pow(2).sum().backward();
      sgd.step();
      unit.zero_grad();
      for (size_t i = 0; i < whole.size(); ++i) {
        whole[i].add_(seen[i].grad().to(at::kFloat), -0.1);
        EXPECT_TRUE(at::equal(reshard_and_view(unit.w[i]).local, part_like(whole[i], unit.w[i])));
      }
    }
  });
}

TEST(FullyShardExtensions, test_all_gather_extensions_monkey_patch) {
  run_ranks(2, [](const ProcessGroupPtr& world) {
    AffineOnMeta unit(5, 6);
    fully_shard(unit, resharding(world));
    const at::Tensor whole = fixed({5, 6}, 1), bias = fixed({5}, 2), x = fixed({4, 6}, 3);
    for (const auto& w : unit.w) materialise_empty_parameter(w, device_of_tests());
    assign_full_parameter(unit.w[0], whole);
    assign_full_parameter(unit.w[1], bias);
    const auto gives = [&](const at::Tensor& weight) {
      const at::Tensor output = unit.forward(x);
      output.sum().backward();
      EXPECT_TRUE(at::equal(output, affine({weight, bias}, x)));
      EXPECT_EQ(unit.w[0].grad().scalar_type(), at::kFloat);
    };
    set_all_gather_extension(unit.w[0], std::make_shared<InBFloat16>());
    gives(whole.to(at::kBFloat16).to(at::kFloat));
    set_all_gather_extension(unit.w[0], std::make_shared<Float8AllGather>());  // between steps
    gives(through_float8(whole, 2, at::kFloat));
    set_all_gather_extension(unit.w[0], nullptr);
    gives(whole);
    contains(message_of([&] { set_all_gather_extension(x, nullptr); }), "fully_shard");
  });
}

// Payloads have the padded size on every rank; rows may have fewer.
TEST(FullyShardExtensions, test_all_gather_extension_outer_size_stride) {
  run_ranks(4, [](const ProcessGroupPtr& world) {
    FullyShardOptions options = resharding(world);
    options.shard_placement_fn = [](const at::Tensor& parameter) {
      return ShardPlacement{.dim = parameter.size(1) == 8 ? 1 : 0};
    };
    const Body body = [](const Weights& w, at::Tensor x) { return at::linear(at::linear(x, w[0]), w[1]); };
    Twins twins({{5, 8}, {3, 5}}, body, options);  // columns even, rows 1, 1, 1 and 0
    std::vector<std::shared_ptr<Halves>> extensions;
    for (const auto& w : twins.unit.w) {
      extensions.push_back(std::make_shared<Halves>());
      set_all_gather_extension(w, extensions.back());
    }
    const at::Tensor x = fixed({4, 8}, 3);
    const at::Tensor output = twins.unit.forward(x);
    EXPECT_TRUE(at::equal(output, twins.plain.forward(x)));
    const Halves &columns = *extensions[0], &rows = *extensions[1];
    EXPECT_EQ(columns.seen.shard_dim, 1);
    EXPECT_EQ(columns.seen.whole_sizes, (std::vector<int64_t>{5, 8}));
    EXPECT_EQ(columns.seen.chunk_sizes, (std::vector<int64_t>{5, 2}));
    EXPECT_EQ(rows.seen.chunk_sizes, (std::vector<int64_t>{1, 5}));
    EXPECT_EQ(rows.rows_sizes, (std::vector<int64_t>{world->rank() == 3 ? 0 : 1, 5}));
    EXPECT_EQ(rows.payload_numel, 5);
    EXPECT_EQ(rows.seen.rank, world->rank());
  });
}

TEST(FullyShardExtensions, test_all_gather_extension_hsdp_mesh) {
  run_ranks(4, [](const ProcessGroupPtr& world) {
    const auto mesh =
        std::make_shared<DeviceMesh>(world, std::vector<int>{2, 2}, std::vector<std::string>{"replicate", "shard"});
    Twins twins({{5, 6}}, linear, {.mesh = mesh, .reshard_after_forward = true});
    const auto extension = std::make_shared<Halves>();
    set_all_gather_extension(twins.unit.w[0], extension);
    const at::Tensor x = fixed({4, 6}, 3);
    twins.plain.forward(x).pow(2).sum().backward();
    twins.unit.forward(x).pow(2).sum().backward();
    twins.expect_equal_gradients();
    EXPECT_EQ(extension->seen.ranks, 2);  // ranks with different rows
    EXPECT_EQ(extension->seen.rank, world->rank() % 2);
    EXPECT_EQ(extension->seen.chunk_sizes, (std::vector<int64_t>{3, 6}));
  });
}

/// Sends its rows as they are, and watches the gathered buffer.
class Watching final : public AllGatherExtension {
 public:
  std::vector<Payload> payloads(const GatherShape& shape) override {
    return {{at::kFloat, c10::multiply_integers(shape.chunk_sizes)}};
  }
  void pack(const GatherShape&, const at::Tensor& rows, at::ArrayRef<at::Tensor> payloads) override {
    payloads[0].copy_(rows.reshape({-1}));
  }
  void unpack(const GatherShape&, at::ArrayRef<at::Tensor> payloads, const at::Tensor& whole) override {
    ++unpacked;
    whole.copy_(payloads[0].reshape(whole.sizes()));
    gathered = payloads[0].storage().getWeakStorageImpl();
  }
  bool is_released() const { return gathered->expired(); }

  int unpacked = 0;
  std::optional<c10::weak_intrusive_ptr<c10::StorageImpl>> gathered;
};

/// Unpacked weights never share memory with the gathered buffer, which is freed as soon as it may be reused: on a CPU
/// at once, on a device after the forward or the next unit's all-gather.
TEST(FullyShardExtensions, test_release_all_gather_outputs_after_post_all_gather) {
  for (const bool reshards : {false, true}) {
    run_ranks(2, [=](const ProcessGroupPtr& world) {
      const auto watching = std::make_shared<Watching>();
      const Body body = [&](const Weights& w, at::Tensor x) {
        EXPECT_TRUE(!watching->gathered || watching->is_released() || on_simulated_device());
        return affine(w, x);
      };
      Twins twins({{8, 8}, {8}}, body, {.mesh = flat_mesh(world), .reshard_after_forward = reshards});
      set_all_gather_extension(twins.unit.w[0], watching);
      for (uint64_t step = 0; step < 2; ++step) {
        twins.zero_grad();
        const at::Tensor x = fixed({4, 8}, step), expected = twins.plain.forward(x), loss = twins.unit.forward(x);
        EXPECT_TRUE(watching->is_released());
        EXPECT_EQ(twins.unit.w[0].sizes() == at::IntArrayRef({8, 8}), !reshards);
        expected.sum().backward();
        loss.sum().backward();
        EXPECT_TRUE(watching->is_released());
        twins.expect_equal_gradients();
        twins.expect_sharded();
      }
      EXPECT_EQ(watching->unpacked, reshards ? 4 : 2);
    });
  }
}

TEST(FullyShardExtensions, Float8AndPlainParametersTravelInOneAllGather) {
  run_ranks(2, [](const ProcessGroupPtr& world) {
    std::vector<CollectiveCall> calls;
    FullyShardOptions options{.mesh = recording_mesh(world, {2}, {"shard"}, calls)};
    Formula unit({{6, 7}, {6}}, affine);
    const Weights whole{unit.w[0].detach().clone(), unit.w[1].detach().clone()};
    fully_shard(unit, options);
    const at::Tensor x = fixed({4, 7}, 3);
    unit.forward(x);
    set_all_gather_extension(unit.w[0], std::make_shared<Float8AllGather>());
    EXPECT_TRUE(at::equal(unit.forward(x), affine({through_float8(whole[0], 2, at::kFloat), whole[1]}, x)));
    ASSERT_EQ(calls.size(), 2U);
    for (const auto& call : calls) {
      EXPECT_EQ(call.operation, "all_gather");
      EXPECT_EQ(call.dtype, at::kByte);
    }
    EXPECT_EQ(calls[0].numel, 96 + 16);       // 3 x 7 and 3 values of 4 bytes, rounded up to 16
    EXPECT_EQ(calls[1].numel, 32 + 16 + 16);  // 3 x 7 of 1 byte, a scale, 3 of 4 bytes
  });
}

TEST(FullyShardExtensions, Float8TravelsAlongAnyDimensionAndOnOneRank) {
  for (const int ranks : {1, 2}) {
    run_ranks(ranks, [ranks](const ProcessGroupPtr& world) {
      FullyShardOptions options = resharding(world);
      options.shard_placement_fn = [](const at::Tensor&) { return ShardPlacement{.dim = 1}; };
      Formula unit({{3, 8}}, linear);
      const at::Tensor whole = unit.w[0].detach().clone();
      fully_shard(unit, options);
      set_all_gather_extension(unit.w[0], std::make_shared<Float8AllGather>());
      const at::Tensor by_columns = through_float8(whole.t().contiguous(), ranks, at::kFloat).t().contiguous();
      const at::Tensor x = fixed({4, 8}, 3);
      EXPECT_TRUE(at::equal(unit.forward(x), at::linear(x, by_columns)));
    });
  }
}

/// A row, a row of a stacked matrix, a filter; sharded along the first dimension and along rows.
TEST(FullyShardExtensions, Float8RowsHaveScalesOfTheirOwn) {
  struct Case {
    std::vector<int64_t> sizes;
    int dim;
    int64_t rows;  // scales of a rank
  };
  for (const Case& each : {Case{{6, 16}, 0, 3}, Case{{5, 32}, 0, 3}, Case{{4, 3, 16}, 0, 6}, Case{{4, 2, 3, 3}, 0, 2},
                           Case{{6, 32}, 1, 6}, Case{{6, 16}, 1, 1}}) {
    run_ranks(2, [each](const ProcessGroupPtr& world) {
      std::vector<CollectiveCall> calls;
      FullyShardOptions options{.mesh = recording_mesh(world, {2}, {"shard"}, calls)};
      options.shard_placement_fn = [each](const at::Tensor&) { return ShardPlacement{.dim = each.dim}; };
      const Body body = [](const Weights& w, at::Tensor x) { return w[0] * x; };
      Formula unit({each.sizes}, body);
      const at::Tensor whole = unit.w[0].detach().clone();
      fully_shard(unit, options);
      set_all_gather_extension(unit.w[0], std::make_shared<Float8AllGather>(Float8Scale::kRowAmax));
      const at::Tensor one = at::ones({1});
      const at::Tensor gathered = unit.forward(one).detach();
      const int64_t chunk = (each.sizes[each.dim] + 1) / 2;
      const int64_t numel = whole.numel() / each.sizes[each.dim] * chunk;
      EXPECT_EQ(calls[0].numel, (numel + 15) / 16 * 16 + (4 * each.rows + 15) / 16 * 16) << at::IntArrayRef(each.sizes);
      for (int rank = 0; rank < 2; ++rank) {
        const int64_t begin = std::min(rank * chunk, each.sizes[each.dim]);
        const int64_t length = std::min(chunk, each.sizes[each.dim] - begin);
        const at::Tensor part = whole.narrow(each.dim, begin, length).contiguous().view({-1, numel / each.rows});
        const at::Tensor ours = gathered.narrow(each.dim, begin, length).contiguous().view(part.sizes());
        for (int64_t row = 0; row < part.size(0); ++row) {
          EXPECT_TRUE(at::equal(ours[row], through_float8(part[row].view({1, -1}), 1, at::kFloat)[0]));
        }
      }
    });
  }
}

TEST(FullyShardInit, test_mixed_dtypes_no_grad_param) {
  run_ranks(2, [](const ProcessGroupPtr& world) {
    std::vector<CollectiveCall> calls;
    FullyShardOptions options{.mesh = recording_mesh(world, {2}, {"shard"}, calls)};
    const Body body = [](const Weights& w, at::Tensor x) { return at::linear(x, w[0] * w[1].to(at::kFloat)); };
    FormulaImpl plain({{5, 6}, {5, 6}}, body);
    Formula unit({{5, 6}, {5, 6}}, body);
    for (FormulaImpl* each : {&plain, static_cast<FormulaImpl*>(&unit)}) {
      each->w[1].requires_grad_(false);
      each->w[1].set_data(each->w[1].to(at::kFloat8_e4m3fn));
    }
    fully_shard(unit, options);
    const at::Tensor x = fixed({4, 6}, 3);
    plain.forward(x).pow(2).sum().backward();
    unit.forward(x).pow(2).sum().backward();
    EXPECT_TRUE(at::equal(unit.w[0].grad(), part_like(plain.w[0].grad(), unit.w[0])));
    EXPECT_FALSE(unit.w[1].grad().defined());
    EXPECT_EQ(unit.w[1].scalar_type(), at::kFloat8_e4m3fn);
    EXPECT_EQ(calls[0].numel, 80 + 32);  // 3 x 6 of 4 bytes and of 1, rounded up to 16
    EXPECT_EQ(calls.back().operation, "reduce_scatter");
    EXPECT_EQ(calls.back().numel, 2 * 32);  // 18 trainable values and flags, rounded up to 128 bytes
  });
}

}  // namespace
}  // namespace megashard::testing
