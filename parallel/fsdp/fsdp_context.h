#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
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

  /// A packed all-gather result whose copy-out may still run; the next group's wait lets the stream
  /// that packs reuse it. Gathers come after packing.
  struct HeldGather {
    at::Tensor buffer;
    StreamEvent copied_out;
  };
  std::optional<HeldGather> held_gather;
  void drop_held_gather() {
    if (!held_gather) return;
    held_gather->copied_out.make_wait(*streams.copy_in);
    held_gather.reset();
  }

  /// The last group's outputs, made on the reduce-scatter stream and read on another one, until the
  /// first waits for their readers.
  struct HeldReduction {
    std::unique_ptr<GradientReduction> reduction;
    StreamEvent read;
  };
  HeldReduction held_reduction;
  void drop_held_reduction() {
    if (held_reduction.reduction == nullptr) return;
    held_reduction.read.make_wait(*streams.reduce_scatter);
    held_reduction = {};
  }

  /// Streams that reductions ran on since the last wait_for_reductions, each once.
  std::vector<c10::Stream> reducing_streams;
  void reduces_on(const c10::Stream& stream) {
    if (std::find(reducing_streams.begin(), reducing_streams.end(), stream) ==
        reducing_streams.end())
      reducing_streams.push_back(stream);
  }
  /// The current stream waits for what they made. A stream that did nothing is left alone: its last
  /// work may lie outside a graph that is being captured.
  void wait_for_reductions() {
    if (reducing_streams.empty()) return;
    const c10::Stream current = streams.current();
    for (const auto& stream : reducing_streams) {
      if (stream != current) order_streams(stream, current);
    }
    reducing_streams.clear();
  }
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
