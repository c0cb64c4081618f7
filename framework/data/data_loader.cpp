#include "framework/data/data_loader.h"

#include <c10/util/Exception.h>

#include <chrono>
#include <condition_variable>
#include <deque>
#include <exception>
#include <mutex>
#include <utility>
#include <vector>

namespace megashard {
struct DataLoader::Reader {
  const std::shared_ptr<const SampleDataset> dataset;
  const std::unique_ptr<DataSampler> sampler;
  const BatchOptions options;
  const size_t prefetch;

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
