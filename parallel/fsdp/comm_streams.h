#pragma once

#include <c10/core/Device.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include <optional>

namespace megashard {

/// The streams of one root's communication (FSDPCommContext). On a CPU there are none: collectives
/// run on the backend's threads, and waiting for their Work is all the ordering there is.
struct CommStreams {
  explicit CommStreams(c10::Device device);

  c10::Device device;
  std::optional<c10::Stream> copy_in;     // high priority: casts and packing before an all-gather
  std::optional<c10::Stream> all_gather;  // high priority
  std::optional<c10::Stream> reduce_scatter;  // high priority
  std::optional<c10::Stream> all_reduce;      // HSDP
  bool enabled() const { return copy_in.has_value(); }
  c10::Stream current() const;
};

/// Makes a stream current while it lives; does nothing without a stream.
class StreamScope {
 public:
  explicit StreamScope(const std::optional<c10::Stream>& stream);
  ~StreamScope();
  StreamScope(const StreamScope&) = delete;
  StreamScope& operator=(const StreamScope&) = delete;

 private:
  std::optional<c10::Stream> previous_;
};

/// A point on a stream; empty on CPUs.
class StreamEvent {
 public:
  static StreamEvent record(const c10::Stream& stream);
  void make_wait(const c10::Stream& stream) const;  ///< the stream waits, the host does not
  void synchronize() const;                         ///< the host waits

 private:
  std::optional<c10::Event> event_;
};

/// `later` waits for all that was enqueued on `earlier`.
void order_streams(const c10::Stream& earlier, const c10::Stream& later);

}  // namespace megashard
