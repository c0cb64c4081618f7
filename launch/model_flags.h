#pragma once

#include <cstdint>

#include "framework/arguments.h"
#include "framework/model_registry.h"

namespace megashard {

/// What the registry builds the model from: --hf-model and the network flags that were written
/// beside it, or the flags.
ModelContext model_context(const Arguments& arguments);

/// Token that ends a document: NullTokenizer's last one, else eos_token_id of the Hugging Face
/// model or tokenizer; -1 if neither says.
int64_t end_of_document_id(const Arguments& arguments);

}  // namespace megashard
