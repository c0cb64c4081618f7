#include "launch/train/end_of_document.h"

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "checkpoint/hugging_face/hf_files.h"
#include "framework/arguments/yaml_value.h"
#include "framework/diagnostics.h"

namespace megashard {
namespace {

/// eos_token_id: one or several tokens.
std::vector<int64_t> eos_in(const std::optional<nlohmann::ordered_json>& config) {
  if (!config) return {};
  const bool nested = !config->contains("eos_token_id") && config->contains("text_config");
  const auto& text = nested ? config->at("text_config") : *config;  // for vision-language models
  if (!text.is_object() || !text.contains("eos_token_id")) return {};
  const auto& eos = text.at("eos_token_id");
  std::vector<int64_t> tokens;
  for (const auto& each : eos.is_array() ? eos : nlohmann::ordered_json::array({eos})) {
    if (each.is_number_integer()) tokens.push_back(each.get<int64_t>());
  }
  return tokens;
}

/// A file of the tokenizer; null if it is missing or not a JSON object.
nlohmann::json read_tokenizer_file(const std::filesystem::path& path) {
  std::ifstream file(path);
  auto object = nlohmann::json::parse(file, nullptr, /*allow_exceptions=*/false);
  return object.is_object() ? object : nlohmann::json();
}

/// As token_to_id of the package tokenizers: added tokens first.
std::optional<int64_t> token_id(const nlohmann::json& tokenizer, const std::string& token) {
  for (const auto& added : tokenizer.value("added_tokens", nlohmann::json::array())) {
    if (added.value("content", "") == token) return added.at("id").get<int64_t>();
  }
  const auto vocab = nlohmann::json::json_pointer("/model/vocab");
  if (!tokenizer.contains(vocab)) return std::nullopt;
  const auto& words = tokenizer.at(vocab);
  if (words.is_object()) {
    const auto found = words.find(token);
    return found == words.end() ? std::nullopt : std::optional(found->get<int64_t>());
  }
  for (size_t i = 0; i < words.size(); ++i) {  // Unigram: [token, score]
    if (words[i].at(0) == token) return static_cast<int64_t>(i);
  }
  return std::nullopt;
}

/// eos_token of tokenizer_config.json as an id of tokenizer.json.
std::optional<int64_t> named_eos(const std::filesystem::path& folder) {
  const auto config = read_tokenizer_file(folder / "tokenizer_config.json");
  if (!config.contains("eos_token")) return std::nullopt;
  const auto& eos = config.at("eos_token");
  const auto& token = eos.is_object() && eos.contains("content") ? eos.at("content") : eos;
  const auto path = folder / "tokenizer.json";
  if (!token.is_string() || !std::filesystem::exists(path)) return std::nullopt;
  const auto id = token_id(read_tokenizer_file(path), token.get<std::string>());
  if (!id) {
    throw UsageError("eos_token of " + (folder / "tokenizer_config.json").string() + " is " + token.get<std::string>() +
                     ", which " + path.string() + " does not have; correct one of them");
  }
  return id;
}

/// Decides by --tokenizer-type; without it --vocab-file is used if no other tokenizer is given.
bool has_gpt2_tokenizer(const Arguments& arguments) {
  if (!arguments.vocab_file) return false;
  if (arguments.tokenizer_type) return arguments.tokenizer_type == TokenizerType::kGpt2Bpe;
  return !arguments.tokenizer_model && !arguments.hf_model;
}

bool needs_ends(const Arguments& arguments) {
  return arguments.eod_mask_loss || arguments.reset_position_ids || arguments.reset_attention_mask;
}

}  // namespace

int64_t end_of_document_id(const Arguments& arguments) {
  if (arguments.tokenizer_type == TokenizerType::kNull) return arguments.vocab_size.value_or(-1);
  if (has_gpt2_tokenizer(arguments)) {
    const auto text = read_configuration(*arguments.vocab_file, "--vocab-file");
    const auto words = nlohmann::json::parse(text, nullptr, /*allow_exceptions=*/false);
    if (const auto end = words.find("<|endoftext|>"); end != words.end() && end->is_number_integer())
      return end->get<int64_t>();
  }
  for (const auto& given : {arguments.tokenizer_model, arguments.hf_model}) {
    if (!given) continue;
    const std::filesystem::path path = *given;  // or the path of tokenizer.json
    const auto folder = std::filesystem::is_directory(path) ? path : path.parent_path();
    if (const auto named = named_eos(folder)) return *named;
    for (const auto& config : {read_generation_config(folder.string()), read_hf_config(folder.string())}) {
      const auto tokens = eos_in(config);
      if (!tokens.empty() && tokens[0] >= 0) return tokens[0];
    }
  }
  if (needs_ends(arguments)) {
    throw UsageError("--eod-mask-loss, --reset-position-ids and --reset-attention-mask need the token that ends "
                     "documents, and nothing names it; give a --tokenizer-model folder with "
                     "tokenizer_config.json and tokenizer.json, or a --hf-model whose config.json has "
                     "eos_token_id.");
  }
  return -1;
}

std::vector<int64_t> end_of_text_ids(const Arguments& arguments) {
  if (arguments.hf_model) {
    for (const auto& config : {read_generation_config(*arguments.hf_model), read_hf_config(*arguments.hf_model)}) {
      if (auto tokens = eos_in(config); !tokens.empty()) return tokens;
    }
  }
  const int64_t end = end_of_document_id(arguments);
  return end < 0 ? std::vector<int64_t>{} : std::vector<int64_t>{end};
}

}  // namespace megashard
