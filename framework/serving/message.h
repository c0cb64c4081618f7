#pragma once

#include <ATen/core/Tensor.h>

#include <map>
#include <string>

namespace megashard {

/// A request to `megashard serve` or its reply, in the form of docs/serving_losses.md: words and tensors by their
/// names. Tensors are on the CPU.
struct Message {
  std::map<std::string, std::string> fields{};
  std::map<std::string, at::Tensor> tensors{};

  /// The field's word; "" if there is none.
  std::string word(const std::string& name) const;
  /// True if the field is "true".
  bool is_set(const std::string& name) const { return word(name) == "true"; }
  /// The field's number; `otherwise` if there is none. Throws c10::ValueError for a word that is no number.
  double number(const std::string& name, double otherwise) const;
  /// The tensor; undefined if there is none.
  at::Tensor find(const std::string& name) const;
  /// One dimension of `dtype`, or undefined if there is none. Throws c10::ValueError for another dtype, and for another
  /// size than `size`.
  at::Tensor column(const std::string& name, at::ScalarType dtype, int64_t size) const;
};

/// The message as the bytes of a safetensors file, with the fields as its metadata.
std::string encode_message(const Message& message);
/// Reads such bytes. Throws an error with `where` if they are none.
Message decode_message(const std::string& bytes, const std::string& where);

}  // namespace megashard
