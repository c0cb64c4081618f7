#include "checkpoint/values/numpy_value.h"

#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

#include <array>
#include <cstring>
#include <utility>

#include "checkpoint/values/tensor_info.h"

namespace megashard {
namespace {

constexpr std::array<std::pair<std::string_view, at::ScalarType>, 14> kNumpyDtypes{{
    {"f8", at::kDouble},
    {"f4", at::kFloat},
    {"f2", at::kHalf},
    {"i8", at::kLong},
    {"i4", at::kInt},
    {"i2", at::kShort},
    {"i1", at::kChar},
    {"u8", at::kUInt64},
    {"u4", at::kUInt32},
    {"u2", at::kUInt16},
    {"u1", at::kByte},
    {"b1", at::kBool},
    {"c8", at::kComplexFloat},
    {"c16", at::kComplexDouble},
}};

/// numpy has these functions under numpy.core (older) or numpy._core (newer).
bool is_numpy_call(const Object& object, std::string_view function) {
  const std::string_view name = object.class_name;
  return (name.starts_with("numpy.core.") && name.substr(11) == function) ||
         (name.starts_with("numpy._core.") && name.substr(12) == function);
}

/// Parses numpy.dtype("f8", False, True) with the state (3, "<", ...).
std::optional<at::ScalarType> numpy_dtype_of(const Value& value) {
  const auto* object = value.object();
  if (object == nullptr || object->class_name != "numpy.dtype") return std::nullopt;
  const auto& arguments = object->arguments.as_items();
  const auto* code = arguments.empty() ? nullptr : arguments[0].get_if<std::string>();
  const auto* state = object->state.get_if<Tuple>();
  const bool swapped = state != nullptr && state->items.size() > 1 && state->items[1] == Value(">");
  if (code == nullptr || swapped) return std::nullopt;
  for (const auto& [name, dtype] : kNumpyDtypes) {
    if (name == *code) return dtype;
  }
  return std::nullopt;
}

const std::string* bytes_of(const Value& value) {
  if (const auto* bytes = value.get_if<Bytes>()) return &bytes->data;
  const auto* object = value.object();
  if (object == nullptr || object->class_name != "builtins.bytearray") return nullptr;
  const auto& arguments = object->arguments.as_items();
  return arguments.size() == 1 ? bytes_of(arguments[0]) : nullptr;
}

std::optional<std::vector<int64_t>> shape_of(const Value& value) {
  const auto* items = value.get_if<Tuple>();
  if (items == nullptr) return std::nullopt;
  std::vector<int64_t> sizes;
  for (const auto& item : items->items) {
    const auto* size = item.get_if<int64_t>();
    if (size == nullptr) return std::nullopt;
    sizes.push_back(*size);
  }
  return sizes;
}

at::Tensor tensor_of(at::ScalarType dtype, std::vector<int64_t> sizes, bool fortran, const std::string& bytes) {
  const auto element_bytes = static_cast<int64_t>(c10::elementSize(dtype));
  const auto numel = checked_numel(sizes, element_bytes);
  TORCH_CHECK(numel.has_value() && static_cast<uint64_t>(*numel * element_bytes) == bytes.size(),
              "a numpy array of sizes ", describe_sizes(sizes), " and dtype ", torch_dtype_name(dtype), " holds ",
              bytes.size(), " bytes");
  if (fortran) sizes = {sizes.rbegin(), sizes.rend()};
  auto tensor = at::empty(sizes, at::TensorOptions(dtype));
  if (!bytes.empty()) std::memcpy(tensor.mutable_data_ptr(), bytes.data(), bytes.size());
  if (!fortran) return tensor;
  std::vector<int64_t> reversed;
  for (int64_t i = tensor.dim(); i-- > 0;) reversed.push_back(i);
  return tensor.permute(reversed).contiguous();
}

}  // namespace

std::optional<at::Tensor> numpy_tensor(const Value& record) {
  const auto* object = record.object();
  if (object == nullptr || object->opcode == Object::Opcode::kPersId) return std::nullopt;
  const auto& arguments = object->arguments.as_items();
  const Value* dtype = nullptr;
  const Value* data = nullptr;
  std::optional<std::vector<int64_t>> sizes;
  bool fortran = false;
  if (is_numpy_call(*object, "multiarray.scalar") && arguments.size() == 2) {
    dtype = &arguments[0];
    data = &arguments[1];
    sizes.emplace();
  } else if (is_numpy_call(*object, "numeric._frombuffer") && arguments.size() == 4) {
    data = &arguments[0];
    dtype = &arguments[1];
    sizes = shape_of(arguments[2]);
    fortran = arguments[3] == Value("F");
  } else if (is_numpy_call(*object, "multiarray._reconstruct")) {
    const auto* state = object->state.get_if<Tuple>();  // version, sizes, dtype, Fortran order, data
    if (state == nullptr || state->items.size() != 5) return std::nullopt;
    sizes = shape_of(state->items[1]);
    dtype = &state->items[2];
    fortran = state->items[3] == Value(true);
    data = &state->items[4];
  }
  if (dtype == nullptr || !sizes) return std::nullopt;
  const auto known = numpy_dtype_of(*dtype);
  const auto* bytes = bytes_of(*data);
  if (!known || bytes == nullptr) return std::nullopt;
  return tensor_of(*known, std::move(*sizes), fortran, *bytes);
}

}  // namespace megashard
