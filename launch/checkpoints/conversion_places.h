#pragma once

#include <CLI/CLI.hpp>
#include <cstdint>
#include <optional>
#include <string>

#include "checkpoint/convert/tensor_stream.h"

namespace megashard {

/// A path and its flag.
struct GivenPath {
  std::string path;
  std::string flag;
};

/// Folder of the step that a converter reads: a step's own folder; DIR/best; for a training's DIR the step that a run
/// would load, which is logged. Returns other paths unchanged.
std::string step_folder(const std::string& path);

/// Adds --overwrite to a converter.
void add_overwrite(CLI::App& app, bool& overwrite);

// Check a converter's output path before much is read. Throw UsageError if it holds something valuable (folder_refusal)
// or, regardless of --overwrite, if it is the source.

/// For weights: files are written into `target`.
void check_hf_target(const GivenPath& source, const GivenPath& target, bool overwrite);
/// For a step: the folder `step` ("release") is created in `target`.
void check_step_target(const GivenPath& source, const GivenPath& target, const std::string& step, bool overwrite);
/// For a single file.
void check_file_target(const GivenPath& source, const GivenPath& target, bool overwrite);
/// For a folder that is replaced completely.
void check_whole_folder(const GivenPath& source, const GivenPath& target, bool overwrite);

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
