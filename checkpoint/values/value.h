#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

namespace megashard {

class Value;
struct Object;

/// Ordered by insertion; keys are mostly strings. Of duplicate keys the last one is used, as in Python.
struct Dict {
  std::vector<std::pair<Value, Value>> entries;

  const Value* find(std::string_view key) const;  ///< null when absent
  Value* find(std::string_view key);
  const Value& at(std::string_view key) const;  ///< throws an error that names the key
  void set(std::string_view key, Value value);
  bool operator==(const Dict& other) const;
};

struct List {
  std::vector<Value> items;
  bool operator==(const List& other) const;
};
struct Tuple {
  std::vector<Value> items;
  bool operator==(const Tuple& other) const;
};
struct Bytes {
  std::string data;
  bool operator==(const Bytes&) const = default;
};
/// A Python int of more than 64 bits: two's complement, little-endian.
struct BigInt {
  std::string little_endian;
  bool operator==(const BigInt&) const = default;
};
struct TorchSize {
  std::vector<int64_t> sizes;
  bool operator==(const TorchSize&) const = default;
};
/// A class or function used as a value ("torch.nn.functional.gelu"); never resolved.
struct Global {
  std::string name;
  bool operator==(const Global&) const = default;
};

/// Checkpoint content besides tensors: plain data as a tree. Python objects of other classes are Objects, which record
/// how to construct them; nothing here does so.
class Value {
 public:
  using Data = std::variant<std::monostate, bool, int64_t, double, std::string, Bytes, BigInt, List, Tuple, Dict,
                            at::ScalarType, TorchSize, Global, std::shared_ptr<const Object>>;

  Value() = default;                                       ///< None
  Value(bool value) : data_(value) {}                      // NOLINT: values read like literals
  Value(int value) : data_(int64_t{value}) {}              // NOLINT
  Value(int64_t value) : data_(value) {}                   // NOLINT
  Value(double value) : data_(value) {}                    // NOLINT
  Value(const char* value) : data_(std::string(value)) {}  // NOLINT
  Value(std::string value) : data_(std::move(value)) {}    // NOLINT
  Value(Bytes value) : data_(std::move(value)) {}          // NOLINT
  Value(BigInt value) : data_(std::move(value)) {}         // NOLINT
  Value(List value) : data_(std::move(value)) {}           // NOLINT
  Value(Tuple value) : data_(std::move(value)) {}          // NOLINT
  Value(Dict value) : data_(std::move(value)) {}           // NOLINT
  Value(at::ScalarType value) : data_(value) {}            // NOLINT
  Value(TorchSize value) : data_(std::move(value)) {}      // NOLINT
  Value(Global value) : data_(std::move(value)) {}         // NOLINT
  Value(Object value);                                     // NOLINT

  const Data& data() const { return data_; }
  bool is_none() const { return std::holds_alternative<std::monostate>(data_); }
  template <class T>
  const T* get_if() const {
    return std::get_if<T>(&data_);
  }
  template <class T>
  T* get_if() {
    return std::get_if<T>(&data_);
  }
  const Object* object() const;  ///< null for other kinds

  // Return the value as this type; otherwise throw an error that names its actual kind.
  bool as_bool() const;
  int64_t as_int() const;
  double as_double() const;  ///< accepts ints
  const std::string& as_string() const;
  const std::vector<Value>& as_items() const;  ///< elements of a list or tuple
  const Dict& as_dict() const;

  std::string kind() const;  ///< "dict", "object of class argparse.Namespace", ...
  bool operator==(const Value& other) const;

 private:
  Data data_;
};

/// A Python object that is not plain data: its class and the arguments, state and contents from its pickle.
struct Object {
  /// Pickle operation that creates it: class(*arguments), class.__new__(class, *arguments), a torch storage.
  enum class Opcode { kReduce, kNewObj, kPersId };
  std::string class_name;  ///< "module.Name"; empty for kPersId
  Opcode opcode = Opcode::kReduce;
  Value arguments;  ///< a tuple; for kPersId the identity of the storage
  Value state;      ///< argument of __setstate__; None if absent
  std::vector<Value> items;
  Dict entries;

  bool operator==(const Object&) const = default;
};

/// argparse.Namespace, in which Megatron stores its arguments.
Value make_namespace(Dict fields);
/// The fields of such a namespace; null for other values.
const Dict* namespace_fields(const Value& value);

}  // namespace megashard
