#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "framework/diagnostics.h"

namespace megashard {

struct Arguments;
struct Option;
struct RunParts;
class Mistakes;

/// Megatron's proportions of training, validation and test data.
inline constexpr const char* kDefaultSplit = "969, 30, 1";

enum class DataloaderType { kSingle, kCyclic };
enum class TokenizerType { kNull, kHuggingFace, kGpt2Bpe };

struct DataArguments {
  std::vector<std::string> data_path;  // [weight] prefix ...
  std::optional<std::string> split;    // (derived) kDefaultSplit with data_path
  std::vector<std::string> train_data_path, valid_data_path, test_data_path;
  std::optional<std::string> data_args_path;  // file with the words of data_path
  std::optional<std::string> data_cache_path;
  bool mmap_bin_files = true;
  bool mock_data = false;
  std::optional<std::string> rollouts;  // folder of step_1, step_2, ..., which other processes write
  int64_t rollout_timeout_minutes = 60;
  std::optional<int64_t> seq_length;          // (derived) from encoder_seq_length, if given
  std::optional<int64_t> encoder_seq_length;  // another name for seq_length
  DataloaderType dataloader_type = DataloaderType::kSingle;
  bool shuffle_conversations = true;
  bool neat_packing = false;
  double caption_dropout_rate = 0;
  int64_t num_workers = 2;
  bool reset_position_ids = false;
  bool reset_attention_mask = false;
  bool eod_mask_loss = false;
};

struct TokenizerArguments {
  std::optional<TokenizerType> tokenizer_type;
  std::optional<std::string> tokenizer_model;
  std::optional<std::string> vocab_file;  // for a GPT-2 tokenizer
  std::optional<int64_t> vocab_size;      // (derived) with vocab_file
  int64_t vocab_extra_ids = 0;
  std::optional<int64_t> padded_vocab_size;  // (derived) without hf_model
};

/// Parses the three weights of --split, whose sum is positive. Throws UsageError.
std::vector<double> parse_split_weights(const std::string& split);

/// The next multiple of divisible_by * tensor_parallel_size. Not used for Hugging Face models.
int64_t padded_vocab_size(int64_t vocab_size, int64_t divisible_by, int64_t tensor_parallel_size);
/// Vocabulary size before padding: --vocab-size, NullTokenizer's end of document and --vocab-extra-ids.
int64_t unpadded_vocab_size(const Arguments& arguments);

namespace detail {

/// Adds the rows of these options, in the order of the help.
void add_data_options(std::vector<Option>& rows);
/// Validates data sources, lengths and the vocabulary.
void validate_data(Arguments& arguments, const RunParts& parts, const DiagnosticSink& sink, Mistakes& rules);

}  // namespace detail

}  // namespace megashard
