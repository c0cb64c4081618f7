#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/StorageImpl.h>

#include <string>

namespace megashard {

/// Sets the error for access while a storage has no memory; it names the tensor and the remedy. Memory may be removed
/// and put back while the storage, and with it every tensor over it (a parameter, its views, tensors saved by
/// autograd), stays.
void set_missing_message(c10::StorageImpl& storage, std::string message);
/// Removes the memory; destroying the result frees it.
c10::DataPtr take_memory(c10::StorageImpl& storage);
/// Puts memory of the storage's size into the storage.
void give_memory(c10::StorageImpl& storage, c10::DataPtr memory);

// Views without the cost of dispatched operators, and without autograd.

/// A contiguous tensor over a storage, starting at element `offset`.
at::Tensor tensor_over(const c10::Storage& storage, c10::DispatchKeySet keys, at::ScalarType dtype,
                       at::IntArrayRef sizes, int64_t offset = 0);
/// The same with the dispatch keys of a plain tensor on the storage's device.
at::Tensor tensor_over(const c10::Storage& storage, at::ScalarType dtype, at::IntArrayRef sizes);
/// All of a storage as a 1-D uint8 tensor.
at::Tensor bytes_of(const c10::Storage& storage);
/// A contiguous view of a 1-D buffer, starting at element `offset`, in the buffer's dtype.
at::Tensor flat_view(const at::Tensor& buffer, at::IntArrayRef sizes, int64_t offset);
/// The same for a byte buffer, in another dtype; `byte_offset` is a multiple of the element size.
at::Tensor typed_view(const at::Tensor& bytes, at::ScalarType dtype, at::IntArrayRef sizes, int64_t byte_offset);
/// Strided view [rows, numel]: row i starts `row_stride` elements after row i - 1.
at::Tensor typed_rows(const at::Tensor& bytes, at::ScalarType dtype, int64_t rows, int64_t numel, int64_t row_stride,
                      int64_t byte_offset);

}  // namespace megashard
