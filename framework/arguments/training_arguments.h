#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace megashard {

/// Megatron's groups for the loop itself, with its names and defaults. (derived): filled by
/// validate_arguments.
struct TrainingArguments {
  std::optional<int64_t> micro_batch_size;   // per rank
  std::optional<int64_t> global_batch_size;  // (derived) micro batch * data parallel size
  std::vector<int64_t> rampup_batch_size;    // {start, increment, samples}; empty: constant
  bool decrease_batch_size_if_needed = false;
  std::optional<int64_t> train_iters;  // one of these two
  std::optional<int64_t> train_samples;
  std::optional<int64_t> exit_interval;
  std::optional<int64_t> exit_duration_in_mins;
  bool exit_signal_handler = false;  // at exit_signal: save and exit
  std::string exit_signal = "SIGTERM";
  bool check_for_nan_in_loss_and_grad = true;
  bool calculate_per_token_loss = false;
  int64_t empty_unused_memory_level = 0;
  bool deterministic_mode = false;
  bool skip_train = false;             // evaluate only
  int64_t consumed_train_samples = 0;  // computed while running, kept in the checkpoint's args
  int64_t consumed_valid_samples = 0;
};

/// Saved tensors of fewer elements stay on the device (Megatron's --min-offloaded-tensor-size).
inline constexpr int64_t kMinOffloadedElements = int64_t{1} << 20;

/// What is kept between forward and backward, and where.
struct ActivationArguments {
  bool recompute_activations = false;                // recompute_granularity selective
  std::optional<std::string> recompute_granularity;  // full, selective; (derived)
  std::optional<std::string> recompute_method;       // uniform, block; with full
  std::optional<int64_t> recompute_num_layers;       // with full
  std::vector<std::string> recompute_modules;        // (derived) core_attn with selective
  int64_t cpu_offloading_num_layers = 0;
  bool fine_grained_activation_offloading = false;
  std::vector<std::string> offload_modules;
  int64_t min_offloaded_tensor_size = kMinOffloadedElements;
};

struct OptimizerArguments {
  std::string optimizer = "adam";  // adam (AdamW), sgd, muon
  std::string optimizer_selection = "fused_torch_adamw";
  double weight_decay = 0.01;
  std::optional<double> start_weight_decay;          // (derived) weight_decay when the increase is constant
  std::optional<double> end_weight_decay;            // (derived)
  std::string weight_decay_incr_style = "constant";  // constant, linear, cosine
  double clip_grad = 1.0;                            // 0: the norm is computed, nothing is clipped
  double adam_beta1 = 0.9;
  double adam_beta2 = 0.999;
  double adam_eps = 1e-8;
  double sgd_momentum = 0.9;
  double muon_momentum = 0.9;
  bool muon_use_nesterov = false;
  bool muon_split_qkv = true;                // each projection of a fused one is a matrix of its own
  std::string muon_scale_mode = "spectral";  // spectral, shape_scaling, unit_rms_norm
  std::string muon_fp32_matmul_prec = "medium";
  std::string muon_coefficient_type = "quintic";  // quintic, simple
  int64_t muon_num_ns_steps = 5;
  double muon_extra_scale_factor = 1.0;
  double lr_mult = 1.0;  // of parameters whose names contain one of lr_scale_modules
  std::vector<std::string> lr_scale_modules;
  std::vector<std::string> weight_decay_exclude_modules;
  std::vector<std::string> param_group_overrides;  // PATTERN:SETTING=NUMBER,...
};

struct LearningRateArguments {
  std::optional<double> lr;
  std::string lr_decay_style = "linear";  // constant, linear, cosine, inverse-square-root, WSD
  std::string lr_wsd_decay_style = "exponential";
  std::optional<int64_t> lr_decay_iters;
  std::optional<int64_t> lr_decay_samples;
  std::optional<int64_t> lr_wsd_decay_iters;
  std::optional<int64_t> lr_wsd_decay_samples;
  std::optional<double> lr_warmup_fraction;
  int64_t lr_warmup_iters = 0;
  int64_t lr_warmup_samples = 0;
  double lr_warmup_init = 0.0;
  double min_lr = 0.0;
  bool override_opt_param_scheduler = false;
  bool use_checkpoint_opt_param_scheduler = false;
};

struct ValidationArguments {
  int64_t eval_iters = 100;
  int64_t eval_interval = 1000;
  bool test_mode = false;
};

struct LoggingArguments {
  int64_t log_interval = 100;
  bool log_params_norm = false;
  bool log_num_zeros_in_grad = false;
  bool log_throughput = false;
  bool log_tokens_per_second = false;
  bool log_memory = false;                   // peak of a rank
  int64_t timing_log_level = 0;              // 0 to 2: how finely a step's time is told
  std::string timing_log_option = "minmax";  // over ranks: max, minmax, all
  bool print_all_arguments = false;          // also those at their defaults
  bool log_progress = false;                 // in vain: metrics_file says more
  bool log_tps = false;                      // "tokens per sample" in the log line
  std::optional<std::string> metrics_file;   // JSON lines, one object a step
  std::optional<double> peak_tflops;         // of one device, for mfu; unset: the device's, or measured
};

}  // namespace megashard
