#pragma once

#include <memory>
#include <torch/csrc/distributed/c10d/Store.hpp>

namespace megashard {

/// The key-value store through which the members of a group find each other. Included by .cpp files
/// only; headers know it by its forward declaration in gloo_process_group.h.
struct GroupStore {
  c10::intrusive_ptr<c10d::Store> store;
};

/// A group of processes, whose members can leave word for each other beside its collectives, which may be stuck.
class HasStore {
 public:
  virtual std::shared_ptr<GroupStore> store() const = 0;  ///< null: a routed group of groups that have none

 protected:
  ~HasStore() = default;
};

}  // namespace megashard
