#include "framework/modules/fsdp2_config.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <sstream>

#include "tests/support/diagnostics.h"

namespace megashard {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using Kind = ReshardAfterForward::Kind;

Fsdp2Config parse(const std::string& text, CollectedDiagnostics& told, Strictness strictness = Strictness::kWarn) {
  return parse_fsdp2_config(text, "f.yaml", strictness, told.sink());
}

Fsdp2Config parse_quietly(const std::string& text) {
  CollectedDiagnostics told;
  const auto config = parse(text, told);
  EXPECT_THAT(told.all, IsEmpty()) << told.text();
  return config;
}

TEST(Fsdp2Config, HasTheDefaultsOfMindSpeed) {
  CollectedDiagnostics told;
  const auto config = parse("", told);
  EXPECT_FALSE(config.sharding_size.has_value());
  EXPECT_FALSE(config.sub_modules_to_wrap.has_value());
  EXPECT_EQ(config.reshard_after_forward.kind, Kind::kDefault);  // MindSpeed-MM's is true: the root's group too
  EXPECT_FALSE(config.mixed_precision.param_dtype.has_value());
  EXPECT_TRUE(config.mixed_precision.cast_forward_inputs);
  EXPECT_TRUE(config.use_reentrant);
  EXPECT_TRUE(config.pin_memory);
  EXPECT_TRUE(config.reshard_local_experts);
  EXPECT_EQ(config.expert_parallel_size, 1);
  EXPECT_EQ(told.text(), "");
}

TEST(Fsdp2Config, ReadsEveryKey) {
  const auto config = parse_quietly(R"(
sharding_size: 8
sub_modules_to_wrap: ["a.{*}", b]
reshard_after_forward: 4
param_dtype: bf16
reduce_dtype: "fp32"
output_dtype: 'fp16'
cast_forward_inputs: False
grad_dtype: fp32
buffer_dtype: bf16
shard_placement:
  a.{*}.out: 1
  b: -1
unused_parameters: error
fp8_all_gather: Power_of_two
fp8_all_gather_modules: [b]
reduce_scatter_max_input_buffers: 3
communication_memory: symmetric
offload_to_cpu: true
pin_memory: no
num_to_forward_prefetch: 1
num_to_backward_prefetch: 2
ignored_modules: [ae]
ignored_modules_replicated: true
recompute_modules: 
  - a.{0-3}
use_reentrant: false
recompute_save_ops: ["aten::mm"]
offload_modules: [a.1]
min_offloaded_tensor_size: 7
align_fsdp_param_groups: True
expert_parallel_size: 2
expert_fully_shard_parallel_size: 4
reshard_local_experts: false
moe_modules: 
  - a.{*}.experts
)");
  EXPECT_EQ(config.sharding_size, 8);
  EXPECT_THAT(*config.sub_modules_to_wrap, ElementsAre("a.{*}", "b"));
  EXPECT_EQ(config.reshard_after_forward.kind, Kind::kTo);
  EXPECT_EQ(config.reshard_after_forward.ranks, 4);
  EXPECT_EQ(config.mixed_precision.param_dtype, at::kBFloat16);
  EXPECT_EQ(config.mixed_precision.reduce_dtype, at::kFloat);
  EXPECT_EQ(config.mixed_precision.output_dtype, at::kHalf);
  EXPECT_FALSE(config.mixed_precision.cast_forward_inputs);
  EXPECT_EQ(config.mixed_precision.grad_dtype, at::kFloat);
  EXPECT_EQ(config.mixed_precision.buffer_dtype, at::kBFloat16);
  EXPECT_THAT(config.shard_placement.dims, ElementsAre(testing::Pair("a.{*}.out", 1), testing::Pair("b", -1)));
  EXPECT_EQ(config.unused_parameters, UnusedParameters::kError);
  EXPECT_EQ(config.fp8_all_gather, Float8Scale::kPowerOfTwo);
  EXPECT_THAT(config.fp8_all_gather_modules, ElementsAre("b"));
  EXPECT_EQ(config.reduce_scatter_max_input_buffers, 3);
  EXPECT_EQ(config.communication_memory, GroupMemory::kSymmetric);
  EXPECT_TRUE(config.offload_to_cpu);
  EXPECT_FALSE(config.pin_memory);
  EXPECT_EQ(config.num_to_forward_prefetch, 1);
  EXPECT_EQ(config.num_to_backward_prefetch, 2);
  EXPECT_THAT(config.ignored_modules, ElementsAre("ae"));
  EXPECT_TRUE(config.ignored_modules_replicated);
  EXPECT_THAT(config.recompute_modules, ElementsAre("a.{0-3}"));
  EXPECT_FALSE(config.use_reentrant);
  EXPECT_THAT(config.recompute_save_ops, ElementsAre("aten::mm"));
  EXPECT_THAT(config.offload_modules, ElementsAre("a.1"));
  EXPECT_EQ(config.min_offloaded_tensor_size, 7);
  EXPECT_TRUE(config.align_fsdp_param_groups);
  EXPECT_EQ(config.expert_parallel_size, 2);
  EXPECT_EQ(config.expert_shard_size, 4);
  EXPECT_FALSE(config.reshard_local_experts);
  EXPECT_THAT(config.moe_modules, ElementsAre("a.{*}.experts"));
}

// The values of MindSpeed-MM's samples: block style, comments, auto, null, quoted and bare dtypes.
TEST(Fsdp2Config, ReadsSampleFiles) {
  const auto video = parse_quietly(R"(
sharding_size: auto
sub_modules_to_wrap:
  - predictor.blocks.{*}
  - predictor.head
reshard_after_forward: True
param_dtype: "bf16"  # compute
reduce_dtype: "fp32"
cast_forward_inputs: True
num_to_forward_prefetch: 0
recompute_modules:
  - predictor.blocks.{*}
ignored_modules:
  - ae
  - text_encoder
)");
  EXPECT_FALSE(video.sharding_size.has_value());
  EXPECT_THAT(*video.sub_modules_to_wrap, ElementsAre("predictor.blocks.{*}", "predictor.head"));
  EXPECT_THAT(video.ignored_modules, ElementsAre("ae", "text_encoder"));

  const auto lora = parse_quietly(R"(
sharding_size: auto
reshard_after_forward: true
param_dtype: bf16
reduce_dtype: bf16
num_to_forward_prefetch: 1
num_to_backward_prefetch: 1
use_reentrant: False
ignored_modules: null
)");
  EXPECT_EQ(lora.mixed_precision.reduce_dtype, at::kBFloat16);
  EXPECT_FALSE(lora.use_reentrant);
  EXPECT_THAT(lora.ignored_modules, IsEmpty());
}

TEST(Fsdp2Config, TheSampleOfThisProjectIsValid) {
  CollectedDiagnostics told;
  const auto path = std::string(MEGASHARD_SOURCE_ROOT) + "/fsdp2_config.yaml";
  const auto config = load_fsdp2_config(path, Strictness::kStrict, told.sink());
  EXPECT_THAT(told.all, IsEmpty());
  EXPECT_THAT(*config.sub_modules_to_wrap, ElementsAre("model.layers.{*}"));
  EXPECT_FALSE(config.mixed_precision.param_dtype.has_value());
  std::stringstream text;  // and shows every key
  text << std::ifstream(path).rdbuf();
  for (const auto& key : fsdp2_config_keys()) EXPECT_THAT(text.str(), testing::ContainsRegex("\n(# )?" + key + ":"));
}

TEST(Fsdp2Config, UnknownKeysAreToldOrRefused) {
  CollectedDiagnostics told;
  parse("sharding_size: auto\nparm_dtype: bf16\n", told);
  ASSERT_EQ(told.all.size(), 1u);
  EXPECT_EQ(told.all[0].first, Severity::kWarning);
  EXPECT_EQ(told.all[0].second, "f.yaml:2: unknown key \"parm_dtype\"; did you mean param_dtype? It is ignored.");
  EXPECT_EQ(usage_error([&] { parse("parm_dtype: bf16", told, Strictness::kStrict); }),
            "f.yaml:1: unknown key \"parm_dtype\"; did you mean param_dtype?");
}

TEST(Fsdp2Config, WrongValuesNameLineKeyAndValue) {
  const std::pair<const char*, const char*> rows[] = {
      {"\nparam_dtype: bfloat", "f.yaml:2: param_dtype takes one of fp16, bf16, fp32, fp64, got \"bfloat\""},
      {"output_dtype: int8", "output_dtype takes one of fp16, bf16, fp32, fp64, got \"int8\"."},
      {"sharding_size: all", "f.yaml:1: sharding_size takes \"auto\", a number of ranks, or null, got \"all\"."},
      {"sharding_size: 0", "sharding_size takes"},
      {"sub_modules_to_wrap: layers.{*}", "sub_modules_to_wrap takes a list of module paths"},
      {"sub_modules_to_wrap: [[a]]", "sub_modules_to_wrap takes a list of module paths"},
      {"use_reentrant: 3", "use_reentrant takes true or false, got \"3\"."},
      {"reshard_after_forward: often", "reshard_after_forward takes true, false or a number of ranks"},
      {"reshard_after_forward: 0", "reshard_after_forward takes true, false or a number of ranks"},
      {"grad_dtype: int8", "grad_dtype takes one of fp16, bf16, fp32, fp64, got \"int8\"."},
      {"shard_placement: 1", "shard_placement takes \"auto\", or dimensions by patterns of modules"},
      {"shard_placement: {a: first}", "shard_placement takes \"auto\", or dimensions"},
      {"unused_parameters: ignore", "unused_parameters takes one of zero_fill, error, got \"ignore\"."},
      {"fp8_all_gather: tensorwise", "fp8_all_gather takes one of false, true, amax, power_of_two, rowwise, got \""},
      {"reduce_scatter_max_input_buffers: 0", "takes a whole number of at least 1, got \"0\"."},
      {"communication_memory: pinned", "communication_memory takes one of registered, symmetric, got \"pinned\"."},
      {"num_to_forward_prefetch: -1", "num_to_forward_prefetch takes a whole number of at least 0, got \"-1\"."},
      {"expert_parallel_size: 0", "expert_parallel_size takes a whole number of at least 1"},
      {"offload_to_cpu: [1]", "offload_to_cpu takes true or false, got a list."},
      {"pin_memory: true\npin_memory: true", "f.yaml:2: pin_memory is given twice"},
      {"- a\n- b", "the file must hold `key: value` lines"},
      {"a: [1", "this is not YAML"},
  };
  for (const auto& [text, message] : rows) {
    CollectedDiagnostics told;
    EXPECT_THAT(usage_error([&] { parse(text, told); }), HasSubstr(message)) << text;
  }
}

TEST(Fsdp2Config, EveryKeySaysWhatItTakes) {
  for (const auto& key : fsdp2_config_keys()) {
    CollectedDiagnostics told;
    EXPECT_THAT(usage_error([&] { parse(key + ": [[seven]]", told); }), HasSubstr("f.yaml:1: " + key + " takes "));
  }
}

TEST(Fsdp2Config, AMissingFileIsAnError) {
  CollectedDiagnostics told;
  EXPECT_THAT(usage_error([&] { load_fsdp2_config("/nowhere.yaml", Strictness::kWarn, told.sink()); }),
              HasSubstr("--fsdp2-config-path /nowhere.yaml"));
}

TEST(Fsdp2Config, ShardGroupsDivideTheWorld) {
  Fsdp2Config config;
  EXPECT_EQ(shard_group_size(config, 6), 6);
  config.sharding_size = 2;
  EXPECT_EQ(shard_group_size(config, 6), 2);
  config.sharding_size = 4;
  EXPECT_THAT(usage_error([&] { shard_group_size(config, 6); }),
              HasSubstr("World size 6 must be divisible by sharding_size 4"));
}

TEST(Fsdp2Config, ReadsMindSpeedsNativePlans) {
  const char* plans = R"(
fsdp_plan:
  apply_modules: ["model.layers.{*}"]
  ignored_modules: []
  param_dtype: bf16
  reduce_dtype: fp32
  cast_forward_inputs: False
  num_to_forward_prefetch: 2
  pregather: false
  hook_modules: null
  cpu_offload: true
recompute_plan:
  apply_modules: ["model.layers.{0-3}"]
)";
  const auto config = parse_quietly(plans);
  EXPECT_TRUE(config.native_patterns);
  EXPECT_THAT(*config.sub_modules_to_wrap, ElementsAre("model.layers.{*}"));
  EXPECT_THAT(config.recompute_modules, ElementsAre("model.layers.{0-3}"));
  EXPECT_FALSE(config.use_reentrant);
  EXPECT_TRUE(config.offload_to_cpu);
  EXPECT_EQ(config.num_to_forward_prefetch, 2);
  EXPECT_FALSE(config.mixed_precision.cast_forward_inputs);

  std::string inside = "parallel:\n  fully_shard_parallel_size: 4\n  recompute: false\n";
  std::istringstream lines(plans);
  for (std::string line; std::getline(lines, line);) inside += "  " + line + "\n";
  const auto parallel = parse_quietly(inside + "training: {lr: 1}\n");
  EXPECT_EQ(parallel.sharding_size, 4);
  EXPECT_THAT(parallel.recompute_modules, IsEmpty()) << "recompute: false";
  EXPECT_THAT(*parallel.sub_modules_to_wrap, ElementsAre("model.layers.{*}"));

  const std::string size_alone = "parallel: {fully_shard_parallel_size: 4}\n";
  const auto outside = parse_quietly(size_alone + plans);
  EXPECT_EQ(outside.sharding_size, 4);
  EXPECT_THAT(*outside.sub_modules_to_wrap, ElementsAre("model.layers.{*}"));
  EXPECT_THAT(outside.recompute_modules, ElementsAre("model.layers.{0-3}"));
  EXPECT_THAT(usage_error([&] { parse_quietly(inside + "fsdp_plan: {}\n"); }),
              HasSubstr("fsdp_plan stands under parallel too; keep one."));

  CollectedDiagnostics told;
  parse("fsdp_plan: {hook_modules: [a]}\nep_plan: {apply_modules: [e], dispatcher: fused, apply_efsdp_modules: [e]}",
        told);
  EXPECT_EQ(told.all.size(), 3u);
  EXPECT_THAT(told.text(), HasSubstr("fsdp_plan.hook_modules has no effect: every unit is gathered when it runs"));
  EXPECT_THAT(told.text(), HasSubstr("ep_plan.dispatcher has no effect: rows go to their experts"));
  EXPECT_THAT(told.text(), HasSubstr("ep_plan.apply_efsdp_modules has no effect"));

  const std::pair<const char*, const char*> rows[] = {
      {"fsdp_plan: {apply_module: [a]}", "unknown key \"fsdp_plan.apply_module\"; did you mean apply_modules?"},
      {"parallel: {ulysses_parallel_size: 2}",
       "parallel.ulysses_parallel_size must be 1 here; give --context-parallel-size 2 instead."},
      {"fsdp_plan: {}\nrecompute_plann: 3", ":2: unknown key \"recompute_plann\"; did you mean recompute_plan?"},
      {"fsdp_plan: {}\nzzz: 3", ":2: unknown key \"zzz\"; remove it: there are parallel, fsdp_plan, "},
      {"fsdp_plan: {pregather: true}", "pregather is not in this version"},
      {"fsdp_plan: 3", "fsdp_plan takes a map"},
      {"recompute_plan: {use_reentrant: 3}", "recompute_plan.use_reentrant takes true or false"},
  };
  for (const auto& [text, message] : rows)
    EXPECT_THAT(usage_error([&] { parse_quietly(text); }), HasSubstr(message)) << text;
}

}  // namespace
}  // namespace megashard
