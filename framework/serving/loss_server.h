#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "framework/arguments/arguments.h"
#include "framework/serving/message_socket.h"
#include "framework/serving/served_model.h"
#include "framework/training/listener.h"
#include "framework/training/training_checkpoint.h"

namespace megashard {

struct LossServerOptions {
  std::string socket;  ///< path of the sockets: SOCKET.0, SOCKET.1, ... by data-parallel rank
  std::chrono::minutes timeout{60};
  int data_parallel_rank = 0, data_parallel_size = 1;
  ServedRowsOptions rows{};
  int64_t samples_of_step = 1;  ///< a step moves the schedule by so many
  /// Writes whole weights, or adapters, as Hugging Face files into a folder. Collective.
  std::function<void(const std::string& folder, bool adapters)> save_weights;
  std::vector<std::shared_ptr<Listener>> listeners{};  ///< called when training starts and ends, and around each step
  std::function<void(const std::string& line)> print;  ///< on the first rank
};

/// Carries out the requests of clients, one for each group of ranks that share data, until all send "stop". All clients
/// send the same commands; a request that a rank refuses, or that they do not agree on, changes nothing, and all get an
/// error as their reply. A client that is gone, or sends what is no message, is an error on all ranks.
class LossServer {
 public:
  /// `sharing`: the ranks that share this one's data, the first of which listens; null: it shares with none.
  /// `arguments`: those of `state`, whose --save changes. All references must outlive this. Collective.
  LossServer(LossServerOptions options, ServedModel& model, TrainingState& state, Arguments& arguments,
             ProcessGroupPtr world, ProcessGroupPtr sharing);
  /// Returns when all clients have sent "stop". Collective.
  void run();

 private:
  bool listens() const { return socket_ != nullptr; }
  /// Sends the reply to the last request, and looks for the next one; a rank that listens calls it. Returns the part
  /// that all ranks must have alike, or why the request is refused, or that it is not there yet.
  std::string exchange();
  /// Returns the same of the request that has come.
  std::string summary_or_refusal() const;
  Message hello() const;
  /// Sets the request on all ranks that share data.
  void share_request();
  Message carry_out(const std::string& command);
  Message step();
  Message save();
  Message load();

  LossServerOptions options_;
  ServedModel& model_;
  TrainingState& state_;
  Arguments& arguments_;
  ProcessGroupPtr world_, sharing_;
  std::unique_ptr<MessageSocket> socket_;  // null: the first rank of sharing_ listens
  std::string bytes_;                      // hold the request
  Message request_, reply_;
  bool has_reply_ = false;  // reply_ is not sent yet
  std::string found_;       // result of exchange() for the request that has come; empty: none has
};

}  // namespace megashard
