#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <cstdint>
#include <optional>
#include <vector>

namespace megashard {

/// How many of `rows` each group has, for the host, which waits for them. A plan has no values: there each group has as
/// many as any other.
std::vector<int64_t> counts_on_host(const at::Tensor& counts, int64_t rows);

/// How many rows each of several groups has; the rows of a group lie side by side, and the groups one after the other.
class RowGroups : public torch::CustomClassHolder {
 public:
  /// `counts` [groups] int64, on the device of the rows, of which there are `rows`; `on_host`: the same numbers, where
  /// they are known there.
  RowGroups(at::Tensor counts, int64_t rows, std::optional<std::vector<int64_t>> on_host = std::nullopt)
      : counts_(std::move(counts)), rows_(rows), on_host_(std::move(on_host)) {}

  int64_t size() const { return counts_.size(0); }
  /// [groups] int32, on the device: where each ends.
  const at::Tensor& ends();
  /// The host waits for the device the first time, if it does not know them yet.
  const std::vector<int64_t>& on_host();

 private:
  at::Tensor counts_, ends_;
  int64_t rows_;
  std::optional<std::vector<int64_t>> on_host_;
};
using RowGroupsPtr = c10::intrusive_ptr<RowGroups>;

}  // namespace megashard
