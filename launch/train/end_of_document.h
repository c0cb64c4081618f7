#pragma once

#include <cstdint>
#include <vector>

#include "framework/arguments/arguments.h"

namespace megashard {

/// Token that ends a document: NullTokenizer's last one; <|endoftext|> of --vocab-file, where --tokenizer-type says
/// GPT2BPETokenizer or no other tokenizer is given; else, of --tokenizer-model and then of --hf-model, the one that
/// preprocess_data.py --append-eod writes: eos_token of tokenizer_config.json, else eos_token_id of
/// generation_config.json or config.json. -1 if nothing says; UsageError where a flag counts on it.
int64_t end_of_document_id(const Arguments& arguments);

/// Tokens behind which transformers' generate() stops: eos_token_id of generation_config.json in
/// --hf-model (Llama's instruct models have several), else of config.json, else the token that
/// ends a document. Empty if nothing says.
std::vector<int64_t> end_of_text_ids(const Arguments& arguments);

}  // namespace megashard
