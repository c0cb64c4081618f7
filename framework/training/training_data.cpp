#include "framework/training/training_data.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/randperm.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <exception>
#include <mutex>
#include <numeric>
#include <utility>
#include <vector>

#include "framework/mistakes.h"
#include "framework/training/start_log.h"
#include "framework/training/training_log.h"

namespace megashard {
namespace {

class SingleSampler : public DataSampler {
 public:
  explicit SingleSampler(const SamplerOptions& options) : options_(options), position_(options.consumed_samples) {
    TORCH_CHECK(position_ < options_.total_samples, "no samples left: ", position_,
                " are consumed and the data set has ", options_.total_samples,
                "; raise --train-iters for a longer run (the data set grows with it), or check that the checkpoint "
                "belongs to this data");
  }

  bool next(std::vector<int64_t>& indices) override {
    const int64_t together = options_.micro_batch_size * options_.micro_batches_together;
    if (position_ + together * options_.data_parallel_size > options_.total_samples) return false;
    indices.resize(static_cast<size_t>(options_.micro_batch_size));
    std::iota(indices.begin(), indices.end(), position_ + options_.data_parallel_rank * together + given_);
    given_ += options_.micro_batch_size;
    if (given_ < together) return true;
    given_ = 0;
    position_ += together * options_.data_parallel_size;
    return true;
  }

 private:
  SamplerOptions options_;
  int64_t position_;
  int64_t given_ = 0;  // samples of this rank since position_
};

class CyclicSampler : public DataSampler {
 public:
  explicit CyclicSampler(const SamplerOptions& options)
      : options_(options), stride_(options.micro_batch_size * options.data_parallel_size) {
    TORCH_CHECK(options_.total_samples >= stride_, "the data set has ", options_.total_samples,
                " samples, fewer than one microbatch on every rank takes (", stride_,
                "); add data, or use fewer ranks or a smaller --micro-batch-size");
    TORCH_CHECK(options_.consumed_samples % stride_ == 0, "a cyclic sampler cannot go on after ",
                options_.consumed_samples, " samples: that is no multiple of micro batch size x data ",
                "parallel size (", stride_, "); resume with the sizes of the earlier run");
  }

  bool next(std::vector<int64_t>& indices) override {
    const int64_t size = options_.micro_batch_size;
    if (position_ + size > static_cast<int64_t>(epoch_indices_.size())) {
      start_epoch();
    }
    const auto begin = epoch_indices_.begin() + position_;
    indices.assign(begin, begin + size);
    position_ += size;
    options_.consumed_samples += stride_;
    return true;
  }

 private:
  void start_epoch() {
    const int64_t active = options_.total_samples - options_.total_samples % stride_;
    const int64_t epoch = options_.consumed_samples / active;
    const int64_t consumed = options_.consumed_samples % active;
    const int64_t range = options_.total_samples / stride_ * options_.micro_batch_size;
    const int64_t base = options_.data_parallel_rank * range;
    const at::Generator generator = at::detail::createCPUGenerator(static_cast<uint64_t>(epoch));
    const at::Tensor permutation = at::randperm(range, generator, at::TensorOptions(at::kLong));
    const int64_t* values = permutation.const_data_ptr<int64_t>();
    epoch_indices_.clear();
    for (int64_t i = consumed / options_.data_parallel_size; i < range; ++i) {
      epoch_indices_.push_back(base + values[i]);
    }
    position_ = 0;
  }

  SamplerOptions options_;
  int64_t stride_;  // samples of one micro batch on all ranks together
  std::vector<int64_t> epoch_indices_;
  int64_t position_ = 0;  // in epoch_indices_
};

}  // namespace

std::unique_ptr<DataSampler> make_data_sampler(const SamplerOptions& options) {
  TORCH_CHECK(options.total_samples > 0, "the data set has no samples; check --split and the number ", "of iterations");
  TORCH_CHECK(options.micro_batch_size > 0, "the micro batch size must be positive, got ", options.micro_batch_size,
              "; set --micro-batch-size");
  TORCH_CHECK(options.consumed_samples >= 0, "the number of consumed samples must not be negative, ", "got ",
              options.consumed_samples);
  TORCH_CHECK(options.data_parallel_rank >= 0 && options.data_parallel_rank < options.data_parallel_size,
              "data parallel rank ", options.data_parallel_rank, " is not one of ", options.data_parallel_size,
              " ranks");
  if (options.type == SamplerType::kSingle) {
    return std::make_unique<SingleSampler>(options);
  }
  return std::make_unique<CyclicSampler>(options);
}

struct DataLoader::Reader {
  const std::shared_ptr<const SampleDataset> dataset;
  const std::unique_ptr<DataSampler> sampler;
  const BatchOptions options;
  const size_t prefetch;
  const std::function<void(Batch&)> prepare;

  std::mutex mutex{};  // guards the members below
  std::condition_variable changed{};
  std::deque<Batch> ready{};
  std::exception_ptr error{};
  bool ended = false;
  bool stop = false;

  /// Runs in the thread until the data end, a read fails or `stop` is set.
  void read_ahead() {
    std::vector<int64_t> indices;
    std::unique_lock lock(mutex);
    while (true) {
      changed.wait(lock, [this] { return stop || ready.size() < prefetch; });
      if (stop) return;
      lock.unlock();
      Batch batch;
      std::exception_ptr failure;
      bool used_up = false;
      try {
        used_up = !sampler->next(indices);
        if (!used_up) batch = dataset->collate(indices, options);
        if (!used_up && prepare) prepare(batch);
      } catch (...) {
        failure = std::current_exception();
      }
      lock.lock();
      ended = used_up;
      error = failure;
      if (!ended && error == nullptr) ready.push_back(std::move(batch));
      changed.notify_all();
      if (ended || error != nullptr) return;
    }
  }
};

DataLoader::DataLoader(std::shared_ptr<const SampleDataset> dataset, std::unique_ptr<DataSampler> sampler,
                       const BatchOptions& batch, const DataLoaderOptions& options)
    : timeout_seconds_(options.timeout_seconds) {
  TORCH_CHECK(options.prefetch > 0, "the data loader reads at least one batch ahead, got 0");
  const bool needs_eod = batch.eod_mask_loss || batch.reset_position_ids || batch.reset_attention_mask;
  TORCH_CHECK(!needs_eod || batch.eod_id >= 0,
              "--eod-mask-loss, --reset-position-ids and --reset-attention-mask need the end-of-document token, which "
              "is unknown; give a tokenizer or model directory that names its eos token");
  reader_.reset(new Reader{std::move(dataset), std::move(sampler), batch, options.prefetch, options.prepare});
  thread_ = std::thread([reader = reader_] { reader->read_ahead(); });
}

DataLoader::~DataLoader() {
  {
    const std::lock_guard lock(reader_->mutex);
    reader_->stop = true;
  }
  reader_->changed.notify_all();
  has_given_up_ ? thread_.detach() : thread_.join();
}

Batch DataLoader::next() {
  const auto start = std::chrono::steady_clock::now();
  auto& ready = reader_->ready;
  std::unique_lock lock(reader_->mutex);
  has_given_up_ = !reader_->changed.wait_for(lock, std::chrono::duration<double>(timeout_seconds_), [&] {
    return !ready.empty() || reader_->error != nullptr || reader_->ended;
  });
  const std::chrono::duration<double> waited = std::chrono::steady_clock::now() - start;
  wait_seconds_ += waited.count();
  TORCH_CHECK(!has_given_up_, "no batch arrived within ", timeout_seconds_,
              " s; the file system that holds the data does not answer");
  if (ready.empty()) {
    if (reader_->error != nullptr) std::rethrow_exception(reader_->error);
    TORCH_CHECK(false, "the data set of ", reader_->dataset->size(),
                " samples is used up; the run asks for more samples than it was built for");
  }
  Batch batch = std::move(ready.front());
  ready.pop_front();
  reader_->changed.notify_all();
  return batch;
}

double DataLoader::take_wait_seconds() { return std::exchange(wait_seconds_, 0.0); }

RunLength run_length(const Arguments& arguments) {
  return {.batches = microbatch_options(arguments),
          .train_iters = arguments.train_iters.value_or(0),
          .train_samples = arguments.train_samples,
          .skip_train = arguments.skip_train,
          .eval_iters = arguments.eval_iters,
          .eval_interval = arguments.eval_interval};
}

DataOptions data_options(const Arguments& arguments, int64_t vocab_size, int64_t eod_id, const DiagnosticSink& sink) {
  return {.data_path = arguments.data_path,
          .split = arguments.split.value_or(kDefaultSplit),
          .train_data_path = arguments.train_data_path,
          .valid_data_path = arguments.valid_data_path,
          .test_data_path = arguments.test_data_path,
          .mock_data = arguments.mock_data,
          .seq_length = *arguments.seq_length,
          .seed = arguments.seed,
          .shuffle_conversations = arguments.shuffle_conversations,
          .neat_packing = arguments.neat_packing,
          .vocab_size = vocab_size,
          .eod_id = eod_id,
          .sink = sink};
}

TrainingDataOptions training_data_options(const Arguments& arguments, DataOptions sets) {
  const BatchOptions batches{.seq_length = sets.seq_length,
                             .length_multiple = arguments.sequence_multiple(),
                             .vocab_size = sets.vocab_size,
                             .eod_id = sets.eod_id,
                             .eod_mask_loss = arguments.eod_mask_loss,
                             .reset_position_ids = arguments.reset_position_ids,
                             .reset_attention_mask = arguments.reset_attention_mask};
  return {.sets = std::move(sets),
          .batches = batches,
          .loading = {.prefetch = static_cast<size_t>(std::max<int64_t>(1, arguments.num_workers))},
          .order = arguments.dataloader_type == DataloaderType::kCyclic ? SamplerType::kCyclic : SamplerType::kSingle,
          .sequence_ranks = arguments.context_parallel_size,
          .rollouts = {.folder = arguments.rollouts.value_or(""),
                       .timeout = std::chrono::minutes(arguments.rollout_timeout_minutes)}};
}

void ask_for_samples(const RunLength& length, int64_t train_iters, const Progress& progress, DataOptions& data) {
  const int64_t batch = length.batches.global_batch_size;
  const int64_t interval = length.eval_interval;
  const int64_t evaluations = train_iters / interval + 1;
  const int64_t to_come = evaluations - std::min(progress.step, train_iters) / interval;  // the last one included
  const bool trains = !length.skip_train && progress.step < train_iters;
  data.train_samples = trains ? length.train_samples.value_or(train_iters * batch) : 0;
  const int64_t evaluation = length.eval_iters * batch;
  data.valid_samples =
      evaluation == 0 ? 0 : std::max(evaluations * evaluation, progress.validation_samples + to_come * evaluation);
  data.test_samples = evaluation;
}

TrainingData::TrainingData(TrainingDataOptions options, RunLength length, int rank, const ProcessGroupPtr& world,
                           c10::Device device)
    : options_(std::move(options)), length_(std::move(length)), rank_(rank) {
  options_.batches.pin_memory = !device.is_cpu();
  RolloutOptions& rollouts = options_.rollouts;
  if (rollouts.folder.empty()) return;
  const DataOptions& sets = options_.sets;
  rollouts.sets = {.seq_length = sets.seq_length,
                   .shuffles = false,
                   .packs = sets.neat_packing,
                   .group = sets.group,
                   .last_tokens = sets.last_tokens};
  rollouts.batches = options_.batches;
  rollouts.micro_batch_size = length_.batches.micro_batch_size;
  rollouts.rank = rank_ / options_.sequence_ranks;
  rollouts.ranks = length_.batches.data_parallel_size;
  rollouts_ = std::make_unique<Rollouts>(rollouts, world);
}

std::unique_ptr<DataSampler> TrainingData::sampler(const SampleDataset& dataset, int64_t consumed) const {
  return make_data_sampler({.type = options_.order,
                            .total_samples = dataset.size(),
                            .consumed_samples = consumed,
                            .micro_batch_size = length_.batches.micro_batch_size,
                            .micro_batches_together = options_.micro_batches_together,
                            .data_parallel_rank = rank_ / options_.sequence_ranks,
                            .data_parallel_size = length_.batches.data_parallel_size});
}

std::unique_ptr<DataLoader> TrainingData::loader(const DatasetPtr& dataset, int64_t consumed) const {
  return std::make_unique<DataLoader>(dataset, sampler(*dataset, consumed), options_.batches, options_.loading);
}

void TrainingData::build(int64_t train_iters, const Progress& progress,
                         const std::function<void(const std::string&)>& print) {
  if (rollouts_) return print("> training reads the rollouts in " + options_.rollouts.folder);
  DataOptions& sets = options_.sets;
  ask_for_samples(length_, train_iters, progress, sets);
  print("> building train, validation, and test datasets ...");
  splits_ = build_datasets(sets);
  require(splits_.train == nullptr || splits_.train->has_labels(),
          "the training data has nothing to learn: in " +
              (splits_.train == nullptr ? "" : splits_.train->source_of(0)) +
              " every label is masked; prepare it again so that answers are learnt (docs/data.md).");
  if (splits_.train) train_loader_ = loader(splits_.train, progress.samples);
  const auto print_split = [&](const char* split, const DatasetPtr& dataset, const std::optional<int64_t>& samples) {
    print(data_line(split, dataset.get(), *samples, sets.seq_length));
  };
  print_split("training", splits_.train, sets.train_samples);
  print_split("validation", splits_.valid, sets.valid_samples);
  print_split("test", splits_.test, sets.test_samples);
  print(datetime_line("after dataloaders are built", log_time_now()));
}

StopRequest TrainingData::wait_for(int64_t step, const std::function<StopRequest()>& stop_request) {
  return rollouts_ ? rollouts_->wait_for(step, stop_request) : StopRequest::kNone;
}

std::vector<Batch> TrainingData::next(int64_t step, int64_t count) {
  if (rollouts_) return rollouts_->read(step);
  std::vector<Batch> batches;
  for (int64_t i = 0; i < count; ++i) batches.push_back(train_loader_->next());
  return batches;
}

std::string TrainingData::microbatch_text(size_t microbatch, size_t microbatches, int64_t consumed) const {
  if (rollouts_) return rollouts_->microbatch_text(microbatch, microbatches);
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
