#include "framework/arguments/argument_validation.h"

namespace megashard::detail {

namespace {

using std::to_string;

void check_sources(Arguments& arguments, const DiagnosticSink& sink) {
  const bool by_split = !arguments.train_data_path.empty() || !arguments.valid_data_path.empty() ||
                        !arguments.test_data_path.empty();
  const bool blended = !arguments.data_path.empty() || arguments.data_args_path.has_value();
  require(
      arguments.data_path.empty() || !arguments.data_args_path,
      "--data-path and --data-args-path exclude each other: the file holds the words of the flag.");
  const int sources = int{arguments.mock_data} + int{blended} + int{by_split};
  require(sources <= 1,
          "--mock-data, --data-path and --train-/--valid-/--test-data-path exclude each other; "
          "give one "
          "source of data.");
  require(
      sources == 1,
      "there is no data; give --data-path PREFIX of .bin/.idx files, or --mock-data for a trial.");
  require(!arguments.split || !by_split,
          "--split " + arguments.split.value_or("") +
              " does not go with --train-/--valid-/--test-data-path, which are "
              "split already; leave it out.");
  if (!arguments.split && !by_split) {
    arguments.split = kDefaultSplit;
    sink(Severity::kNotice, std::string("--split is not given; the data is split ") +
                                kDefaultSplit +
                                " into training, validation and test, as in Megatron.");
  }
}

void check_lengths(const Arguments& arguments) {
  require(arguments.seq_length.has_value(),
          "--seq-length is missing; give the tokens of a sequence.");
  const int64_t length = *arguments.seq_length;
  require(length > 0, "--seq-length is " + to_string(length) + "; it must be positive.");
  const auto& longest = arguments.max_position_embeddings;
  require(!longest || *longest >= length, "--max-position-embeddings " +
                                              to_string(longest.value_or(0)) +
                                              " is less than --seq-length " + to_string(length) +
                                              "; the model would have no positions for the rest.");
  require(arguments.num_workers >= 0,
          "--num-workers is " + to_string(arguments.num_workers) + "; use 0 or more.");
  require(arguments.dataloader_type != "external",
          "--dataloader-type external takes a loader written in Python; use single or cyclic.");
}

void derive_vocabulary(Arguments& arguments) {
  const std::string type = arguments.tokenizer_type.value_or("");
  require(type.empty() || type == "NullTokenizer" || type == "HuggingFaceTokenizer",
          "--tokenizer-type " + type +
              " is not loaded here, since training reads tokens; use HuggingFaceTokenizer, or "
              "NullTokenizer with --vocab-size.");
  require(
      !arguments.vocab_size || *arguments.vocab_size > 0,
      "--vocab-size is " + to_string(arguments.vocab_size.value_or(0)) + "; it must be positive.");
  if (arguments.hf_model) return;  // config.json has the vocabulary, which is never padded
  if (arguments.is_own_model() && !arguments.vocab_size) return;  // the model has it
  require(
      arguments.vocab_size.has_value(),
      "--vocab-size is missing; give the number of tokens, or --hf-model DIR with a config.json.");
  require(arguments.make_vocab_size_divisible_by > 0,
          "--make-vocab-size-divisible-by is " + to_string(arguments.make_vocab_size_divisible_by) +
              "; it must be positive (1: no padding).");
  arguments.padded_vocab_size =
      padded_vocab_size(unpadded_vocab_size(arguments), arguments.make_vocab_size_divisible_by,
                        arguments.tensor_model_parallel_size);
}

void check_format(const std::string& flag, const std::string& format) {
  require(format != "zarr", flag +
                                " zarr is not part of this program, and Megatron gave it up; use "
                                "torch_dist or torch_dcp.");
  require(
      format != "torch",
      flag + " torch keeps whole tensors, which FSDP2 does not have; use torch_dist or torch_dcp.");
}

void check_conversion(const Arguments& arguments) {
  require(arguments.ckpt_convert_format || !arguments.ckpt_convert_save,
          "--ckpt-convert-save needs --ckpt-convert-format, the format to write.");
  if (!arguments.ckpt_convert_format) return;
  check_format("--ckpt-convert-format", *arguments.ckpt_convert_format);
  require(arguments.load && arguments.ckpt_convert_save,
          "--ckpt-convert-format needs --load, the checkpoint, and --ckpt-convert-save, the folder "
          "to write to.");
}

}  // namespace

void validate_data(Arguments& arguments, const DiagnosticSink& sink) {
  check_sources(arguments, sink);
  check_lengths(arguments);
  derive_vocabulary(arguments);
}

void validate_checkpoint(const Arguments& arguments) {
  require(!arguments.save || arguments.save_interval,
          "--save " + arguments.save.value_or("") +
              " needs --save-interval, the steps between checkpoints.");
  require(!arguments.save_interval || *arguments.save_interval > 0,
          "--save-interval is " + to_string(arguments.save_interval.value_or(0)) +
              "; it must be positive.");
  require(!arguments.most_recent_k || *arguments.most_recent_k > 0,
          "--most-recent-k is " + to_string(arguments.most_recent_k.value_or(0)) +
              "; at least the newest checkpoint must stay. Leave it out to keep all.");
  const int64_t retain = arguments.save_retain_interval.value_or(1);
  require(retain > 0, "--save-retain-interval is " + to_string(retain) + "; it must be positive.");
  require(!arguments.save_retain_interval || !arguments.save_interval ||
              retain % *arguments.save_interval == 0,
          "--save-retain-interval " + to_string(retain) + " is no multiple of --save-interval " +
              to_string(arguments.save_interval.value_or(0)) + ", so nothing would be retained.");
  check_format("--ckpt-format", arguments.ckpt_format);
  check_conversion(arguments);
  const bool loads = arguments.load || arguments.pretrained_checkpoint;
  require(!arguments.ckpt_step || arguments.load,
          "--ckpt-step " + to_string(arguments.ckpt_step.value_or(0)) +
              " needs --load, the folder that has the step.");
  require(
      !arguments.finetune || loads || arguments.hf_model,
      "--finetune needs --load, --pretrained-checkpoint or --hf-model, the weights to start from.");
  require(!arguments.exit_on_missing_checkpoint || arguments.load,
          "--exit-on-missing-checkpoint needs --load, the folder to look in.");
}

}  // namespace megashard::detail
