#include "checkpoint/values/tensor_info.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <cstring>

namespace megashard {
namespace {

using at::ScalarType;

constexpr std::array<DtypeNames, 20> kDtypes{{
    {ScalarType::Float, "float32", "FloatStorage", "F32"},
    {ScalarType::BFloat16, "bfloat16", "BFloat16Storage", "BF16"},
    {ScalarType::Half, "float16", "HalfStorage", "F16"},
    {ScalarType::Double, "float64", "DoubleStorage", "F64"},
    {ScalarType::Long, "int64", "LongStorage", "I64"},
    {ScalarType::Int, "int32", "IntStorage", "I32"},
    {ScalarType::Short, "int16", "ShortStorage", "I16"},
    {ScalarType::Char, "int8", "CharStorage", "I8"},
    {ScalarType::Byte, "uint8", "ByteStorage", "U8"},
    {ScalarType::Bool, "bool", "BoolStorage", "BOOL"},
    {ScalarType::Float8_e4m3fn, "float8_e4m3fn", nullptr, "F8_E4M3"},
    {ScalarType::Float8_e5m2, "float8_e5m2", nullptr, "F8_E5M2"},
    {ScalarType::Float8_e8m0fnu, "float8_e8m0fnu", nullptr, "F8_E8M0"},
    {ScalarType::Float8_e4m3fnuz, "float8_e4m3fnuz", nullptr, "F8_E4M3FNUZ"},
    {ScalarType::Float8_e5m2fnuz, "float8_e5m2fnuz", nullptr, "F8_E5M2FNUZ"},
    {ScalarType::UInt16, "uint16", nullptr, "U16"},
    {ScalarType::UInt32, "uint32", nullptr, "U32"},
    {ScalarType::UInt64, "uint64", nullptr, "U64"},
    {ScalarType::ComplexFloat, "complex64", "ComplexFloatStorage", "C64"},
    {ScalarType::ComplexDouble, "complex128", "ComplexDoubleStorage", nullptr},
}};

const DtypeNames* find_by(const char* const DtypeNames::*field, const std::string& name) {
  for (const auto& names : kDtypes) {
    if (names.*field != nullptr && name == names.*field) return &names;
  }
  return nullptr;
}

}  // namespace

const DtypeNames* find_dtype(ScalarType dtype) {
  for (const auto& names : kDtypes) {
    if (names.dtype == dtype) return &names;
  }
  return nullptr;
}

const DtypeNames* find_dtype_by_torch_name(const std::string& name) { return find_by(&DtypeNames::torch, name); }
const DtypeNames* find_dtype_by_storage(const std::string& name) { return find_by(&DtypeNames::storage, name); }
const DtypeNames* find_dtype_by_safetensors_name(const std::string& name) {
  return find_by(&DtypeNames::safetensors, name);
}

std::string torch_dtype_name(ScalarType dtype) {
  const auto* names = find_dtype(dtype);
  TORCH_CHECK_NOT_IMPLEMENTED(names != nullptr, "dtype ", dtype,
                              " has no place in a checkpoint; convert the tensor to a plain dtype first");
  return names->torch;
}

std::optional<int64_t> checked_numel(const std::vector<int64_t>& sizes, int64_t element_bytes) {
  constexpr int64_t kMax = int64_t{1} << 62;
  bool empty = false;
  int64_t numel = 1;
  for (const auto size : sizes) {
    if (size < 0) return std::nullopt;
    if (size == 0) {
      empty = true;
    } else {
      if (numel > kMax / element_bytes / size) return std::nullopt;
      numel *= size;
    }
  }
  return empty ? 0 : numel;
}

int64_t tensor_bytes(const TensorInfo& info) {
  const auto element_bytes = static_cast<int64_t>(c10::elementSize(info.dtype));
  const auto numel = checked_numel(info.sizes, element_bytes);
  TORCH_CHECK_VALUE(numel.has_value(), "tensor ", info.name, " has impossible sizes ", describe_sizes(info.sizes));
  return *numel * element_bytes;
}

std::string describe_sizes(const std::vector<int64_t>& sizes) {
  std::string text = "[";
  for (size_t i = 0; i < sizes.size(); ++i) {
    text += (i == 0 ? "" : ", ") + std::to_string(sizes[i]);
  }
  return text + "]";
}

std::string listed(const std::vector<std::string>& names) {
  constexpr size_t kMaxListed = 20;
  std::string text;
  for (size_t i = 0; i < std::min(names.size(), kMaxListed); ++i) text += (i == 0 ? "" : ", ") + names[i];
  return names.size() <= kMaxListed ? text : text + ", and " + std::to_string(names.size() - kMaxListed) + " more";
}

}  // namespace megashard
