#include "framework/data/data_sampler.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/randperm.h>
#include <c10/util/Exception.h>

#include <numeric>

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
    const int64_t stride = options_.micro_batch_size * options_.data_parallel_size;
    if (position_ + stride > options_.total_samples) return false;
    const int64_t first = position_ + options_.data_parallel_rank * options_.micro_batch_size;
    indices.resize(static_cast<size_t>(options_.micro_batch_size));
    std::iota(indices.begin(), indices.end(), first);
    position_ += stride;
    return true;
  }

 private:
  SamplerOptions options_;
  int64_t position_;
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

}  // namespace megashard
