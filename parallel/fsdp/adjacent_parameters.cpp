#include "parallel/fsdp/adjacent_parameters.h"

#include <atomic>

#include "parallel/device/storage.h"
#include "parallel/fsdp/detail/unsharded_storage.h"
#include "parallel/guarded_tensor.h"

namespace megashard {

void keep_adjacent(at::TensorList weights) {
  static std::atomic<int64_t> sets{0};
  const int64_t set = ++sets;
  for (size_t i = 0; i < weights.size(); ++i) {
    const bool alike = weights[i].dim() == 2 && weights[i].size(1) == weights[0].size(1);
    TORCH_CHECK(alike, "keep_adjacent: weights of sizes ", weights[0].sizes(), " and ", weights[i].sizes(),
                " are not multiplied by one input: give matrices [out, in] of one width");
    ParameterRecords::all().change(weights[i], [&](ParameterRecord& record) {
      record.adjacent = {.set = set, .index = i, .count = weights.size()};
    });
  }
}

at::Tensor adjacent_matrix(at::TensorList weights) {
  const at::Tensor& first = weights[0];
  int64_t rows = first.size(0);
  const auto* memory = UnshardedStorage::adjacent_memory(first);
  if (memory == nullptr) return {};
  const char* end = static_cast<const char*>(first.const_data_ptr()) + first.nbytes();
  for (const auto& weight : weights.slice(1)) {
    if (UnshardedStorage::adjacent_memory(weight) != memory || weight.const_data_ptr() != end) return {};
    rows += weight.size(0);
    end += weight.nbytes();
  }
  const auto bytes = static_cast<size_t>(end - static_cast<const char*>(first.const_data_ptr()));
  const c10::Storage whole(c10::Storage::use_byte_size_t(), bytes,
                           c10::DataPtr(first.mutable_data_ptr(), first.device()));
  return tensor_over(whole, first.scalar_type(), {rows, first.size(1)});
}

}  // namespace megashard
