#include <algorithm>

#include "framework/arguments/argument_validation.h"
#include "framework/data/build_datasets.h"

namespace megashard::detail {

namespace {

using std::to_string;

void check_sources(Arguments& arguments, const DiagnosticSink& sink, Mistakes& rules) {
  const bool by_split =
      !arguments.train_data_path.empty() || !arguments.valid_data_path.empty() || !arguments.test_data_path.empty();
  const bool blended = !arguments.data_path.empty() || arguments.data_args_path.has_value();
  rules.require(arguments.data_path.empty() || !arguments.data_args_path,
                "--data-path and --data-args-path exclude each other: the file holds the words of the flag.");
  const int sources = int{arguments.mock_data} + int{blended} + int{by_split};
  rules.require(sources <= 1, "--mock-data, --data-path and --train-/--valid-/--test-data-path exclude each other; "
                              "give one "
                              "source of data.");
  rules.require(sources >= 1,
                "there is no data; give --data-path PREFIX of .bin/.idx files, or --mock-data for a trial.");
  rules.require(!arguments.split || !by_split, "--split " + arguments.split.value_or("") +
                                                   " does not go with --train-/--valid-/--test-data-path, which are "
                                                   "split already; leave it out.");
  if (arguments.split && !by_split) rules.attempt([&] { parse_split(*arguments.split); });
  if (!arguments.split && !by_split) {
    arguments.split = kDefaultSplit;
    sink(Severity::kNotice, std::string("--split is not given; the data is split ") + kDefaultSplit +
                                " into training, validation and test, as in Megatron.");
  }
}

void check_lengths(const Arguments& arguments, Mistakes& rules) {
  rules.require(arguments.seq_length.has_value(), "--seq-length is missing; give the tokens of a sequence.");
  const int64_t length = arguments.seq_length.value_or(1);
  rules.require(length > 0, "--seq-length is " + to_string(length) + "; it must be positive.");
  const auto& longest = arguments.max_position_embeddings;
  rules.require(!longest || *longest >= length, "--max-position-embeddings " + to_string(longest.value_or(0)) +
                                                    " is less than --seq-length " + to_string(length) +
                                                    "; the model would have no positions for the rest.");
  rules.require(arguments.num_workers >= 0,
                "--num-workers is " + to_string(arguments.num_workers) + "; use 0 or more.");
}

void derive_vocabulary(Arguments& arguments, Mistakes& rules) {
  rules.require(!arguments.vocab_size || *arguments.vocab_size > 0,
                "--vocab-size is " + to_string(arguments.vocab_size.value_or(0)) + "; it must be positive.");
  if (arguments.hf_model) return;  // config.json has the vocabulary, which is never padded
  if (arguments.is_own_model() && !arguments.vocab_size) return;  // the model has it
  const bool given =
      rules.require(arguments.vocab_size.has_value(),
                    "--vocab-size is missing; give the number of tokens, or --hf-model DIR with a config.json.");
  const bool padded =
      rules.require(arguments.make_vocab_size_divisible_by > 0, "--make-vocab-size-divisible-by is " +
                                                                    to_string(arguments.make_vocab_size_divisible_by) +
                                                                    "; it must be positive (1: no padding).");
  if (!given || !padded) return;
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

void check_conversion(const Arguments& arguments, Mistakes& rules) {
  rules.require(arguments.ckpt_convert_format || !arguments.ckpt_convert_save,
                "--ckpt-convert-save needs --ckpt-convert-format, the format to write.");
  if (!arguments.ckpt_convert_format) return;
  rules.require(arguments.load && arguments.ckpt_convert_save,
                "--ckpt-convert-format needs --load, the checkpoint, and --ckpt-convert-save, the folder "
                "to write to.");
}

}  // namespace

void validate_data(Arguments& arguments, const DiagnosticSink& sink, Mistakes& rules) {
  check_sources(arguments, sink, rules);
  check_lengths(arguments, rules);
  derive_vocabulary(arguments, rules);
}

void validate_checkpoint(const Arguments& arguments, Mistakes& rules) {
  rules.require(!arguments.save || arguments.save_interval,
                "--save " + arguments.save.value_or("") + " needs --save-interval, the steps between checkpoints.");
  rules.require(!arguments.save_interval || arguments.save,
                "--save-interval " + to_string(arguments.save_interval.value_or(0)) +
                    " needs --save, the folder for checkpoints; without it nothing would be saved.");
  rules.require(!arguments.save_interval || *arguments.save_interval > 0,
                "--save-interval is " + to_string(arguments.save_interval.value_or(0)) + "; it must be positive.");
  rules.require(!arguments.most_recent_k || *arguments.most_recent_k > 0,
                "--most-recent-k is " + to_string(arguments.most_recent_k.value_or(0)) +
                    "; at least the newest checkpoint must stay. Leave it out to keep all.");
  const int64_t retain = arguments.save_retain_interval.value_or(1);
  rules.require(retain > 0, "--save-retain-interval is " + to_string(retain) + "; it must be positive.");
  const int64_t interval = std::max<int64_t>(1, arguments.save_interval.value_or(1));
  rules.require(!arguments.save_retain_interval || retain % interval == 0,
                "--save-retain-interval " + to_string(retain) + " is no multiple of --save-interval " +
                    to_string(interval) + ", so nothing would be retained.");
  check_conversion(arguments, rules);
  const bool loads = arguments.load || arguments.pretrained_checkpoint;
  rules.require(!arguments.ckpt_step || arguments.load, "--ckpt-step " + to_string(arguments.ckpt_step.value_or(0)) +
                                                            " needs --load, the folder that has the step.");
  rules.require(!arguments.finetune || loads || arguments.hf_model,
                "--finetune needs --load, --pretrained-checkpoint or --hf-model, the weights to start from.");
  rules.require(!arguments.exit_on_missing_checkpoint || arguments.load,
                "--exit-on-missing-checkpoint needs --load, the folder to look in.");
}

}  // namespace megashard::detail
