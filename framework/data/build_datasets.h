#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "framework/arguments/data_arguments.h"
#include "framework/data/latent_dataset.h"
#include "framework/data/sample_dataset.h"
#include "framework/diagnostics.h"

namespace megashard {

struct DataOptions {
  /// Prefixes, or alternating weights and prefixes (--data-path). `split` divides each set.
  std::vector<std::string> data_path{};
  std::string split = kDefaultSplit;
  /// Instead of data_path: a separate blend for each split (--train-data-path ...).
  std::vector<std::string> train_data_path{};
  std::vector<std::string> valid_data_path{};
  std::vector<std::string> test_data_path{};
  /// Instead of both: generated tokens (--mock-data). Uses vocab_size and eod_id.
  bool mock_data = false;

  int64_t seq_length = 0;
  int64_t seed = 1234;
  bool shuffle_conversations = true;
  bool neat_packing = false;  ///< conversations only
  int64_t group = 1;          ///< Objective::rows_per_term; more than 1 needs a single set of conversations
  bool last_tokens = false;   ///< Needs::last_tokens
  std::optional<LatentOptions> latents{};  ///< set for a model of latents, which takes no tokens
  int64_t vocab_size = 0;
  int64_t eod_id = -1;  ///< if negative, mock data use the last token of the vocabulary
  /// Number of samples. 0: the split is not built. nullopt: each document once.
  std::optional<int64_t> train_samples{};
  std::optional<int64_t> valid_samples{};
  std::optional<int64_t> test_samples{};
  /// Receives a warning if the token files do not fit the model's vocabulary. May be null.
  DiagnosticSink sink{};
};

/// Null for a split that was not requested: no samples, no path, or weight 0 in `split`. `train` is null only if
/// train_samples is 0.
struct DataSplits {
  std::shared_ptr<const SampleDataset> train;
  std::shared_ptr<const SampleDataset> valid;
  std::shared_ptr<const SampleDataset> test;
};

/// Builds the datasets of megatron.core's BlendedMegatronDatasetBuilder, sample for sample. Every rank builds the same,
/// without communication. Throws an error with the remedy.
DataSplits build_datasets(const DataOptions& options);

/// The part of a set's sequences from fraction `begin` to fraction `end`.
struct SplitShare {
  double begin = 0.0;
  double end = 1.0;
};
using SplitShares = std::array<std::optional<SplitShare>, 3>;  ///< train, valid, test

/// "969,30,1" -> {[0, .969], [.969, .999], [.999, 1]}; a weight of 0 gives no share.
SplitShares parse_split(const std::string& split);

struct Blend {
  std::vector<std::string> prefixes;
  std::vector<double> weights;  ///< one for each prefix; empty: in proportion to the sizes
};

/// Reads weights and prefixes if the first, third, ... of an even number of words are all numbers; else prefixes only.
Blend parse_blend(const std::vector<std::string>& words);

}  // namespace megashard
