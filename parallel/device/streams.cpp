#include "parallel/device/streams.h"

#include <c10/core/impl/VirtualGuardImpl.h>

namespace megashard {

StreamScope::StreamScope(const std::optional<c10::Stream>& stream) {
  if (stream) previous_ = c10::impl::VirtualGuardImpl(stream->device_type()).exchangeStream(*stream);
}

StreamScope::~StreamScope() {
  if (previous_) c10::impl::VirtualGuardImpl(previous_->device_type()).exchangeStream(*previous_);
}

StreamEvent StreamEvent::record(const c10::Stream& stream) {
  StreamEvent result;
  result.event_.emplace(stream.device_type());
  result.event_->record(stream);
  return result;
}

void StreamEvent::make_wait(const c10::Stream& stream) const {
  if (event_) event_->block(stream);
}

void StreamEvent::synchronize() const {
  if (event_) event_->synchronize();
}

void order_streams(const c10::Stream& earlier, const c10::Stream& later) {
  StreamEvent::record(earlier).make_wait(later);
}

c10::Stream current_stream(c10::Device device) { return c10::impl::VirtualGuardImpl(device.type()).getStream(device); }

}  // namespace megashard
