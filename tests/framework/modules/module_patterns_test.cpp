#include "framework/modules/module_patterns.h"

#include <ATen/ops/zeros.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <sstream>

#include "framework/modules/wrap_policy.h"
#include "parallel/fsdp/hooked_module.h"
#include "tests/support/diagnostics.h"

namespace megashard {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

struct Node : torch::nn::Module {
  std::shared_ptr<Node> child(const std::string& name) { return register_module(name, std::make_shared<Node>()); }
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
  std::vector<std::string> paths(const std::vector<std::string>& patterns, Strictness strictness = Strictness::kWarn) {
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
              ElementsAre("lm_head", "model.layers.1", "model.layers.3", "model.layers.4", "model.layers.0",
                          "model.layers.2", "model.norm"));
  EXPECT_EQ(selection.matches[2].paths.size(), 5u) << "the report counts all that a pattern names";
  EXPECT_EQ(selection.modules[0].module, model->named_children()["lm_head"].get());
}

TEST_F(ModulePatterns, GoOnBehindBraces) {
  EXPECT_THAT(paths({"model.layers.{0-1}.attn"}), ElementsAre("model.layers.0.attn", "model.layers.1.attn"));
  EXPECT_THAT(told.all, IsEmpty());
  EXPECT_THAT(paths({"model.layers.{*}.mlp"}), testing::SizeIs(4));
  EXPECT_THAT(told.text(), HasSubstr("model.layers.3 has no submodule \"mlp\""));
}

TEST_F(ModulePatterns, ListsInLists) {
  const auto layers = model->named_children()["model"]->named_children()["layers"]->named_children();
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
  EXPECT_EQ(told.text(), "sub_modules_to_wrap: Module not found at path \"model.nrm\": model has no submodule "
                         "\"nrm\"; did you mean "
                         "norm?\n");
  EXPECT_THAT(refused("model.nrm", Strictness::kStrict), HasSubstr("did you mean norm?"));
}

TEST_F(ModulePatterns, IndicesBeyondTheListAreTold) {
  EXPECT_THAT(paths({"model.layers.{4-1000000000}"}), ElementsAre("model.layers.4"));
  EXPECT_THAT(told.text(), HasSubstr("goes up to index 1000000000, but the list has 5 modules"));
  EXPECT_THAT(refused("model.layers.{7}", Strictness::kStrict), HasSubstr("the list has 5 modules"));
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
  for (const auto& [pattern, message] : rows) EXPECT_THAT(refused(pattern), HasSubstr(message)) << pattern;
}

TEST_F(ModulePatterns, ClassPathsAreRecognised) {
  paths({"transformers.models.LlamaDecoderLayer"});
  EXPECT_THAT(told.text(), HasSubstr("nor a module of class LlamaDecoderLayer."));
}

/// The trees that MindSpeed-MM's samples are written for, three modules a list.
struct Sample {
  const char* name;
  const char* sharding_size;
  const char* reduce_dtype;
  std::vector<std::string> wrap, recompute, ignored;
  size_t wrapped;  // modules
  int prefetch = 0;
  const char* more = "";  // other keys
};

void grow(Node& root, const std::string& pattern) {
  std::vector<Node*> at = {&root};
  std::stringstream parts(pattern);
  for (std::string part; std::getline(parts, part, '.');) {
    std::vector<Node*> next;
    for (auto* node : at) {
      for (const auto& name :
           part == "{*}" ? std::vector<std::string>{"0", "1", "2"} : std::vector<std::string>{part}) {
        const auto children = node->named_children();
        const auto* child = children.find(name);
        next.push_back(child != nullptr ? static_cast<Node*>(child->get()) : node->child(name).get());
      }
    }
    at = next;
  }
}

TEST(Fsdp2Samples, ResolveOnTheirTrees) {
  const std::vector<std::string> wan = {"predictor.blocks.{*}", "predictor.head"};
  const std::vector<std::string> video = {"ae", "text_encoder"}, blocks = {"predictor.blocks.{*}"};
  const std::vector<std::string> hunyuan = {"predictor.double_blocks.{*}"};
  const std::vector<std::string> intern = {"vision_model.embeddings", "vision_model.encoder.layers.{*}",
                                           "language_model.model.layers.{*}"};
  const std::vector<std::string> magistral = {"language_model.embed_tokens",         "language_model.layers.{*}",
                                              "vision_tower.transformer.layers.{*}", "multi_modal_projector.linear_1",
                                              "multi_modal_projector.linear_2",      "lm_head"};
  const Sample samples[] = {
      {"wan2.1", "auto", "\"fp32\"", wan, blocks, {}, 4},
      {"wan2.2/5B", "8", "\"fp32\"", wan, blocks, video, 4},
      {"wan2.2/A14B", "auto", "\"fp32\"", wan, blocks, video, 4},
      {"hunyuanvideo_1.5", "8", "\"fp32\"", hunyuan, hunyuan, video, 3},
      {"vace",
       "8",
       "fp32",
       {"predictor.wan_dit.blocks.{*}", "predictor.wan_dit.head", "predictor.vace_dit.vace_blocks.{*}"},
       {"predictor.wan_dit.blocks.{*}", "predictor.vace_dit.vace_blocks.{*}"},
       {},
       7},
      {"qwen2.5vl",
       "auto",
       "fp32",
       {"text_decoder.output_layer", "text_decoder.embedding", "text_decoder.rotary_pos_emb",
        "text_decoder.decoder.layers.{*}"},
       {"text_decoder.decoder.layers.{*}"},
       {"image_encoder"},
       6},
      {"internvl3.5", "auto", "fp32", intern, intern, {}, 7},
      {"magistral-2509",
       "auto",
       "\"bf16\"",
       magistral,
       {"language_model.layers.{*}", "vision_tower.transformer.layers.{*}"},
       {},
       10,
       1},
      {"magistral-2509 with adapters",
       "auto",
       "\"bf16\"",
       magistral,
       {"language_model.layers.{*}", "vision_tower.transformer.layers.{*}"},
       {},
       10,
       1,
       "use_reentrant: False\n"},
      {"qwen3vl",
       "auto",
       "\"fp32\"",
       {},
       {},
       {},
       0,
       1,
       "align_fsdp_param_groups: True\nexpert_parallel_size: 1\nreshard_local_experts: True\n"
       "moe_modules:\n  - model.language_model.layers.{*}.mlp.experts\n"},
      {"qwen3omni", "auto", "fp32", {}, {}, {}, 0, 1},
      {"glm4.5v", "auto", "\"fp32\"", {}, {}, {}, 0, 0, "align_fsdp_param_groups: False\n"},
  };
  for (const auto& sample : samples) {
    SCOPED_TRACE(sample.name);
    auto root = std::make_shared<Node>();
    std::string text = "sharding_size: " + std::string(sample.sharding_size) +
                       "\nreshard_after_forward: True\nparam_dtype: bf16\ncast_forward_inputs: True"
                       "\nnum_to_forward_prefetch: " +
                       std::to_string(sample.prefetch) +
                       "\nnum_to_backward_prefetch: " + std::to_string(sample.prefetch) +
                       "\noffload_to_cpu: False\nreduce_dtype: " + sample.reduce_dtype + "\n" + sample.more;
    const auto list = [&](const char* key, const std::vector<std::string>& patterns) {
      if (!patterns.empty()) text += std::string(key) + ":\n";
      for (const auto& pattern : patterns) {
        text += "  - " + pattern + "\n";
        grow(*root, pattern);
      }
    };
    list("sub_modules_to_wrap", sample.wrap);
    list("recompute_modules", sample.recompute);
    list("ignored_modules", sample.ignored);
    CollectedDiagnostics told;
    const auto config = parse_fsdp2_config(text, sample.name, Strictness::kStrict, told.sink());
    EXPECT_EQ(config.sharding_size, std::string(sample.sharding_size) == "8" ? std::optional(8) : std::nullopt);
    EXPECT_EQ(config.mixed_precision.param_dtype, at::kBFloat16);
    EXPECT_EQ(config.sub_modules_to_wrap.has_value(), !sample.wrap.empty());
    const auto count = [&](const std::vector<std::string>& patterns) {
      return select_modules(*root, patterns, "key", Strictness::kStrict, told.sink()).modules.size();
    };
    EXPECT_EQ(count(config.sub_modules_to_wrap.value_or(std::vector<std::string>{})), sample.wrapped);
    EXPECT_EQ(count(config.recompute_modules), count(sample.recompute));
    EXPECT_EQ(count(config.ignored_modules), sample.ignored.size());
    EXPECT_EQ(config.num_to_forward_prefetch, sample.prefetch);
    EXPECT_EQ(config.num_to_backward_prefetch, sample.prefetch);
    EXPECT_EQ(config.use_reentrant, std::string(sample.more).empty() || sample.wrap.empty());
    if (!config.moe_modules.empty()) {
      grow(*root, config.moe_modules.front());
      EXPECT_EQ(count(config.moe_modules), 3u);
    }
    EXPECT_EQ(told.text(), "");
  }
}

struct LayerImpl : torch::nn::Module {
  std::string class_name() const { return "Qwen2MoTDecoderLayer"; }
  at::Tensor forward(const at::Tensor& x) { return x.clone(); }
};

// The last sample, Bagel's, names a class.
TEST_F(ModulePatterns, TakeClassPathsWhereNoPathExists) {
  const char* pattern = "mindspeed_mm.models.omni.mllms.bagel_qwen2_mot.Qwen2MoTDecoderLayer";
  auto layers = model->child("mot");
  for (const auto* name : {"0", "1"}) layers->register_module(name, std::make_shared<Hooked<LayerImpl>>());
  EXPECT_THAT(paths({pattern}), ElementsAre("mot.0", "mot.1"));
  EXPECT_EQ(told.text(), "");
}

TEST_F(ModulePatterns, OfTheNativeRoute) {
  auto strictness = Strictness::kWarn;
  const auto natively = [&](const std::vector<std::string>& patterns) {
    std::vector<std::string> found;
    for (const auto& each : select_modules_natively(*model, patterns, "fsdp_plan", strictness, told.sink()).modules)
      found.push_back(each.path);
    return found;
  };
  EXPECT_THAT(natively({"model.layers.{1-2,4}"}), ElementsAre("model.layers.1", "model.layers.2", "model.layers.4"));
  EXPECT_THAT(natively({"*.norm", "lm_hea?", "model.layers.{*}.mlp"}), testing::SizeIs(6));
  EXPECT_THAT(natively({"*layers.{0}.*"}), ElementsAre("model.layers.0.attn", "model.layers.0.mlp"));
  EXPECT_EQ(told.text(), "");
  EXPECT_THAT(natively({"lm_head", "mtp"}), ElementsAre("lm_head"));
  EXPECT_THAT(told.text(), HasSubstr("fsdp_plan: \"mtp\" matches no module"));
  const auto refused = [&](const std::vector<std::string>& patterns) {
    return usage_error([&] { natively(patterns); });
  };
  EXPECT_THAT(refused({"model.layer.{*}"}), HasSubstr("fsdp_plan: \"model.layer.{*}\" matches no module"));
  strictness = Strictness::kStrict;
  EXPECT_THAT(refused({"lm_head", "mtp"}), HasSubstr("fsdp_plan: \"mtp\" matches no module"));
  EXPECT_TRUE(matches_native_pattern("a.{*}.b.{0-3}", "a.17.b.2"));
  EXPECT_FALSE(matches_native_pattern("a.{*}.b.{0-3}", "a.17.b.4"));
  EXPECT_FALSE(matches_native_pattern("a.{*}", "a.x"));
}

TEST_F(ModulePatterns, PartsOfAVisionLanguageModelNeedNoPrefix) {
  Fsdp2Config config;
  config.sub_modules_to_wrap = {"vision_tower.layers.{*}", "layers.{*}", "lm_head"};
  translate_patterns(*model, {}, config, told.sink());
  EXPECT_EQ(config.sub_modules_to_wrap->front(), "vision_tower.layers.{*}") << "it is a model of text";
  auto inner = std::static_pointer_cast<Node>(model->named_children()["model"]);
  inner->child("language_model");
  inner->child("vision_tower");
  translate_patterns(*model, {}, config, told.sink());
  EXPECT_THAT(*config.sub_modules_to_wrap, ElementsAre("model.vision_tower.layers.{*}", "model.layers.{*}", "lm_head"));
  EXPECT_THAT(told.text(), HasSubstr("vision_tower.layers.{*} is model.vision_tower.layers.{*} in this model"));
}

TEST_F(ModulePatterns, PathsOfOtherLayoutsAreTranslated) {
  const auto inner = std::static_pointer_cast<Node>(model->named_children()["model"]);
  inner->child("language_model")->child("embedding");
  const auto here = [&](const std::string& pattern) {
    return pattern_here(*model, {{"decoder", "model.layers"}, {"thinker.model", "model"}}, pattern);
  };
  EXPECT_EQ(here("model.embedding"), "model.language_model.embedding") << "transformers 4 has it there";
  EXPECT_EQ(here("thinker.model.layers.{0-3}"), "model.layers.{0-3}");
  EXPECT_EQ(here("decoder.{*}.mlp"), "model.layers.{*}.mlp");
  for (const char* own : {"model.layers.{*}", "model", "*.norm", "decoders.{*}", "model.elsewhere"})
    EXPECT_EQ(here(own), own);
}

TEST_F(ModulePatterns, EndsOfATiedWeightStayTogether) {
  const auto head = model->named_children()["lm_head"];
  const auto embeddings = model->named_children()["model"]->named_children()["embed_tokens"];
  const std::vector<NamedModule> ends{{"model.embed_tokens", embeddings.get()}, {"lm_head", head.get()}};
  const auto weight = at::zeros({2, 2});
  for (const auto& end : ends) end.module->register_parameter("weight", weight);
  auto units = ends;
  leave_out_tied(units, "sub_modules_to_wrap", told.sink());
  EXPECT_TRUE(units.empty());
  EXPECT_THAT(told.text(), HasSubstr("sub_modules_to_wrap: lm_head, model.embed_tokens have one weight, so they stay"));
  units = ends;
  units.push_back({"model", model->named_children()["model"].get()});
  leave_out_tied(units, "sub_modules_to_wrap", told.sink());
  EXPECT_TRUE(units.empty()) << "model is around one end, and the other is outside it";
  units = {ends[0]};
  units.push_back({"", model.get()});
  leave_out_tied(units, "sub_modules_to_wrap", told.sink());
  EXPECT_EQ(units.size(), 2u) << "the root is around both ends";
}

TEST(DescribeMatch, SaysWhatMatched) {
  EXPECT_EQ(describe_match({"a.{*}", {"a.0", "a.1", "a.2"}}), "a.{*} -> 3 modules (a.0 .. a.2)");
  EXPECT_EQ(describe_match({"b", {"b"}}), "b -> 1 module (b)");
  EXPECT_EQ(describe_match({"c", {}}), "c -> no module");
}

}  // namespace
}  // namespace megashard
