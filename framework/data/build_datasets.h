#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "framework/arguments/data_arguments.h"
#include "framework/data/sample_dataset.h"
#include "framework/diagnostics.h"

namespace megashard {

struct DataOptions {
  /// Prefixes, or alternating weights and prefixes (--data-path). Divided by `split`.
  std::vector<std::string> data_path{};
  std::string split = kDefaultSplit;
  /// Instead of data_path: a blend of its own for each split (--train-data-path ...).
  std::vector<std::string> train_data_path{};
  std::vector<std::string> valid_data_path{};
  std::vector<std::string> test_data_path{};
  /// Instead of both: generated tokens (--mock-data). Uses vocab_size and eod_id.
  bool mock_data = false;

  int64_t seq_length = 0;
  int64_t seed = 1234;
  bool shuffle_conversations = true;
  bool neat_packing = false;  ///< of conversations
  int64_t group = 1;          ///< Objective::rows_per_term; more than 1: of one set of conversations
  int64_t vocab_size = 0;
  int64_t eod_id = -1;  ///< mock data without one: the last of the vocabulary
  /// Samples wanted; 0: the split is not built; nullopt: each document once.
  std::optional<int64_t> train_samples{};
  std::optional<int64_t> valid_samples{};
  std::optional<int64_t> test_samples{};
  /// Warned of tokens that the model's tokenizer can hardly have written; null: nobody.
  DiagnosticSink sink{};
};

/// A split that was not asked for (no samples, no path, or weight 0 in `split`) is null; train is
/// null only if train_samples is 0.
struct DataSplits {
  std::shared_ptr<const SampleDataset> train;
  std::shared_ptr<const SampleDataset> valid;
  std::shared_ptr<const SampleDataset> test;
};

/// The datasets that megatron.core's BlendedMegatronDatasetBuilder builds for these options, sample
/// for sample. No communication: every rank builds the same. Throws one error with the remedy.
DataSplits build_datasets(const DataOptions& options);

/// A fraction of a set's sequences, from `begin` to `end`.
struct SplitShare {
  double begin = 0.0;
  double end = 1.0;
};
using SplitShares = std::array<std::optional<SplitShare>, 3>;  ///< train, valid, test

/// "969,30,1" -> {[0, .969], [.969, .999], [.999, 1]}; a weight of 0 gives no share.
SplitShares parse_split(const std::string& split);

struct Blend {
  std::vector<std::string> prefixes;
  std::vector<double> weights;  ///< one each, or empty: in proportion to the sizes
};

/// An even number of words whose odd ones are all numbers is weights and prefixes, else prefixes.
Blend parse_blend(const std::vector<std::string>& words);

}  // namespace megashard
