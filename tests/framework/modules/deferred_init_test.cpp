#include "framework/modules/deferred_init.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Functions.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/init.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>
#include <torch/nn/modules/rnn.h>
#include <torch/nn/modules/transformer.h>
#include <torch/nn/modules/transformercoder.h>
#include <torch/types.h>

#include <cmath>
#include <thread>

#include "framework/recompute/call_state.h"
#include "tests/support/counting_allocator.h"
#include "tests/support/default_device.h"
#include "tests/support/message_of.h"
#include "tests/support/simulated_device.h"

namespace megashard {
namespace {

namespace nn = torch::nn;
using testing::CountingAllocator;
using testing::message_of;
using ModulePtr = std::shared_ptr<nn::Module>;

/// A module whose constructor is a function.
struct Built : nn::Module {
  explicit Built(const std::function<void(Built&)>& construct) { construct(*this); }
  at::Tensor buffer(const char* name, at::Tensor value) { return register_buffer(name, std::move(value)); }
  at::Tensor parameter(const char* name, at::Tensor value) { return register_parameter(name, std::move(value)); }
  using nn::Module::register_module;
};

std::function<ModulePtr()> built(std::function<void(Built&)> construct) {
  return [construct] { return std::make_shared<Built>(construct); };
}

struct Row {
  const char* name;
  std::function<ModulePtr()> make;
};
void PrintTo(const Row& row, std::ostream* out) { *out << row.name; }

std::vector<Row> rows() {
  return {
      {"Linear", [] { return nn::Linear(8, 6).ptr(); }},
      {"EmbeddingWithPadding", [] { return nn::Embedding(nn::EmbeddingOptions(10, 6).padding_idx(1)).ptr(); }},
      {"LayerNorm", [] { return nn::LayerNorm(nn::LayerNormOptions({6})).ptr(); }},
      {"Conv2d", [] { return nn::Conv2d(nn::Conv2dOptions(3, 8, 3)).ptr(); }},
      {"MultiheadAttention",
       [] { return nn::MultiheadAttention(nn::MultiheadAttentionOptions(8, 2).add_bias_kv(true)).ptr(); }},
      {"BatchNorm2d", [] { return nn::BatchNorm2d(4).ptr(); }},
      {"GroupNorm", [] { return nn::GroupNorm(2, 4).ptr(); }},
      {"TransformerEncoderLayer", [] { return nn::TransformerEncoderLayer(8, 2).ptr(); }},
      {"TransformerDecoder",
       [] {
         return nn::TransformerDecoder(nn::TransformerDecoderOptions(nn::TransformerDecoderLayer(8, 2), 2)).ptr();
       }},
      {"Transformer", [] { return nn::Transformer(nn::TransformerOptions(8, 2, 2, 2)).ptr(); }},
      {"LSTM", [] { return nn::LSTM(nn::LSTMOptions(4, 6).num_layers(2)).ptr(); }},
      {"EmbeddingBag", [] { return nn::EmbeddingBag(10, 4).ptr(); }},
      {"Bilinear", [] { return nn::Bilinear(3, 4, 5).ptr(); }},
      {"PReLU", [] { return nn::PReLU().ptr(); }},
      {"RotaryFrequencies",
       built([](Built& m) { m.buffer("inv_freq", 1.0 / at::pow(10000.0, at::arange(0, 64, 2).to(at::kFloat) / 64)); })},
      {"CausalMask", built([](Built& m) {
         m.buffer("mask", at::ones({8, 8}).tril().view({1, 1, 8, 8}).to(at::kBool));
       })},
      {"TruncatedNormal", built([](Built& m) {
         auto w = m.parameter("w", at::empty({8, 8}));
         const at::NoGradGuard no_grad;
         w.normal_().fmod_(2).mul_(0.02);
       })},
      {"OrthogonalAndDirac", built([](Built& m) {
         nn::init::orthogonal_(m.parameter("w", at::empty({8, 8})));
         nn::init::dirac_(m.parameter("d", at::empty({4, 4, 3})));
       })},
      {"Sparse", built([](Built& m) {
         nn::init::sparse_(m.parameter("w", at::empty({8, 8})), 0.5);
       })},
      {"ScaledAfterwards", built([](Built& m) {
         auto a = m.register_module("a", nn::Linear(8, 8));
         const at::NoGradGuard no_grad;
         a->weight.mul_(1 / std::sqrt(2.0));
         a->bias.zero_();
         a->weight.narrow(0, 0, 1).fill_(3);
       })},
      {"SetData", built([](Built& m) {
         auto a = m.register_module("a", nn::Linear(8, 8));
         a->weight.set_data(at::ones({8, 8}));
         a->bias.set_data(at::ones({8}));
       })},
      {"BooleanIndex", built([](Built& m) {
         const auto t = at::arange(8);
         m.buffer("c", at::index(t, {std::make_optional(t > 3)}));
       })},
      {"OwnGenerator",
       built([](Built& m) { m.parameter("w", at::rand({4}, at::make_generator<at::CPUGeneratorImpl>(7))); })},
      {"ThreadInConstructor", built([](Built& m) {
         at::Tensor c;
         std::thread([&] { c = at::ones({3}); }).join();
         m.buffer("c", c);
       })},
      {"ItemOfLinspace",
       built([](Built& m) { m.buffer("c", at::full({2}, at::linspace(0, 0.1, 4)[3].item<double>())); })},
      {"TensorOfFloats", built([](Built& m) {
         m.buffer("c", torch::tensor({1.f, 2.f, 3.f}));
       })},
      {"TensorOfNestedInts", built([](Built& m) {
         m.buffer("c", torch::tensor({{1, 2}, {3, 4}}));
       })},
      {"FromBlob", built([](Built& m) {
         static float bytes[3] = {1, 2, 3};
         m.buffer("c", at::from_blob(bytes, {3}).clone());
       })},
      // Beyond the stock cases.
      {"TensorOfVector", built([](Built& m) {
         m.buffer("mean", torch::tensor(std::vector<float>{0.5f, 0.25f}).view({1, 2}) * at::ones({3, 1}));
       })},
      {"RealTensorRead", built([](Built& m) {
         auto values = torch::tensor({1.f, 2.f});
         auto w = m.parameter("w", at::zeros({2}));
         const at::NoGradGuard no_grad;
         w.copy_(values);
         values.fill_(5);
       })},
      {"RandomOnRealTensor", built([](Built& m) {
         m.register_module("a", nn::Linear(4, 4));
         auto noise = torch::tensor({0.f, 0.f, 0.f});
         m.buffer("noise", noise.uniform_());
         m.register_module("b", nn::Linear(4, 4));
       })},
      {"Randperm", built([](Built& m) {
         m.register_module("a", nn::Linear(4, 4));
         m.buffer("order", at::randperm(6));
         m.register_module("b", nn::Linear(4, 4));
         m.buffer("again", at::randperm(6));
       })},
      {"RandomFactories", built([](Built& m) {
         m.parameter("a", at::randn({5, 3}));
         m.buffer("b", at::rand({7}));
         m.buffer("c", at::randint(0, 9, {4}));
         m.buffer("d", at::bernoulli(at::full({9}, 0.5)));
       })},
      {"ItemOfRandom", built([](Built& m) {
         auto a = m.register_module("a", nn::Linear(4, 4));
         m.buffer("first", at::full({1}, a->weight[0][0].item<float>()));
         auto b = m.register_module("b", nn::Linear(4, 4));
         m.buffer("second", at::full({1}, (a->weight.sum() + b->weight.sum()).item<float>()));
         m.register_module("c", nn::Linear(4, 4));
       })},
      {"ReseededInConstructor", built([](Built& m) {
         m.register_module("a", nn::Linear(4, 4));
         at::manual_seed(99);
         m.register_module("b", nn::Linear(4, 4));
         at::manual_seed(99);
       })},
      {"InitialisedTwice", built([](Built& m) {
         auto a = m.register_module("a", nn::Linear(4, 4));
         auto b = m.register_module("b", nn::Linear(4, 4));
         for (auto& w : m.parameters()) nn::init::normal_(w, 0, 0.02);
       })},
      {"Tied", built([](Built& m) {
         auto a = m.register_module("a", nn::Embedding(6, 4));
         m.parameter("head", a->weight);
       })},
      {"DefaultDtype", built([](Built& m) {
         const auto before = at::get_default_dtype();
         at::set_default_dtype(caffe2::TypeMeta::Make<double>());
         m.register_module("a", nn::Linear(4, 4));
         at::set_default_dtype(before);
       })},
      {"ConvertedToBfloat16", built([](Built& m) {
         m.register_module("a", nn::Linear(4, 4));
         m.to(at::kBFloat16);
       })},
  };
}

/// As FSDP2Mixin does with what is not sharded.
void assign_whole(const std::string&, at::Tensor& target, const at::Tensor& full) {
  become(target, full.to(testing::device_of_tests()));
}

/// Constructors run on the host, wherever the tests' device is.
ModulePtr on_host(const std::function<ModulePtr()>& make) {
  const testing::MadeOnTheHost host;
  return make();
}

at::Tensor default_state() { return generator_state(at::detail::getDefaultCPUGenerator()); }

void expect_equal_tensors(const nn::Module& deferred, const nn::Module& ordinary) {
  const auto compare = [](const auto& got, const auto& expected) {
    ASSERT_EQ(got.size(), expected.size());
    for (const auto& item : expected) {
      SCOPED_TRACE(item.key());
      const auto& value = got[item.key()];
      EXPECT_EQ(value.scalar_type(), item.value().scalar_type());
      EXPECT_EQ(value.requires_grad(), item.value().requires_grad());
      EXPECT_EQ(value.strides(), item.value().strides());
      EXPECT_TRUE(at::equal(value.cpu(), item.value().cpu()));
    }
  };
  compare(deferred.named_parameters(), ordinary.named_parameters());
  compare(deferred.named_buffers(), ordinary.named_buffers());
}

class DeferredConstruction : public ::testing::TestWithParam<Row> {};

TEST_P(DeferredConstruction, EqualsAnOrdinaryStart) {
  at::manual_seed(5);
  InitTape tape;
  ModulePtr deferred;
  {
    const DeferredInit guard(tape);
    deferred = on_host(GetParam().make);
  }
  std::vector<c10::TensorImpl*> identities;
  for (const auto& parameter : deferred->parameters()) {
    EXPECT_TRUE(parameter.is_meta());
    identities.push_back(parameter.unsafeGetTensorImpl());
  }
  std::vector<at::Tensor> materialised = deferred->parameters();
  for (const auto& buffer : deferred->buffers()) {
    if (buffer.is_meta()) materialised.push_back(buffer);  // the others are literals
  }
  tape.materialise(*deferred, &assign_whole);
  for (const auto& tensor : materialised) EXPECT_EQ(tensor.device().type(), testing::device_of_tests().type());
  const auto deferred_state = default_state();
  for (size_t i = 0; i < identities.size(); ++i) {
    EXPECT_EQ(deferred->parameters()[i].unsafeGetTensorImpl(), identities[i]);
  }

  at::manual_seed(5);
  const auto ordinary = on_host(GetParam().make);
  expect_equal_tensors(*deferred, *ordinary);
  EXPECT_TRUE(same_generator_state(deferred_state, default_state()));
}

INSTANTIATE_TEST_SUITE_P(Constructors, DeferredConstruction, ::testing::ValuesIn(rows()),
                         [](const auto& info) { return std::string(info.param.name); });

ModulePtr build_under(InitTape& tape, const std::function<ModulePtr()>& make) {
  return tape.construct([&] { return on_host(make); });
}

TEST(DeferredInit, RawBytesAreAnError) {
  InitTape tape;
  const auto accessor = built([](Built& m) {
    auto t = at::empty({4});
    t.accessor<float, 1>()[0] = 1;
    m.buffer("c", t);
  });
  EXPECT_THAT(message_of([&] { build_under(tape, accessor); }),
              ::testing::HasSubstr("the one made last: aten::empty [4]"));
  EXPECT_FALSE(at::ones({2}).is_meta());  // the guard ended with the exception
}

TEST(DeferredInit, UnsetTensorsAreNamed) {
  const auto make = built([](Built& m) {
    m.parameter("w", at::empty({4, 3}));
    m.buffer("copy_of_nothing", at::empty({2}).clone());
    m.buffer("set", at::zeros({2}));
  });
  InitTape tape;
  auto module = build_under(tape, make);
  const auto message = message_of([&] { tape.materialise(*module, &assign_whole); });
  EXPECT_THAT(message, ::testing::HasSubstr("parameter 'w' [4, 3], buffer 'copy_of_nothing' [2]"));
  EXPECT_THAT(message, ::testing::Not(::testing::HasSubstr("'set'")));
  EXPECT_EQ(tape.materialise(*module, &assign_whole, {.parameters = true, .allow_unset = true}).tensors, 3);
  EXPECT_FALSE(module->parameters()[0].is_meta());
}

TEST(DeferredInit, TensorsFromElsewhereAreNamed) {
  const auto outside = at::empty({2, 2}, at::TensorOptions().device(at::kMeta));
  InitTape tape;
  auto module = build_under(tape, built([&](Built& m) { m.parameter("w", outside); }));
  EXPECT_THAT(message_of([&] { tape.materialise(*module, &assign_whole); }),
              ::testing::HasSubstr("not made under this tape's DeferredInit, so nothing can set them: parameter 'w'"));
  InitTape second;
  EXPECT_THAT(message_of([&] { build_under(second, built([&](Built& m) { m.buffer("b", outside + 1); })); }),
              ::testing::HasSubstr("made before this DeferredInit"));
}

TEST(DeferredInit, DrawsBesideTheTapeAreAnError) {
  at::manual_seed(1);
  InitTape tape;
  auto module = build_under(tape, built([](Built& m) {
                              m.register_module("a", nn::Linear(2, 2));
                              std::thread([] { at::rand({3}, at::kCPU); }).join();
                            }));
  EXPECT_THAT(message_of([&] { tape.materialise(*module, &assign_whole); }),
              ::testing::HasSubstr("drawn beside the recorded operations"));
}

TEST(DeferredInit, TwoGuardsContinueOneTape) {
  at::manual_seed(3);
  InitTape tape;
  auto a = build_under(tape, [] { return nn::Linear(4, 4).ptr(); });
  auto b = build_under(tape, [] { return nn::Linear(4, 4).ptr(); });
  Built both([&](Built& m) {
    m.register_module("a", a);
    m.register_module("b", b);
  });
  tape.materialise(both, &assign_whole);
  at::manual_seed(3);
  const auto linear = [] { return nn::Linear(4, 4).ptr(); };
  expect_equal_tensors(*a, *on_host(linear));
  expect_equal_tensors(*b, *on_host(linear));
}

TEST(DeferredInit, BuffersAlone) {
  at::manual_seed(3);
  const auto before = default_state();
  InitTape tape;
  auto module = build_under(tape, built([](Built& m) {
                              m.register_module("a", nn::Linear(4, 4));
                              m.buffer("b", at::arange(3) * 2);
                            }));
  const auto report = tape.materialise(*module, &assign_whole, {.parameters = false, .allow_unset = false});
  EXPECT_EQ(report.tensors, 1);
  EXPECT_TRUE(at::equal(module->buffers()[0], at::arange(3) * 2));
  EXPECT_TRUE(module->parameters()[0].is_meta());
  EXPECT_TRUE(same_generator_state(before, default_state()));
}

TEST(DeferredInit, PeakIsShardsAndOneParameter) {
  auto* allocator = new CountingAllocator;  // outlives every tensor it made
  constexpr int64_t kWorld = 4;
  const auto make = built([](Built& m) {
    m.register_module("embedding", nn::Embedding(600, 64));
    for (int i = 0; i < 12; ++i) m.register_module("layer" + std::to_string(i), nn::Linear(128, 128));
    for (auto& w : m.parameters()) nn::init::normal_(w, 0, 0.02);  // a second pass over all, as models do
  });
  InitTape tape;
  auto module = build_under(tape, make);
  const size_t before = allocator->live();
  allocator->reset_peak();
  const auto report = tape.materialise(*module, [&](const std::string&, at::Tensor& target, const at::Tensor& full) {
    const auto rows = (full.size(0) + kWorld - 1) / kWorld;
    become(target, full.narrow(0, 0, std::min(rows, full.size(0))).clone());
  });
  const auto peak = static_cast<double>(allocator->peak() - before);
  allocator->stop();
  EXPECT_EQ(report.full_bytes, (600 * 64 + 12 * (128 * 128 + 128)) * 4);
  EXPECT_LE(peak, 0.4 * static_cast<double>(report.full_bytes));
  EXPECT_EQ(report.peak_bytes, 600 * 64 * 4);  // one whole parameter at a time
}

TEST(DeferredInit, RanksAsThreadsDrawTheSameNumbers) {
  const auto make = [] { return nn::TransformerEncoderLayer(16, 2).ptr(); };
  at::manual_seed(11);
  const auto ordinary = on_host(make);
  const auto after = default_state();
  std::vector<ModulePtr> modules(8);
  std::vector<at::Generator> generators;
  std::vector<std::thread> threads;
  for (size_t rank = 0; rank < modules.size(); ++rank) {
    generators.push_back(at::make_generator<at::CPUGeneratorImpl>(11));
  }
  for (size_t rank = 0; rank < modules.size(); ++rank) {
    threads.emplace_back([&, rank] {
      InitTape tape(generators[rank]);
      modules[rank] = build_under(tape, make);
      tape.materialise(*modules[rank], &assign_whole);
    });
  }
  for (auto& thread : threads) thread.join();
  for (size_t rank = 0; rank < modules.size(); ++rank) {
    expect_equal_tensors(*modules[rank], *ordinary);
    EXPECT_TRUE(same_generator_state(generator_state(generators[rank]), after));
  }
  EXPECT_TRUE(same_generator_state(default_state(), after));  // the process's own generator was left alone
}

TEST(DeferredInit, ConstructsWhatNoMachineHolds) {
  InitTape tape;
  auto module = build_under(tape, [] { return nn::Linear(1 << 20, 1 << 20).ptr(); });  // 4 TB
  EXPECT_TRUE(module->parameters()[0].is_meta());
  EXPECT_GT(tape.operations(), 0u);
}

TEST(DeferredInit, ATapeIsReplayedOnce) {
  InitTape tape;
  auto module = build_under(tape, [] { return nn::Linear(2, 2).ptr(); });
  tape.materialise(*module, &assign_whole);
  EXPECT_THAT(message_of([&] { tape.materialise(*module, &assign_whole); }), ::testing::HasSubstr("replayed already"));
}

}  // namespace
}  // namespace megashard
