#pragma once

#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include <optional>

namespace megashard {

/// Scope in which a stream is current; no effect without a stream.
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
  void make_wait(const c10::Stream& stream) const;  ///< makes the stream wait; does not block the host
  void synchronize() const;                         ///< blocks the host

 private:
  std::optional<c10::Event> event_;
};

/// Makes `later` wait for all work enqueued on `earlier`.
void order_streams(const c10::Stream& earlier, const c10::Stream& later);
/// Current stream of this thread on the device.
c10::Stream current_stream(c10::Device device);

}  // namespace megashard
