#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace megashard {

/// What is known of a tensor without its data.
struct TensorInfo {
  std::string name;
  at::ScalarType dtype = at::ScalarType::Float;
  std::vector<int64_t> sizes;
};

/// One dtype's names in the file formats.
struct DtypeNames {
  at::ScalarType dtype;
  const char* torch;        ///< "float32", as in torch.float32
  const char* storage;      ///< "FloatStorage", as in torch.FloatStorage; null: written as untyped storage
  const char* safetensors;  ///< "F32"; null: the format has no such dtype
};

/// Null when no file format here knows the name.
const DtypeNames* find_dtype(at::ScalarType dtype);
const DtypeNames* find_dtype_by_torch_name(const std::string& name);
const DtypeNames* find_dtype_by_storage(const std::string& name);
const DtypeNames* find_dtype_by_safetensors_name(const std::string& name);

/// "bfloat16"; throws for dtypes that checkpoints do not hold (quantised, complex halves, ...).
std::string torch_dtype_name(at::ScalarType dtype);

/// Product of the sizes; nothing when one is negative, or the product or its bytes exceed 2^62.
std::optional<int64_t> checked_numel(const std::vector<int64_t>& sizes, int64_t element_bytes = 1);
/// Bytes of a contiguous tensor; throws for impossible sizes.
int64_t tensor_bytes(const TensorInfo& info);

std::string describe_sizes(const std::vector<int64_t>& sizes);  ///< "[2, 3]"

/// At most twenty names, separated by commas, and how many more there are.
std::string listed(const std::vector<std::string>& names);

}  // namespace megashard
