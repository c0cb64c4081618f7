#include "framework/serving/message.h"

#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

#include <cmath>
#include <cstring>
#include <utility>
#include <vector>

#include "checkpoint/hugging_face/safetensors.h"
#include "framework/arguments/argument_value.h"

namespace megashard {

std::string Message::word(const std::string& name) const {
  const auto found = fields.find(name);
  return found == fields.end() ? "" : found->second;
}

double Message::number(const std::string& name, double otherwise) const {
  const auto found = fields.find(name);
  if (found == fields.end()) return otherwise;
  const auto value = parse_number(found->second);
  TORCH_CHECK_VALUE(value && std::isfinite(*value), "the field \"", name, "\" must be a number, got \"", found->second,
                    "\"");
  return *value;
}

at::Tensor Message::find(const std::string& name) const {
  const auto found = tensors.find(name);
  return found == tensors.end() ? at::Tensor() : found->second;
}

at::Tensor Message::column(const std::string& name, at::ScalarType dtype, int64_t size) const {
  const at::Tensor tensor = find(name);
  if (!tensor.defined()) return tensor;
  TORCH_CHECK_VALUE(tensor.scalar_type() == dtype && tensor.sizes() == at::IntArrayRef({size}), "the tensor \"", name,
                    "\" must be ", torch_dtype_name(dtype), " ", at::IntArrayRef({size}), ", got ",
                    torch_dtype_name(tensor.scalar_type()), " ", tensor.sizes());
  return tensor;
}

std::string encode_message(const Message& message) {
  std::vector<TensorInfo> infos;
  for (const auto& [name, tensor] : message.tensors)
    infos.push_back({name, tensor.scalar_type(), tensor.sizes().vec()});
  const auto layout = layout_safetensors("a message", std::move(infos), message.fields);
  std::string bytes = layout.head;
  for (const TensorInfo& info : layout.tensors) {
    const at::Tensor data = message.tensors.at(info.name).detach().cpu().contiguous();
    bytes.append(static_cast<const char*>(data.const_data_ptr()), static_cast<size_t>(tensor_bytes(info)));
  }
  return bytes;
}

Message decode_message(const std::string& bytes, const std::string& where) {
  auto content = parse_safetensors(bytes, where);
  Message message{.fields = std::move(content.metadata), .tensors = {}};
  for (size_t i = 0; i < content.tensors.size(); ++i) {
    const TensorInfo& info = content.tensors[i];
    const at::Tensor tensor = at::empty(info.sizes, at::TensorOptions(info.dtype));
    std::memcpy(tensor.mutable_data_ptr(), bytes.data() + content.offsets[i], static_cast<size_t>(tensor_bytes(info)));
    message.tensors.emplace(info.name, tensor);
  }
  return message;
}

}  // namespace megashard
