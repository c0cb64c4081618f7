#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "checkpoint/readers/checkpoint_reader.h"

namespace megashard {

/// Summary of a checkpoint.
struct CheckpointSummary {
  struct Part {
    int64_t tensors = 0;
    int64_t elements = 0;
    int64_t bytes = 0;
    std::set<std::string> dtypes{};  ///< "float32", ...
  };
  /// Iteration of the step, from its folder's name; nullopt for release and single files.
  std::optional<int64_t> iteration{};
  std::vector<std::pair<std::string, int64_t>> files{};  ///< names and bytes; -1: missing
  Part model{};                                          ///< weights that are stored once count once
  int64_t tied_names = 0;                                ///< additional names of such weights
  Part optimizer{};                                      ///< optimizer state
  std::set<std::string> buffers{};                       ///< optimizer buffers: "exp_avg", ...
  std::set<std::string> random_ranks{};                  ///< ranks with random states
  int64_t data_files = 0;
  bool has_arguments = false;      ///< has the arguments of a run
  std::optional<int64_t> ranks{};  ///< number of ranks that saved it, from args
  std::string family{};            ///< model_type, the value of --hf-model or --model, or "gpt"; empty: unknown
  /// Network sizes from args or config.json: "num_layers", "hidden_size", "num_attention_heads", "num_query_groups",
  /// "num_experts", "vocab_size", "seq_length", "lora_r".
  std::map<std::string, int64_t> network{};
};

/// Reads `args` or config.json, but no tensors.
CheckpointSummary summarise(CheckpointReader& reader);

/// CheckpointReader::verify; also checks every file of a step with a manifest against it.
CheckedBytes verify_checkpoint(CheckpointReader& reader, const FaultSink& fault);

}  // namespace megashard
