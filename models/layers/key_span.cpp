#include "models/layers/key_span.h"

#include <ATen/ops/empty.h>

#include <algorithm>

#include "parallel/copies/on_device.h"

namespace megashard {
namespace {

at::Tensor ends_of(const std::vector<int64_t>& lengths) {
  const at::Tensor ends = at::empty({std::ssize(lengths) + 1}, at::TensorOptions(at::kInt).device(at::kCPU));
  auto* end = ends.mutable_data_ptr<int32_t>();
  *end = 0;
  for (const int64_t length : lengths) {
    end[1] = end[0] + static_cast<int32_t>(length);
    ++end;
  }
  return ends;
}

at::Tensor begins_of(const std::vector<int64_t>& lengths, int64_t rows, int64_t row_length) {
  const at::Tensor begins = at::empty({rows, row_length}, at::TensorOptions(at::kLong).device(at::kCPU));
  auto* begin = begins.mutable_data_ptr<int64_t>();
  int64_t token = 0;
  for (const int64_t length : lengths) {
    std::fill_n(begin + token, length, token % row_length);
    token += length;
  }
  return begins;
}

}  // namespace

std::shared_ptr<const Documents> Documents::of(const at::Tensor& lengths, int64_t rows, int64_t length, bool in_ring,
                                               c10::Device device) {
  if (!lengths.defined()) return nullptr;
  TORCH_CHECK(lengths.is_cpu() && lengths.dim() == 1 && lengths.scalar_type() == at::kLong,
              "document_lengths must be int64 of one dimension in host memory, got ", lengths.scalar_type(), " ",
              lengths.sizes(), " on ", lengths.device());
  const auto dense = lengths.contiguous();
  const auto* first = dense.const_data_ptr<int64_t>();
  auto documents = std::make_shared<Documents>();
  documents->lengths.assign(first, first + dense.numel());
  int64_t tokens = 0;
  for (const int64_t each : documents->lengths) {
    TORCH_CHECK(each > 0 && tokens % length + each <= length, "document_lengths ", documents->lengths,
                " are not those of rows of ", length, " tokens: a document ends with its row");
    tokens += each;
    documents->longest = std::max(documents->longest, each);
  }
  TORCH_CHECK(tokens == rows * length, "document_lengths are of ", tokens, " tokens, but there are ", rows, " rows of ",
              length);
  if (in_ring || device.is_cpu()) {
    documents->begins = on_device(begins_of(documents->lengths, rows, length), device);
  } else {
    documents->ends = on_device(ends_of(documents->lengths), device);
  }
  return documents;
}

}  // namespace megashard
