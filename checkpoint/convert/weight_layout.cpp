#include "checkpoint/convert/weight_layout.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>

#include <algorithm>

namespace megashard {

std::vector<int64_t> source_sizes(const MegatronWeight& weight, size_t source) {
  auto sizes = weight.sizes;
  sizes[0] = 0;
  for (const auto& run : weight.runs) {
    if (run.source == source) sizes[0] = std::max(sizes[0], run.from_row + run.rows);
  }
  return sizes;
}

at::Tensor gather_sources(const MegatronWeight& weight, const std::function<at::Tensor(size_t source)>& source) {
  const at::NoGradGuard no_grad;
  at::Tensor gathered;
  for (size_t i = 0; i < weight.sources.size(); ++i) {
    const auto part = source(i);
    const auto sizes = source_sizes(weight, i);
    TORCH_CHECK_VALUE(part.sizes() == at::IntArrayRef(sizes), "weight ", weight.sources[i], " has sizes ", part.sizes(),
                      ", and config.json makes them ", describe_sizes(sizes),
                      ": give the config.json that belongs to the weights");
    if (!gathered.defined()) gathered = at::zeros(weight.sizes, part.options());
    TORCH_CHECK_VALUE(part.scalar_type() == gathered.scalar_type(), weight.sources[i], " is ",
                      torch_dtype_name(part.scalar_type()), ", and ", weight.sources[0], ", which lies in the same ",
                      weight.name, ", is ", torch_dtype_name(gathered.scalar_type()), "; give --to-bf16");
    for (const auto& run : weight.runs) {
      if (run.source != i) continue;
      gathered.narrow(0, run.to_row, run.rows).copy_(part.narrow(0, run.from_row, run.rows));
    }
  }
  return gathered;
}

}  // namespace megashard
