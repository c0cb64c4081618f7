#include "framework/arguments/argument_validation.h"

#include <algorithm>
#include <array>

#include "framework/arguments/argument_table.h"

namespace megashard {

namespace {

using std::to_string;

std::string text(double value) { return argument_text(value); }

/// 2 and not 2.0.
std::string shortest(double value) {
  const auto whole = static_cast<int64_t>(value);
  return static_cast<double>(whole) == value ? to_string(whole) : text(value);
}

void check_model_source(const Arguments& arguments, Mistakes& rules) {
  rules.require(!arguments.from_scratch || arguments.hf_model,
                "--from-scratch needs --hf-model, whose config.json describes the model; without it "
                "weights are fresh anyway.");
  rules.require(!arguments.model_plugin || arguments.model || arguments.hf_model,
                "--model-plugin " + arguments.model_plugin.value_or("") +
                    " needs --model, the name under which it registers the model.");
  rules.require(!arguments.is_own_model() || !arguments.save_hf || arguments.hf_model,
                "--save-hf needs --hf-model here: only it has the config.json of a model of "
                "--model-plugin.");
}

void take_synonyms(Arguments& arguments, Mistakes& rules) {
  rules.require(!arguments.num_layers || !arguments.encoder_num_layers,
                "--num-layers and --encoder-num-layers mean the same; give only --num-layers.");
  if (arguments.encoder_num_layers) arguments.num_layers = arguments.encoder_num_layers;
  if (arguments.use_rotary_position_embeddings) arguments.position_embedding_type = "rope";
  if (arguments.add_bias_linear) arguments.add_qkv_bias = true;
  rules.require(!arguments.seq_length || !arguments.encoder_seq_length,
                "--seq-length and --encoder-seq-length mean the same; give only --seq-length.");
  if (arguments.encoder_seq_length) arguments.seq_length = arguments.encoder_seq_length;
}

void derive_sizes(Arguments& arguments, Mistakes& rules) {
  const std::pair<const char*, const std::optional<int64_t>*> required[] = {
      {"--num-layers", &arguments.num_layers},
      {"--hidden-size", &arguments.hidden_size},
      {"--num-attention-heads", &arguments.num_attention_heads},
      {"--max-position-embeddings", &arguments.max_position_embeddings},
  };
  for (const auto& [flag, value] : required) {
    rules.require(value->has_value(),
                  std::string(flag) + " is missing; give it, or --hf-model DIR with a config.json.");
    rules.require(value->value_or(1) > 0,
                  std::string(flag) + " is " + to_string(value->value_or(1)) + "; it must be positive.");
  }
  const int64_t hidden = arguments.hidden_size.value_or(0);
  const int64_t heads = arguments.num_attention_heads.value_or(0);
  if (hidden <= 0 || heads <= 0) return;
  if (!arguments.ffn_hidden_size) {
    constexpr int64_t kStep = 64;
    const auto gated = static_cast<int64_t>(static_cast<double>(4 * hidden) * 2 / 3 / kStep) * kStep;
    const bool enough = rules.require(!arguments.swiglu || gated > 0,
                                      "--ffn-hidden-size is missing: with --swiglu it would be 8/3 of --hidden-size " +
                                          to_string(hidden) + " in steps of 64, which is 0; give it.");
    if (enough) arguments.ffn_hidden_size = arguments.swiglu ? gated : 4 * hidden;
  }
  if (!arguments.kv_channels) {
    const bool divides = rules.require(
        hidden % heads == 0, "--hidden-size " + to_string(hidden) + " is not divisible by --num-attention-heads " +
                                 to_string(heads) + "; change one, or give the head size by --kv-channels.");
    if (divides) arguments.kv_channels = hidden / heads;
  }
}

struct Least {
  const char* flag;
  std::optional<double> value;
  bool may_be_zero = false;
};

void check_least(const std::vector<Least>& values, Mistakes& rules) {
  for (const auto& each : values) {
    const double value = each.value.value_or(1);
    rules.require(each.may_be_zero ? value >= 0 : value > 0,
                  each.flag + (" is " + shortest(value)) +
                      (each.may_be_zero ? "; it must not be negative." : "; it must be positive."));
  }
}

/// Rotary positions turn channels in pairs.
void check_rotary(const Arguments& arguments, Mistakes& rules) {
  rules.require(!arguments.rotary_seq_len_interpolation_factor || !arguments.use_rope_scaling,
                "--rotary-seq-len-interpolation-factor and --use-rope-scaling exclude each other; "
                "give one of them.");
  if (arguments.position_embedding_type != "rope" || arguments.kv_channels.value_or(0) <= 0) return;
  const int64_t channels = *arguments.kv_channels;
  const auto turning = static_cast<int64_t>(static_cast<double>(channels) * arguments.rotary_percent);
  rules.require(turning > 0 && turning % 2 == 0, "rotary positions need an even number of channels a head, got " +
                                                     to_string(turning) + " of " + to_string(channels) +
                                                     "; change --kv-channels or --rotary-percent.");
}

void check_network(const Arguments& arguments, Mistakes& rules) {
  check_least({{"--ffn-hidden-size", arguments.ffn_hidden_size},
               {"--kv-channels", arguments.kv_channels},
               {"--rotary-base", arguments.rotary_base},
               {"--rotary-seq-len-interpolation-factor", arguments.rotary_seq_len_interpolation_factor},
               {"--rope-scaling-factor", arguments.rope_scaling_factor},
               {"--norm-epsilon", arguments.norm_epsilon},
               {"--init-method-std", arguments.init_method_std, /*may_be_zero=*/true},
               {"--vocab-extra-ids", arguments.vocab_extra_ids, /*may_be_zero=*/true},
               {"--ckpt-step", arguments.ckpt_step, /*may_be_zero=*/true},
               {"--adam-eps", arguments.adam_eps},
               {"--lora-alpha", arguments.lora_alpha}},
              rules);
  check_rotary(arguments, rules);
  const auto& positions = arguments.position_embedding_type;
  rules.require(positions != "mrope" || arguments.hf_model,
                "--position-embedding-type mrope belongs to vision-language models; give one by "
                "--hf-model, or use rope.");
  rules.require(arguments.add_position_embedding || positions != "learned_absolute",
                "--no-position-embedding leaves learned positions out, and "
                "--position-embedding-type is learned_absolute; say rope or none there.");
  rules.require(int{arguments.swiglu} + int{arguments.squared_relu} + int{arguments.openai_gelu} <= 1,
                "--swiglu, --squared-relu and --openai-gelu exclude each other; give one.");
  rules.require(arguments.tiled_num_shards > 0, "--tiled-num-shards is " + to_string(arguments.tiled_num_shards) +
                                                    "; it is the number of pieces of a sequence, so at least 1.");
  rules.require(arguments.rotary_percent > 0 && arguments.rotary_percent <= 1,
                "--rotary-percent is " + text(arguments.rotary_percent) + "; it must be above 0 and at most 1.");
  for (const auto& [flag, value] : {std::pair("--attention-dropout", arguments.attention_dropout),
                                    std::pair("--hidden-dropout", arguments.hidden_dropout)}) {
    rules.require(value >= 0 && value < 1,
                  std::string(flag) + " is " + text(value) + "; it must be from 0 to below 1.");
  }
  if (!arguments.group_query_attention || !arguments.num_attention_heads) return;
  const int64_t heads = *arguments.num_attention_heads, groups = arguments.num_query_groups;
  rules.require(groups > 0 && heads % groups == 0, "--num-attention-heads " + to_string(heads) +
                                                       " is not divisible by --num-query-groups " + to_string(groups) +
                                                       "; each group serves the same number of heads.");
}

void check_lora(const Arguments& arguments, Mistakes& rules) {
  if (!arguments.lora_r) {
    rules.require(arguments.lora_target_modules.empty(),
                  "--lora-target-modules needs --lora-r, the rank of the adapters.");
    return;
  }
  rules.require(*arguments.lora_r > 0 && arguments.lora_dropout >= 0 && arguments.lora_dropout < 1,
                "--lora-r must be positive, and --lora-dropout from 0 to below 1.");
  rules.require(!arguments.lora_target_modules.empty(),
                "--lora-r needs --lora-target-modules, the linear layers that get adapters; for Llama and "
                "Qwen q_proj k_proj v_proj o_proj gate_proj up_proj down_proj, or all-linear.");
  rules.require(arguments.hf_model && !arguments.from_scratch,
                "--lora-r needs --hf-model, whose weights the adapters change, without --from-scratch.");
}

void derive_parallel(Arguments& arguments, const RunEnvironment& environment, Mistakes& rules) {
  arguments.world_size = environment.world_size;
  arguments.rank = environment.rank;
  arguments.sequence_parallel = false;
  rules.require(arguments.distributed_timeout_minutes > 0,
                "--distributed-timeout-minutes is " + to_string(arguments.distributed_timeout_minutes) +
                    "; every wait has a deadline, so it must be at least 1.");
  const auto divides = [&](const char* flag, int64_t size) {
    if (!rules.require(size > 0, std::string(flag) + " is " + to_string(size) +
                                     "; parallel sizes must be positive; leave it out for 1."))
      return false;
    return rules.require(arguments.world_size % size == 0, "world size " + to_string(arguments.world_size) +
                                                               " is not divisible by " + flag + " " + to_string(size) +
                                                               "; change one of them.");
  };
  divides("--expert-model-parallel-size", arguments.expert_model_parallel_size);
  if (divides("--context-parallel-size", arguments.context_parallel_size))
    arguments.data_parallel_size = arguments.world_size / arguments.context_parallel_size;
}

void check_fsdp2(const Arguments& arguments, bool on_gpu, const RunEnvironment& environment, Mistakes& rules) {
  rules.require(
      !arguments.fsdp2_config_path || arguments.use_torch_fsdp2,
      "--fsdp2-config-path " + arguments.fsdp2_config_path.value_or("") + " needs --use-torch-fsdp2; add it.");
  rules.require(!arguments.fsdp2_config_strict || arguments.fsdp2_config_path,
                "--fsdp2-config-strict needs --fsdp2-config-path, the file that it checks.");
  rules.require(arguments.use_torch_fsdp2 || arguments.world_size == 1,
                "world size is " + to_string(arguments.world_size) +
                    ", which needs --use-torch-fsdp2; sharding_size: 1 in the FSDP2 file replicates the "
                    "model instead.");
  const bool one_connection = environment.cuda_device_max_connections == "1";
  rules.require(!on_gpu || !arguments.use_torch_fsdp2 || !one_connection,
                "CUDA_DEVICE_MAX_CONNECTIONS is 1, which keeps FSDP2's collectives from overlapping "
                "compute; unset it.");
}

void check_backend(const Arguments& arguments, bool on_gpu, Mistakes& rules) {
  const auto& backend = *arguments.distributed_backend;
  if (!rules.require(
          backend.find("hccl") == backend.npos,
          "--distributed-backend " + backend + " is for NPUs, which this program does not drive; use nccl or gloo."))
    return;
  constexpr std::array kKnown = {"nccl", "gloo", "cpu:gloo,cuda:nccl", "cuda:nccl,cpu:gloo"};
  if (!rules.require(std::find(kKnown.begin(), kKnown.end(), backend) != kKnown.end(),
                     "--distributed-backend " + backend + " is unknown; use nccl, gloo or cpu:gloo,cuda:nccl."))
    return;
  rules.require(
      on_gpu || backend == "gloo",
      "--distributed-backend " + backend + " needs GPUs, but this run is on CPUs; use gloo or leave the flag out.");
  rules.require(backend != "nccl" || !arguments.async_save,
                "--async-save needs a backend for the CPU, over which its threads agree; use "
                "--distributed-backend cpu:gloo,cuda:nccl or leave the flag out.");
}

bool derive_device(Arguments& arguments, const RunEnvironment& environment, Mistakes& rules) {
  rules.require(arguments.device != "cuda" || environment.has_gpu,
                "--device cuda needs a GPU, and this machine has none that can be used; leave it out or "
                "use --device cpu.");
  const bool on_gpu =
      arguments.device == "cuda" || arguments.device == "sim" || (arguments.device == "auto" && environment.has_gpu);
  if (!arguments.distributed_backend) {
    const char* on_gpus = arguments.save || arguments.async_save ? "cpu:gloo,cuda:nccl" : "nccl";
    arguments.distributed_backend = on_gpu ? on_gpus : "gloo";
  }
  check_backend(arguments, on_gpu, rules);
  return on_gpu;
}

void check_determinism(const Arguments& arguments, bool on_gpu, const RunEnvironment& environment, Mistakes& rules) {
  if (!arguments.deterministic_mode || !on_gpu || arguments.world_size == 1) return;
  constexpr std::array kDeterministic = {"Tree", "Ring", "CollnetDirect", "CollnetChain", "^NVLS"};
  const auto& algorithm = environment.nccl_algo;
  const bool known =
      algorithm && std::find(kDeterministic.begin(), kDeterministic.end(), *algorithm) != kDeterministic.end();
  rules.require(known, "--deterministic-mode needs NCCL_ALGO to be one of Tree, Ring, CollnetDirect, "
                       "CollnetChain, ^NVLS, "
                       "but it is " +
                           algorithm.value_or("not set") + "; NCCL may otherwise choose another order of addition.");
}

void derive_precision(Arguments& arguments, const DiagnosticSink& sink) {
  if (!arguments.bf16) return;
  arguments.params_dtype = "bf16";
  sink(Severity::kNotice, "--bf16 stores the parameters in bf16, and the optimizer steps fp32 copies of them; to store "
                          "them in fp32 only and compute in bf16, leave it out and set param_dtype: bf16 in the FSDP2 "
                          "file.");
}

void list_without_effect(const Arguments& arguments, const DiagnosticSink& sink) {
  std::string list;
  for (const auto& flag : arguments.given_without_effect) {
    list += (list.empty() ? "" : "; ") + flag + " (" + find_option(flag)->reason + ")";
  }
  if (!list.empty()) sink(Severity::kNotice, "Accepted without effect: " + list + ".");
  std::string sections;
  for (const auto& name : arguments.unread_sections) sections += (sections.empty() ? "" : ", ") + name;
  if (!sections.empty()) {
    sink(Severity::kWarning, "Not read: " + sections +
                                 ", which stand beside gpt_args; data and "
                                 "model come from flags here.");
  }
}

}  // namespace

void derive_network(Arguments& arguments) {
  Mistakes rules;
  derive_sizes(arguments, rules);
  check_network(arguments, rules);
  rules.tell();
}

int64_t unpadded_vocab_size(const Arguments& arguments) {
  const int64_t end_of_document = arguments.tokenizer_type == "NullTokenizer" ? 1 : 0;
  return arguments.vocab_size.value() + end_of_document + arguments.vocab_extra_ids;
}

int64_t padded_vocab_size(int64_t vocab_size, int64_t divisible_by, int64_t tensor_parallel_size) {
  const int64_t multiple = divisible_by * tensor_parallel_size;
  return (vocab_size + multiple - 1) / multiple * multiple;
}

void validate_arguments(Arguments& arguments, const RunEnvironment& environment, const DiagnosticSink& sink,
                        Mistakes rules) {
  std::vector<std::pair<Severity, std::string>> notices;  // for a run that starts
  const DiagnosticSink later = [&](Severity severity, const std::string& sentence) {
    notices.emplace_back(severity, sentence);
  };
  check_model_source(arguments, rules);
  take_synonyms(arguments, rules);
  // Sizes come from config.json, or are the model's own business.
  if (!arguments.hf_model && !arguments.is_own_model()) derive_sizes(arguments, rules);
  check_network(arguments, rules);
  check_lora(arguments, rules);
  derive_parallel(arguments, environment, rules);
  const bool on_gpu = derive_device(arguments, environment, rules);
  check_fsdp2(arguments, on_gpu, environment, rules);
  check_determinism(arguments, on_gpu, environment, rules);
  detail::validate_schedule(arguments, rules);
  detail::validate_activations(arguments, later, rules);
  detail::validate_data(arguments, later, rules);
  detail::validate_checkpoint(arguments, rules);
  rules.tell();
  for (const auto& [severity, sentence] : notices) sink(severity, sentence);
  derive_precision(arguments, sink);
  list_without_effect(arguments, sink);
}

}  // namespace megashard
