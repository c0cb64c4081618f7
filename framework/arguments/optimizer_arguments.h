#pragma once

#include <cstdint>
#include <initializer_list>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace megashard {

struct Arguments;
struct Option;
struct RunParts;
class Mistakes;

/// Settings for parameters with matching names (Megatron's ParamKey and ParamGroupOverride). Unset values are
/// unchanged.
struct ParamGroupOverride {
  std::string pattern;  ///< matches the whole name, as Python's fnmatch: "*.q_proj.weight"
  bool ignores_case = false;
  std::optional<double> lr_mult{}, wd_mult{}, beta1{}, beta2{};

  bool matches(const std::string& name) const;
};

/// Parses "*.norm.weight:wd_mult=0.5,lr_mult=0.1". Throws UsageError.
ParamGroupOverride parse_param_group_override(const std::string& text);

/// Overrides from --lr-mult with --lr-scale-modules, --weight-decay-exclude-modules and --param-group-overrides. If
/// several match a parameter, the last one is used.
std::vector<ParamGroupOverride> param_group_overrides(const Arguments& arguments);

enum class OptimizerKind {
  kAdam,  ///< AdamW, as Megatron's `--optimizer adam`
  kSgd,
  kMuon,  ///< Muon for matrices; AdamW for embeddings, output layers, norms and biases
};
/// Values of --optimizer.
inline constexpr std::initializer_list<std::pair<const char*, OptimizerKind>> kOptimizerKinds = {
    {"adam", OptimizerKind::kAdam}, {"sgd", OptimizerKind::kSgd}, {"muon", OptimizerKind::kMuon}};
enum class WeightDecayStyle { kConstant, kLinear, kCosine };
enum class MatmulPrecision { kMedium, kHigh, kHighest };
/// Values of Megatron's --muon-* flags (NVIDIA's emerging_optimizers).
enum class MuonScaleMode { kSpectral, kShapeScaling, kUnitRmsNorm };
enum class MuonCoefficients { kQuintic, kSimple };
enum class LrDecayStyle { kConstant, kLinear, kCosine, kInverseSquareRoot, kWsd };
/// Values of --lr-decay-style.
inline constexpr std::initializer_list<std::pair<const char*, LrDecayStyle>> kLrDecayStyles = {
    {"constant", LrDecayStyle::kConstant},
    {"linear", LrDecayStyle::kLinear},
    {"cosine", LrDecayStyle::kCosine},
    {"inverse-square-root", LrDecayStyle::kInverseSquareRoot},
    {"WSD", LrDecayStyle::kWsd}};
enum class MomentDtype { kFp32, kBf16 };
enum class WsdDecayStyle { kExponential, kLinear, kCosine };

struct OptimizerArguments {
  OptimizerKind optimizer = OptimizerKind::kAdam;
  std::string optimizer_selection = "fused_torch_adamw";
  double weight_decay = 0.01;
  std::optional<double> start_weight_decay;  // (derived) weight_decay if the increase is constant
  std::optional<double> end_weight_decay;    // (derived) likewise
  WeightDecayStyle weight_decay_incr_style = WeightDecayStyle::kConstant;
  double clip_grad = 1.0;  // 0: computes the norm without clipping
  double adam_beta1 = 0.9;
  double adam_beta2 = 0.999;
  double adam_eps = 1e-8;
  bool use_precision_aware_optimizer = false;
  MomentDtype exp_avg_dtype = MomentDtype::kFp32;  // of AdamW's state
  MomentDtype exp_avg_sq_dtype = MomentDtype::kFp32;
  double sgd_momentum = 0.9;
  double muon_momentum = 0.9;
  bool muon_use_nesterov = false;
  bool muon_split_qkv = true;  // orthogonalises each projection of a fused one separately
  MuonScaleMode muon_scale_mode = MuonScaleMode::kSpectral;
  MatmulPrecision muon_fp32_matmul_prec = MatmulPrecision::kMedium;
  MuonCoefficients muon_coefficient_type = MuonCoefficients::kQuintic;
  int64_t muon_num_ns_steps = 5;
  double muon_extra_scale_factor = 1.0;
  double lr_mult = 1.0;  // for parameters whose name contains one of lr_scale_modules
  std::vector<std::string> lr_scale_modules;
  std::vector<std::string> weight_decay_exclude_modules;
  std::vector<std::string> param_group_overrides;  // PATTERN:SETTING=NUMBER,...
};

struct LearningRateArguments {
  std::optional<double> lr;
  LrDecayStyle lr_decay_style = LrDecayStyle::kLinear;
  WsdDecayStyle lr_wsd_decay_style = WsdDecayStyle::kExponential;
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
  bool use_checkpoint_opt_param_scheduler = false;  // (derived) true with skip_train
};

namespace detail {

/// Adds the rows of these options, in the order of the help.
void add_optimizer_options(std::vector<Option>& rows);
void validate_optimizer(Arguments& arguments, const RunParts& parts, Mistakes& rules);

}  // namespace detail

}  // namespace megashard
