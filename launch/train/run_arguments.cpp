#include "launch/train/run_arguments.h"

#include "launch/mindspeed/preparation.h"

namespace megashard {
namespace {

void apply_worker(RollWorker& worker, Arguments& arguments, int64_t world_size,
                  const std::function<int64_t()>& epoch_samples, const DiagnosticSink& sink) {
  if (!worker.trains) {
    throw UsageError(worker.role + " is a worker of fsdp2_infer, which trains nothing; choose one "
                                   "of fsdp2_train.");
  }
  apply_roll_worker(worker, arguments, world_size, epoch_samples, sink);
  for (const auto* words : {&arguments.data_path, &arguments.train_data_path}) {
    for (const auto& prefix : parse_blend(*words).prefixes)
      require_pictures_prepared(prefix, worker.image_pixels, worker.role + ".model_args");
  }
}

}  // namespace

DataOptions data_options(const Arguments& arguments, int64_t vocab_size, int64_t eod_id, const DiagnosticSink& sink) {
  DataOptions options;
  options.data_path = arguments.data_path;
  options.split = arguments.split.value_or(kDefaultSplit);
  options.train_data_path = arguments.train_data_path;
  options.valid_data_path = arguments.valid_data_path;
  options.test_data_path = arguments.test_data_path;
  options.mock_data = arguments.mock_data;
  options.seq_length = *arguments.seq_length;
  options.seed = arguments.seed;
  options.shuffle_conversations = arguments.shuffle_conversations;
  options.neat_packing = arguments.neat_packing;
  options.vocab_size = vocab_size;
  options.eod_id = eod_id;
  options.sink = sink;
  return options;
}

int64_t samples_of_epoch(const Arguments& arguments) {
  if (!arguments.seq_length) {
    throw UsageError("num_train_epochs needs the length of a sequence; give sequence_length in the file, "
                     "--seq-length, or the length of the training by --train-iters.");
  }
  // The number of samples does not depend on the tokens.
  auto options = data_options(arguments, /*vocab_size=*/1, /*eod_id=*/0);
  options.valid_samples = options.test_samples = 0;
  return build_datasets(options).train->size();
}

void apply_files(CommandLine& line, int64_t world_size, const std::function<int64_t()>& epoch_samples,
                 const DiagnosticSink& sink) {
  Arguments& arguments = line.arguments;
  if (line.worker) apply_worker(*line.worker, arguments, world_size, epoch_samples, sink);
  if (line.mindspeed) apply_mindspeed(*line.mindspeed, arguments, world_size, epoch_samples, sink, line.mistakes);
}

}  // namespace megashard
