#pragma once

#include <cstdint>

#include "framework/arguments/arguments.h"

namespace megashard {

/// Token that ends a document: NullTokenizer's last one, else eos_token_id of the Hugging Face
/// model or tokenizer; -1 if neither says.
int64_t end_of_document_id(const Arguments& arguments);

}  // namespace megashard
