#pragma once

#include <c10/core/Stream.h>

#include <array>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "parallel/sim/access_log.h"
#include "parallel/sim/arena.h"
#include "parallel/sim/block_pools.h"
#include "parallel/sim/recording.h"
#include "parallel/sim/timeline.h"
#include "parallel/sim/vector_clock.h"

namespace megashard::sim {

constexpr int kHost = 0;                        ///< the host's agent; stream i is agent i + 1
constexpr int kPoolStreams = 32;                ///< per priority, used round-robin as in c10
constexpr int kStreams = 1 + 2 * kPoolStreams;  ///< default stream, low priority, high priority

inline int agent_of(c10::StreamId stream) { return static_cast<int>(stream) + 1; }

struct Event;

/// One simulated GPU. Operations run immediately on the CPU; vector clocks tell which ones a GPU could run in another
/// order. One lock per device; hold it for all members except where noted.
class SimDevice {
 public:
  static SimDevice& at(int index);  ///< no lock needed
  static SimDevice& of(c10::Device device) { return at(device.index()); }

  explicit SimDevice(int number) : index(number), pools(number) {}

  const int index;
  std::recursive_mutex mutex;
  BlockPools pools;
  AccessLog log;
  Recording recording;
  Timeline timeline;
  int64_t operations = 0;                ///< enqueued so far
  int64_t collectives = 0;               ///< part of operations
  int64_t collective_bytes = 0;          ///< of each collective's larger tensor
  const std::string* running = nullptr;  ///< operation being enqueued; null: none

  const VectorClock& seen_by(int agent) const { return clocks_[static_cast<size_t>(agent)]; }
  /// The host enqueues on `agent`; returns the new operation's time.
  uint64_t enqueue(int agent);
  void record(Event& event, c10::StreamId stream);
  void wait(const Event& event, c10::StreamId stream);
  /// The host waited for a stream, an event or all streams; `what`: the call, for the count.
  void host_waits_for_stream(c10::StreamId stream, const char* what);
  void host_waits_for_event(const Event& event, const char* what);
  void host_waits_for_all(const char* what);
  /// The host has learned without waiting that an event is complete.
  void host_saw(const Event& event);
  bool host_has_seen(const Event& event) const;

  c10::StreamId next_pool_stream(bool high_priority);

  /// For random orders: replays the recording in another order and compares. Call after the host has waited for all of
  /// it.
  void end_window();

 private:
  /// `over`: completion time on the timeline.
  void host_joins(const VectorClock& clock, double over, const char* what);

  std::array<VectorClock, 1 + kStreams> clocks_;
  int next_stream_[2] = {0, 0};
};

/// The event behind a guard's void*.
struct Event {
  int device = -1;  ///< -1: not recorded yet
  VectorClock clock;
  Recording::Place place;
  uint64_t capture = 0;  ///< graph capture in which it was recorded; 0: none
  double over = 0;       ///< completion time on the timeline
};

// For the calling thread.
int current_device();
void set_current_device(int index);
c10::StreamId current_stream(int device);
c10::StreamId exchange_current_stream(int device, c10::StreamId stream);

/// Returns the same address for equal texts, valid forever.
const std::string* interned(const std::string& text);

}  // namespace megashard::sim
