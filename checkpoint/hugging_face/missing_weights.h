#pragma once

#include <string>

namespace megashard {

/// Message that explains why a directory has no safetensors weights, with the remedy. Recognises pickled weights, GGUF
/// files, PEFT adapters, steps and runs, shards without their index, and interrupted saves.
std::string why_no_weights(const std::string& directory);

}  // namespace megashard
