#include "framework/arguments/argument_validation.h"

#include <algorithm>
#include <array>

#include "framework/arguments/argument_table.h"

namespace megashard {

namespace {

using std::to_string;

std::string text(double value) { return argument_text(value); }

void check_model_source(const Arguments& arguments) {
  require(!arguments.from_scratch || arguments.hf_model,
          "--from-scratch needs --hf-model, whose config.json describes the model; without it "
          "weights are fresh anyway.");
  require(!arguments.model_plugin || arguments.model || arguments.hf_model,
          "--model-plugin " + arguments.model_plugin.value_or("") +
              " needs --model, the name under which it registers the model.");
  require(!arguments.is_own_model() || !arguments.save_hf || arguments.hf_model,
          "--save-hf needs --hf-model here: only it has the config.json of a model of "
          "--model-plugin.");
}

void take_synonyms(Arguments& arguments) {
  require(!arguments.num_layers || !arguments.encoder_num_layers,
          "--num-layers and --encoder-num-layers mean the same; give only --num-layers.");
  if (arguments.encoder_num_layers) arguments.num_layers = arguments.encoder_num_layers;
  if (arguments.use_rotary_position_embeddings) arguments.position_embedding_type = "rope";
  if (arguments.add_bias_linear) arguments.add_qkv_bias = true;
}

void derive_sizes(Arguments& arguments) {
  const std::pair<const char*, const std::optional<int64_t>*> required[] = {
      {"--num-layers", &arguments.num_layers},
      {"--hidden-size", &arguments.hidden_size},
      {"--num-attention-heads", &arguments.num_attention_heads},
      {"--max-position-embeddings", &arguments.max_position_embeddings},
  };
  for (const auto& [flag, value] : required) {
    require(value->has_value(),
            std::string(flag) + " is missing; give it, or --hf-model DIR with a config.json.");
    require(**value > 0,
            std::string(flag) + " is " + to_string(**value) + "; it must be positive.");
  }
  const int64_t hidden = *arguments.hidden_size, heads = *arguments.num_attention_heads;
  if (!arguments.ffn_hidden_size) {
    constexpr int64_t kStep = 64;
    const auto gated =
        static_cast<int64_t>(static_cast<double>(4 * hidden) * 2 / 3 / kStep) * kStep;
    arguments.ffn_hidden_size = arguments.swiglu ? gated : 4 * hidden;
  }
  if (!arguments.kv_channels) {
    require(hidden % heads == 0,
            "--hidden-size " + to_string(hidden) + " is not divisible by --num-attention-heads " +
                to_string(heads) + "; change one, or give the head size by --kv-channels.");
    arguments.kv_channels = hidden / heads;
  }
}

void check_network(const Arguments& arguments) {
  const auto& positions = arguments.position_embedding_type;
  require(positions != "relative",
          "--position-embedding-type relative belongs to T5; use rope or learned_absolute.");
  require(positions != "mrope" || arguments.hf_model,
          "--position-embedding-type mrope belongs to vision-language models; give one by "
          "--hf-model, or use rope.");
  require(int{arguments.swiglu} + int{arguments.squared_relu} + int{arguments.openai_gelu} <= 1,
          "--swiglu, --squared-relu and --openai-gelu exclude each other; give one.");
  require(arguments.tiled_num_shards > 0,
          "--tiled-num-shards is " + to_string(arguments.tiled_num_shards) +
              "; it is the number of pieces of a sequence, so at least 1.");
  require(arguments.rotary_percent > 0 && arguments.rotary_percent <= 1,
          "--rotary-percent is " + text(arguments.rotary_percent) +
              "; it must be above 0 and at most 1.");
  for (const auto& [flag, value] : {std::pair("--attention-dropout", arguments.attention_dropout),
                                    std::pair("--hidden-dropout", arguments.hidden_dropout)}) {
    require(value >= 0 && value < 1,
            std::string(flag) + " is " + text(value) + "; it must be from 0 to below 1.");
  }
  if (!arguments.group_query_attention || !arguments.num_attention_heads) return;
  const int64_t heads = *arguments.num_attention_heads, groups = arguments.num_query_groups;
  require(groups > 0 && heads % groups == 0,
          "--num-attention-heads " + to_string(heads) + " is not divisible by --num-query-groups " +
              to_string(groups) + "; each group serves the same number of heads.");
}

void check_lora(const Arguments& arguments) {
  if (!arguments.lora_r) {
    require(arguments.lora_target_modules.empty(),
            "--lora-target-modules needs --lora-r, the rank of the adapters.");
    return;
  }
  require(*arguments.lora_r > 0 && arguments.lora_dropout >= 0 && arguments.lora_dropout < 1,
          "--lora-r must be positive, and --lora-dropout from 0 to below 1.");
  require(
      !arguments.lora_target_modules.empty(),
      "--lora-r needs --lora-target-modules, the linear layers that get adapters; for Llama and "
      "Qwen q_proj k_proj v_proj o_proj gate_proj up_proj down_proj, or all-linear.");
  require(arguments.hf_model && !arguments.from_scratch,
          "--lora-r needs --hf-model, whose weights the adapters change, without --from-scratch.");
}

void check_parallel_sizes(const Arguments& arguments) {
  const int64_t tensor = arguments.tensor_model_parallel_size,
                pipeline = arguments.pipeline_model_parallel_size;
  const int64_t context = arguments.context_parallel_size;
  require(tensor > 0 && pipeline > 0 && context > 0 && arguments.expert_model_parallel_size > 0,
          "parallel sizes must be positive; leave the flags out for 1.");
  const int64_t model_ranks = tensor * pipeline * context;
  require(arguments.world_size % model_ranks == 0,
          "world size " + to_string(arguments.world_size) + " is not divisible by " +
              to_string(model_ranks) + " (tensor " + to_string(tensor) + " * pipeline " +
              to_string(pipeline) + " * context parallel size " + to_string(context) +
              "); change the number of ranks.");
  require(pipeline == 1,
          "--pipeline-model-parallel-size is " + to_string(pipeline) +
              ", but FSDP2 needs 1: pipeline parallelism is not part of this program, which shards "
              "over all ranks instead.");
  require(arguments.world_size % arguments.expert_model_parallel_size == 0,
          "world size " + to_string(arguments.world_size) +
              " is not divisible by --expert-model-parallel-size " +
              to_string(arguments.expert_model_parallel_size) + "; change one of them.");
  require(tensor == 1, "--tensor-model-parallel-size " + to_string(tensor) +
                           " must be 1 in this version; leave it out and let FSDP2 shard.");
  require(arguments.context_parallel_algo == "ulysses_cp_algo",
          "--context-parallel-algo " + arguments.context_parallel_algo +
              " is not in this version; ulysses_cp_algo is, which shares out attention heads.");
}

void derive_parallel(Arguments& arguments, const RunEnvironment& environment,
                     const DiagnosticSink& sink) {
  arguments.world_size = environment.world_size;
  arguments.rank = environment.rank;
  check_parallel_sizes(arguments);
  const int64_t model_ranks = arguments.tensor_model_parallel_size *
                              arguments.pipeline_model_parallel_size *
                              arguments.context_parallel_size;
  arguments.data_parallel_size = arguments.world_size / model_ranks;
  if (arguments.sequence_parallel && arguments.tensor_model_parallel_size == 1) {
    arguments.sequence_parallel = false;
    sink(Severity::kWarning, "--sequence-parallel is turned off: it needs tensor parallelism.");
  }
  require(arguments.distributed_timeout_minutes > 0,
          "--distributed-timeout-minutes is " + to_string(arguments.distributed_timeout_minutes) +
              "; every wait has a deadline, so it must be at least 1.");
}

void check_fsdp2(const Arguments& arguments, bool on_gpu, const RunEnvironment& environment) {
  require(!arguments.fsdp2_config_path || arguments.use_torch_fsdp2,
          "--fsdp2-config-path " + arguments.fsdp2_config_path.value_or("") +
              " needs --use-torch-fsdp2; add it.");
  require(!arguments.fsdp2_config_strict || arguments.fsdp2_config_path,
          "--fsdp2-config-strict needs --fsdp2-config-path, the file that it checks.");
  require(arguments.use_torch_fsdp2 || arguments.world_size == 1,
          "world size is " + to_string(arguments.world_size) +
              ", which needs --use-torch-fsdp2; sharding_size: 1 in the FSDP2 file replicates the "
              "model instead.");
  const bool one_connection = environment.cuda_device_max_connections == "1";
  require(!on_gpu || !arguments.use_torch_fsdp2 || !one_connection,
          "CUDA_DEVICE_MAX_CONNECTIONS is 1, which keeps FSDP2's collectives from overlapping "
          "compute; unset it.");
}

bool derive_device(Arguments& arguments, const RunEnvironment& environment) {
  require(arguments.device != "cuda" || environment.has_gpu,
          "--device cuda needs a GPU, and this machine has none that can be used; leave it out or "
          "use --device cpu.");
  const bool on_gpu =
      arguments.device == "cuda" || (arguments.device == "auto" && environment.has_gpu);
  if (!arguments.distributed_backend) {
    const char* on_gpus = arguments.save || arguments.async_save ? "cpu:gloo,cuda:nccl" : "nccl";
    arguments.distributed_backend = on_gpu ? on_gpus : "gloo";
  }
  const auto& backend = *arguments.distributed_backend;
  require(backend.find("hccl") == backend.npos,
          "--distributed-backend " + backend +
              " is for NPUs, which this program does not drive; use nccl or gloo.");
  constexpr std::array kKnown = {"nccl", "gloo", "cpu:gloo,cuda:nccl", "cuda:nccl,cpu:gloo"};
  require(
      std::find(kKnown.begin(), kKnown.end(), backend) != kKnown.end(),
      "--distributed-backend " + backend + " is unknown; use nccl, gloo or cpu:gloo,cuda:nccl.");
  require(on_gpu || backend == "gloo",
          "--distributed-backend " + backend +
              " needs GPUs, but this run is on CPUs; use gloo or leave the flag out.");
  require(backend != "nccl" || !arguments.async_save,
          "--async-save needs a backend for the CPU, over which its threads agree; use "
          "--distributed-backend cpu:gloo,cuda:nccl or leave the flag out.");
  return on_gpu;
}

void check_determinism(const Arguments& arguments, bool on_gpu, const RunEnvironment& environment) {
  if (!arguments.deterministic_mode || !on_gpu) return;
  constexpr std::array kDeterministic = {"Tree", "Ring", "CollnetDirect", "CollnetChain", "^NVLS"};
  const auto& algorithm = environment.nccl_algo;
  const bool known = algorithm && std::find(kDeterministic.begin(), kDeterministic.end(),
                                            *algorithm) != kDeterministic.end();
  require(known,
          "--deterministic-mode needs NCCL_ALGO to be one of Tree, Ring, CollnetDirect, "
          "CollnetChain, ^NVLS, "
          "but it is " +
              algorithm.value_or("not set") +
              "; NCCL may otherwise choose another order of addition.");
}

void derive_precision(Arguments& arguments, const DiagnosticSink& sink) {
  if (!arguments.bf16) return;
  arguments.params_dtype = "bf16";
  sink(
      Severity::kNotice,
      "--bf16 stores the parameters in bf16, and the optimizer steps fp32 copies of them; to store "
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
  for (const auto& name : arguments.unread_sections)
    sections += (sections.empty() ? "" : ", ") + name;
  if (!sections.empty()) {
    sink(Severity::kWarning, "Not read: " + sections +
                                 ", which stand beside gpt_args; data and "
                                 "model come from flags here.");
  }
}

}  // namespace

void derive_network(Arguments& arguments) {
  derive_sizes(arguments);
  check_network(arguments);
}

int64_t unpadded_vocab_size(const Arguments& arguments) {
  const int64_t end_of_document = arguments.tokenizer_type == "NullTokenizer" ? 1 : 0;
  return arguments.vocab_size.value() + end_of_document + arguments.vocab_extra_ids;
}

int64_t padded_vocab_size(int64_t vocab_size, int64_t divisible_by, int64_t tensor_parallel_size) {
  const int64_t multiple = divisible_by * tensor_parallel_size;
  return (vocab_size + multiple - 1) / multiple * multiple;
}

void validate_arguments(Arguments& arguments, const RunEnvironment& environment,
                        const DiagnosticSink& sink) {
  check_model_source(arguments);
  take_synonyms(arguments);
  if (arguments.hf_model || arguments.is_own_model()) {
    check_network(arguments);  // sizes come from config.json, or are the model's own business
  } else {
    derive_network(arguments);
  }
  check_lora(arguments);
  require(!arguments.seq_length || !arguments.encoder_seq_length,
          "--seq-length and --encoder-seq-length mean the same; give only --seq-length.");
  if (arguments.encoder_seq_length) arguments.seq_length = arguments.encoder_seq_length;
  derive_parallel(arguments, environment, sink);
  const bool on_gpu = derive_device(arguments, environment);
  check_fsdp2(arguments, on_gpu, environment);
  check_determinism(arguments, on_gpu, environment);
  derive_precision(arguments, sink);
  detail::validate_schedule(arguments);
  detail::validate_activations(arguments, sink);
  detail::validate_data(arguments, sink);
  detail::validate_checkpoint(arguments);
  list_without_effect(arguments, sink);
}

}  // namespace megashard
