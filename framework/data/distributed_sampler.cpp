#include "framework/data/distributed_sampler.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/randperm.h>
#include <c10/util/Exception.h>

#include <numeric>

namespace megashard {
namespace {

std::vector<int64_t> order_of_epoch(const DistributedSamplerOptions& options, int64_t epoch) {
  std::vector<int64_t> order(static_cast<size_t>(options.total_samples));
  if (!options.shuffle) {
    std::iota(order.begin(), order.end(), 0);
    return order;
  }
  const auto generator = at::detail::createCPUGenerator(static_cast<uint64_t>(options.seed + epoch));
  const at::Tensor permutation = at::randperm(options.total_samples, generator, at::TensorOptions(at::kLong));
  const auto* values = permutation.const_data_ptr<int64_t>();
  order.assign(values, values + options.total_samples);
  return order;
}

}  // namespace

std::vector<int64_t> distributed_samples(const DistributedSamplerOptions& options, int64_t epoch) {
  const int64_t samples = options.total_samples, replicas = options.replicas;
  TORCH_CHECK(samples > 0, "the data set has no samples");
  TORCH_CHECK(options.rank >= 0 && options.rank < replicas, "rank ", options.rank, " is not one of ", replicas,
              " replicas");
  const auto order = order_of_epoch(options, epoch);
  const int64_t each = (samples + (options.drop_last ? 0 : replicas - 1)) / replicas;
  std::vector<int64_t> mine;
  for (int64_t i = 0; i < each; ++i)
    mine.push_back(order[static_cast<size_t>((i * replicas + options.rank) % samples)]);
  return mine;
}

}  // namespace megashard
