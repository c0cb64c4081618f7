#include "launch/end_of_document.h"

#include <nlohmann/json.hpp>

#include "checkpoint/hugging_face/hf_assets.h"

namespace megashard {
namespace {

int64_t eos_in(const std::string& directory) {
  const auto config = read_hf_config(directory);
  if (!config) return -1;
  const bool nested = !config->contains("eos_token_id") && config->contains("text_config");
  const auto& text = nested ? config->at("text_config") : *config;  // of vision-language models
  if (!text.contains("eos_token_id")) return -1;
  const auto& eos = text.at("eos_token_id");
  if (eos.is_array() && !eos.empty() && eos[0].is_number_integer()) return eos[0].get<int64_t>();
  return eos.is_number_integer() ? eos.get<int64_t>() : -1;
}

}  // namespace

int64_t end_of_document_id(const Arguments& arguments) {
  if (arguments.tokenizer_type == "NullTokenizer") return arguments.vocab_size.value_or(-1);
  for (const auto& directory : {arguments.tokenizer_model, arguments.hf_model}) {
    if (!directory) continue;
    if (const int64_t eos = eos_in(*directory); eos >= 0) return eos;
  }
  return -1;
}

}  // namespace megashard
