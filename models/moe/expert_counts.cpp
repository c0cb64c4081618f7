#include "models/moe/expert_counts.h"

#include "parallel/device/device_plan.h"

namespace megashard {

std::vector<int64_t> counts_on_host(const at::Tensor& counts, int64_t rows) {
  const at::Tensor host = counts.cpu();
  const auto* first = host.const_data_ptr<int64_t>();
  std::vector<int64_t> values(first, first + host.numel());
  if (!device_is_planned()) return values;
  const auto experts = static_cast<int64_t>(values.size());
  for (int64_t i = 0; i < experts; ++i) values[static_cast<size_t>(i)] = rows * (i + 1) / experts - rows * i / experts;
  return values;
}

}  // namespace megashard
