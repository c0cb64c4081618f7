#include "framework/arguments/argument_validation.h"

#include <c10/util/StringUtil.h>

#include "framework/arguments/argument_table.h"

namespace megashard {

namespace {

void take_synonyms(Arguments& arguments, Mistakes& rules) {
  rules.require(!arguments.num_layers || !arguments.encoder_num_layers,
                "--num-layers and --encoder-num-layers mean the same; give only --num-layers.");
  if (arguments.encoder_num_layers) arguments.num_layers = arguments.encoder_num_layers;
  if (arguments.use_rotary_position_embeddings) arguments.position_embedding_type = PositionEmbeddingType::kRope;
  if (arguments.add_bias_linear) arguments.add_qkv_bias = true;
  rules.require(!arguments.seq_length || !arguments.encoder_seq_length,
                "--seq-length and --encoder-seq-length mean the same; give only --seq-length.");
  if (arguments.encoder_seq_length) arguments.seq_length = arguments.encoder_seq_length;
}

void list_without_effect(const Arguments& arguments, const DiagnosticSink& sink) {
  std::vector<std::string> flags;
  for (const auto& flag : arguments.given_without_effect)
    flags.push_back(flag + " (" + find_option(flag)->reason + ")");
  if (!flags.empty()) sink(Severity::kNotice, "Accepted without effect: " + c10::Join("; ", flags) + ".");
  if (arguments.unread_sections.empty()) return;
  sink(Severity::kNotice, "Not read: " + c10::Join(", ", arguments.unread_sections) + ", which stand beside gpt_args.");
}

}  // namespace

void derive_network(Arguments& arguments) {
  Mistakes rules;
  check_ranges(arguments, rules);
  detail::derive_network_sizes(arguments, rules);
  detail::derive_expert_sizes(arguments, rules);
  detail::check_network(arguments, rules);
  detail::check_experts(arguments, rules);
  rules.throw_if_any();
}

void validate_arguments(Arguments& arguments, const RunEnvironment& environment, const DiagnosticSink& sink,
                        Mistakes rules, const RunParts& parts) {
  std::vector<std::pair<Severity, std::string>> notices;  // for runs that start
  const DiagnosticSink later = [&](Severity severity, const std::string& message) {
    notices.emplace_back(severity, message);
  };
  check_ranges(arguments, rules);
  detail::check_model_source(arguments, rules);
  detail::check_precision(arguments, rules);
  take_synonyms(arguments, rules);
  // Sizes come from config.json, or belong to the plugin's model.
  if (!arguments.hf_model && !arguments.is_own_model()) {
    detail::derive_network_sizes(arguments, rules);
    detail::derive_expert_sizes(arguments, rules);
  }
  detail::check_network(arguments, rules);
  detail::check_experts(arguments, rules);
  detail::validate_parallel(arguments, environment, parts, later, rules);
  detail::validate_context_parallel(arguments, parts, later, rules);
  detail::validate_training(arguments, parts, rules);
  detail::validate_optimizer(arguments, parts, rules);
  detail::validate_activations(arguments, later, rules);
  detail::validate_data(arguments, parts, later, rules);
  detail::check_checkpointing(arguments, rules);
  detail::check_logging(arguments, rules);
  rules.throw_if_any();
  for (const auto& [severity, message] : notices) sink(severity, message);
  detail::derive_precision(arguments, parts, sink);
  list_without_effect(arguments, sink);
}

}  // namespace megashard
