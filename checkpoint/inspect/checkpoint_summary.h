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

/// What a checkpoint holds, in short.
struct CheckpointSummary {
  struct Part {
    int64_t tensors = 0;
    int64_t elements = 0;
    int64_t bytes = 0;
    std::set<std::string> dtypes{};  ///< "float32", ...
  };
  /// The step's, from its folder's name; nothing for release and single files.
  std::optional<int64_t> iteration{};
  std::vector<std::pair<std::string, int64_t>> files{};  ///< and their bytes; -1: it is gone
  Part model{};                                          ///< weights that are stored once counted once
  int64_t tied_names = 0;                                ///< further names of such weights
  Part optimizer{};                                      ///< its state
  std::set<std::string> buffers{};                       ///< of it: "exp_avg", ...
  std::set<std::string> random_ranks{};                  ///< whose random states there are
  int64_t data_files = 0;
  bool has_arguments = false;      ///< a run's args
  std::optional<int64_t> ranks{};  ///< that saved it, as args say
  std::string family{};            ///< model_type, the value of --hf-model or --model, or "gpt"; empty: unknown
  /// Of the network, as args or config.json say: "num_layers", "hidden_size",
  /// "num_attention_heads", "num_query_groups", "num_experts", "vocab_size", "seq_length",
  /// "lora_r".
  std::map<std::string, int64_t> network{};
};

/// Reads `args` or config.json, and no tensor.
CheckpointSummary summarise(CheckpointReader& reader);

/// CheckpointReader::verify, and of a step with a manifest every file against that.
CheckedBytes verify_checkpoint(CheckpointReader& reader, const FaultSink& fault);

}  // namespace megashard
