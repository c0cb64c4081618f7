#include "parallel/sim/graph_capture.h"

#include <c10/util/Exception.h>

#include <array>
#include <atomic>
#include <utility>

#include "parallel/sim/findings.h"
#include "parallel/sim/operation.h"

namespace megashard::sim {

Graph::~Graph() {
  SimDevice& owner = SimDevice::at(device);
  const std::lock_guard lock(owner.mutex);
  owner.pools.release_pool(pool);
}

GraphCapture& capture_of(SimDevice& device) {
  static auto* captures = [] {
    auto* made = new std::array<std::unique_ptr<GraphCapture>, kDevices>;
    for (int i = 0; i < kDevices; ++i)
      (*made)[static_cast<size_t>(i)] = std::make_unique<GraphCapture>(SimDevice::at(i));
    return made;
  }();
  return *(*captures)[static_cast<size_t>(device.index)];
}

void GraphCapture::begin(c10::StreamId stream) {
  static std::atomic<uint64_t> captures{0};
  TORCH_CHECK(!running(), "a graph is being captured already");
  device_.end_window();
  id_ = ++captures;
  origin_ = stream;
  streams_ = {stream};
  before_ = MemoryImage(device_);
  graph_ = std::make_unique<Graph>();
  graph_->device = device_.index;
  graph_->pool = id_;
  device_.pools.take_from_pool(id_);
  device_.recording.start();
}

std::unique_ptr<Graph> GraphCapture::end() {
  TORCH_CHECK(running(), "no graph is being captured");
  const VectorClock& origin = device_.seen_by(agent_of(origin_));
  std::string unjoined;
  for (const c10::StreamId stream : streams_) {
    const auto agent = static_cast<size_t>(agent_of(stream));
    if (device_.seen_by(agent_of(stream)).at(agent) > origin.at(agent)) unjoined += " " + std::to_string(stream);
  }
  device_.pools.take_from_pool(0);
  std::unique_ptr<Graph> graph = std::move(graph_);
  graph->recording = std::exchange(device_.recording, Recording());
  device_.recording.continue_after(graph->recording);
  before_.restore();
  before_ = {};
  TORCH_CHECK(unjoined.empty(), "cudaErrorStreamCaptureUnjoined: stream(s)", unjoined,
              " joined the capture, and the capturing stream does not wait for them before the capture ends");
  return graph;
}

void GraphCapture::on_operation(c10::StreamId stream, const std::string& name) {
  if (!running() || streams_.contains(stream)) return;
  found("a graph is captured, but " + name + " runs on stream " + std::to_string(stream) +
        ", which is not part of the capture: a replay will not run it. Let the stream wait for an "
        "event of the capture first");
}

void GraphCapture::on_use(const void* begin, size_t bytes, bool writes) {
  if (running()) graph_->uses.push_back({begin, bytes, writes});
}

void GraphCapture::on_record(Event& event, c10::StreamId stream) const {
  event.capture = running() && streams_.contains(stream) ? id_ : 0;
}

void GraphCapture::on_wait(const Event& event, c10::StreamId stream) {
  if (!running()) {
    TORCH_CHECK(event.capture == 0, "cudaErrorCapturedEvent: stream ", stream,
                " waits for an event that was recorded while a graph was captured");
    return;
  }
  if (event.capture == id_) {
    streams_.insert(stream);
  } else {
    TORCH_CHECK(!streams_.contains(stream), "cudaErrorStreamCaptureIsolation: stream ", stream,
                ", which is capturing, waits for an event that was recorded outside the capture");
  }
}

void GraphCapture::refuse(const char* what) const {
  TORCH_CHECK(!running(), "cudaErrorStreamCaptureUnsupported: ", what, " is not permitted while a graph is captured");
}

void replay(const Graph& graph) {
  Operation operation(SimDevice::at(graph.device), "graph");
  for (const auto& use : graph.uses)
    use.writes ? operation.writes(use.begin, use.bytes) : operation.reads(use.begin, use.bytes);
  operation.run([&graph] { graph.recording.run_in_order(); });
}

}  // namespace megashard::sim
