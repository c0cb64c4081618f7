#pragma once

#include <ATen/core/Tensor.h>

#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "parallel/fsdp/comm_streams.h"
#include "parallel/fsdp/gradient_reduction.h"

namespace megashard {

class FsdpGroup;
class FsdpState;

/// Streams, and what is in flight on them (FSDPCommContext). One root has one; several roots that
/// run by turns may share it.
struct CommContext {
  explicit CommContext(c10::Device device) : streams(device) {}

  CommStreams streams;
  std::deque<FsdpGroup*> reducing;    // their reduce-scatters are in flight, oldest first
  size_t max_reducing = 1;            // set_reduce_scatter_max_input_buffers
  FsdpGroup* all_reducing = nullptr;  // its all-reduce across replicas is in flight: one at a time

  /// A packed all-gather result whose copy-out may still run; the next group's wait lets the gather
  /// streams reuse it.
  struct HeldGather {
    at::Tensor buffer;
    StreamEvent copied_out;
  };
  std::optional<HeldGather> held_gather;
  void drop_held_gather() {
    if (!held_gather) return;
    held_gather->copied_out.make_wait(*streams.copy_in);
    held_gather->copied_out.make_wait(*streams.all_gather);
    held_gather.reset();
  }

  /// The last group's all-reduced buffers, until the next reduction lets its stream wait for their
  /// readers.
  struct HeldReduction {
    std::unique_ptr<GradientReduction> reduction;
    StreamEvent read;
  };
  HeldReduction held_reduction;
};

/// What all groups under one root share (FSDPStateContext). One thread at a time uses it: the one
/// that runs forward, or the autograd thread that runs backward.
struct FsdpContext {
  explicit FsdpContext(std::shared_ptr<CommContext> shared) : comm(std::move(shared)) {}
  bool idle() const { return forward_depth == 0 && !backward_running; }
  const CommStreams& streams() const { return comm->streams; }

  std::shared_ptr<CommContext> comm;
  std::vector<FsdpState*> states;  // in pre-order of the module tree
  std::vector<FsdpState*>
      post_forward_order;         // with repetitions; backward prefetch walks it from the end
  int forward_depth = 0;          // hooked modules on the call stack, except in backward
  bool backward_running = false;  // the final callback is queued
  bool is_last_backward = true;
  bool autocast_cache = true;                   // the setting outside forward
  std::optional<StreamEvent> post_optim_event;  // of the user, for the next forward

  /// Test and tracing hook: events "gather", "release", "reduce", ... of groups by name, in host
  /// order.
  std::function<void(const char* event, const std::string& group)> observer;
  void note(const char* event, const std::string& group) const {
    if (observer) observer(event, group);
  }
};

}  // namespace megashard
