#include "framework/arguments/checkpoint_arguments.h"

#include <algorithm>
#include <array>
#include <string_view>

#include "checkpoint/checkpoint.h"
#include "checkpoint/dcp/checkpoint_format.h"
#include "checkpoint/files/file_io.h"
#include "checkpoint/files/unreadable_error.h"
#include "checkpoint/open_checkpoint.h"
#include "checkpoint/steps/find_step.h"
#include "checkpoint/steps/manifest.h"
#include "checkpoint/values/torch_archive.h"
#include "checkpoint/values/verify_archive.h"

namespace megashard {
namespace {

constexpr const char* kNetworkGroup = "network size";

/// Of the network, but free to be changed when a training goes on: no weight depends on them.
constexpr std::array<std::string_view, 10> kNotOfWeights = {"max_position_embeddings",
                                                            "add_position_embedding",  // the type says it
                                                            "encoder_num_layers",
                                                            "use_rotary_position_embeddings",
                                                            "rotary_base",
                                                            "rotary_seq_len_interpolation_factor",
                                                            "use_rope_scaling",
                                                            "rope_scaling_factor",
                                                            "make_vocab_size_divisible_by",
                                                            "norm_epsilon"};

constexpr std::array<std::string_view, 7> kSteeringGroups = {
    "regularization", "mixed precision", "training", "optimizer", "learning rate", "data", "tokenizer"};

/// Of those groups, but without a say in what is learnt.
constexpr std::array<std::string_view, 9> kNotSteering = {"exit_interval",
                                                          "exit_duration_in_mins",
                                                          "exit_signal_handler",
                                                          "check_for_nan_in_loss_and_grad",
                                                          "empty_unused_memory_level",
                                                          "skip_train",
                                                          "num_workers",
                                                          "override_opt_param_scheduler",
                                                          "use_checkpoint_opt_param_scheduler"};

/// Taken by --use-checkpoint-args besides the network.
constexpr std::array<std::string_view, 7> kTakenToo = {"attention_dropout", "hidden_dropout",  "seq_length",
                                                       "tokenizer_type",    "tokenizer_model", "vocab_size",
                                                       "vocab_extra_ids"};

template <size_t N>
bool is_among(const std::array<std::string_view, N>& names, const std::string& name) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

bool equal(const ArgumentValue& a, const ArgumentValue& b) {
  const auto number = [](const ArgumentValue& value) -> const int64_t* { return std::get_if<int64_t>(&value); };
  if (const auto* whole = number(a); whole != nullptr && std::holds_alternative<double>(b))
    return static_cast<double>(*whole) == std::get<double>(b);
  if (const auto* whole = number(b); whole != nullptr && std::holds_alternative<double>(a))
    return static_cast<double>(*whole) == std::get<double>(a);
  return a == b;
}

/// Options whose value is known on both sides and differs: visit(option, ours, theirs).
template <class Visit>
void for_each_difference(const Arguments& arguments, const ArgumentRecord& saved, const Visit& visit) {
  for (const auto& [name, ours] : argument_values(arguments)) {
    if (std::holds_alternative<std::monostate>(ours)) continue;
    const auto* theirs = find_known(saved, name);
    if (theirs != nullptr && !equal(ours, *theirs)) visit(*find_argument(name), ours, *theirs);
  }
}

bool shapes_weights(const Option& option, const Arguments& arguments) {
  if (option.name == "padded_vocab_size") return true;
  if (option.name == "num_query_groups" && !arguments.group_query_attention) return false;
  return option.group == kNetworkGroup && !is_among(kNotOfWeights, option.name);
}

std::string remedy(const Option& option, const ArgumentValue& theirs, const Arguments& arguments) {
  if (arguments.hf_model) {
    return "it was trained from another model than --hf-model " + *arguments.hf_model + "; give that one";
  }
  const bool has_flag = option.status == OptionStatus::kUsed && !option.is_switch();
  return "give " +
         (has_flag ? option.flag + " " + argument_text(theirs) : std::string("the flags of the run that wrote it")) +
         ", or --use-checkpoint-args";
}

/// What is wrong with the bytes of a step's args; empty: nothing.
std::string damage_of_args(const std::string& folder) {
  std::string damage;
  try {
    const auto reader = open_step(folder);
    if (!reader->is_value("args")) return "";
    for (const auto& chunk : reader->chunks("args")) {
      const InputFile file(folder + "/" + chunk.file);
      verify_archive(TorchArchive(file, chunk.range), "args", [&damage](const std::string& fault) { damage = fault; });
    }
  } catch (const UnreadableError&) {
    throw;
  } catch (const c10::Error& error) {
    damage = error.what_without_backtrace();
  }
  return damage;
}

}  // namespace

void check_checkpoint_arguments(const Arguments& arguments, const ArgumentRecord& saved, const std::string& folder) {
  for_each_difference(
      arguments, saved, [&](const Option& option, const ArgumentValue& ours, const ArgumentValue& theirs) {
        if (!shapes_weights(option, arguments)) return;
        throw UsageError("the checkpoint " + folder + " has " + option.name + " " + argument_text(theirs) +
                         ", and this run has " + argument_text(ours) + ": " + remedy(option, theirs, arguments) + ".");
      });
}

std::string changed_arguments(const Arguments& arguments, const ArgumentRecord& saved) {
  std::string text;
  for_each_difference(
      arguments, saved, [&](const Option& option, const ArgumentValue& ours, const ArgumentValue& theirs) {
        const bool of_schedule =
            option.group == "learning rate" || option.name.find("weight_decay") != std::string::npos;
        if (of_schedule && arguments.use_checkpoint_opt_param_scheduler) return;
        const bool steers =
            option.name == "seed" || option.group == kNetworkGroup ||
            std::find(kSteeringGroups.begin(), kSteeringGroups.end(), option.group) != kSteeringGroups.end();
        if (!steers || option.status != OptionStatus::kUsed || is_among(kNotSteering, option.name)) return;
        text += (text.empty() ? "" : ", ") + option.name + " " + argument_text(theirs) + " -> " + argument_text(ours);
      });
  return text;
}

void take_checkpoint_arguments(Arguments& arguments, const DiagnosticSink& sink) {
  if (!arguments.load) {
    throw UsageError("--use-checkpoint-args needs --load, the folder of the checkpoint to ask.");
  }
  if (arguments.hf_model) {
    throw UsageError("--use-checkpoint-args and --hf-model " + *arguments.hf_model +
                     " both say what the model is; leave one out.");
  }
  const auto step = find_step(*arguments.load, nullptr,
                              {.ckpt_step = arguments.ckpt_step,
                               .depth = VerifyDepth::kSizes,  // the ranks read the rest together
                               .further_damage = damage_of_args});
  if (!step) {
    sink(Severity::kNotice,
         "--use-checkpoint-args: " + *arguments.load + " holds no checkpoint yet, so the flags count.");
    return;
  }
  const auto loaded = load_checkpoint(
      *step, {}, nullptr, {.strict = false, .wanted = [](const std::string& key) { return key == "args"; }});
  const Value* args = loaded.values.find("args");
  const Dict* fields = args == nullptr ? nullptr : namespace_fields(*args);
  if (fields == nullptr) {
    throw UsageError("--use-checkpoint-args: " + step->folder +
                     " keeps no args; give the network's flags, or --hf-model.");
  }
  const ArgumentRecord saved = to_record(*fields);
  std::string taken;
  for (const auto& option : option_table()) {
    const bool wanted =
        (option.group == kNetworkGroup && option.name != "encoder_num_layers") || is_among(kTakenToo, option.name);
    if (!wanted || option.status != OptionStatus::kUsed || arguments.is_given(option.name)) continue;
    const auto* value = find_known(saved, option.name);
    if (value == nullptr || !set_argument_value(option.name, *value, arguments)) continue;
    taken += (taken.empty() ? "" : ", ") + option.name + " " + argument_text(*value);
  }
  sink(Severity::kNotice, "From the args of " + step->folder + ": " + taken + ".");
}

}  // namespace megashard
