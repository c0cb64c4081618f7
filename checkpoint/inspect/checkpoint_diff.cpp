#include "checkpoint/inspect/checkpoint_diff.h"

#include <ATen/ops/abs.h>
#include <ATen/ops/all.h>
#include <ATen/ops/any.h>
#include <ATen/ops/isnan.h>
#include <ATen/ops/logical_and.h>
#include <ATen/ops/max.h>
#include <ATen/ops/ne.h>
#include <ATen/ops/sub.h>
#include <ATen/ops/sum.h>
#include <ATen/ops/where.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <map>

#include "checkpoint/values/pickle_writer.h"
#include "checkpoint/values/value_text.h"

namespace megashard {
namespace {

constexpr int64_t kDiffBytesAtOnce = 32 << 20;
constexpr size_t kMaxText = 60;

using Wanted = std::function<bool(const std::string&)>;

std::string kind_of(const TensorInfo& info) { return torch_dtype_name(info.dtype) + describe_sizes(info.sizes); }

/// Converts to a dtype in which differences can be computed.
at::Tensor widened(const at::Tensor& tensor) {
  return tensor.to(at::isComplexType(tensor.scalar_type()) ? at::kComplexDouble : at::kDouble);
}

/// Mask of differing elements; compares bits if the dtypes are equal.
at::Tensor differing(const at::Tensor& a, const at::Tensor& b, const at::Tensor& wide_a, const at::Tensor& wide_b) {
  if (a.scalar_type() != b.scalar_type()) {
    return at::logical_and(at::ne(wide_a, wide_b), at::logical_and(at::isnan(wide_a), at::isnan(wide_b)).logical_not());
  }
  const auto bytes = [](const at::Tensor& tensor) {
    return tensor.view({-1}).view(at::kByte).view({tensor.numel(), -1});
  };
  return at::any(at::ne(bytes(a), bytes(b)), 1);
}

void compare_rows(const at::Tensor& rows_a, const at::Tensor& rows_b, TensorDifference& into) {
  const auto a = rows_a.contiguous();
  const auto b = rows_b.contiguous();
  if (a.numel() == 0) return;
  const bool same_kind = a.scalar_type() == b.scalar_type();
  if (same_kind && std::memcmp(a.const_data_ptr(), b.const_data_ptr(), a.nbytes()) == 0) return;
  const auto wide_a = widened(a).view({-1});
  const auto wide_b = widened(b).view({-1});
  into.differing += differing(a, b, wide_a, wide_b).sum().item<int64_t>();
  const auto nan_a = at::isnan(wide_a);
  const auto nan_b = at::isnan(wide_b);
  if (at::any(at::ne(nan_a, nan_b)).item<bool>()) {
    into.largest = std::numeric_limits<double>::quiet_NaN();
    return;
  }
  // Equal infinities and NaN on both sides have distance 0.
  const auto distance = at::abs(at::sub(wide_a, wide_b));
  const auto largest = at::where(at::isnan(distance), 0.0, distance).max().item<double>();
  if (!std::isnan(into.largest)) into.largest = std::max(into.largest, largest);
}

TensorDifference compare(CheckpointReader& a, const TensorInfo& info_a, CheckpointReader& b, const TensorInfo& info_b) {
  TensorDifference difference{info_a.name, kind_of(info_a), kind_of(info_b), 0, 0};
  if (info_a.sizes != info_b.sizes) return difference;
  const auto rows = info_a.sizes.empty() ? 1 : info_a.sizes[0];
  const auto row_bytes = std::max(tensor_bytes(info_a), tensor_bytes(info_b)) / std::max<int64_t>(rows, 1);
  const auto step = std::max<int64_t>(1, kDiffBytesAtOnce / std::max<int64_t>(row_bytes, 1));
  for (int64_t row = 0; row < rows; row += step) {
    const auto count = std::min(step, rows - row);
    compare_rows(a.read_rows(info_a.name, row, count), b.read_rows(info_b.name, row, count), difference);
  }
  return difference;
}

using Infos = std::map<std::string, const TensorInfo*>;

Infos tensors_of(const CheckpointReader& reader, const Wanted& wanted) {
  Infos infos;
  for (const auto& info : reader.tensors()) {
    if (!wanted || wanted(info.name)) infos.emplace(info.name, &info);
  }
  return infos;
}

std::map<std::string, Value> values_of(CheckpointReader& reader, const Wanted& wanted) {
  std::map<std::string, Value> values;
  for (const auto& [key, path] : reader.value_keys()) {
    if (reader.find(key) != nullptr || (wanted && !wanted(key))) continue;
    auto value = reader.read_value(key);
    const auto* fields = namespace_fields(value);
    if (fields == nullptr) {
      values.emplace(key, std::move(value));
      continue;
    }
    for (const auto& [name, field] : fields->entries) {
      const auto* text = name.get_if<std::string>();
      values.emplace(key + "." + (text != nullptr ? *text : value_text(name)), field);
    }
  }
  return values;
}

/// Merges two sorted maps: calls a function for each key in one or both.
template <class Map>
void walk(const Map& a, const Map& b, const std::function<void(typename Map::const_reference)>& only_a,
          const std::function<void(typename Map::const_reference)>& only_b,
          const std::function<void(typename Map::const_reference, typename Map::const_reference)>& both) {
  auto in_a = a.begin();
  auto in_b = b.begin();
  while (in_a != a.end() || in_b != b.end()) {
    if (in_b == b.end() || (in_a != a.end() && in_a->first < in_b->first)) {
      only_a(*in_a++);
    } else if (in_a == a.end() || in_b->first < in_a->first) {
      only_b(*in_b++);
    } else {
      both(*in_a++, *in_b++);
    }
  }
}

}  // namespace

CheckpointDifference diff_checkpoints(CheckpointReader& a, CheckpointReader& b, const Wanted& wanted) {
  CheckpointDifference difference;
  walk<Infos>(
      tensors_of(a, wanted), tensors_of(b, wanted),
      [&](const auto& one) {
        difference.tensors.push_back({one.first, kind_of(*one.second), "", 0, 0});
      },
      [&](const auto& one) {
        difference.tensors.push_back({one.first, "", kind_of(*one.second), 0, 0});
      },
      [&](const auto& one, const auto& other) {
        auto compared = compare(a, *one.second, b, *other.second);
        if (compared.a == compared.b && compared.differing == 0) {
          ++difference.equal_tensors;
        } else {
          difference.tensors.push_back(std::move(compared));
        }
      });
  const auto text = [](const Value& value) { return value_text(value, kMaxText); };
  walk<std::map<std::string, Value>>(
      values_of(a, wanted), values_of(b, wanted),
      [&](const auto& one) {
        difference.values.push_back({one.first, text(one.second), ""});
      },
      [&](const auto& one) {
        difference.values.push_back({one.first, "", text(one.second)});
      },
      [&](const auto& one, const auto& other) {
        // compared as bytes, so that NaN equals itself
        if (write_pickle(one.second) == write_pickle(other.second)) {
          ++difference.equal_values;
        } else {
          difference.values.push_back({one.first, text(one.second), text(other.second)});
        }
      });
  return difference;
}

}  // namespace megashard
