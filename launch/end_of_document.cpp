#include "launch/end_of_document.h"

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

namespace megashard {
namespace {

int64_t eos_in(const std::filesystem::path& file) {
  std::ifstream stream(file);
  if (!stream) return -1;
  const auto json = nlohmann::json::parse(stream, nullptr, /*allow_exceptions=*/false);
  if (!json.is_object() || !json.contains("eos_token_id")) return -1;
  const auto& eos = json["eos_token_id"];
  if (eos.is_array() && !eos.empty() && eos[0].is_number_integer()) return eos[0].get<int64_t>();
  return eos.is_number_integer() ? eos.get<int64_t>() : -1;
}

}  // namespace

int64_t end_of_document_id(const Arguments& arguments) {
  if (arguments.tokenizer_type == "NullTokenizer") return arguments.vocab_size.value_or(-1);
  for (const auto& directory : {arguments.tokenizer_model, arguments.hf_model}) {
    if (!directory) continue;
    if (const int64_t eos = eos_in(std::filesystem::path(*directory) / "config.json"); eos >= 0)
      return eos;
  }
  return -1;
}

}  // namespace megashard
