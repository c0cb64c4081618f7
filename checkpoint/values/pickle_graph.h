#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "checkpoint/values/value.h"

namespace megashard {

/// One object while a pickle is read: nodes refer to each other as Python's objects do, cycles
/// included.
struct PickleNode {
  enum class Kind {
    kLeaf,
    kList,
    kTuple,
    kDict,
    kSet,
    kFrozenSet,
    kGlobal,  ///< leaf: its name, "module.Name", nested ones "module:Outer.Name"
    kCalled,
    kNew,
    kPersistent
  };
  Kind kind = Kind::kLeaf;
  Value leaf = {};
  const PickleNode* callable = nullptr;         // of objects: their class
  const PickleNode* arguments = nullptr;        // a tuple, of objects
  std::vector<const PickleNode*> items = {};    // of containers (dict: key, value, key, ...) and list-like objects
  std::vector<const PickleNode*> entries = {};  // key, value, ... of dict-like objects
  const PickleNode* state = nullptr;

  bool is_object() const { return kind == Kind::kCalled || kind == Kind::kNew; }
  /// Of a string; null for others.
  const std::string* text() const { return kind == Kind::kLeaf ? leaf.get_if<std::string>() : nullptr; }
};

/// The graph from `root` as a tree of plain values. What is shared is repeated, within a budget
/// that grows with `pickle_bytes`; cycles and deeper nesting than 100 throw.
Value pickle_tree(const PickleNode* root, size_t pickle_bytes, const std::string& where);

}  // namespace megashard
