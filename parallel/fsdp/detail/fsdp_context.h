#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "parallel/device/streams.h"
#include "parallel/fsdp/detail/foreach_reduce.h"
#include "parallel/fsdp/fsdp_controls.h"

namespace megashard {

/// Log of what a root's groups did in the current step, in host order, for CollectiveOrder. One writer at a time;
/// another thread may read the first `count` events meanwhile.
struct CollectiveTrail {
  struct Event {
    const char* what;
    const std::string* group;  // the group's name; valid while the group lives
  };
  static constexpr size_t kMost = 1 << 14;  // later events are dropped

  std::unique_ptr<Event[]> events = std::make_unique<Event[]>(kMost);
  std::atomic<size_t> count{0};
  std::atomic<bool> is_on{false};

  void note(const char* what, const std::string& group) {
    const size_t place = count.load(std::memory_order_relaxed);
    if (!is_on.load(std::memory_order_relaxed) || place == kMost) return;
    events[place] = {what, &group};
    count.store(place + 1, std::memory_order_release);
  }
};

class FsdpContext;
class FsdpParamGroup;
class FsdpState;

/// Events of a unit that are reported to a step's clock (UnitTrace).
enum class UnitMoment {
  kGather,     ///< all-gather starts
  kGathered,   ///< forward or backward of the unit starts
  kResharded,  ///< after forward, or after a backward without reduction
  kReduce,     ///< its backward is done, the reduction starts
  kReduced,
};

/// Streams of one root's communication. None on a CPU, where collectives run on the backend's threads and are ordered
/// by waiting for their Work.
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

/// Streams and collectives in flight on them (FSDPCommContext). One per root; roots that take turns may share it.
struct CommContext {
  explicit CommContext(c10::Device device) : streams(device) {}

  CommStreams streams;
  std::deque<FsdpParamGroup*> reducing;  // groups with a reduce-scatter in flight, oldest first
  size_t max_reducing = 1;               // see set_reduce_scatter_max_input_buffers
  /// Groups with an all-reduce across replicas in flight, oldest first; reduce-scatters overlap with them. At most one
  /// if buffers are freed afterwards.
  std::deque<FsdpParamGroup*> all_reducing;
  static constexpr size_t kMaxAllReducing = 4;
  const FsdpContext* finalizing = nullptr;  // root with a finalize_backward(async_op=true) to wait for
  uint64_t finalization = 0;                // number of the last such call
  std::vector<const FsdpContext*> roots;    // that share it
  /// Throws if there is such a root; `before` completes the message.
  void check_finalized(const char* before) const;
  /// Removes the group's reductions: they are complete or abandoned.
  void forget(const FsdpParamGroup* group);

  /// Holds a packed all-gather result whose copy-out may still run. The next group's wait makes the packing stream wait
  /// for that, so that the memory can be reused; gathers follow packing.
  void hold_gather(at::Tensor buffer);
  void drop_held_gather();
  /// Holds the last group's outputs, written on the reduce-scatter stream and read on another one, until the first
  /// stream waits for the readers. Outputs that are gradients need no holding.
  void hold_reduction(std::unique_ptr<Reduction> reduction);
  void drop_held_reduction();

  void reduces_on(const c10::Stream& stream);
  /// The current stream waits for all reductions since the last call. Skips streams that did nothing: their last work
  /// may lie outside a graph that is being captured.
  void wait_for_reductions();

 private:
  at::Tensor held_gather_;
  StreamEvent copied_out_;
  std::unique_ptr<Reduction> held_reduction_;
  StreamEvent held_reduction_read_;
  std::vector<c10::Stream> reducing_streams_;  // used since the last wait_for_reductions, each once
};

/// State shared by all units under one root (FSDPStateContext), and the work at the end of an iteration and of a
/// backward. Used by one thread at a time: forward's thread, or the autograd thread of backward.
class FsdpContext : public std::enable_shared_from_this<FsdpContext> {
 public:
  explicit FsdpContext(std::shared_ptr<CommContext> shared) : comm(std::move(shared)) { comm->roots.push_back(this); }
  ~FsdpContext() { std::erase(comm->roots, this); }
  FsdpContext(const FsdpContext&) = delete;
  FsdpContext& operator=(const FsdpContext&) = delete;
  bool idle() const { return forward_depth == 0 && !backward_running; }
  const CommStreams& streams() const { return comm->streams; }

  void begin_iteration();    ///< the root's forward starts
  void end_iteration();      ///< the root's forward has returned
  void abandon_iteration();  ///< the root's forward threw: reshards all units
  /// Called by each unit's pre-backward; the first call of a backward queues the engine's final callback (root
  /// post-backward).
  void queue_final_callback();
  // See fsdp_controls.h.
  void set_manual_finalization(bool manual);
  GradientReductionHandle finalize_backward(bool async_op);
  void reset_iteration();
  void forget(const FsdpState* state);
  /// Adopts run-time controls set in a unit's own context before this one existed. Settings made here win.
  void take_settings(FsdpContext& of_unit);

  std::shared_ptr<CommContext> comm;
  std::vector<FsdpState*> states;              // in pre-order of the module tree
  std::vector<FsdpState*> post_forward_order;  // with repetitions; backward prefetch reads it from the end
  int forward_depth = 0;                       // hooked modules on the call stack, except in backward
  bool backward_running = false;               // the final callback is queued
  bool is_last_backward = true;
  bool manual_finalization = false;
  std::optional<StreamEvent> post_optim_event;  // set by the user, for the next forward

  /// For tests and tracing: "unshard", "reshard", "reduce", ... with the group's name, in host order.
  std::function<void(const char* event, const std::string& group)> observer;
  /// If set, nothing is prefetched, and reductions are waited for where they start.
  std::function<void(UnitMoment moment, FsdpState& unit)> clock;
  std::shared_ptr<CollectiveTrail> trail;  // null: no CollectiveOrder checks
  void note(const char* event, const std::string& group) const {
    if (observer) observer(event, group);
    if (trail != nullptr) trail->note(event, group);
  }

 private:
  struct BackwardEnd;
  bool another_root_works() const;
  void restore_outside_forward();
  void finish_backward();
  void wait_for_gradients();
  void abandon_backward() noexcept;

  bool autocast_cache_ = true;  // the setting outside forward
  bool finalization_due_ = false;
};

}  // namespace megashard
