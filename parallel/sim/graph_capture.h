#pragma once

#include <c10/core/Stream.h>

#include <memory>
#include <set>
#include <string>
#include <vector>

#include "parallel/sim/recording.h"
#include "parallel/sim/shuffled_run.h"

namespace megashard::sim {

class SimDevice;
struct Event;

/// A captured graph with its own memory pool.
struct Graph {
  struct Use {
    const void* begin;
    size_t bytes;
    bool writes;
  };
  ~Graph();

  int device = 0;
  uint64_t pool = 0;
  Recording recording;
  std::vector<Use> uses;
};

/// Rules of cudaStreamBeginCapture for one device. Operations run during the capture, because their results' sizes must
/// be known; memory is restored when the capture ends. Throws CUDA's errors.
class GraphCapture {
 public:
  explicit GraphCapture(SimDevice& device) : device_(device) {}

  bool running() const { return graph_ != nullptr; }
  void begin(c10::StreamId stream);
  std::unique_ptr<Graph> end();

  void on_operation(c10::StreamId stream, const std::string& name);
  void on_use(const void* begin, size_t bytes, bool writes);
  void on_record(Event& event, c10::StreamId stream) const;
  void on_wait(const Event& event, c10::StreamId stream);
  void refuse(const char* what) const;  ///< for calls that would block the host

 private:
  SimDevice& device_;
  std::unique_ptr<Graph> graph_;
  uint64_t id_ = 0;
  c10::StreamId origin_ = 0;
  std::set<c10::StreamId> streams_;
  MemoryImage before_;
};

GraphCapture& capture_of(SimDevice& device);

/// Runs a graph on its device's current stream.
void replay(const Graph& graph);

}  // namespace megashard::sim
