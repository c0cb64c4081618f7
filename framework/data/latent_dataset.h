#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "framework/data/latent_set.h"
#include "framework/data/sample_dataset.h"

namespace megashard {

struct LatentOptions {
  LatentPatches patches{};
  int64_t run = 1;               ///< samples of one shape follow each other in runs of this: a global batch
  double caption_dropout = 0.0;  ///< share of the samples that get the empty prompt
};

/// Samples of a LatentSet, epoch after epoch. In each epoch samples are shuffled, if asked for, and put into runs of
/// one shape (buckets), so that all ranks compute the same; what fills no run waits for the next epoch. A sample has
/// the patches of its latents in the order frame, row, column; a batch is as long as its longest sample, rounded up to
/// length_multiple. Its columns are those of models of latents: latents without noise, loss_mask, noise_seeds,
/// position_ids and the features. loss_mask is 0 for padding and for clean patches.
class LatentDataset : public SampleDataset {
 public:
  /// Throws if a sample has other channels than the model, sizes that its patches do not divide, or more than
  /// seq_length patches.
  LatentDataset(std::shared_ptr<const LatentSet> set, const SplitOptions& split, const LatentOptions& options);

  int64_t size() const override { return static_cast<int64_t>(order_.size()); }
  Batch collate(const std::vector<int64_t>& indices, const BatchOptions& options) const override;
  const std::string& source_of(int64_t /*index*/) const override { return set_->folder(); }
  std::string parts_of(int64_t index) const override;
  void add_facts(int64_t samples, DatasetFacts& facts) const override;

 private:
  int64_t patches_of(int64_t sample) const;
  void check_sample(int64_t sample, int64_t seq_length) const;
  LatentSample read(int64_t index) const;

  std::shared_ptr<const LatentSet> set_;
  LatentOptions options_;
  int64_t first_, last_, seed_;
  std::vector<int64_t> order_;  // sample numbers of all epochs
};

/// The inverse: the first patches of [C pt ph pw, T] as a video [C, F, H, W] of these three sizes.
at::Tensor video_of_patches(const at::Tensor& patches, const std::vector<int64_t>& sizes,
                            const std::array<int64_t, 3>& patch);
/// Patches of a video [C, F, H, W]: [C pt ph pw, T], T in the order frame, row, column.
at::Tensor patches_of_video(const at::Tensor& video, const std::array<int64_t, 3>& patch);

}  // namespace megashard
