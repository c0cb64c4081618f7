#include "launch/end_of_document.h"

#include <nlohmann/json.hpp>

#include "checkpoint/hugging_face/hf_assets.h"

namespace megashard {
namespace {

/// eos_token_id: a token or several.
std::vector<int64_t> eos_in(const std::optional<nlohmann::ordered_json>& config) {
  if (!config) return {};
  const bool nested = !config->contains("eos_token_id") && config->contains("text_config");
  const auto& text = nested ? config->at("text_config") : *config;  // of vision-language models
  if (!text.is_object() || !text.contains("eos_token_id")) return {};
  const auto& eos = text.at("eos_token_id");
  std::vector<int64_t> tokens;
  for (const auto& each : eos.is_array() ? eos : nlohmann::ordered_json::array({eos})) {
    if (each.is_number_integer()) tokens.push_back(each.get<int64_t>());
  }
  return tokens;
}

}  // namespace

int64_t end_of_document_id(const Arguments& arguments) {
  if (arguments.tokenizer_type == "NullTokenizer") return arguments.vocab_size.value_or(-1);
  for (const auto& directory : {arguments.tokenizer_model, arguments.hf_model}) {
    if (!directory) continue;
    const auto tokens = eos_in(read_hf_config(*directory));
    if (!tokens.empty() && tokens[0] >= 0) return tokens[0];
  }
  return -1;
}

std::vector<int64_t> end_of_text_ids(const Arguments& arguments) {
  if (arguments.hf_model) {
    for (const auto& config :
         {read_generation_config(*arguments.hf_model), read_hf_config(*arguments.hf_model)}) {
      if (auto tokens = eos_in(config); !tokens.empty()) return tokens;
    }
  }
  const int64_t end = end_of_document_id(arguments);
  return end < 0 ? std::vector<int64_t>{} : std::vector<int64_t>{end};
}

}  // namespace megashard
