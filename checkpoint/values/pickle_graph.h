#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "checkpoint/values/value.h"

namespace megashard {

/// One object of a pickle being read. Nodes refer to each other as Python objects do, including cycles.
struct PickleNode {
  enum class Kind {
    kLeaf,
    kList,
    kTuple,
    kDict,
    kSet,
    kFrozenSet,
    kGlobal,  ///< leaf: its name, "module.Name"; of nested classes "module:Outer.Name"
    kCalled,
    kNew,
    kPersistent
  };
  Kind kind = Kind::kLeaf;
  Value leaf = {};
  const PickleNode* callable = nullptr;         // class of an object
  const PickleNode* arguments = nullptr;        // arguments of an object, a tuple
  std::vector<const PickleNode*> items = {};    // of containers (dict: key, value, key, ...) and list-like objects
  std::vector<const PickleNode*> entries = {};  // key, value, ... of a dict-like object
  const PickleNode* state = nullptr;

  bool is_object() const { return kind == Kind::kCalled || kind == Kind::kNew; }
  /// The string of a leaf; null for other nodes.
  const std::string* text() const { return kind == Kind::kLeaf ? leaf.get_if<std::string>() : nullptr; }
};

/// Converts the graph from `root` to a tree of plain values. Shared nodes are repeated, within a budget that grows with
/// `pickle_bytes`. Throws for cycles and for nesting deeper than 100.
Value pickle_tree(const PickleNode* root, size_t pickle_bytes, const std::string& where);

}  // namespace megashard
