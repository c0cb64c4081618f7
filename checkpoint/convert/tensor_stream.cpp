#include "checkpoint/convert/tensor_stream.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <iterator>
#include <map>
#include <set>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "checkpoint/values/state_dict_keys.h"

namespace megashard {
namespace {

using Names = std::vector<std::string>;

/// Parts of a key around the weight's name, for one kind of tensors.
struct KeyFamily {
  std::string buffer;  // optimizer buffer; empty: the weights themselves
  std::string key(const std::string& name) const {
    return is_model() ? model_key(name) : optimizer_state_key(name, buffer);
  }
  bool is_model() const { return buffer.empty(); }
};

/// One family for the weights, then one per optimizer buffer.
std::vector<KeyFamily> families_of(const std::vector<TensorInfo>& tensors) {
  std::set<std::string> buffers;
  for (const auto& info : tensors) {
    if (auto parts = split_optimizer_state_key(info.name)) buffers.insert(std::move(parts->buffer));
  }
  std::vector<KeyFamily> families(1);
  for (const auto& buffer : buffers) families.push_back({buffer});
  return families;
}

Names stored_names(const StoredForm& form) {
  Names names;
  for (const auto& part : form.parts) {
    if (std::ranges::count(names, part.stored) == 0) names.push_back(part.stored);
  }
  return names;
}

Names model_names(const WeightGroup& group) {
  Names names;
  for (const auto& each : group.tensors) names.push_back(each.name);
  return names;
}

enum class Target { kModel, kPublished };
/// Tensors that the map must have.
enum class Coverage { kSome, kAll };

/// A stream whose groups of weights change their form.
class FormChange {
 public:
  FormChange(TensorStream stream, const WeightMap& map, Target target, Coverage coverage)
      : from_(std::move(stream)), target_(target), coverage_(coverage) {
    for (const auto& info : from_.tensors) infos_.emplace(info.name, &info);
    for (const auto& group : map.groups) groups_.push_back(std::make_unique<WeightGroup>(group));
    for (const auto& family : families_of(from_.tensors)) {
      for (const auto& group : groups_) add(family, *group);
    }
    if (coverage_ == Coverage::kAll) {
      check_coverage();
      return;
    }
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
    KeyFamily family;
    const WeightGroup* group;
    const StoredForm* from;  // in which the stream has the model's tensor; null: as it is
    const StoredForm* to;    // null: the model's
    std::string name;
    TensorInfo info;
    std::string scalar{};  // source of an optimizer's step; empty: a tensor of the weight's sizes
  };

  const TensorInfo* info(const KeyFamily& family, const std::string& name) const {
    const auto found = infos_.find(family.key(name));
    return found == infos_.end() ? nullptr : found->second;
  }

  /// True if the stream has all tensors of the group in this form (null: the model's); at least one exists.
  bool has_form(const KeyFamily& family, const WeightGroup& group, const StoredForm* form) const {
    const auto is_there = [&](const std::string& name, const auto& fits) {
      const auto* there = info(family, name);
      return there != nullptr && ((there->sizes.empty() && !family.is_model()) || fits(there->sizes));
    };
    if (form == nullptr) {
      return std::ranges::all_of(group.tensors, [&](const WeightGroup::Member& each) {
        return is_there(each.name, [&](const auto& sizes) { return sizes == each.sizes; });
      });
    }
    return std::ranges::all_of(form->parts, [&](const WeightPart& part) {
      return is_there(part.stored, [&](const auto& sizes) { return is_stored_with(part, sizes); });
    });
  }

  void add(const KeyFamily& family, const WeightGroup& group) {
    const auto* published = &group.forms.front();
    const auto* to = target_ == Target::kPublished ? published : nullptr;
    const StoredForm* from = nullptr;
    if (coverage_ == Coverage::kAll) {
      from = to == nullptr ? published : nullptr;
      if (!need(family, group, from)) return;
    } else if (!has_form(family, group, nullptr)) {
      const auto fits = [&](const StoredForm& form) { return has_form(family, group, &form); };
      const auto found = std::ranges::find_if(group.forms, fits);
      if (found == group.forms.end()) return;
      from = &*found;
    }
    if (from == to) return;
    make(family, group, from, to);
  }

  /// Checks that the stream has the group in this form; false if a tensor is missing.
  bool need(const KeyFamily& family, const WeightGroup& group, const StoredForm* form) {
    const auto names = form == nullptr ? model_names(group) : stored_names(*form);
    const auto is_missing = [&](const std::string& name) { return info(family, name) == nullptr; };
    const auto missing = std::ranges::count_if(names, is_missing);
    if (missing == std::ssize(names) && !family.is_model()) return false;  // the optimizer does not train it
    for (const auto& name : names) {
      if (is_missing(name)) missing_.push_back(family.key(name));
      taken_.insert(family.key(name));
    }
    is_of_map_ = is_of_map_ || missing < std::ssize(names);
    if (missing > 0 || has_form(family, group, form)) return missing == 0;
    const auto refuse = [&](const std::string& name, const std::vector<int64_t>& expected, const char* more) {
      const auto& there = *info(family, name);
      TORCH_CHECK_VALUE(there.sizes == expected, from_.where, " holds ", there.name, " of sizes ",
                        describe_sizes(there.sizes), ", and config.json makes them ", describe_sizes(expected), more,
                        ": give the config.json that belongs to it");
    };
    for (const auto& each : group.tensors) {
      if (form == nullptr) refuse(each.name, each.sizes, "");
    }
    for (size_t i = 0; form != nullptr && i < form->parts.size(); ++i) {
      const auto& part = form->parts[i];
      if (!is_stored_with(part, info(family, part.stored)->sizes))
        refuse(part.stored, least_sizes(part), part.padded ? " or more rows" : "");
    }
    return true;
  }

  void make(const KeyFamily& family, const WeightGroup& group, const StoredForm* from, const StoredForm* to) {
    std::unordered_set<std::string> sources;
    const auto source_names = from == nullptr ? model_names(group) : stored_names(*from);
    for (const auto& name : source_names) sources.insert(family.key(name));
    const auto& first = *info(family, source_names.front());
    auto dtype = first.dtype;
    for (const auto& key : sources) dtype = c10::promoteTypes(dtype, infos_.at(key)->dtype);
    const bool is_scalar = first.sizes.empty() && !family.is_model();
    std::vector<TensorInfo> results;
    const auto add = [&](const std::string& name, const std::vector<int64_t>& sizes) {
      const TensorInfo result{family.key(name), dtype, is_scalar ? std::vector<int64_t>() : sizes};
      const Made made{family, &group, from, to, name, result, is_scalar ? first.name : ""};
      if (made_.emplace(result.name, made).second) results.push_back(result);
    };
    if (to == nullptr) {
      for (const auto& each : group.tensors) add(each.name, each.sizes);
    } else {
      for (const auto& part : to->parts) add(part.stored, part.stored_sizes);
    }
    if (coverage_ == Coverage::kAll) {
      std::ranges::move(results, std::back_inserter(tensors_));
      return;
    }
    const auto place =
        std::ranges::find_if(from_.tensors, [&](const TensorInfo& info) { return sources.contains(info.name); });
    for (const auto& key : sources) replaced_[key];
    replaced_[place->name] = std::move(results);
  }

  void check_coverage() const {
    TORCH_CHECK_VALUE(is_of_map_ || missing_.empty(), from_.where,
                      " holds none of the weights that this takes, such "
                      "as ",
                      missing_[0], ": convert without --megatron-layout, or give the config.json that belongs to it");
    TORCH_CHECK_VALUE(
        missing_.empty(), from_.where, " lacks weights that config.json asks for: ", listed(missing_),
        "; give the config.json that belongs to it (its tie_word_embeddings says whether there is a head)");
    Names left;
    for (const auto& info : from_.tensors) {
      const bool derived = is_extra_state(info.name) || info.name.ends_with(".rotary_emb.inv_freq");
      if (!taken_.contains(info.name) && !derived) left.push_back(info.name);
    }
    TORCH_CHECK_VALUE(left.empty(), from_.where,
                      " holds tensors that have no place in this model's Megatron layout: ", listed(left),
                      "; give the config.json that belongs to it, or convert without --megatron-layout");
  }

  at::Tensor read(const std::string& key) {
    const at::NoGradGuard no_grad;
    const auto found = made_.find(key);
    if (found == made_.end()) return from_.read(key);
    const auto& made = found->second;
    if (!made.scalar.empty()) return from_.read(made.scalar);
    if (made.to == nullptr) return of_model(made, made.name);
    at::Tensor whole;
    for (const auto& part : made.to->parts) {
      if (part.stored != made.name) continue;
      const auto tensor = kept(made, part.tensor);
      const auto pieces = stored_pieces({"", {part}}, part.tensor, ShardedTensor::replicated(tensor));
      const auto& first = pieces.front().second.local;
      if (first.sizes() == at::IntArrayRef(made.info.sizes)) return first.contiguous();
      if (!whole.defined()) whole = at::zeros(made.info.sizes, tensor.options());  // rows in no part are padding
      for (const auto& [stored, piece] : pieces) narrowed(whole, piece.offsets, piece.local.sizes()).copy_(piece.local);
    }
    return whole;
  }

  at::Tensor of_model(const Made& made, const std::string& name) {
    if (made.from == nullptr) return from_.read(made.family.key(name)).to(made.info.dtype);
    const auto& tensors = made.group->tensors;
    const auto member = std::ranges::find(tensors, name, &WeightGroup::Member::name);
    const auto options = at::TensorOptions(made.info.dtype).device(at::kCPU);
    auto whole = ShardedTensor::replicated(at::empty(member->sizes, options));
    for (const auto& part : made.from->parts) {
      if (part.tensor == name) read_part(part, stored(made.family.key(part.stored)), whole);
    }
    return std::move(whole.local);
  }

  /// Keeps the stored tensor that was read last, which several parts are cut from.
  const at::Tensor& stored(const std::string& key) {
    if (last_stored_.first == key) return last_stored_.second;
    last_stored_ = {};  // free it before the next is read
    last_stored_ = {key, from_.read(key)};
    return last_stored_.second;
  }

  /// Keeps the tensors of the last group, which its stored ones are cut from.
  at::Tensor kept(const Made& made, const std::string& name) {
    if (last_group_ != std::pair(made.group, made.family.buffer)) last_.clear();
    last_group_ = {made.group, made.family.buffer};
    auto& tensor = last_[name];
    if (!tensor.defined()) tensor = of_model(made, name);
    return tensor;
  }

  TensorStream from_;
  Target target_;
  Coverage coverage_;
  std::unordered_map<std::string, const TensorInfo*> infos_;
  std::vector<std::unique_ptr<WeightGroup>> groups_;
  std::unordered_map<std::string, Made> made_;  // by key
  std::unordered_map<std::string, std::vector<TensorInfo>> replaced_;
  std::unordered_set<std::string> taken_;
  Names missing_;
  bool is_of_map_ = false;
  std::vector<TensorInfo> tensors_;
  std::pair<const WeightGroup*, std::string> last_group_;
  std::unordered_map<std::string, at::Tensor> last_;
  std::pair<std::string, at::Tensor> last_stored_;
};

TensorStream changed(TensorStream stream, const WeightMap& map, Target target, Coverage coverage) {
  return FormChange::changed(std::make_shared<FormChange>(std::move(stream), map, target, coverage));
}

}  // namespace

TensorStream stream_of(const std::shared_ptr<CheckpointReader>& reader) {
  TensorStream stream;
  stream.where = reader->path();
  std::unordered_set<std::string> further;  // additional keys of tensors in the stream
  for (const auto& [key, first] : reader->tied_keys()) further.insert(key);
  for (const auto& info : reader->tensors()) {
    if (!reader->is_value(info.name) && further.count(info.name) == 0) stream.tensors.push_back(info);
  }
  stream.read = [reader](const std::string& key) { return reader->read_tensor(key); };
  return stream;
}

TensorStream as_model(TensorStream stream, const WeightMap& map) {
  return changed(std::move(stream), map, Target::kModel, Coverage::kSome);
}

TensorStream as_published(TensorStream stream, const WeightMap& map) {
  return changed(std::move(stream), map, Target::kPublished, Coverage::kSome);
}

TensorStream as_megatron(TensorStream stream, const WeightMap& all) {
  return changed(std::move(stream), all, Target::kPublished, Coverage::kAll);
}

TensorStream as_hugging_face(TensorStream stream, const WeightMap& all) {
  return changed(std::move(stream), all, Target::kModel, Coverage::kAll);
}

void rename_groups(Dict& values, const WeightMap& map, bool to_published) {
  std::map<std::string, Names> renamed;
  for (const auto& group : map.groups) {
    auto from = model_names(group), to = stored_names(group.forms.front());
    if (!to_published) std::swap(from, to);
    for (const auto& name : from) renamed[name];
    renamed[from.front()] = to;
  }
  auto* optimizer = values.find(kOptimizerKey);
  auto* fields = optimizer == nullptr ? nullptr : optimizer->get_if<Dict>();
  auto* groups = fields == nullptr ? nullptr : fields->find(kParamGroupsKey);
  auto* list = groups == nullptr ? nullptr : groups->get_if<List>();
  if (list == nullptr) return;
  for (auto& group : list->items) {
    auto* entries = group.get_if<Dict>();
    auto* params = entries == nullptr ? nullptr : entries->find(kParamsKey);
    if (params == nullptr || params->get_if<List>() == nullptr) continue;
    List names;
    for (const auto& name : params->as_items()) {
      const auto* text = name.get_if<std::string>();
      const auto found = text == nullptr ? renamed.end() : renamed.find(*text);
      if (found == renamed.end()) names.items.push_back(name);
      if (found == renamed.end()) continue;
      for (const auto& other : found->second) names.items.emplace_back(other);
    }
    *params = std::move(names);
  }
}

}  // namespace megashard
