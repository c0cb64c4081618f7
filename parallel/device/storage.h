#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/StorageImpl.h>

#include <string>

namespace megashard {

/// The memory under a storage may come and go while the storage stays, and with it every tensor over it: a parameter,
/// its views, what autograd saved. While the memory is gone, reads and writes throw this message, which names what was
/// read and what to do.
void set_missing_message(c10::StorageImpl& storage, std::string message);
/// Takes the memory out; dropping it gives it back to its allocator.
c10::DataPtr take_memory(c10::StorageImpl& storage);
/// Puts memory of the storage's size under it.
void give_memory(c10::StorageImpl& storage, c10::DataPtr memory);

// Views without the cost of dispatched operators, and without autograd.

/// A contiguous tensor over a storage, from element `offset` on.
at::Tensor tensor_over(const c10::Storage& storage, c10::DispatchKeySet keys, at::ScalarType dtype,
                       at::IntArrayRef sizes, int64_t offset = 0);
/// The same in the keys of a plain tensor of the storage's device.
at::Tensor tensor_over(const c10::Storage& storage, at::ScalarType dtype, at::IntArrayRef sizes);
/// All of a storage as a 1-D uint8 tensor.
at::Tensor bytes_of(const c10::Storage& storage);
/// A contiguous view of a 1-D buffer from element `offset` on, in the buffer's dtype.
at::Tensor flat_view(const at::Tensor& buffer, at::IntArrayRef sizes, int64_t offset);
/// The same of a buffer of bytes, in another dtype; `byte_offset` is a multiple of the element size.
at::Tensor typed_view(const at::Tensor& bytes, at::ScalarType dtype, at::IntArrayRef sizes, int64_t byte_offset);
/// Row i starts `row_stride` elements after row i - 1: sizes [rows, numel].
at::Tensor typed_rows(const at::Tensor& bytes, at::ScalarType dtype, int64_t rows, int64_t numel, int64_t row_stride,
                      int64_t byte_offset);

}  // namespace megashard
