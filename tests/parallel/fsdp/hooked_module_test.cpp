#include "parallel/fsdp/hooked_module.h"

#include <torch/nn/modules/container/any.h>
#include <torch/nn/modules/container/sequential.h>

#include <map>
#include <optional>

#include "tests/support/formula.h"
#include "tests/support/run_ranks.h"

namespace megashard::testing {
namespace {

struct Batch {
  at::Tensor x;
  std::optional<at::Tensor> scale;
  std::map<std::string, std::vector<at::Tensor>> more;
  int repeats = 1;
  template <class F>
  void visit_tensors(F&& f) {
    f(x);
    f(scale);
    f(more);
  }
};

struct Result {
  at::Tensor y;
  std::pair<int, std::optional<at::Tensor>> hidden;
  template <class F>
  void visit_tensors(F&& f) {
    f(y);
    f(hidden);
  }
};

struct BatchedImpl : torch::nn::Module {
  BatchedImpl() : w(register_parameter("w", fixed({5, 6}, 1))) {}
  Result forward(const Batch& batch) {
    at::Tensor y = at::linear(batch.x, w);
    if (batch.scale) y = y * *batch.scale;
    for (const auto& [name, tensors] : batch.more) {
      for (const auto& tensor : tensors) y = y + tensor;
    }
    seen = batch.x.scalar_type();
    return {y * batch.repeats, {7, y}};
  }
  at::Tensor w;
  at::ScalarType seen{};
};

Batch batch() {
  return {.x = fixed({4, 6}, 2).requires_grad_(),
          .scale = fixed({5}, 3),
          .more = {{"a", {fixed({5}, 4), fixed({4, 5}, 5)}}},
          .repeats = 2};
}

TEST(HookedModule, TensorsInsideStructsMapsAndOptionalsAreHooked) {
  run_ranks(2, [](const ProcessGroupPtr& world) {
    for (const bool through_hidden : {false, true}) {
      BatchedImpl plain;
      Hooked<BatchedImpl> unit;
      fully_shard(unit, {.mesh = flat_mesh(world), .reshard_after_forward = true});
      auto loss = [&](auto& model, const Batch& of) {
        const Result result = model.forward(of);
        EXPECT_EQ(result.hidden.first, 7);
        return (through_hidden ? *result.hidden.second : result.y).pow(2).sum();
      };
      const Batch a = batch(), b = batch();
      const auto expected = loss(plain, a), actual = loss(unit, b);
      EXPECT_TRUE(at::equal(actual, expected));
      expected.backward();
      actual.backward();
      EXPECT_TRUE(at::equal(unit.w.grad(), part_like(plain.w.grad(), unit.w)));
      EXPECT_TRUE(at::equal(b.x.grad(), a.x.grad()));
    }
  });
}

TEST(HookedModule, TensorsInsideStructsAreCast) {
  run_ranks(1, [](const ProcessGroupPtr& world) {
    Hooked<BatchedImpl> unit;
    FullyShardOptions options{.mesh = flat_mesh(world)};
    options.mixed_precision.param_dtype = at::kBFloat16;
    options.mixed_precision.output_dtype = at::kDouble;
    fully_shard(unit, options);
    const Batch given = batch();
    const Result result = unit.forward(given);
    EXPECT_EQ(unit.seen, at::kBFloat16);
    EXPECT_EQ(given.x.scalar_type(), at::kFloat);  // the caller's tensor is unchanged
    EXPECT_EQ(result.y.scalar_type(), at::kDouble);
    EXPECT_EQ(result.hidden.second->scalar_type(), at::kDouble);
  });
}

struct Opaque {
  at::Tensor y;
};
struct OpaqueImpl : torch::nn::Module {
  OpaqueImpl() : w(register_parameter("w", fixed({5, 6}, 1))) {}
  Opaque forward(at::Tensor x) { return {at::linear(x, w)}; }
  at::Tensor w;
};

TEST(HookedModule, AResultWhoseTensorsCannotBeSeenRaises) {
  run_ranks(1, [](const ProcessGroupPtr& world) {
    Hooked<OpaqueImpl> unit;
    fully_shard(unit, {.mesh = flat_mesh(world)});
    contains(message_of([&] { unit.forward(fixed({4, 6}, 1)); }), "give the returned struct a visit_tensors member");
  });
}

struct FormulaHolder : torch::nn::ModuleHolder<Formula> {
  using torch::nn::ModuleHolder<Formula>::ModuleHolder;
};

TEST(HookedModule, HooksRunInsideSequentialAnyModuleAndHolders) {
  run_ranks(2, [](const ProcessGroupPtr& world) {
    using Run = std::function<at::Tensor(const std::shared_ptr<Formula>&, at::Tensor)>;
    const std::vector<Run> ways = {
        [](const auto& unit, at::Tensor x) { return torch::nn::Sequential(unit)->forward(x); },
        [](const auto& unit, at::Tensor x) { return torch::nn::AnyModule(unit).forward(x); },
        [](const auto& unit, at::Tensor x) { return FormulaHolder(unit)->forward(x); },
        [](const auto& unit, at::Tensor x) { return FormulaHolder(unit)(x); },
        [](const auto& unit, at::Tensor x) { return (*unit)(x); },
    };
    for (const auto& run : ways) {
      FormulaImpl plain({{5, 6}}, linear);
      const auto unit = std::make_shared<Formula>(Sizes{{5, 6}}, linear);
      fully_shard(*unit, {.mesh = flat_mesh(world), .reshard_after_forward = true});
      const at::Tensor expected = plain.forward(fixed({4, 6}, 2)), output = run(unit, fixed({4, 6}, 2));
      EXPECT_TRUE(at::equal(output, expected));
      expected.sum().backward();
      output.sum().backward();
      EXPECT_TRUE(at::equal(unit->w[0].grad(), part_like(plain.w[0].grad(), unit->w[0])));
    }
  });
}

/// Counts inputs and failures, and doubles outputs.
struct Counting final : ForwardHooks {
  void pre_forward(TensorRefs inputs) override { inputs_seen += inputs.size(); }
  void post_forward(TensorRefs outputs) override {
    for (auto* output : outputs) *output = *output * 2;
  }
  void forward_failed() noexcept override { ++failures; }
  void before_conversion() override {}
  void before_rebind(const char*) override {}
  size_t inputs_seen = 0;
  int failures = 0;
};

TEST(HookedModule, HooksSeeAndMayReplaceTensorsAndHearOfFailures) {
  Formula unit({{5, 6}}, linear);
  EXPECT_EQ(unit.class_name(), "Formula");
  const auto hooks = std::make_shared<Counting>();
  unit.set_forward_hooks(hooks);
  const at::Tensor x = fixed({4, 6}, 1);
  EXPECT_TRUE(at::equal(unit.forward(x), at::linear(x, unit.w[0]) * 2));
  EXPECT_EQ(hooks->inputs_seen, 1U);
  message_of([&] { unit.forward(fixed({4, 5}, 1)); });
  EXPECT_EQ(hooks->failures, 1);
}

}  // namespace
}  // namespace megashard::testing
