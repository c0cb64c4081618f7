#include "framework/arguments/data_arguments.h"

#include <cmath>
#include <nlohmann/json.hpp>
#include <string>

#include "framework/arguments/argument_validation.h"
#include "framework/arguments/argument_value.h"
#include "framework/arguments/option_group.h"
#include "framework/arguments/yaml_value.h"
#include "framework/mistakes.h"

namespace megashard::detail {
namespace {

using A = Arguments;
using std::to_string;

void add_data(std::vector<Option>& rows) {
  using enum OnResume;
  OptionGroup group("data", rows);
  OptionGroup training("data", rows, {.pretrain_only = true});
  constexpr const char* kBlend = "[WEIGHT] PREFIX";
  group.add("--data-path", &A::data_path, kReport, "of .bin/.idx files, or a folder of latents, split by --split")
      .shown_as(kBlend);
  training.add("--split", &A::split, kReport, "parts of training, validation and test: 969,30,1").shown_as("N,N,N");
  training.add("--train-data-path", &A::train_data_path, kReport, "training data, instead of --data-path")
      .shown_as(kBlend);
  training.add("--valid-data-path", &A::valid_data_path, kReport, "validation data").shown_as(kBlend);
  training.add("--test-data-path", &A::test_data_path, kReport, "test data").shown_as(kBlend);
  group.add("--data-args-path", &A::data_args_path, kReport, "a file with the words of --data-path").shown_as("FILE");
  group.add("--data-cache-path", &A::data_cache_path, kFree, "")
      .no_effect("sample indices are built in memory at every start, so there is no cache");
  group.add("--no-mmap-bin-files", &A::mmap_bin_files, kFree, "")
      .turns_off()
      .named("mmap_bin_files")
      .no_effect("the .bin files are always mapped");
  training.add("--mock-data", &A::mock_data, kReport, "generated tokens, for trials");
  training
      .add("--rollouts", &A::rollouts, kReport,
           "instead of data: answers for each step in DIR/step_N, which other processes write meanwhile: "
           "rank_R.bin of prime-rl, or rollouts.vision.safetensors (docs/reinforcement_learning.md)")
      .shown_as("DIR");
  training
      .add("--rollout-timeout-minutes", &A::rollout_timeout_minutes, kFree,
           "how long a step waits for its rollouts, and serve for its client")
      .above(0);
  group.add("--seq-length", &A::seq_length, kReport, "tokens of a sequence").above(0).taken_from_checkpoint();
  group.add("--encoder-seq-length", &A::encoder_seq_length, kReport, "another name for --seq-length").above(0);
  training
      .choice("--dataloader-type", &A::dataloader_type, kReport,
              {{"single", DataloaderType::kSingle}, {"cyclic", DataloaderType::kCyclic}},
              "single: in order; cyclic: shuffled each epoch")
      .refuse_values({"external"}, "it takes a loader written in Python; use single or cyclic");
  training
      .add("--no-shuffle-conversations", &A::shuffle_conversations, kReport,
           "conversations come in the order of their file, every epoch")
      .turns_off()
      .named("shuffle_conversations");
  training
      .add("--neat-packing", &A::neat_packing, kReport,
           "pack whole conversations into samples of up to --seq-length, without attention between them")
      .alias("--neat-pack");
  training
      .add("--caption-dropout-rate", &A::caption_dropout_rate, kReport,
           "share of the samples of latents that get the empty prompt, for guidance without a classifier")
      .at_least(0)
      .at_most(1);
  group.add("--num-workers", &A::num_workers, kFree, "batches that are prepared ahead, by one thread; at least one")
      .at_least(0);
  group.add("--reset-position-ids", &A::reset_position_ids, kReport, "positions start anew after an end of document");
  group.add("--reset-attention-mask", &A::reset_attention_mask, kReport, "attention does not cross an end of document");
  group.add("--eod-mask-loss", &A::eod_mask_loss, kReport, "no loss on ends of documents");
}

void add_tokenizer(std::vector<Option>& rows) {
  using enum OnResume;
  OptionGroup group("tokenizer", rows);
  group
      .choice("--tokenizer-type", &A::tokenizer_type, kReport,
              {{"NullTokenizer", TokenizerType::kNull},
               {"HuggingFaceTokenizer", TokenizerType::kHuggingFace},
               {"GPT2BPETokenizer", TokenizerType::kGpt2Bpe}},
              "sets only the end-of-document token, since training reads tokens: NullTokenizer: token number "
              "--vocab-size; HuggingFaceTokenizer: the eos_token of --tokenizer-model; GPT2BPETokenizer: "
              "<|endoftext|> of --vocab-file")
      .refuse_values(
          {"BertWordPieceLowerCase", "BertWordPieceCase", "SentencePieceTokenizer", "GPTSentencePieceTokenizer",
           "Llama2Tokenizer", "TikTokenizer", "MultimodalTokenizer", "NullMultimodalTokenizer", "SFTTokenizer"},
          "training reads tokens and loads no tokenizer; leave it out, or give "
          "HuggingFaceTokenizer, or NullTokenizer with --vocab-size")
      .taken_from_checkpoint();
  group.add("--tokenizer-model", &A::tokenizer_model, kReport, "folder of the Hugging Face tokenizer")
      .shown_as("DIR")
      .alias("--tokenizer-name-or-path")
      .taken_from_checkpoint();
  group
      .add("--vocab-size", &A::vocab_size, kReport,
           "number of tokens, required without --hf-model and --vocab-file; NullTokenizer adds one for the end of a "
           "document")
      .above(0)
      .taken_from_checkpoint();
  group.add("--vocab-extra-ids", &A::vocab_extra_ids, kReport, "further tokens").at_least(0).taken_from_checkpoint();
  group.add("--padded-vocab-size", &A::padded_vocab_size, kMustMatch,
            "number of tokens with padding; unset: by --make-vocab-size-divisible-by");
  group.add("--vocab-file", &A::vocab_file, kReport, "vocab.json of a GPT-2 tokenizer, whose tokens are counted")
      .shown_as("FILE");
  group.without_effect("--merge-file", 1, "training reads tokens; a merge file is for preprocessing");
}

void check_rollouts(const Arguments& arguments, Mistakes& rules) {
  rules.require(!arguments.train_samples,
                "--rollouts decides how many answers a step has; give --train-iters instead of --train-samples.");
}

void check_sources(Arguments& arguments, const RunParts& parts, const DiagnosticSink& sink, Mistakes& rules) {
  rules.require(arguments.data_path.empty() || !arguments.data_args_path,
                "--data-path and --data-args-path exclude each other: the file holds the words of the flag.");
  if (!parts.schedule) return;  // nothing is split
  const bool by_split =
      !arguments.train_data_path.empty() || !arguments.valid_data_path.empty() || !arguments.test_data_path.empty();
  const bool blended = !arguments.data_path.empty() || arguments.data_args_path.has_value();
  const bool by_rollouts = arguments.rollouts.has_value();
  const int sources = int{arguments.mock_data} + int{blended} + int{by_split} + int{by_rollouts};
  rules.require(sources <= 1,
                "--mock-data, --data-path, --train-/--valid-/--test-data-path and --rollouts exclude each "
                "other; give one source of data.");
  rules.require(sources >= 1,
                "there is no data; give --data-path PREFIX of .bin/.idx files, or --mock-data for a trial.");
  rules.require(!arguments.split || !by_split, "--split " + arguments.split.value_or("") +
                                                   " does not go with --train-/--valid-/--test-data-path, which are "
                                                   "split already; leave it out.");
  if (arguments.split && !by_split) rules.attempt([&] { parse_split_weights(*arguments.split); });
  if (by_rollouts) check_rollouts(arguments, rules);
  if (!arguments.split && !by_split && !by_rollouts) {
    arguments.split = kDefaultSplit;
    if (blended) {
      sink(Severity::kNotice, std::string("--split is not given; the data is split ") + kDefaultSplit +
                                  " into training, validation and test, as in Megatron.");
    }
  }
}

void check_lengths(const Arguments& arguments, Mistakes& rules) {
  rules.require(arguments.seq_length.has_value(), "--seq-length is missing; give the tokens of a sequence.");
  const int64_t length = arguments.seq_length.value_or(1);
  const auto& longest = arguments.max_position_embeddings;
  rules.require(!longest || *longest >= length, "--max-position-embeddings " + to_string(longest.value_or(0)) +
                                                    " is less than --seq-length " + to_string(length) +
                                                    "; the model would have no positions for the rest.");
}

int64_t tokens_in(const std::string& vocab_file) {
  const auto words =
      nlohmann::json::parse(read_configuration(vocab_file, "--vocab-file"), nullptr, /*allow_exceptions=*/false);
  require(words.is_object() && !words.empty(),
          "--vocab-file " + vocab_file +
              " is not a JSON object of tokens and their numbers; give vocab.json of a "
              "GPT-2 tokenizer, or --vocab-size.");
  return static_cast<int64_t>(words.size());
}

void derive_vocabulary(Arguments& arguments, Mistakes& rules) {
  if (arguments.hf_model) return;  // config.json has the vocabulary size, which is never padded
  if (arguments.vocab_file && !arguments.vocab_size) {
    if (!rules.attempt([&] { arguments.vocab_size = tokens_in(*arguments.vocab_file); })) return;
  }
  if (arguments.is_own_model() && !arguments.vocab_size) return;  // the plugin's model knows it
  const bool given =
      rules.require(arguments.vocab_size.has_value(),
                    "--vocab-size is missing; give the number of tokens, or --hf-model DIR with a config.json.");
  if (!given || arguments.make_vocab_size_divisible_by <= 0 || arguments.tensor_model_parallel_size <= 0) return;
  const int64_t tokens = unpadded_vocab_size(arguments);
  if (arguments.is_given("padded_vocab_size")) {
    const int64_t with_padding = arguments.padded_vocab_size.value_or(0);
    rules.require(with_padding >= tokens, "--padded-vocab-size is " + to_string(with_padding) + ", but there are " +
                                              to_string(tokens) + " tokens; give as many or more.");
    return;
  }
  arguments.padded_vocab_size =
      padded_vocab_size(tokens, arguments.make_vocab_size_divisible_by, arguments.tensor_model_parallel_size);
}

}  // namespace

void add_data_options(std::vector<Option>& rows) {
  add_data(rows);
  add_tokenizer(rows);
}

void validate_data(Arguments& arguments, const RunParts& parts, const DiagnosticSink& sink, Mistakes& rules) {
  if (parts.data) check_sources(arguments, parts, sink, rules);
  check_lengths(arguments, rules);
  rules.require(arguments.tokenizer_type != TokenizerType::kGpt2Bpe || arguments.vocab_file.has_value(),
                "--tokenizer-type GPT2BPETokenizer needs --vocab-file, its vocab.json; give it, or leave the type "
                "out.");
  derive_vocabulary(arguments, rules);
}

}  // namespace megashard::detail

namespace megashard {

int64_t unpadded_vocab_size(const Arguments& arguments) {
  const int64_t end_of_document = arguments.tokenizer_type == TokenizerType::kNull ? 1 : 0;
  return arguments.vocab_size.value() + end_of_document + arguments.vocab_extra_ids;
}

int64_t padded_vocab_size(int64_t vocab_size, int64_t divisible_by, int64_t tensor_parallel_size) {
  const int64_t multiple = divisible_by * tensor_parallel_size;
  return (vocab_size + multiple - 1) / multiple * multiple;
}

std::vector<double> parse_split_weights(const std::string& split) {
  constexpr size_t kSplits = 3;
  std::vector<double> weights;
  for (const auto& word : split_text(split, ",/")) {
    const auto weight = parse_number(word);
    require(weight.has_value() && *weight >= 0 && std::isfinite(*weight),
            "--split \"" + split +
                "\" is not a list of weights; give three numbers for train, validation and test, as in 969,30,1");
    weights.push_back(*weight);
  }
  require(weights.size() <= kSplits, "--split \"" + split + "\" has " + std::to_string(weights.size()) +
                                         " weights; there are three splits: train, validation and test");
  weights.resize(kSplits, 0.0);
  require(weights[0] + weights[1] + weights[2] > 0,
          "--split \"" + split + "\" leaves nothing to any split; at least one weight must be positive");
  return weights;
}

}  // namespace megashard
