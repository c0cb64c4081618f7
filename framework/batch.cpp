#include "framework/batch.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/tensor.h>

#include <algorithm>
#include <set>
#include <utility>

#include "parallel/copies/on_device.h"

namespace megashard {
namespace {

at::Tensor padded(const at::Tensor& tokens, int64_t length) {
  const int64_t missing = length - tokens.size(-1);
  return missing == 0 ? tokens : at::constant_pad_nd(tokens, {0, missing});
}

/// The padding of a row is a document of its own.
at::Tensor joined_documents(const std::vector<Batch>& parts, int64_t length) {
  std::vector<int64_t> lengths;
  for (const Batch& part : parts) {
    TORCH_CHECK(part.document_lengths.defined(), "only some of the samples of a batch are cut into documents");
    const int64_t of_row = part.length();
    const auto* document = part.document_lengths.const_data_ptr<int64_t>();
    int64_t in_row = 0;
    for (const auto* end = document + part.document_lengths.size(0); document != end; ++document) {
      lengths.push_back(*document);
      in_row += *document;
      if (in_row < of_row) continue;
      if (of_row < length) lengths.push_back(length - of_row);
      in_row = 0;
    }
  }
  return at::tensor(lengths, at::device(at::kCPU).dtype(at::kLong));
}

}  // namespace

at::Tensor Batch::find(std::string_view name) const {
  const auto found = columns.find(name);
  return found == columns.end() ? at::Tensor() : found->second.data;
}

const at::Tensor& Batch::at(std::string_view name) const {
  const auto found = columns.find(name);
  TORCH_CHECK(found != columns.end(), "the batch has no column \"", name, "\"; its data set must make it");
  return found->second.data;
}

const at::Tensor& Batch::per_token() const {
  for (const char* name : {kLatents, kTokens}) {
    if (columns.contains(name)) return at(name);
  }
  return at(kLossMask);
}

void Batch::set(const std::string& name, at::Tensor data, Axis axis, bool is_input) {
  if (data.defined()) columns[name] = {.data = std::move(data), .axis = axis, .is_input = is_input};
}

at::Tensor Batch::take(std::string_view name) {
  const auto found = columns.find(name);
  if (found == columns.end()) return {};
  at::Tensor data = std::move(found->second.data);
  columns.erase(found);
  return data;
}

Batch concatenate(std::vector<Batch> parts, bool pin_memory) {
  int64_t length = 0;
  for (const Batch& part : parts) length = std::max(length, part.length());
  const bool has_padding = std::ranges::any_of(
      parts, [&](const Batch& part) { return part.token_mask().defined() || part.length() < length; });
  std::set<std::string> names;
  for (Batch& part : parts) {
    if (has_padding && !part.token_mask().defined())
      part.set(kTokenMask, at::ones({part.rows(), part.length()}, at::kBool));
    for (const auto& [name, column] : part.columns) names.insert(name);
  }
  Batch all;
  for (const std::string& name : names) {
    std::vector<at::Tensor> tensors;
    Column whole;
    for (const Batch& part : parts) {
      const auto found = part.columns.find(name);
      if (found == part.columns.end()) continue;
      whole = found->second;
      tensors.push_back(whole.axis == Axis::kToken ? padded(whole.data, length) : whole.data);
    }
    TORCH_CHECK(whole.axis == Axis::kItem || tensors.size() == parts.size(),
                "only some of the samples of a batch have ", "the column \"", name,
                "\": give it in all data sets, or in none");
    const bool pins = whole.axis == Axis::kItem ? whole.data.is_pinned() : pin_memory;
    whole.data = cat_parts(tensors, whole.axis == Axis::kToken ? -2 : 0, pins);
    all.columns[name] = std::move(whole);
  }
  if (parts.front().document_lengths.defined()) all.document_lengths = joined_documents(parts, length);
  return all;
}

Batch to_device(Batch batch, c10::Device device) {
  for (auto& [name, column] : batch.columns) column.data = on_device(column.data, device);
  return batch;
}

Batch rows_of_rank(Batch whole) {
  for (auto& [name, column] : whole.columns) {
    if (column.axis == Axis::kToken) column.data = whole.sequence.rows_of(column.data, -1);
  }
  return whole;
}

at::Tensor cat_parts(const std::vector<at::Tensor>& parts, int64_t dim, bool pin_memory) {
  if (!pin_memory) return at::cat(parts, dim);
  auto sizes = parts.front().sizes().vec();
  int64_t& size = sizes[static_cast<size_t>(dim < 0 ? dim + parts.front().dim() : dim)];
  size = 0;
  for (const at::Tensor& part : parts) size += part.size(dim);
  at::Tensor all = at::empty(sizes, parts.front().options().pinned_memory(true));
  return at::cat_out(all, parts, dim);
}

}  // namespace megashard
