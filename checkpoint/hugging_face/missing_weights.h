#pragma once

#include <string>

namespace megashard {

/// Why a directory has no safetensors weights and what to do: one message. Knows pickled weights,
/// GGUF files, PEFT adapters, steps and runs, shards without their index and saves that were cut
/// short.
std::string why_no_weights(const std::string& directory);

}  // namespace megashard
