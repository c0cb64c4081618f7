#pragma once

#include <cstdint>
#include <vector>

#include "framework/arguments/arguments.h"

namespace megashard {

/// The end-of-document token: NullTokenizer's last token; <|endoftext|> of --vocab-file, if --tokenizer-type is
/// GPT2BPETokenizer or no other tokenizer is given; otherwise, for --tokenizer-model and then --hf-model, the token
/// that preprocess_data.py --append-eod writes: eos_token of tokenizer_config.json, else eos_token_id of
/// generation_config.json or config.json. -1 if unknown; throws UsageError if a flag needs it.
int64_t end_of_document_id(const Arguments& arguments);

/// Tokens that stop transformers' generate(): eos_token_id of generation_config.json in --hf-model (Llama's instruct
/// models have several), else of config.json, else the end-of-document token. Empty if unknown.
std::vector<int64_t> end_of_text_ids(const Arguments& arguments);

}  // namespace megashard
