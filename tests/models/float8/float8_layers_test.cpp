#include "models/float8/float8_layers.h"

#include <gmock/gmock.h>

#include "models/layers/linear.h"
#include "tests/support/diagnostics.h"

namespace megashard {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

/// Two layers, each with a router and a projection, beside a tower and the head.
struct SmallModel : torch::nn::Module {
  SmallModel() {
    for (const char* path : {"tower", "layers.0.gate", "layers.0.proj", "layers.1.gate", "layers.1.proj", "lm_head"})
      add(*this, path);
  }

  static void add(torch::nn::Module& owner, const std::string& path) {
    const auto dot = path.find('.');
    const auto name = path.substr(0, dot);
    if (dot == path.npos) {
      owner.register_module(name, std::make_shared<Linear>(Linear::Options{.in = 32, .out = 64}));
      return;
    }
    const auto children = owner.named_children();
    const auto* found = children.find(name);
    const auto child = found != nullptr ? *found : owner.register_module(name, std::make_shared<torch::nn::Module>());
    add(*child, path.substr(dot + 1));
  }

  std::vector<std::string> in_float8() const {
    std::vector<std::string> paths;
    for (const auto& item : named_modules("", /*include_self=*/false)) {
      const auto* linear = dynamic_cast<const Linear*>(item.value().get());
      if (linear != nullptr && !linear->is_plain()) paths.push_back(item.key());
    }
    return paths;
  }
};

std::vector<std::string> layers_of(const Float8Modules& modules) {
  SmallModel model;
  const auto count = use_float8(model, {.recipe = Float8Recipe::kMxfp8}, modules);
  auto paths = model.in_float8();
  EXPECT_EQ(count, paths.size());
  return paths;
}

TEST(Float8Layers, AreThoseOfTheNamedModules) {
  EXPECT_THAT(layers_of({}), testing::SizeIs(5)) << "all but the head";
  EXPECT_THAT(layers_of({.only = {"layers.{*}"}, .ignored = {"*gate"}}), ElementsAre("layers.0.proj", "layers.1.proj"));
  EXPECT_THAT(layers_of({.only = {"layers.{1}", "tower"}}), ElementsAre("tower", "layers.1.gate", "layers.1.proj"));
  EXPECT_THAT(layers_of({.ignored = {"layers.{*}"}}), testing::SizeIs(5)) << "layers are ignored by their own paths";
  EXPECT_THAT(usage_error([] { layers_of({.only = {"blocks.{*}"}}); }), HasSubstr("no linear layer of blocks.{*} has"));
}

TEST(Float8Layers, OfTheDecoderMayLeaveOutThoseAtTheEnds) {
  EXPECT_THAT(layers_of({.first = 1}), ElementsAre("tower", "layers.1.gate", "layers.1.proj"));
  EXPECT_THAT(layers_of({.last = 1}), ElementsAre("tower", "layers.0.gate", "layers.0.proj"));
  EXPECT_THAT(usage_error([] { layers_of({.first = 1, .last = 1}); }), HasSubstr("leaves out all 2 layers; lower"));
  SmallModel model;
  EXPECT_EQ(use_float4(model, {.last = 1}), 3);
}

}  // namespace
}  // namespace megashard
