#include "models/kernels/row_groups.h"

#include <ATen/ops/cumsum.h>

namespace megashard {

const at::Tensor& RowGroups::ends() {
  if (!ends_.defined()) ends_ = at::cumsum(counts_, 0, at::kInt);
  return ends_;
}

const std::vector<int64_t>& RowGroups::counts_on_host() {
  if (!on_host_) {
    const auto host = counts_.cpu();
    const auto* first = host.const_data_ptr<int64_t>();
    on_host_.emplace(first, first + host.numel());
  }
  return *on_host_;
}

}  // namespace megashard
