#include "models/moe/expert_streams.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <unordered_map>
#include <utility>
#include <vector>

#include "models/moe/stacked_experts.h"

namespace megashard {
namespace {

constexpr const char* kGateUp = ".experts.gate_up_proj";
constexpr const char* kDown = ".experts.down_proj";

/// A tensor of stacked experts, and the layer's other one.
struct Stack {
  std::string other;
  std::vector<int64_t> other_sizes{};
};

std::optional<Stack> stack_of(const std::string& key) {
  for (const auto& [mine, other] : {std::pair{kGateUp, kDown}, std::pair{kDown, kGateUp}}) {
    if (key.ends_with(mine)) return Stack{key.substr(0, key.size() - std::string(mine).size()) + other};
  }
  return std::nullopt;
}

/// Splits stacks into one tensor per expert.
class SplitExperts {
 public:
  explicit SplitExperts(TensorStream stream) : stream_(std::move(stream)) {
    std::unordered_map<std::string, std::vector<int64_t>> sizes;
    for (const auto& info : stream_.tensors) sizes[info.name] = info.sizes;
    for (const auto& info : stream_.tensors) {
      auto stack = stack_of(info.name);
      if (!stack || info.sizes.size() != 3) {
        tensors_.push_back(info);
        continue;
      }
      const auto other = sizes.find(stack->other);
      TORCH_CHECK(other != sizes.end(), stream_.where, " has ", info.name, ", but not ", stack->other,
                  ": the experts of a layer need both");
      stack->other_sizes = other->second;
      for (int64_t expert = 0; expert < info.sizes[0]; ++expert) add(info, *stack, expert);
    }
  }

  const std::vector<TensorInfo>& tensors() const { return tensors_; }
  const std::string& where() const { return stream_.where; }
  at::Tensor read(const std::string& key) {
    const auto found = pieces_.find(key);
    if (found == pieces_.end()) return stream_.read(key);
    const auto& piece = found->second;
    if (last_ != piece.source) {
      last_stack_ = stream_.read(piece.source);
      last_ = piece.source;
    }
    return piece.weight.view(last_stack_, piece.other_sizes).contiguous();
  }

 private:
  struct Piece {
    StackedWeight weight;
    std::string source;
    std::vector<int64_t> other_sizes;
  };

  void add(const TensorInfo& info, const Stack& stack, int64_t expert) {
    const bool down = info.name.ends_with(kDown);
    const auto list = info.name.substr(0, info.name.rfind('.'));
    for (const char* part : {"gate_proj", "up_proj", "down_proj"}) {
      if ((std::string(part) == "down_proj") != down) continue;
      const auto key = list + "." + std::to_string(expert) + "." + part + ".weight";
      Piece piece{*StackedWeight::of(key), info.name, stack.other_sizes};
      const auto shape = piece.weight.view(at::empty(info.sizes, at::kMeta), piece.other_sizes);
      tensors_.push_back({key, info.dtype, shape.sizes().vec()});
      pieces_.emplace(key, std::move(piece));
    }
  }

  TensorStream stream_;
  std::vector<TensorInfo> tensors_;
  std::unordered_map<std::string, Piece> pieces_;
  std::string last_;
  at::Tensor last_stack_;
};

/// Stacks the tensors of separate experts.
class StackExperts {
 public:
  explicit StackExperts(TensorStream stream) : stream_(std::move(stream)) {
    for (const auto& info : stream_.tensors) add(info);
    for (auto& info : tensors_) {
      const auto found = stacks_.find(info.name);
      if (found != stacks_.end()) info.sizes = sizes_of(info.name, found->second);
    }
  }

  const std::vector<TensorInfo>& tensors() const { return tensors_; }
  const std::string& where() const { return stream_.where; }
  at::Tensor read(const std::string& key) const {
    const auto found = stacks_.find(key);
    if (found == stacks_.end()) return stream_.read(key);
    const auto& stack = found->second;
    const bool down = key.ends_with(kDown);
    const auto rows = stack.sizes[0];
    const auto whole = at::empty({stack.experts, rows * (down ? 1 : 2), stack.sizes[1]}, stack.dtype);
    for (const auto& [weight, source] : stack.keys) {
      const int64_t begin = weight.part == StackedWeight::Part::kUp ? rows : 0;
      whole.select(0, weight.expert).narrow(0, begin, rows).copy_(stream_.read(source));
    }
    return stack.transposed ? whole.transpose(1, 2).contiguous() : whole;
  }

 private:
  struct Pieces {
    std::vector<std::pair<StackedWeight, std::string>> keys;
    std::vector<int64_t> sizes;  // of one
    at::ScalarType dtype = at::kFloat;
    int64_t experts = 0;
    bool transposed = false;
  };

  void add(const TensorInfo& info) {
    const auto weight = StackedWeight::of(info.name);
    if (!weight) {
      tensors_.push_back(info);
      return;
    }
    const auto [found, is_new] = stacks_.try_emplace(weight->source());
    auto& stack = found->second;
    if (is_new) {
      tensors_.push_back({weight->source(), info.dtype, {}});
      stack.sizes = info.sizes;
      stack.dtype = info.dtype;
    }
    TORCH_CHECK(info.sizes == stack.sizes && info.sizes.size() == 2, stream_.where, ": the experts of ",
                weight->source(), " differ in their sizes: ", info.sizes, " and ", stack.sizes);
    stack.experts = std::max(stack.experts, weight->expert + 1);
    stack.keys.emplace_back(*weight, info.name);
  }

  std::vector<int64_t> sizes_of(const std::string& key, Pieces& stack) const {
    const bool down = key.ends_with(kDown);
    const int64_t rows = stack.sizes[0] * (down ? 1 : 2), columns = stack.sizes[1];
    TORCH_CHECK(static_cast<int64_t>(stack.keys.size()) == stack.experts * (down ? 1 : 2), stream_.where,
                " does not have every part of the ", stack.experts, " experts of ", key);
    stack.transposed = down ? stacks_transposed(rows, columns) : stacks_transposed(columns, stack.sizes[0]);
    if (stack.transposed) return {stack.experts, columns, rows};
    return {stack.experts, rows, columns};
  }

  TensorStream stream_;
  std::vector<TensorInfo> tensors_;
  std::unordered_map<std::string, Pieces> stacks_;
};

template <class Experts>
TensorStream stream_of(TensorStream stream) {
  const auto experts = std::make_shared<Experts>(std::move(stream));
  return {.tensors = experts->tensors(),
          .read = [experts](const std::string& key) { return experts->read(key); },
          .where = experts->where()};
}

}  // namespace

StreamChange to_parameter_experts(WeightFiles::Experts published) {
  if (published == WeightFiles::Experts::kNone) return {};
  return stream_of<SplitExperts>;
}

StreamChange to_published_experts(WeightFiles::Experts published) {
  if (published != WeightFiles::Experts::kStacked) return {};
  return stream_of<StackExperts>;
}

}  // namespace megashard
