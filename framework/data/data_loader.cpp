#include "framework/data/data_loader.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <exception>
#include <mutex>
#include <utility>

#include "framework/data/picture_dataset.h"

namespace megashard {
namespace {

// One row of a batch: seq_length + 1 tokens to tokens, labels and masks.
class RowWriter {
 public:
  RowWriter(Batch& batch, const BatchOptions& options) : batch_(batch), options_(options) {}

  void write(int64_t row, const std::vector<int64_t>& sample) {
    const int64_t length = options_.seq_length;
    int64_t* tokens = batch_.tokens.mutable_data_ptr<int64_t>() + row * length;
    int64_t* labels = batch_.labels.mutable_data_ptr<int64_t>() + row * length;
    float* loss_mask = batch_.loss_mask.mutable_data_ptr<float>() + row * length;
    for (int64_t i = 0; i < length; ++i) {
      const int64_t token = sample[static_cast<size_t>(i)];
      const bool eod = token == options_.eod_id;
      loss_mask[i] = eod && options_.eod_mask_loss ? 0.0F : 1.0F;
      tokens[i] = token;
      labels[i] = sample[static_cast<size_t>(i) + 1];
    }
    if (options_.reset_position_ids) write_positions(row, sample);
    if (options_.reset_attention_mask) write_attention_mask(row, sample);
  }

 private:
  void write_positions(int64_t row, const std::vector<int64_t>& sample) {
    const int64_t length = options_.seq_length;
    int64_t* positions = batch_.position_ids.mutable_data_ptr<int64_t>() + row * length;
    int64_t begin = 0;
    for (int64_t i = 0; i < length; ++i) {
      positions[i] = i - begin;
      if (sample[static_cast<size_t>(i)] == options_.eod_id) begin = i + 1;
    }
  }

  void write_attention_mask(int64_t row, const std::vector<int64_t>& sample) {
    const int64_t length = options_.seq_length;
    bool* mask = batch_.attention_mask.mutable_data_ptr<bool>() + row * length * length;
    int64_t begin = 0;  // first token of the document that token i belongs to
    for (int64_t i = 0; i < length; ++i, mask += length) {
      std::fill_n(mask, length, true);
      std::fill(mask + begin, mask + i + 1, false);
      if (sample[static_cast<size_t>(i)] == options_.eod_id) {
        begin = i + 1;
      }
    }
  }

  Batch& batch_;
  const BatchOptions& options_;
};

void check_tokens(const std::vector<int64_t>& sample, const SampleDataset& dataset, int64_t index,
                  const BatchOptions& options) {
  for (const int64_t token : sample) {
    TORCH_CHECK(static_cast<uint64_t>(token) < static_cast<uint64_t>(options.vocab_size), "data set \"",
                dataset.source_of(index), "\" holds token ", token, " (in sample ", index,
                "), which is not in the model's vocabulary of ", options.vocab_size,
                "; tokenise the text with the model's own tokenizer, or use a model with the vocabulary of the data");
  }
}

Batch make_picture_batch(const PictureDataset& dataset, const std::vector<int64_t>& indices,
                         const BatchOptions& options) {
  std::vector<PictureSet::Sample> samples;
  int64_t length = 0;
  for (const int64_t index : indices) {
    samples.push_back(dataset.picture_sample(index));
    const auto& sample = samples.back();
    check_tokens({sample.tokens.begin(), sample.tokens.end()}, dataset, index, options);
    length = std::max(length, static_cast<int64_t>(sample.tokens.size()) - 1);
  }
  const auto rows = static_cast<int64_t>(samples.size());
  const auto zeros = [&](at::IntArrayRef shape, at::ScalarType type) {
    return at::zeros(shape, at::TensorOptions(type).pinned_memory(options.pin_memory));
  };
  Batch batch{.tokens = zeros({rows, length}, at::kLong),
              .labels = zeros({rows, length}, at::kLong),
              .loss_mask = zeros({rows, length}, at::kFloat),
              .position_ids = {},
              .attention_mask = {},
              .token_mask = zeros({rows, length}, at::kBool)};
  auto* tokens = batch.tokens.mutable_data_ptr<int64_t>();
  auto* labels = batch.labels.mutable_data_ptr<int64_t>();
  auto* mask = batch.loss_mask.mutable_data_ptr<float>();
  auto* real = batch.token_mask.mutable_data_ptr<bool>();
  for (const auto& sample : samples) {
    std::fill_n(real, sample.tokens.size() - 1, true);
    real += length;
    for (size_t i = 0; i + 1 < sample.tokens.size(); ++i) {
      tokens[i] = sample.tokens[i];
      labels[i] = sample.tokens[i + 1];
      mask[i] = sample.loss_mask[i + 1] == 0 ? 0.0F : 1.0F;
    }
    tokens += length;
    labels += length;
    mask += length;
  }
  batch.extra = picture_inputs(samples, options.pin_memory);
  return batch;
}

}  // namespace

Batch make_batch(const SampleDataset& dataset, const std::vector<int64_t>& indices, const BatchOptions& options) {
  if (const auto* pictures = dynamic_cast<const PictureDataset*>(&dataset))
    return make_picture_batch(*pictures, indices, options);
  const auto rows = static_cast<int64_t>(indices.size());
  const int64_t length = options.seq_length;
  const auto empty = [&](at::IntArrayRef shape, at::ScalarType type) {
    return at::empty(shape, at::TensorOptions(type).pinned_memory(options.pin_memory));
  };
  Batch batch{.tokens = empty({rows, length}, at::kLong),
              .labels = empty({rows, length}, at::kLong),
              .loss_mask = empty({rows, length}, at::kFloat),
              .position_ids = {},
              .attention_mask = {}};
  if (options.reset_position_ids) batch.position_ids = empty({rows, length}, at::kLong);
  if (options.reset_attention_mask) {
    batch.attention_mask = empty({rows, 1, length, length}, at::kBool);
  }
  RowWriter writer(batch, options);
  std::vector<int64_t> sample(static_cast<size_t>(length) + 1);
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t index = indices[static_cast<size_t>(row)];
    dataset.read(index, sample);
    check_tokens(sample, dataset, index, options);
    writer.write(row, sample);
  }
  return batch;
}

struct DataLoader::Reader {
  const std::shared_ptr<const SampleDataset> dataset;
  const std::unique_ptr<DataSampler> sampler;
  const BatchOptions options;
  const size_t prefetch;

  std::mutex mutex{};  // guards what follows
  std::condition_variable changed{};
  std::deque<Batch> ready{};
  std::exception_ptr error{};
  bool ended = false;
  bool stop = false;

  /// The thread; until the end of the data, an error, or stop.
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
        if (!used_up) batch = make_batch(*dataset, indices, options);
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
  TORCH_CHECK(batch.vocab_size > 0, "batches are checked against the vocabulary, got a size of ", batch.vocab_size,
              "; set --vocab-size");
  const bool needs_eod = batch.eod_mask_loss || batch.reset_position_ids || batch.reset_attention_mask;
  TORCH_CHECK(!needs_eod || batch.eod_id >= 0,
              "--eod-mask-loss, --reset-position-ids and --reset-attention-mask need the end-of-document token, which "
              "is unknown; give a tokenizer or model directory that names its eos token");
  reader_.reset(new Reader{std::move(dataset), std::move(sampler), batch, options.prefetch});
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

}  // namespace megashard
