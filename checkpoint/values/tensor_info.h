#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace megashard {

/// Name, dtype and sizes of a tensor without its data.
struct TensorInfo {
  std::string name;
  at::ScalarType dtype = at::ScalarType::Float;
  std::vector<int64_t> sizes;
};

/// Names of a dtype in the file formats.
struct DtypeNames {
  at::ScalarType dtype;
  const char* torch;        ///< "float32", as in torch.float32
  const char* storage;      ///< "FloatStorage", as in torch.FloatStorage; null: written as untyped storage
  const char* safetensors;  ///< "F32"; null: the format has no such dtype
};

/// Null if no format supports the dtype or name.
const DtypeNames* find_dtype(at::ScalarType dtype);
const DtypeNames* find_dtype_by_torch_name(const std::string& name);
const DtypeNames* find_dtype_by_storage(const std::string& name);
const DtypeNames* find_dtype_by_safetensors_name(const std::string& name);

/// "bfloat16"; throws for dtypes that checkpoints cannot hold (quantised, complex half, ...).
std::string torch_dtype_name(at::ScalarType dtype);

/// Product of the sizes; nullopt if a size is negative, or if the product or its bytes exceed 2^62.
std::optional<int64_t> checked_numel(const std::vector<int64_t>& sizes, int64_t element_bytes = 1);
/// Bytes of a contiguous tensor; throws for impossible sizes.
int64_t tensor_bytes(const TensorInfo& info);

std::string describe_sizes(const std::vector<int64_t>& sizes);  ///< "[2, 3]"

/// The first twenty names, separated by commas, and the number of the others.
std::string listed(const std::vector<std::string>& names);

}  // namespace megashard
