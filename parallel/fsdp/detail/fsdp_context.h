#pragma once

#include <ATen/core/Tensor.h>

#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "parallel/device/streams.h"
#include "parallel/fsdp/detail/collective_trail.h"
#include "parallel/fsdp/detail/foreach_reduce.h"

namespace megashard {

class FsdpParamGroup;
class FsdpState;

/// What a step's clock is told of a unit (UnitTrace).
enum class UnitMoment {
  kGather,     ///< begins
  kGathered,   ///< its forward or backward begins
  kResharded,  ///< after its forward, or after a backward whose gradients are not reduced
  kReduce,     ///< its backward is done, the reduction begins
  kReduced,
};

/// The streams of one root's communication. On a CPU there are none: collectives run on the backend's threads, and
/// waiting for their Work is all the ordering there is.
struct CommStreams {
  explicit CommStreams(c10::Device device);

  c10::Device device;
  std::optional<c10::Stream> copy_in;         // high priority: casts and packing before an all-gather
  std::optional<c10::Stream> all_gather;      // high priority
  std::optional<c10::Stream> reduce_scatter;  // high priority
  std::optional<c10::Stream> all_reduce;      // HSDP
  bool enabled() const { return copy_in.has_value(); }
  c10::Stream current() const { return current_stream(device); }
};

/// Streams, and what is in flight on them (FSDPCommContext). One root has one; several roots that run by turns may
/// share it.
struct CommContext {
  explicit CommContext(c10::Device device) : streams(device) {}

  CommStreams streams;
  std::deque<FsdpParamGroup*> reducing;  // their reduce-scatters are in flight, oldest first
  size_t max_reducing = 1;               // set_reduce_scatter_max_input_buffers
  /// Their all-reduces across replicas are in flight, oldest first; reduce-scatters go on beside them. One at a time
  /// where buffers go back afterwards.
  std::deque<FsdpParamGroup*> all_reducing;
  static constexpr size_t kMaxAllReducing = 4;
  /// The group's reductions are no longer in flight, or are given up.
  void forget(const FsdpParamGroup* group);

  /// A packed all-gather result whose copy-out may still run; the next group's wait lets the stream that packs reuse
  /// it. Gathers come after packing.
  void hold_gather(at::Tensor buffer);
  void drop_held_gather();
  /// The last group's outputs, made on the reduce-scatter stream and read on another one, until the first waits for
  /// their readers. Those that have become gradients need not be held.
  void hold_reduction(std::unique_ptr<Reduction> reduction);
  void drop_held_reduction();

  void reduces_on(const c10::Stream& stream);
  /// The current stream waits for the reductions since the last call. A stream that did nothing is left alone: its last
  /// work may lie outside a graph that is being captured.
  void wait_for_reductions();

 private:
  at::Tensor held_gather_;
  StreamEvent copied_out_;
  std::unique_ptr<Reduction> held_reduction_;
  StreamEvent held_reduction_read_;
  std::vector<c10::Stream> reducing_streams_;  // since the last wait_for_reductions, each once
};

/// What all units under one root share (FSDPStateContext), and what happens at the ends of an iteration and of a
/// backward. One thread at a time uses it: the one that runs forward, or the autograd thread that runs backward.
class FsdpContext : public std::enable_shared_from_this<FsdpContext> {
 public:
  explicit FsdpContext(std::shared_ptr<CommContext> shared) : comm(std::move(shared)) {}
  bool idle() const { return forward_depth == 0 && !backward_running; }
  const CommStreams& streams() const { return comm->streams; }

  void begin_iteration();    ///< the root's forward begins
  void end_iteration();      ///< it has returned
  void abandon_iteration();  ///< it threw: every unit is sharded again
  /// Called by each unit's pre-backward; the first one has the engine call back when backward ends (root
  /// post-backward).
  void queue_final_callback();
  void forget(const FsdpState* state);
  /// What the run-time controls set in a unit's own context, before this one was there. What is set here stays.
  void take_settings(FsdpContext& of_unit);

  std::shared_ptr<CommContext> comm;
  std::vector<FsdpState*> states;              // in pre-order of the module tree
  std::vector<FsdpState*> post_forward_order;  // with repetitions; backward prefetch walks it from the end
  int forward_depth = 0;                       // hooked modules on the call stack, except in backward
  bool backward_running = false;               // the final callback is queued
  bool is_last_backward = true;
  std::optional<StreamEvent> post_optim_event;  // of the user, for the next forward

  /// Test and tracing hook: events "unshard", "reshard", "reduce", ... of groups by name, in host order.
  std::function<void(const char* event, const std::string& group)> observer;
  /// While it is set, nothing is prefetched, and reductions are waited for where they begin.
  std::function<void(UnitMoment moment, FsdpState& unit)> clock;
  std::shared_ptr<CollectiveTrail> trail;  // null: CollectiveOrder does not look
  void note(const char* event, const std::string& group) const {
    if (observer) observer(event, group);
    if (trail != nullptr) trail->note(event, group);
  }

 private:
  struct BackwardEnd;
  void restore_outside_forward();
  void finish_backward();
  void abandon_backward() noexcept;

  bool autocast_cache_ = true;  // the setting outside forward
};

}  // namespace megashard
