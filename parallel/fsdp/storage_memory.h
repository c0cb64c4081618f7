#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/StorageImpl.h>

#include <string>

namespace megashard {

/// The memory under a storage may come and go while the storage stays, and with it every tensor
/// over it: a parameter, its views, what autograd saved. While it is gone, reads and writes throw
/// the storage's sentence.

/// What is thrown while the memory is gone; it names what was read and what to do.
void set_gone_sentence(c10::StorageImpl& storage, std::string sentence);
/// Takes the memory out; dropping it gives it back to its allocator.
c10::DataPtr take_memory(c10::StorageImpl& storage);
/// Puts memory of the storage's size under it.
void give_memory(c10::StorageImpl& storage, c10::DataPtr memory);
/// All of a storage as a 1-D uint8 tensor over it.
at::Tensor bytes_of(const c10::Storage& storage);

}  // namespace megashard
