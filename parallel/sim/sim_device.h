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

constexpr int kHost = 0;                        ///< the agent that is the host; stream i is agent i + 1
constexpr int kPoolStreams = 32;                ///< of each priority, handed out in turn, as c10 does
constexpr int kStreams = 1 + 2 * kPoolStreams;  ///< the default stream, low priority, high priority

inline int agent_of(c10::StreamId stream) { return static_cast<int>(stream) + 1; }

struct Event;

/// One simulated GPU. Operations run at once, on the CPU; what a GPU could have run in another
/// order is known from vector clocks. One lock a device; every member needs it but those that say
/// otherwise.
class SimDevice {
 public:
  static SimDevice& at(int index);  ///< needs no lock
  static SimDevice& of(c10::Device device) { return at(device.index()); }

  explicit SimDevice(int number) : index(number), pools(number) {}

  const int index;
  std::recursive_mutex mutex;
  BlockPools pools;
  AccessLog log;
  Recording recording;
  Timeline timeline;
  int64_t operations = 0;                ///< enqueued so far
  int64_t collectives = 0;               ///< of these
  int64_t collective_bytes = 0;          ///< of the larger tensor of each
  const std::string* running = nullptr;  ///< the operation that is being enqueued; null: none

  const VectorClock& seen_by(int agent) const { return clocks_[static_cast<size_t>(agent)]; }
  /// The host enqueues on `agent`: the new operation's time.
  uint64_t enqueue(int agent);
  void record(Event& event, c10::StreamId stream);
  void wait(const Event& event, c10::StreamId stream);
  /// The host waited for a stream, an event or all streams; `what` says how, for the count.
  void host_waits_for_stream(c10::StreamId stream, const char* what);
  void host_waits_for_event(const Event& event, const char* what);
  void host_waits_for_all(const char* what);
  /// The host has learned, without waiting, that an event is over.
  void host_saw(const Event& event);
  bool host_has_seen(const Event& event) const;

  c10::StreamId next_pool_stream(bool high_priority);

  /// Runs what is recorded in another order and compares; for the random orders. The host has
  /// waited for all of it.
  void end_window();

 private:
  /// `over`: when it is, by the timeline.
  void host_joins(const VectorClock& clock, double over, const char* what);

  std::array<VectorClock, 1 + kStreams> clocks_;
  int next_stream_[2] = {0, 0};
};

/// An event as a guard's void* has it.
struct Event {
  int device = -1;  ///< -1: not recorded yet
  VectorClock clock;
  Recording::Place place;
  uint64_t capture = 0;  ///< the graph capture that it was recorded in; 0: none
  double over = 0;       ///< when it is, by the timeline
};

// Of the calling thread.
int current_device();
void set_current_device(int index);
c10::StreamId current_stream(int device);
c10::StreamId exchange_current_stream(int device, c10::StreamId stream);

/// The same text at the same address for good.
const std::string* interned(const std::string& text);

}  // namespace megashard::sim
