#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <cstdint>
#include <optional>
#include <vector>

namespace megashard {

/// Number of rows of each group, on the host. Blocks the host. A planned device has no values: the rows are then
/// distributed equally.
std::vector<int64_t> counts_on_host(const at::Tensor& counts, int64_t rows);

/// Numbers of rows of several groups; the rows of a group are contiguous and the groups consecutive.
class RowGroups : public torch::CustomClassHolder {
 public:
  /// `counts` [groups] int64, on the device of the rows; `rows` is their sum; `on_host`: the same numbers, if known on
  /// the host.
  RowGroups(at::Tensor counts, int64_t rows, std::optional<std::vector<int64_t>> on_host = std::nullopt)
      : counts_(std::move(counts)), rows_(rows), on_host_(std::move(on_host)) {}

  int64_t size() const { return counts_.size(0); }
  /// [groups] int32, on the device: end of each group.
  const at::Tensor& ends();
  /// Blocks the host in the first call, unless the numbers are known.
  const std::vector<int64_t>& on_host();

 private:
  at::Tensor counts_, ends_;
  int64_t rows_;
  std::optional<std::vector<int64_t>> on_host_;
};
using RowGroupsPtr = c10::intrusive_ptr<RowGroups>;

}  // namespace megashard
