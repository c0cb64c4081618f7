#pragma once

#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include <optional>

namespace megashard {

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
/// The device's current stream of this thread.
c10::Stream current_stream(c10::Device device);

}  // namespace megashard
