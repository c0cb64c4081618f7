#include "checkpoint/values/pickle_graph.h"

#include <c10/util/Exception.h>

#include "checkpoint/values/tensor_info.h"

namespace megashard {
namespace {

using Kind = PickleNode::Kind;

constexpr int kMaxDepth = 100;
constexpr size_t kMaxGrowth = 128;  // bytes in memory per byte of pickle; real files need up to 40
constexpr size_t kAlwaysAllowed = 1 << 20;

/// Converts latin1 text (as UTF-8) back to bytes; nullopt for other text.
std::optional<std::string> latin1_bytes(const std::string& utf8) {
  std::string bytes;
  for (size_t i = 0; i < utf8.size(); ++i) {
    const auto lead = static_cast<unsigned char>(utf8[i]);
    if (lead < 0x80) {
      bytes += utf8[i];
    } else {
      if ((lead != 0xc2 && lead != 0xc3) || i + 1 == utf8.size()) return std::nullopt;
      bytes += static_cast<char>((lead & 0x03) << 6 | (utf8[++i] & 0x3f));
    }
  }
  return bytes;
}

class TreeBuilder {
 public:
  TreeBuilder(size_t budget, const std::string& where) : budget_(budget), where_(where) {}

  Value build(const PickleNode* node, int depth) {
    TORCH_CHECK(depth < kMaxDepth, where_, ": values are nested deeper than ", kMaxDepth, ", or contain themselves");
    switch (node->kind) {
      case Kind::kLeaf:
        if (const auto* text = node->leaf.get_if<std::string>()) spend(text->size());
        if (const auto* bytes = node->leaf.get_if<Bytes>()) spend(bytes->data.size());
        if (const auto* number = node->leaf.get_if<BigInt>()) spend(number->little_endian.size());
        return node->leaf;
      case Kind::kList:
        return List{build_all(node->items, depth)};
      case Kind::kTuple:
        return Tuple{build_all(node->items, depth)};
      case Kind::kDict:
        return build_dict(node->items, depth);
      case Kind::kSet:
        return set_of("builtins.set", node, depth);
      case Kind::kFrozenSet:
        return set_of("builtins.frozenset", node, depth);
      case Kind::kGlobal:
        return global(name_of(node, depth));
      case Kind::kPersistent:
        spend(sizeof(Object));
        return Object{"", Object::Opcode::kPersId, build(node->items[0], depth + 1), {}, {}, {}};
      case Kind::kCalled:
      case Kind::kNew:
        return object(node, depth);
    }
    return {};
  }

 private:
  void spend(size_t cost) {
    TORCH_CHECK(cost <= budget_, where_, ": the pickle unfolds to many times its size; it is refused");
    budget_ -= cost;
  }

  std::vector<Value> build_all(const std::vector<const PickleNode*>& nodes, int depth) {
    spend(nodes.size() * sizeof(Value));  // before memory is reserved: lists may be nested
    std::vector<Value> values;
    values.reserve(nodes.size());
    for (const auto* node : nodes) values.push_back(build(node, depth + 1));
    return values;
  }

  Dict build_dict(const std::vector<const PickleNode*>& nodes, int depth) {
    spend(nodes.size() * sizeof(Value));
    Dict dict;
    dict.entries.reserve(nodes.size() / 2);
    for (size_t i = 0; i + 1 < nodes.size(); i += 2) {
      auto key = build(nodes[i], depth + 1);
      dict.entries.emplace_back(std::move(key), build(nodes[i + 1], depth + 1));
    }
    return dict;
  }

  Value set_of(const char* class_name, const PickleNode* node, int depth) {
    spend(sizeof(Object) + sizeof(Value));
    Tuple arguments;
    arguments.items.emplace_back(List{build_all(node->items, depth)});
    return Object{class_name, Object::Opcode::kReduce, std::move(arguments), {}, {}, {}};
  }

  std::string name_of(const PickleNode* callable, int depth) {
    auto name = global_name(callable, depth);
    TORCH_CHECK(name.has_value(), where_, ": a call of something that is no class");
    return std::move(*name);
  }

  /// The name of a class or of a nested class, which protocols before 4 write as getattr(Outer, "Name"). Nullopt for
  /// other nodes.
  std::optional<std::string> global_name(const PickleNode* node, int depth) {
    TORCH_CHECK(depth < kMaxDepth, where_, ": names are nested deeper than ", kMaxDepth);
    if (node->kind == Kind::kGlobal) {
      spend(node->leaf.as_string().size());
      return node->leaf.as_string();
    }
    if (node->kind != Kind::kCalled || node->callable->kind != Kind::kGlobal) return std::nullopt;
    const auto& how = node->callable->leaf.as_string();
    const auto& arguments = node->arguments->items;
    const bool is_attribute = (how == "builtins.getattr" || how == "__builtin__.getattr") && arguments.size() == 2 &&
                              arguments[1]->text() != nullptr;
    if (!is_attribute) return std::nullopt;
    auto name = global_name(arguments[0], depth + 1);
    if (!name) return std::nullopt;
    if (name->find(':') == std::string::npos) {
      const auto dot = name->rfind('.');
      if (dot != std::string::npos) (*name)[dot] = ':';
    }
    spend(arguments[1]->text()->size());
    return *name + "." + *arguments[1]->text();
  }

  static Value global(const std::string& name) {
    if (name.starts_with("torch.")) {
      if (const auto* dtype = find_dtype_by_torch_name(name.substr(6))) return dtype->dtype;
    }
    return Global{name};
  }

  Value object(const PickleNode* node, int depth) {
    if (auto name = global_name(node, depth)) return Global{std::move(*name)};
    spend(sizeof(Object));
    Object made{name_of(node->callable, depth),
                node->kind == Kind::kNew ? Object::Opcode::kNewObj : Object::Opcode::kReduce,
                build(node->arguments, depth + 1),
                {},
                {},
                {}};
    undo_reconstructor(made);
    made.items = build_all(node->items, depth);
    made.entries = build_dict(node->entries, depth);
    if (auto known = known_object(made)) return std::move(*known);
    if (node->state != nullptr) made.state = build(node->state, depth + 1);
    return made;
  }

  /// Undoes protocols 0 and 1, which write class.__new__(class) as copyreg._reconstructor(class, object, None).
  static void undo_reconstructor(Object& made) {
    const auto& arguments = made.arguments.as_items();
    const bool is_new =
        (made.class_name == "copy_reg._reconstructor" || made.class_name == "copyreg._reconstructor") &&
        arguments.size() == 3 && arguments[2].is_none() &&
        (arguments[1] == Value(Global{"__builtin__.object"}) || arguments[1] == Value(Global{"builtins.object"}));
    const auto* made_class = is_new ? arguments[0].get_if<Global>() : nullptr;
    if (made_class == nullptr) return;
    made.class_name = std::string(made_class->name);
    made.opcode = Object::Opcode::kNewObj;
    made.arguments = Tuple();
  }

  /// Converts objects of known classes to plain data.
  static std::optional<Value> known_object(Object& made) {
    const auto& arguments = made.arguments.as_items();
    if (made.class_name == "torch.Size" && arguments.size() == 1) return torch_size(arguments[0]);
    if (made.class_name == "collections.OrderedDict" && arguments.empty()) return std::move(made.entries);
    if (made.class_name == "_codecs.encode" && arguments.size() == 2 && arguments[1] == Value("latin1")) {
      const auto* text = arguments[0].get_if<std::string>();
      auto bytes = text == nullptr ? std::nullopt : latin1_bytes(*text);
      if (bytes) return Bytes{std::move(*bytes)};
    }
    const bool empty_bytes = made.class_name == "__builtin__.bytes" || made.class_name == "builtins.bytes";
    if (empty_bytes && arguments.empty()) return Bytes();
    return std::nullopt;
  }

  static std::optional<Value> torch_size(const Value& argument) {
    const auto* items = argument.get_if<Tuple>();
    if (items == nullptr) return std::nullopt;
    TorchSize size;
    for (const auto& item : items->items) {
      const auto* count = item.get_if<int64_t>();
      if (count == nullptr) return std::nullopt;
      size.sizes.push_back(*count);
    }
    return size;
  }

  size_t budget_;
  const std::string& where_;
};

}  // namespace

Value pickle_tree(const PickleNode* root, size_t pickle_bytes, const std::string& where) {
  return TreeBuilder(pickle_bytes * kMaxGrowth + kAlwaysAllowed, where).build(root, 0);
}

}  // namespace megashard
