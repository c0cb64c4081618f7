#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "framework/data/sample_dataset.h"

namespace megashard {

/// Draws from several datasets in proportion to weights, as megatron.core's BlendedDataset: each sample comes from the
/// dataset that lags most behind its share, the first one on ties. Datasets may be of different kinds.
class BlendedDataset : public SampleDataset {
 public:
  /// Draws `size` samples by `weights`, which are normalised here. If `size` is nullopt: draws each dataset completely,
  /// and stops drawing from a dataset when it is used up. `split_name` is for messages.
  BlendedDataset(std::vector<std::shared_ptr<const SampleDataset>> datasets, std::vector<double> weights,
                 std::optional<int64_t> size, const std::string& split_name);

  int64_t size() const override { return static_cast<int64_t>(dataset_index_.size()); }
  /// Pads rows of different kinds to the longest one. Throws if only some of the rows have position ids or document
  /// lengths (--reset-position-ids, --reset-attention-mask, --neat-packing).
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
