#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string>
#include <vector>

#include "checkpoint/values/torch_archive.h"
#include "checkpoint/values/value.h"

namespace megashard {

/// Small tensors inside plain values, as the random number states and the optimizer's step are in
/// Megatron's checkpoints. The tensor is the record that torch.save makes of it; its storage, an
/// Object of kind kPersId, has the bytes as its state, so that a value is whole on its own.

/// Sizes and strides as records hold them: torch.Size, a tuple or a list.
std::vector<int64_t> ints_of(const Value& value);
/// The record of a contiguous CPU tensor, with its bytes.
Value tensor_value(const at::Tensor& tensor);
/// The tensor of such a record, a copy; nothing for other values, for records without bytes, and
/// for tensors that are a part of their storage.
std::optional<at::Tensor> tensor_in(const Value& value);
/// What random number states are kept as: the bytes of a Bytes or of such a uint8 tensor.
std::optional<std::string> bytes_in(const Value& value);

/// The value with the bytes of its storages from the archive, 64 MiB in all at most: storages
/// beyond that stay without.
Value with_storages(const TorchArchive& archive, Value root);

/// The value with its storages on the CPU and numbered from 0, as one archive keeps them, and their
/// bytes.
struct NumberedStorages {
  Value root;
  std::vector<std::string> bytes;
};
NumberedStorages number_storages(const Value& value);

/// A value on its way from one torch archive to another: each storage that its records name (entry
/// data/NAME), once, and the value naming them by numbers instead, on the CPU.
struct RenamedStorages {
  Value value;
  std::vector<std::string> names;  ///< in the old archive; number first + i stands for names[i]
};
RenamedStorages rename_storages(const Value& value, size_t first);

}  // namespace megashard
