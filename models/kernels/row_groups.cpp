#include "models/kernels/row_groups.h"

#include <ATen/ops/cumsum.h>

#include "parallel/device/device_plan.h"

namespace megashard {

std::vector<int64_t> counts_on_host(const at::Tensor& counts, int64_t rows) {
  const at::Tensor host = counts.cpu();
  const auto* first = host.const_data_ptr<int64_t>();
  std::vector<int64_t> values(first, first + host.numel());
  if (!device_is_planned()) return values;
  const auto groups = static_cast<int64_t>(values.size());
  for (int64_t i = 0; i < groups; ++i) values[static_cast<size_t>(i)] = rows * (i + 1) / groups - rows * i / groups;
  return values;
}

const at::Tensor& RowGroups::ends() {
  if (!ends_.defined()) ends_ = at::cumsum(counts_, 0, at::kInt);
  return ends_;
}

const std::vector<int64_t>& RowGroups::on_host() {
  if (!on_host_) on_host_ = counts_on_host(counts_, rows_);
  return *on_host_;
}

}  // namespace megashard
