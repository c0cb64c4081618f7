#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "framework/data/data_sampler.h"
#include "framework/data/sample_dataset.h"

namespace megashard {

struct BatchOptions {
  int64_t seq_length = 0;
  int64_t vocab_size = 0;  // a token outside [0, vocab_size) is an error
  int64_t eod_id = -1;     // end-of-document token; needed by the three flags
  bool eod_mask_loss = false;
  bool reset_position_ids = false;
  bool reset_attention_mask = false;
  bool pin_memory = false;  // page-locked tensors, for copies to a GPU beside compute
};

// One microbatch on the CPU; B samples of T = seq_length tokens. Of conversations with pictures, T
// is the longest one's, the rest is filled with token 0 of masks 0.
struct Batch {
  at::Tensor tokens;                          // [B, T] int64
  at::Tensor labels;                          // [B, T] int64
  at::Tensor loss_mask;                       // [B, T] float32, 0 or 1
  at::Tensor position_ids;                    // [B, T] int64, only if reset_position_ids; else 0 .. T-1
  at::Tensor attention_mask;                  // [B, 1, T, T] bool, true where masked; only if reset_attention_mask
  at::Tensor token_mask{};                    // [B, T] bool, of ModelInput; only of conversations
  std::map<std::string, at::Tensor> extra{};  // of ModelInput: picture_inputs()
};

// Reads the samples and builds what megatron.core's GPTDataset returns for them. A token outside
// the vocabulary throws a sentence with the data set, the sample and the token. Conversations learn
// what their loss_mask marks; the flags about documents do not concern them.
Batch make_batch(const SampleDataset& dataset, const std::vector<int64_t>& indices, const BatchOptions& options);

struct DataLoaderOptions {
  size_t prefetch = 2;             // batches read ahead by a thread
  double timeout_seconds = 600.0;  // next() gives up after so long without a batch
};

// Batches in the sampler's order, read ahead in a thread so that reading hides behind compute. An
// error in the thread is thrown by the next() that would have returned its batch. One caller
// thread. The end does not wait for a read that next() has given up: its thread is left behind.
class DataLoader {
 public:
  DataLoader(std::shared_ptr<const SampleDataset> dataset, std::unique_ptr<DataSampler> sampler,
             const BatchOptions& batch, const DataLoaderOptions& options = {});
  ~DataLoader();
  DataLoader(const DataLoader&) = delete;
  DataLoader& operator=(const DataLoader&) = delete;

  // Throws when the sampler has come to its end.
  Batch next();

  // Seconds that next() has waited for data since the last call of this function.
  double take_wait_seconds();

 private:
  struct Reader;

  std::shared_ptr<Reader> reader_;  // the thread's, too
  std::thread thread_;
  double timeout_seconds_;
  double wait_seconds_ = 0;
  bool has_given_up_ = false;
};

}  // namespace megashard
