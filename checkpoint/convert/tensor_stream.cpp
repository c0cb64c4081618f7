#include "checkpoint/convert/tensor_stream.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <map>
#include <optional>
#include <set>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "checkpoint/values/state_dict_keys.h"

namespace megashard {
namespace {

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

/// Parts of a stream being changed.
class StreamChange {
 public:
  explicit StreamChange(TensorStream stream) : from_(std::move(stream)) {
    for (const auto& info : from_.tensors) infos_.emplace(info.name, &info);
  }

  using Read = std::function<at::Tensor(const TensorStream& from)>;

  const TensorStream& from() const { return from_; }
  std::vector<KeyFamily> families() const { return families_of(from_.tensors); }
  /// Returns the tensor with that key and marks it as used; null if there is none.
  const TensorInfo* take(const std::string& key) {
    const auto found = infos_.find(key);
    if (found == infos_.end()) return nullptr;
    taken_.insert(key);
    return found->second;
  }
  void add(TensorInfo info, Read read) {
    reads_.emplace(info.name, std::move(read));
    tensors_.push_back(std::move(info));
  }
  void miss(const std::string& key) { missing_.push_back(key); }

  TensorStream finish() && {
    TORCH_CHECK_VALUE(!taken_.empty() || missing_.empty(), from_.where,
                      " holds none of the weights that this takes, such as ", missing_[0],
                      ": convert without --megatron-layout, or give the config.json that belongs to it");
    TORCH_CHECK_VALUE(
        missing_.empty(), from_.where, " lacks weights that config.json asks for: ", listed(missing_),
        "; give the config.json that belongs to it (its tie_word_embeddings says whether there is a head)");
    std::vector<std::string> left;
    for (const auto& info : from_.tensors) {
      const bool derived = is_extra_state(info.name) || info.name.ends_with(".rotary_emb.inv_freq");
      if (taken_.count(info.name) == 0 && !derived) left.push_back(info.name);
    }
    TORCH_CHECK_VALUE(left.empty(), from_.where,
                      " holds tensors that have no place in this model's Megatron layout: ", listed(left),
                      "; give the config.json that belongs to it, or convert without --megatron-layout");
    TensorStream changed{std::move(tensors_), {}, from_.where};
    auto shared = std::make_shared<StreamChange>(std::move(*this));
    changed.read = [shared](const std::string& key) { return shared->reads_.at(key)(shared->from_); };
    return changed;
  }

 private:
  TensorStream from_;
  std::unordered_map<std::string, const TensorInfo*> infos_;
  std::unordered_set<std::string> taken_;
  std::unordered_map<std::string, Read> reads_;
  std::vector<TensorInfo> tensors_;
  std::vector<std::string> missing_;
};

void add_megatron_weight(StreamChange& change, const KeyFamily& family, const MegatronWeight& weight) {
  std::vector<std::string> keys;
  std::vector<std::string> absent;
  const TensorInfo* first = nullptr;
  for (const auto& source : weight.sources) {
    keys.push_back(family.key(source));
    const auto* info = change.take(keys.back());
    if (info == nullptr) {
      absent.push_back(keys.back());
    } else if (first == nullptr) {
      first = info;
    }
  }
  if (first == nullptr && !family.is_model()) return;  // a weight that the optimizer does not train
  for (const auto& key : absent) change.miss(key);
  if (!absent.empty()) return;
  const bool is_scalar = first->sizes.empty();  // the optimizer's step
  change.add({family.key(weight.name), first->dtype, is_scalar ? first->sizes : weight.sizes},
             [weight, keys, is_scalar](const TensorStream& from) {
               if (is_scalar) return from.read(keys[0]);
               return gather_sources(weight, [&](size_t i) { return from.read(keys[i]); });
             });
}

void check_stored_sizes(const TensorInfo& stored, const MegatronWeight& weight, const std::string& where) {
  auto expected = weight.sizes;
  const bool is_padded = weight.padded && !stored.sizes.empty();
  if (is_padded) expected[0] = std::max(stored.sizes[0], source_sizes(weight, 0)[0]);
  TORCH_CHECK_VALUE(stored.sizes == expected, where, " holds ", stored.name, " of sizes ", describe_sizes(stored.sizes),
                    ", and config.json makes them ", describe_sizes(expected), is_padded ? " or more rows" : "",
                    ": give the config.json that belongs to it");
}

/// The Megatron weight that was read last.
struct LastRead {
  std::string key;
  at::Tensor tensor;
};

at::Tensor split_source(const MegatronWeight& weight, size_t source, const at::Tensor& stored) {
  const at::NoGradGuard no_grad;
  auto part = at::empty(source_sizes(weight, source), stored.options());
  for (const auto& run : weight.runs) {
    if (run.source != source) continue;
    part.narrow(0, run.from_row, run.rows).copy_(stored.narrow(0, run.to_row, run.rows));
  }
  return part;
}

void add_sources(StreamChange& change, const KeyFamily& family, const MegatronWeight& weight,
                 const std::shared_ptr<LastRead>& last) {
  const auto key = family.key(weight.name);
  const auto* stored = change.take(key);
  if (stored == nullptr) {
    if (family.is_model()) change.miss(key);
    return;
  }
  const bool is_scalar = stored->sizes.empty();
  if (!is_scalar) check_stored_sizes(*stored, weight, change.from().where);
  for (size_t i = 0; i < weight.sources.size(); ++i) {
    change.add({family.key(weight.sources[i]), stored->dtype, is_scalar ? stored->sizes : source_sizes(weight, i)},
               [weight, key, i, is_scalar, last](const TensorStream& from) {
                 if (is_scalar) return from.read(key);
                 if (last->key != key) *last = {};  // free it before the next is read
                 if (last->key != key) *last = {key, from.read(key)};
                 return split_source(weight, i, last->tensor);
               });
  }
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

TensorStream as_megatron(TensorStream stream, const WeightLayout& layout) {
  StreamChange change(std::move(stream));
  for (const auto& family : change.families()) {
    for (const auto& weight : layout.weights) add_megatron_weight(change, family, weight);
  }
  return std::move(change).finish();
}

TensorStream as_hugging_face(TensorStream stream, const WeightLayout& layout) {
  StreamChange change(std::move(stream));
  const auto last = std::make_shared<LastRead>();
  for (const auto& family : change.families()) {
    for (const auto& weight : layout.weights) add_sources(change, family, weight, last);
  }
  return std::move(change).finish();
}

void rename_groups(Dict& values, const WeightLayout& layout, bool to_megatron) {
  std::map<std::string, std::vector<std::string>> renamed;
  for (const auto& weight : layout.weights) {
    if (!to_megatron) renamed[weight.name] = weight.sources;
    for (size_t i = 0; to_megatron && i < weight.sources.size(); ++i)
      renamed[weight.sources[i]] = i == 0 ? std::vector{weight.name} : std::vector<std::string>();
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
