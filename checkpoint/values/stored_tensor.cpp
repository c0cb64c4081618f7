#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

#include <algorithm>

#include "checkpoint/values/tensor_info.h"
#include "checkpoint/values/torch_archive.h"
#include "checkpoint/values/value_tensors.h"

namespace megashard {
namespace {

constexpr std::string_view kRebuild = "torch._utils._rebuild_";
constexpr std::string_view kRebuildTyped = "torch._tensor._rebuild_from_type_v2";

/// The arguments of a tensor with attributes, (function, class, arguments, state); null for classes that store data
/// differently.
const std::vector<Value>* typed_arguments(const std::vector<Value>& items) {
  if (items.size() < 3 || items[2].get_if<Tuple>() == nullptr) return nullptr;
  const auto* function = items[0].get_if<Global>();
  const auto* type = items[1].get_if<Global>();
  const bool plain =
      function != nullptr && type != nullptr &&
      (function->name == "torch._utils._rebuild_tensor_v2" || function->name == "torch._utils._rebuild_tensor_v3") &&
      (type->name == "torch.Tensor" || type->name == "torch._tensor.Tensor" ||
       type->name == "torch.nn.parameter.Buffer");
  return plain && items[2].as_items().size() >= 4 ? &items[2].as_items() : nullptr;
}

/// The arguments (storage, offset, sizes, strides, ..) of a tensor record, also inside a Parameter; null for other
/// records.
const std::vector<Value>* rebuild_arguments(const Value& record, int depth = 0) {
  const auto* object = record.object();
  if (object == nullptr || depth > 2 || object->arguments.get_if<Tuple>() == nullptr) return nullptr;
  const auto& arguments = object->arguments.as_items();
  if (object->class_name == kRebuildTyped) return typed_arguments(arguments);
  if (!object->class_name.starts_with(kRebuild)) return nullptr;
  const auto how = std::string_view(object->class_name).substr(kRebuild.size());
  if (how == "parameter" || how == "parameter_with_state")
    return arguments.empty() ? nullptr : rebuild_arguments(arguments[0], depth + 1);
  const bool plain = how == "tensor" || how == "tensor_v2" || how == "tensor_v3";
  return plain && arguments.size() >= 4 ? &arguments : nullptr;
}

at::ScalarType dtype_of(const std::vector<Value>& arguments, const Value& storage_class, const std::string& where) {
  const auto* global = storage_class.get_if<Global>();
  TORCH_CHECK(global != nullptr, where, ": the tensor's storage has no class");
  if (global->name == "torch.storage.UntypedStorage") {
    const auto* dtype = arguments.size() > 6 ? arguments[6].get_if<at::ScalarType>() : nullptr;
    TORCH_CHECK(dtype != nullptr, where, ": the tensor has no dtype");
    return *dtype;
  }
  const auto* names = global->name.starts_with("torch.") ? find_dtype_by_storage(global->name.substr(6)) : nullptr;
  TORCH_CHECK_NOT_IMPLEMENTED(names != nullptr, where, ": tensors of ", global->name, " are not read here");
  return names->dtype;
}

/// End of the last element, in elements from the first; nullopt for an overflow or a negative stride.
std::optional<int64_t> span_of(const StoredTensor& stored) {
  if (!checked_numel(stored.sizes, 16)) return std::nullopt;
  int64_t span = 1;
  for (size_t i = 0; i < stored.sizes.size(); ++i) {
    if (stored.sizes[i] == 0) return 0;
    int64_t reach = 0;
    if (stored.strides[i] < 0 || __builtin_mul_overflow(stored.sizes[i] - 1, stored.strides[i], &reach) ||
        __builtin_add_overflow(span, reach, &span)) {
      return std::nullopt;
    }
  }
  return span;
}

}  // namespace

bool StoredTensor::is_contiguous() const {
  int64_t expected = 1;
  for (size_t i = sizes.size(); i-- > 0;) {
    if (sizes[i] != 1 && strides[i] != expected) return false;
    expected *= std::max<int64_t>(sizes[i], 1);
  }
  return true;
}

bool is_tensor_record(const Value& value) {
  const auto* object = value.object();
  return object != nullptr &&
         (object->class_name.starts_with(kRebuild) || object->class_name.starts_with("torch._tensor._rebuild_"));
}

std::optional<StoredTensor> stored_tensor(const TorchArchive& archive, const Value& record) {
  const auto* found = rebuild_arguments(record);
  if (found == nullptr) return std::nullopt;
  const auto& arguments = *found;
  const auto& where = archive.where();
  for (size_t i = 6; i < arguments.size(); ++i) {  // conjugated and negated views are marked in a dict
    const auto* marks = arguments[i].get_if<Dict>();
    TORCH_CHECK_NOT_IMPLEMENTED(
        marks == nullptr || marks->entries.empty(), where,
        ": a conjugated or negated view is not read here; save it after resolve_conj() and resolve_neg()");
  }
  const auto* storage = arguments[0].object();
  TORCH_CHECK(storage != nullptr && storage->opcode == Object::Opcode::kPersId, where, ": the tensor has no storage");
  const auto& identity = storage->arguments.as_items();
  TORCH_CHECK(identity.size() >= 5 && identity[0] == Value("storage"), where, ": the tensor's storage is unknown");
  StoredTensor stored{dtype_of(arguments, identity[1], where), ints_of(arguments[2]), ints_of(arguments[3]), 0};
  const auto first = arguments[1].as_int();
  const auto bytes = archive.locate("data/" + identity[2].as_string());
  const auto element_bytes = static_cast<int64_t>(c10::elementSize(stored.dtype));
  const auto elements = bytes.length / element_bytes;
  const auto span = stored.strides.size() == stored.sizes.size() ? span_of(stored) : std::nullopt;
  TORCH_CHECK(span.has_value() && first >= 0 && first <= elements && *span <= elements - first, where,
              ": a tensor of sizes ", describe_sizes(stored.sizes), " and strides ", describe_sizes(stored.strides),
              " does not fit its ", bytes.length, " bytes of data");
  stored.data_offset = bytes.offset + first * element_bytes;
  return stored;
}

StoredTensor find_stored_tensor(const InputFile& file, FileRange range) {
  const TorchArchive archive(file, range);
  const auto root = read_root(archive);
  const auto stored = stored_tensor(archive, root);
  TORCH_CHECK(stored.has_value(), archive.where(), ": expected a plain tensor, found ", root.kind());
  return *stored;
}

at::Tensor read_rows(const InputFile& file, const StoredTensor& stored, int64_t begin, int64_t count) {
  const auto options = at::TensorOptions(stored.dtype);
  const auto element_bytes = static_cast<int64_t>(c10::elementSize(stored.dtype));
  auto sizes = stored.sizes;
  auto offset = stored.data_offset;
  if (!sizes.empty()) {
    TORCH_CHECK(begin >= 0 && count >= 0 && count <= sizes[0] - begin, "rows ", begin, " to ", begin + count,
                " of a tensor with ", sizes[0], " rows");
    sizes[0] = count;
    if (*checked_numel(sizes) == 0) return at::empty(sizes, options);
    offset += begin * stored.strides[0] * element_bytes;
  }
  const StoredTensor rows{stored.dtype, sizes, stored.strides, offset};
  if (rows.is_contiguous()) {
    auto tensor = at::empty(sizes, options);
    file.read_at(tensor.data_ptr(), static_cast<int64_t>(tensor.nbytes()), offset);
    return tensor;
  }
  auto elements = at::empty({*span_of(rows)}, options);
  file.read_at(elements.data_ptr(), static_cast<int64_t>(elements.nbytes()), offset);
  return elements.as_strided(sizes, stored.strides);
}

}  // namespace megashard
