#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "framework/data/sample_dataset.h"

namespace megashard {

/// Several datasets drawn from in proportion to weights, as megatron.core's BlendedDataset: at every
/// position the one that lags most behind its share; ties go to the first. Datasets may be of any kind.
class BlendedDataset : public SampleDataset {
 public:
  /// `size` samples by `weights` (normalised here), or, when `size` is nullopt, each dataset
  /// completely: a spent one drops out. `split_name` is for messages.
  BlendedDataset(std::vector<std::shared_ptr<const SampleDataset>> datasets, std::vector<double> weights,
                 std::optional<int64_t> size, const std::string& split_name);

  int64_t size() const override { return static_cast<int64_t>(dataset_index_.size()); }
  /// Members of several kinds have their rows filled up to the longest one. Throws where only some of the rows would
  /// have position ids or documents (--reset-position-ids, --reset-attention-mask, --neat-packing).
  Batch collate(const std::vector<int64_t>& indices, const BatchOptions& options) const override;
  const std::string& source_of(int64_t index) const override;
  std::string parts_of(int64_t index) const override;
  bool has_labels() const override;
  void add_facts(int64_t samples, DatasetFacts& facts) const override;

 private:
  void build(const std::vector<double>& weights, int64_t size, bool drops_spent);
  void check_not_oversampled(const std::string& split_name) const;

  std::vector<std::shared_ptr<const SampleDataset>> datasets_;
  std::vector<int64_t> counts_;         // samples taken from each dataset
  std::vector<int16_t> dataset_index_;  // [size]
  std::vector<int64_t> sample_index_;   // [size], sample of that dataset
};

/// Weights divided by numpy's sum of them (megatron.core.datasets.utils.normalize).
std::vector<double> normalized(std::vector<double> weights);

}  // namespace megashard
