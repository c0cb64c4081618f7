#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string>
#include <vector>

#include "checkpoint/values/torch_archive.h"
#include "checkpoint/values/value.h"

namespace megashard {

/// Small tensors inside plain values, such as random number states and the optimizer's step in Megatron's checkpoints.
/// The tensor is a record as written by torch.save; its storage, an Object of kind kPersId, holds the bytes as its
/// state, so that the value is self-contained.

/// Sizes or strides of a record: torch.Size, a tuple or a list.
std::vector<int64_t> ints_of(const Value& value);
/// The record of a contiguous CPU tensor, with its bytes.
Value tensor_value(const at::Tensor& tensor);
/// A copy of the tensor in such a record; nullopt for other values, for records without bytes, and for tensors that are
/// only a part of their storage.
std::optional<at::Tensor> tensor_in(const Value& value);
/// The bytes of a random number state: a Bytes value or such a uint8 tensor.
std::optional<std::string> bytes_in(const Value& value);

/// Adds the bytes of storages from the archive, at most 64 MiB in total; further storages stay without bytes.
Value with_storages(const TorchArchive& archive, Value root);

/// A value with its storages moved to the CPU and numbered from 0, as in one archive, and their bytes.
struct NumberedStorages {
  Value root;
  std::vector<std::string> bytes;
};
NumberedStorages number_storages(const Value& value);

/// A value being moved between torch archives: its storages (entries data/NAME), each once, are on the CPU and named by
/// numbers.
struct RenamedStorages {
  Value value;
  std::vector<std::string> names;  ///< names in the old archive; number first + i stands for names[i]
};
RenamedStorages rename_storages(const Value& value, size_t first);

}  // namespace megashard
