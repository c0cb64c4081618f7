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

// Products of each group of rows with its own matrix, without autograd. GPUs use one kernel where there is one,
// at::_grouped_mm, which reads the group boundaries on the device; else there is one product per group into its rows,
// and the host reads the boundaries. CPUs multiply as linear_products.h does.

/// True if at::_grouped_mm has one kernel for such rows and matrices on x's device: bf16 on Hopper and Blackwell, fewer
/// than 1,024 matrices, rows of a multiple of 16 bytes. Its other implementations block the host.
bool has_grouped_kernel(const at::Tensor& x, at::IntArrayRef matrix, int64_t groups);

/// x W^T of each part; x [N, in], weight [groups, parts, out, in] -> [N, out] a part, with the kernel as columns of one
/// tensor.
std::vector<at::Tensor> grouped_product(const at::Tensor& x, const at::Tensor& weight, RowGroups& groups);
/// The sum of the parts' grad W; grads [N, out] -> [N, in]
at::Tensor grouped_gradient_of_input(at::TensorList grads, const at::Tensor& weight, RowGroups& groups);
/// grad^T x of each part; grads [N, out], x [N, in] -> [groups, parts, out, in], zeros for a group without rows
at::Tensor grouped_gradient_of_weight(at::TensorList grads, const at::Tensor& x, RowGroups& groups);

/// linear(x, weight) of each group's rows with its own weights, as one grouped product, also in backward: x [N, in],
/// weight [groups, out, in], or [groups, parts, out, in] for several weights per group -> one result [N, out] per part,
/// as columns of one tensor (JointLinears). The gradient of the weight is zero for a group without rows. A GPU
/// without a kernel for these dtypes and sizes (has_grouped_kernel) computes one product per group, and the host waits
/// for the numbers of rows.
std::vector<at::Tensor> grouped_linear(const at::Tensor& x, const at::Tensor& weight, const RowGroupsPtr& groups);

/// grouped_linear of swiglu(gate, up) without saving it: gate, up [N, in], weight [groups, out, in] -> [N, out].
at::Tensor grouped_swiglu_linear(const at::Tensor& gate, const at::Tensor& up, const at::Tensor& weight,
                                 const RowGroupsPtr& groups);

}  // namespace megashard
