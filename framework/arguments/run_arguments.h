#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace megashard {

/// Where and from what a run is made. (derived): filled by validate_arguments.
struct DistributedArguments {
  int64_t tensor_model_parallel_size = 1;
  int64_t pipeline_model_parallel_size = 1;
  int64_t context_parallel_size = 1;
  std::string context_parallel_algo = "ulysses_cp_algo";
  int64_t expert_model_parallel_size = 1;
  bool sequence_parallel = false;
  std::optional<std::string> distributed_backend;  // (derived) nccl with GPUs, gloo without
  int64_t distributed_timeout_minutes = 10;
  std::optional<std::string> distributed_init_method;  // tcp://HOST:PORT, file://PATH; unset: env://
  std::optional<int64_t> local_rank;
  std::string device = "auto";  // cpu, cuda, sim (a CUDA device made of the CPU), auto
  bool use_torch_fsdp2 = false;
  std::optional<std::string> fsdp2_config_path;
  bool fsdp2_config_strict = false;
  std::optional<std::string> fsdp_schedule_trace;  // a folder for rank_N.json
  bool log_host_syncs = false;                     // what made the host wait for the device
  bool reduce_scatter_during_grad_accumulation = true;
  std::vector<std::string> freeze_module_prefix;  // of parameter names
  bool gradient_accumulation_fusion = true;       // as Megatron's default; has no meaning here
  int64_t world_size = 1;                         // (derived)
  int64_t rank = 0;                               // (derived)
  int64_t data_parallel_size = 1;                 // (derived)
};

struct CheckpointArguments {
  std::optional<std::string> save;
  std::optional<int64_t> save_interval;
  bool async_save = false;
  std::optional<int64_t> most_recent_k;         // steps that stay
  std::optional<int64_t> save_retain_interval;  // multiples that stay
  std::optional<std::string> load;
  bool no_save_optim = false;
  bool no_save_rng = false;
  bool no_load_optim = false;
  bool no_load_rng = false;
  bool finetune = false;  // weights only, from iteration 0
  std::optional<std::string> pretrained_checkpoint;
  std::optional<int64_t> ckpt_step;
  bool verify_checkpoint = true;  // read every byte before loading
  bool use_checkpoint_args = false;
  std::optional<std::string> dist_ckpt_strictness;  // Megatron's values; unset: all must fit
  bool exit_on_missing_checkpoint = false;
  bool auto_detect_ckpt_format = false;
  std::string ckpt_format = "torch_dist";          // torch_dist, torch_dcp
  std::optional<std::string> ckpt_convert_format;  // load, save in this one, exit
  std::optional<std::string> ckpt_convert_save;    // folder for it
  std::optional<std::string> save_hf;              // folder for Hugging Face files, at the end
  bool save_hf_stacked_experts = false;            // a layer's experts in two tensors there
  bool overwrite = false;                          // --save-hf may replace what its folder holds
  bool overwrite_run = false;                      // a new run may write among another's steps
};

/// The model that Megatron's flags of the network describe.
inline constexpr const char* kModelOfFlags = "gpt";

/// The model's source besides Megatron's flags.
struct ModelSourceArguments {
  std::optional<std::string> hf_model;      // Hugging Face directory
  bool from_scratch = false;                // with hf_model: its config, but freshly initialised weights
  std::optional<std::string> model_plugin;  // a library that registers models
  std::optional<std::string> model;         // a registered name; unset: by hf_model or the flags

  /// A model of a plugin takes what it likes from the flags.
  bool is_own_model() const { return model_plugin && model != kModelOfFlags; }
};

/// Megatron's shares of training, validation and test.
inline constexpr const char* kDefaultSplit = "969, 30, 1";

struct DataArguments {
  std::vector<std::string> data_path;  // [weight] prefix ...
  std::optional<std::string> split;    // (derived) kDefaultSplit with data_path
  std::vector<std::string> train_data_path, valid_data_path, test_data_path;
  std::optional<std::string> data_args_path;  // a file with the words of data_path
  std::optional<std::string> data_cache_path;
  bool mmap_bin_files = true;
  bool mock_data = false;
  std::optional<int64_t> seq_length;
  std::optional<int64_t> encoder_seq_length;  // another name for seq_length
  std::string dataloader_type = "single";     // single, cyclic
  int64_t num_workers = 2;
  bool reset_position_ids = false;
  bool reset_attention_mask = false;
  bool eod_mask_loss = false;
};

struct TokenizerArguments {
  std::optional<std::string> tokenizer_type;  // NullTokenizer, HuggingFaceTokenizer
  std::optional<std::string> tokenizer_model;
  std::optional<int64_t> vocab_size;
  int64_t vocab_extra_ids = 0;
  std::optional<int64_t> padded_vocab_size;  // (derived) without hf_model
};

}  // namespace megashard
