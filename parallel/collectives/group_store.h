#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

namespace megashard {

/// The key-value store through which the members of a group find each other. Included by .cpp files
/// only; headers know it by its forward declaration in gloo_process_group.h.
struct GroupStore {
  c10::intrusive_ptr<c10d::Store> store;
};

}  // namespace megashard
