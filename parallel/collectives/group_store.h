#pragma once

#include <memory>
#include <torch/csrc/distributed/c10d/Store.hpp>

namespace megashard {

/// Key-value store through which members of a group find each other. Include in .cpp files only; headers use the
/// forward declaration in gloo_process_group.h.
struct GroupStore {
  c10::intrusive_ptr<c10d::Store> store;
};

/// Group of processes whose members can exchange messages through a store, even if its collectives hang.
class HasStore {
 public:
  virtual std::shared_ptr<GroupStore> store() const = 0;  ///< null for a routed group whose groups have none

 protected:
  ~HasStore() = default;
};

}  // namespace megashard
