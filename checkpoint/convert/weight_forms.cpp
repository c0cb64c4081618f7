#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <iterator>
#include <memory>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "checkpoint/convert/tensor_stream.h"
#include "checkpoint/values/state_dict_keys.h"

namespace megashard {
namespace {

/// A stream whose groups of weights change their form.
class FormChange {
 public:
  FormChange(TensorStream stream, const WeightMap& map, bool publishes) : from_(std::move(stream)) {
    for (const auto& info : from_.tensors) infos_.emplace(info.name, &info);
    for (const auto& group : map.groups) add(group, publishes);
    for (const auto& info : from_.tensors) {
      const auto found = replaced_.find(info.name);
      if (found == replaced_.end()) {
        tensors_.push_back(info);
      } else {
        std::ranges::move(found->second, std::back_inserter(tensors_));
        found->second.clear();  // written once, in the place of the group's first tensor
      }
    }
  }

  static TensorStream changed(const std::shared_ptr<FormChange>& change) {
    return {.tensors = change->tensors_,
            .read = [change](const std::string& key) { return change->read(key); },
            .where = change->from_.where};
  }

 private:
  /// A tensor of the model, or of files, that is made of others.
  struct Made {
    const WeightGroup* group;
    const StoredForm* from;  // in which files have the model's tensor; null: as it is
    const StoredForm* to;    // null: the model's
    TensorInfo info;
  };

  const std::vector<int64_t>* sizes(const std::string& name) const {
    const auto found = infos_.find(model_key(name));
    return found == infos_.end() ? nullptr : &found->second->sizes;
  }

  void add(const WeightGroup& given, bool publishes) {
    const auto* group = groups_.emplace_back(std::make_unique<WeightGroup>(given)).get();
    const auto is_there = [&](const WeightGroup::Member& each) {
      const auto* there = sizes(each.name);
      return there != nullptr && *there == each.sizes;
    };
    const bool is_model = std::ranges::all_of(group->tensors, is_there);
    const auto* from = is_model ? nullptr : fitting_form(*group, [&](const std::string& name) { return sizes(name); });
    const auto* to = publishes ? &group->forms.front() : nullptr;
    if (from == to || (from == nullptr && !is_model)) return;

    std::unordered_set<std::string> sources;
    for (const auto& each : group->tensors) {
      if (is_model) sources.insert(model_key(each.name));
    }
    if (!is_model) {
      for (const auto& part : from->parts) sources.insert(model_key(part.stored));
    }
    auto dtype = infos_.at(*sources.begin())->dtype;
    for (const auto& key : sources) dtype = c10::promoteTypes(dtype, infos_.at(key)->dtype);
    std::vector<TensorInfo> results;
    const auto make = [&](const std::string& name, const std::vector<int64_t>& sizes) {
      const TensorInfo info{model_key(name), dtype, sizes};
      if (made_.emplace(info.name, Made{group, from, to, info}).second) results.push_back(info);
    };
    if (to == nullptr) {
      for (const auto& each : group->tensors) make(each.name, each.sizes);
    } else {
      for (const auto& part : to->parts) make(part.stored, part.stored_sizes);
    }
    const auto first =
        std::ranges::find_if(from_.tensors, [&](const TensorInfo& info) { return sources.contains(info.name); });
    for (const auto& key : sources) replaced_[key];
    replaced_[first->name] = std::move(results);
  }

  at::Tensor read(const std::string& key) {
    const at::NoGradGuard no_grad;
    const auto found = made_.find(key);
    if (found == made_.end()) return from_.read(key);
    const auto& made = found->second;
    const auto name = key.substr(kModelPrefix.size());
    if (made.to == nullptr) return of_model(made, name);
    at::Tensor whole;
    for (const auto& part : made.to->parts) {
      if (part.stored != name) continue;
      const auto tensor = kept(made, part.tensor);
      const auto pieces = stored_pieces({"", {part}}, part.tensor, ShardedTensor::replicated(tensor));
      const auto& first = pieces.front().second.local;
      if (first.sizes() == at::IntArrayRef(made.info.sizes)) return first.contiguous();
      if (!whole.defined()) whole = at::empty(made.info.sizes, tensor.options());
      for (const auto& [stored, piece] : pieces) place_of(piece, whole).copy_(piece.local);
    }
    return whole;
  }

  static at::Tensor place_of(const ShardedTensor& piece, at::Tensor whole) {
    for (int64_t dim = 0; dim < whole.dim(); ++dim)
      whole = whole.narrow(dim, piece.offsets[static_cast<size_t>(dim)], piece.local.size(dim));
    return whole;
  }

  at::Tensor of_model(const Made& made, const std::string& name) {
    if (made.from == nullptr) return from_.read(model_key(name)).to(made.info.dtype);
    const auto& tensors = made.group->tensors;
    const auto member = std::ranges::find(tensors, name, &WeightGroup::Member::name);
    const auto options = at::TensorOptions(made.info.dtype).device(at::kCPU);
    auto whole = ShardedTensor::replicated(at::empty(member->sizes, options));
    for (const auto& part : made.from->parts) {
      if (part.tensor == name) read_part(part, from_.read(model_key(part.stored)), whole);
    }
    return std::move(whole.local);
  }

  /// Keeps the tensors of the last group, which its stored ones are cut from.
  at::Tensor kept(const Made& made, const std::string& name) {
    if (last_group_ != made.group) last_.clear();
    last_group_ = made.group;
    auto& tensor = last_[name];
    if (!tensor.defined()) tensor = of_model(made, name);
    return tensor;
  }

  TensorStream from_;
  std::unordered_map<std::string, const TensorInfo*> infos_;
  std::vector<std::unique_ptr<WeightGroup>> groups_;
  std::unordered_map<std::string, Made> made_;  // by key
  std::unordered_map<std::string, std::vector<TensorInfo>> replaced_;
  std::vector<TensorInfo> tensors_;
  const WeightGroup* last_group_ = nullptr;
  std::unordered_map<std::string, at::Tensor> last_;
};

}  // namespace

TensorStream as_model(TensorStream stream, const WeightMap& map) {
  return FormChange::changed(std::make_shared<FormChange>(std::move(stream), map, /*publishes=*/false));
}

TensorStream as_published(TensorStream stream, const WeightMap& map) {
  return FormChange::changed(std::make_shared<FormChange>(std::move(stream), map, /*publishes=*/true));
}

}  // namespace megashard
