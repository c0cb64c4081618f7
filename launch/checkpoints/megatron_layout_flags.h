#pragma once

#include <CLI/CLI.hpp>

#include <cstdint>
#include <optional>
#include <string>

#include "checkpoint/convert/tensor_stream.h"

namespace megashard {

/// --megatron-layout and its flags.
struct MegatronLayoutFlags {
  bool use = false;
  int64_t make_vocab_size_divisible_by = 128;
  int64_t tensor_model_parallel_size = 1;

  void add(CLI::App& app);
  /// Layout of the model that hf_dir's config.json describes; nullopt without --megatron-layout. `flag` is the flag of
  /// hf_dir.
  std::optional<MegatronLayout> layout(const std::string& hf_dir, const std::string& flag) const;
};

}  // namespace megashard
