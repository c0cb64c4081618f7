#include "framework/training/training_data.h"

#include <algorithm>
#include <utility>

#include "framework/mistakes.h"
#include "framework/training/start_log.h"
#include "framework/training/training_log.h"

namespace megashard {

void ask_for_samples(const Arguments& arguments, int64_t train_iters, const Progress& progress, DataOptions& data) {
  const int64_t batch = *arguments.global_batch_size;
  const int64_t interval = arguments.eval_interval;
  const int64_t evaluations = train_iters / interval + 1;
  const int64_t to_come = evaluations - std::min(progress.step, train_iters) / interval;  // the last one included
  const bool trains = !arguments.skip_train && progress.step < train_iters;
  data.train_samples = trains ? arguments.train_samples.value_or(train_iters * batch) : 0;
  const int64_t evaluation = arguments.eval_iters * batch;
  data.valid_samples =
      evaluation == 0 ? 0 : std::max(evaluations * evaluation, progress.validation_samples + to_come * evaluation);
  data.test_samples = evaluation;
}

TrainingData::TrainingData(const Arguments& arguments, DataOptions options, int rank, c10::Device device)
    : arguments_(arguments), options_(std::move(options)), rank_(rank), pins_memory_(!device.is_cpu()) {}

std::unique_ptr<DataSampler> TrainingData::sampler(const SampleDataset& dataset, int64_t consumed) const {
  SamplerOptions sampler;
  sampler.type = arguments_.dataloader_type == DataloaderType::kCyclic ? SamplerType::kCyclic : SamplerType::kSingle;
  sampler.total_samples = dataset.size();
  sampler.consumed_samples = consumed;
  sampler.micro_batch_size = *arguments_.micro_batch_size;
  sampler.data_parallel_rank = rank_ / arguments_.context_parallel_size;
  sampler.data_parallel_size = arguments_.data_parallel_size;
  return make_data_sampler(sampler);
}

std::unique_ptr<DataLoader> TrainingData::loader(const DatasetPtr& dataset, int64_t consumed) const {
  BatchOptions batch;
  batch.seq_length = options_.seq_length;
  batch.length_multiple = arguments_.sequence_multiple();
  batch.vocab_size = options_.vocab_size;
  batch.eod_id = options_.eod_id;
  batch.eod_mask_loss = arguments_.eod_mask_loss;
  batch.reset_position_ids = arguments_.reset_position_ids;
  batch.reset_attention_mask = arguments_.reset_attention_mask;
  batch.pin_memory = pins_memory_;
  DataLoaderOptions reading;
  reading.prefetch = static_cast<size_t>(std::max<int64_t>(1, arguments_.num_workers));
  return std::make_unique<DataLoader>(dataset, sampler(*dataset, consumed), batch, reading);
}

void TrainingData::build(int64_t train_iters, const Progress& progress,
                         const std::function<void(const std::string&)>& print) {
  ask_for_samples(arguments_, train_iters, progress, options_);
  print("> building train, validation, and test datasets ...");
  splits_ = build_datasets(options_);
  require(splits_.train == nullptr || splits_.train->has_labels(),
          "the training data has nothing to learn: in " +
              (splits_.train == nullptr ? "" : splits_.train->source_of(0)) +
              " every label is masked; prepare it again so that answers are learnt (docs/data.md).");
  if (splits_.train) train_loader_ = loader(splits_.train, progress.samples);
  const auto print_split = [&](const char* split, const DatasetPtr& dataset, const std::optional<int64_t>& samples) {
    print(data_line(split, dataset.get(), *samples, options_.seq_length));
  };
  print_split("training", splits_.train, options_.train_samples);
  print_split("validation", splits_.valid, options_.valid_samples);
  print_split("test", splits_.test, options_.test_samples);
  print(datetime_line("after dataloaders are built", log_time_now()));
}

std::vector<Batch> TrainingData::next(int64_t count) {
  std::vector<Batch> batches;
  for (int64_t i = 0; i < count; ++i) batches.push_back(train_loader_->next());
  return batches;
}

std::string TrainingData::microbatch_text(size_t microbatch, size_t microbatches, int64_t consumed) const {
  const SampleDataset& train = *splits_.train;
  const auto order = sampler(train, consumed);
  std::vector<int64_t> samples;
  for (size_t i = 0; i <= microbatch; ++i) order->next(samples);
  constexpr size_t kShown = 4;
  std::string text = c10::str("micro batch ", microbatch + 1, " of ", microbatches, " (");
  for (size_t i = 0; i < std::min(kShown, samples.size()); ++i) {
    const auto parts = train.parts_of(samples[i]);
    text += c10::str(i == 0 ? "" : "; ", "sample ", samples[i], " of ", train.source_of(samples[i]),
                     parts.empty() ? "" : ", " + parts);
  }
  return text + (samples.size() > kShown ? c10::str(" and ", samples.size() - kShown, " more samples)") : ")");
}

}  // namespace megashard
