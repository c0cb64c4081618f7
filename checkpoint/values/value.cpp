#include "checkpoint/values/value.h"

#include <c10/util/Exception.h>

#include <algorithm>

namespace megashard {
namespace {

constexpr const char* kNamespace = "argparse.Namespace";

template <class T>
const T& expect(const Value& value, const char* what) {
  const auto* found = value.get_if<T>();
  TORCH_CHECK(found != nullptr, "expected ", what, ", got ", value.kind());
  return *found;
}

struct KindName {
  std::string operator()(std::monostate) const { return "None"; }
  std::string operator()(bool) const { return "a bool"; }
  std::string operator()(int64_t) const { return "an int"; }
  std::string operator()(double) const { return "a float"; }
  std::string operator()(const std::string&) const { return "a string"; }
  std::string operator()(const Bytes&) const { return "bytes"; }
  std::string operator()(const BigInt&) const { return "an int beyond 64 bits"; }
  std::string operator()(const List&) const { return "a list"; }
  std::string operator()(const Tuple&) const { return "a tuple"; }
  std::string operator()(const Dict&) const { return "a dict"; }
  std::string operator()(at::ScalarType) const { return "a torch dtype"; }
  std::string operator()(const TorchSize&) const { return "a torch.Size"; }
  std::string operator()(const Global& global) const { return "the name " + global.name; }
  std::string operator()(const std::shared_ptr<const Object>& object) const {
    return object->opcode == Object::Opcode::kPersId ? "a storage" : "an object of class " + object->class_name;
  }
};

}  // namespace

const Value* Dict::find(std::string_view key) const {
  const auto found = std::find_if(entries.rbegin(), entries.rend(), [key](const auto& entry) {
    const auto* name = entry.first.template get_if<std::string>();
    return name != nullptr && *name == key;
  });
  return found == entries.rend() ? nullptr : &found->second;
}

Value* Dict::find(std::string_view key) { return const_cast<Value*>(static_cast<const Dict&>(*this).find(key)); }

const Value& Dict::at(std::string_view key) const {
  const auto* value = find(key);
  TORCH_CHECK(value != nullptr, "there is no entry \"", key, "\"");
  return *value;
}

void Dict::set(std::string_view key, Value value) {
  if (auto* existing = find(key)) {
    *existing = std::move(value);
  } else {
    entries.emplace_back(std::string(key), std::move(value));
  }
}

bool Dict::operator==(const Dict& other) const { return entries == other.entries; }
bool List::operator==(const List& other) const { return items == other.items; }
bool Tuple::operator==(const Tuple& other) const { return items == other.items; }

Value::Value(Object value) : data_(std::make_shared<const Object>(std::move(value))) {}

const Object* Value::object() const {
  const auto* held = get_if<std::shared_ptr<const Object>>();
  return held == nullptr ? nullptr : held->get();
}

bool Value::as_bool() const { return expect<bool>(*this, "a bool"); }
int64_t Value::as_int() const { return expect<int64_t>(*this, "an int"); }

double Value::as_double() const {
  const auto* whole = get_if<int64_t>();
  return whole != nullptr ? static_cast<double>(*whole) : expect<double>(*this, "a float");
}

const std::string& Value::as_string() const { return expect<std::string>(*this, "a string"); }
const Dict& Value::as_dict() const { return expect<Dict>(*this, "a dict"); }

const std::vector<Value>& Value::as_items() const {
  const auto* tuple = get_if<Tuple>();
  return tuple != nullptr ? tuple->items : expect<List>(*this, "a list or tuple").items;
}

std::string Value::kind() const { return std::visit(KindName(), data_); }

bool Value::operator==(const Value& other) const {
  const auto* mine = object();
  const auto* others = other.object();
  if (mine != nullptr && others != nullptr) return *mine == *others;
  return data_ == other.data_;
}

Value make_namespace(Dict fields) {
  return Object{kNamespace, Object::Opcode::kNewObj, Tuple(), std::move(fields), {}, {}};
}

const Dict* namespace_fields(const Value& value) {
  const auto* object = value.object();
  return object != nullptr && object->class_name == kNamespace ? object->state.get_if<Dict>() : nullptr;
}

}  // namespace megashard
