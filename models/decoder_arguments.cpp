#include "models/decoder_arguments.h"

#include <algorithm>
#include <cmath>

#include "framework/arguments/argument_table.h"
#include "models/families/model_family.h"
#include "models/model_config.h"
#include "models/network_arguments.h"

namespace megashard {
namespace {

/// Beyond it rotary positions turn by angles that training never saw.
int64_t longest_sequence(const DecoderConfig& config) {
  const auto& rotary = config.rotary;
  if (rotary.kind == RotaryConfig::Kind::kDefault) return config.max_positions;
  const auto scaled = static_cast<int64_t>(rotary.factor * rotary.original_max_positions);
  return std::max(config.max_positions, scaled);
}

void warn_of_length(const DecoderConfig& config, const Arguments& arguments, const DiagnosticSink& sink) {
  const int64_t longest = longest_sequence(config);
  const int64_t length = arguments.seq_length.value_or(0);
  if (length <= longest) return;
  const auto factor = std::to_string((length + longest - 1) / longest);
  const bool plain = config.rotary.kind == RotaryConfig::Kind::kDefault;
  sink(Severity::kWarning, "--seq-length " + std::to_string(length) + " is more than the " + std::to_string(longest) +
                               " positions (max_position_embeddings) of " + *arguments.hf_model +
                               ", which the model was not trained for: shorten it, or " +
                               (plain ? "scale the positions by \"rope_type\": \"linear\", \"factor\": " + factor +
                                            ".0 in the rope_parameters of config.json (older ones: rope_scaling)"
                                      : "multiply the factor of its rope scaling in config.json by " + factor));
}

void tell_replaced_balance(const Arguments& arguments, const HfConfig& config, const DiagnosticSink& sink) {
  if (!replaces_balance_of_config(arguments)) return;
  const double replaced = decoder_config_from_hf(config).moe.aux_loss_coef;
  if (replaced == 0) return;
  sink(Severity::kNotice, "the experts are balanced by Megatron's loss, as the flags say (--moe-aux-loss-coeff " +
                              argument_text(arguments.moe_aux_loss_coeff) +
                              "), and not by transformers', for which config.json says router_aux_loss_coef " +
                              argument_text(replaced) + ".");
}

}  // namespace

std::optional<HfConfig> take_network_from_hf_model(Arguments& arguments, const DiagnosticSink& sink) {
  if (!arguments.hf_model) return std::nullopt;
  std::optional<HfConfig> file;
  DecoderConfig config;
  try {
    config = network_of(arguments, file.emplace(HfConfig::of_model(*arguments.hf_model))).config;
  } catch (const c10::Error& error) {  // a config.json that is wrong now will be wrong again
    throw UsageError(error.what_without_backtrace());
  }
  if (arguments.untie_embeddings_and_output_weights && config.tie_word_embeddings) {
    sink(Severity::kNotice, "--untie-embeddings-and-output-weights is not used: " + *arguments.hf_model +
                                "/config.json says \"tie_word_embeddings\": true; write false there to train a head of "
                                "its own");
  }
  warn_of_length(config, arguments, sink);
  tell_replaced_balance(arguments, *file, sink);
  auto values = network_values(config);
  values.erase("vocab_size");  // NullTokenizer's: the text's, not the model's
  values["untie_embeddings_and_output_weights"] = !config.tie_word_embeddings;
  values["init_method_std"] = config.init_std;
  for (const auto& [name, value] : values) {
    if (set_argument_value(name, value, arguments)) continue;
    set_argument_value(name, std::llround(std::get<double>(value)), arguments);  // rotary_base
  }
  return file;
}

}  // namespace megashard
