#include "framework/modules/module_patterns.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>

#include "tests/support/diagnostics.h"

namespace megashard {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

struct Node : torch::nn::Module {
  std::shared_ptr<Node> child(const std::string& name) {
    return register_module(name, std::make_shared<Node>());
  }
};

/// model.{embed_tokens, layers.{0..4}.{attn, mlp}, norm}, lm_head
std::shared_ptr<Node> small_model() {
  auto root = std::make_shared<Node>();
  auto model = root->child("model");
  model->child("embed_tokens");
  auto layers = model->child("layers");
  for (int i = 0; i < 5; ++i) {
    auto layer = layers->child(std::to_string(i));
    layer->child("attn");
    if (i != 3) layer->child("mlp");
  }
  model->child("norm");
  root->child("lm_head");
  return root;
}

struct ModulePatterns : testing::Test {
  std::vector<std::string> paths(const std::vector<std::string>& patterns,
                                 Strictness strictness = Strictness::kWarn) {
    selection = select_modules(*model, patterns, "sub_modules_to_wrap", strictness, told.sink());
    std::vector<std::string> found;
    for (const auto& each : selection.modules) found.push_back(each.path);
    return found;
  }
  std::string refused(const std::string& pattern, Strictness strictness = Strictness::kWarn) {
    return usage_error([&] { paths({pattern}, strictness); });
  }

  std::shared_ptr<Node> model = small_model();
  CollectedDiagnostics told;
  ModuleSelection selection;
};

TEST_F(ModulePatterns, KeepOrderAndTakeEachModuleOnce) {
  EXPECT_THAT(paths({"lm_head", "model.layers.{3-9,1, 1}", "model.layers.{*}", "model.norm"}),
              ElementsAre("lm_head", "model.layers.1", "model.layers.3", "model.layers.4",
                          "model.layers.0", "model.layers.2", "model.norm"));
  EXPECT_EQ(selection.matches[2].paths.size(), 5u) << "the report counts all that a pattern names";
  EXPECT_EQ(selection.modules[0].module, model->named_children()["lm_head"].get());
}

TEST_F(ModulePatterns, GoOnBehindBraces) {
  EXPECT_THAT(paths({"model.layers.{0-1}.attn"}),
              ElementsAre("model.layers.0.attn", "model.layers.1.attn"));
  EXPECT_THAT(told.all, IsEmpty());
  EXPECT_THAT(paths({"model.layers.{*}.mlp"}), testing::SizeIs(4));
  EXPECT_THAT(told.text(), HasSubstr("model.layers.3 has no submodule \"mlp\""));
}

TEST_F(ModulePatterns, ListsInLists) {
  const auto layers =
      model->named_children()["model"]->named_children()["layers"]->named_children();
  for (const char* layer : {"1", "4"}) {
    const auto list = std::dynamic_pointer_cast<Node>(layers[layer]->named_children()["mlp"]);
    for (int i = 0; i < 3; ++i) list->child(std::to_string(i));
  }
  EXPECT_THAT(paths({"model.layers.{0-3}.mlp.{0,2}", "model.layers.{4}.mlp.{*}"}),
              ElementsAre("model.layers.1.mlp.0", "model.layers.1.mlp.2", "model.layers.4.mlp.0",
                          "model.layers.4.mlp.1", "model.layers.4.mlp.2"));
  EXPECT_THAT(told.text(), HasSubstr("model.layers.3 has no submodule \"mlp\""));
  EXPECT_THAT(refused("model.layers.{2-3}.mlp.{*}", Strictness::kStrict),
              HasSubstr("model.layers.3 has no submodule \"mlp\""));
}

TEST_F(ModulePatterns, MissingPathsAreToldOrRefused) {
  EXPECT_THAT(paths({"model.nrm", "lm_head"}), ElementsAre("lm_head"));
  EXPECT_EQ(told.text(),
            "sub_modules_to_wrap: Module not found at path \"model.nrm\": model has no submodule "
            "\"nrm\"; did you mean "
            "norm?\n");
  EXPECT_THAT(refused("model.nrm", Strictness::kStrict), HasSubstr("did you mean norm?"));
}

TEST_F(ModulePatterns, IndicesBeyondTheListAreTold) {
  EXPECT_THAT(paths({"model.layers.{4-1000000000}"}), ElementsAre("model.layers.4"));
  EXPECT_THAT(told.text(), HasSubstr("goes up to index 1000000000, but the list has 5 modules"));
  EXPECT_THAT(refused("model.layers.{7}", Strictness::kStrict),
              HasSubstr("the list has 5 modules"));
}

TEST_F(ModulePatterns, AllIndicesOfNothingIsAlwaysAnError) {
  EXPECT_THAT(refused("model.layer.{*}"), HasSubstr("did you mean layers?"));
  EXPECT_THAT(refused("model.{*}"), HasSubstr("model is not a list of modules"));
}

TEST_F(ModulePatterns, AnEmptyListMatchesNothing) {
  EXPECT_THAT(paths({"lm_head.{*}"}), IsEmpty());
  EXPECT_THAT(told.text(), HasSubstr("matches no module"));
}

TEST_F(ModulePatterns, MalformedPatternsAreRefused) {
  const std::pair<const char*, const char*> rows[] = {
      {"model.layers.{*}{*}", "braces that do not match"},
      {"model.layers.{*", "braces that do not match"},
      {"model.layers.}0{", "braces that do not match"},
      {"model.layers{*}", "braces that are only part of a name"},
      {"model.layers.{5-3}", "\"5-3\", which is no index"},
      {"model.layers.{a}", "\"a\", which is no index"},
      {"model.layers.{}", "which is no index"},
      {"model..norm", "an empty name"},
      {"", "an empty name"},
  };
  for (const auto& [pattern, message] : rows)
    EXPECT_THAT(refused(pattern), HasSubstr(message)) << pattern;
}

TEST_F(ModulePatterns, ClassPathsAreRecognised) {
  paths({"transformers.models.LlamaDecoderLayer"});
  EXPECT_THAT(told.text(), HasSubstr("it looks like a class, but this key takes paths of modules"));
}

TEST(DescribeMatch, SaysWhatMatched) {
  EXPECT_EQ(describe_match({"a.{*}", {"a.0", "a.1", "a.2"}}), "a.{*} -> 3 modules (a.0 .. a.2)");
  EXPECT_EQ(describe_match({"b", {"b"}}), "b -> 1 module (b)");
  EXPECT_EQ(describe_match({"c", {}}), "c -> no module");
}

}  // namespace
}  // namespace megashard
