#pragma once

#include <cstdint>
#include <vector>

#include "framework/arguments/arguments.h"

namespace megashard {

/// Token that ends a document: NullTokenizer's last one, else eos_token_id of the Hugging Face
/// model or tokenizer; -1 if neither says.
int64_t end_of_document_id(const Arguments& arguments);

/// Tokens behind which transformers' generate() stops: eos_token_id of generation_config.json in
/// --hf-model (Llama's instruct models have several), else of config.json, else the token that
/// ends a document. Empty if nothing says.
std::vector<int64_t> end_of_text_ids(const Arguments& arguments);

}  // namespace megashard
