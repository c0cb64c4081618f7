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
  std::string socket;  ///< clients find SOCKET.D, of the ranks that share the data with number D
  std::chrono::minutes timeout{60};
  int data_parallel_rank = 0, data_parallel_size = 1;
  ServedRowsOptions rows{};
  int64_t samples_of_step = 1;  ///< by which the schedule advances
  /// Writes whole weights, or adapters, as Hugging Face files into a folder. Collective.
  std::function<void(const std::string& folder, bool adapters)> save_weights;
  std::vector<std::shared_ptr<Listener>> listeners{};  ///< of gradients_ready, weights_updated and steps_ended
  std::function<void(const std::string& line)> print;  ///< on the first rank
};

/// Carries out the requests of clients, one for each group of ranks that share data, until all send "stop". All clients
/// send the same commands; a request that a rank refuses, or that they do not agree on, changes nothing, and all get an
/// error as their reply. A client that is gone, or sends what is no message, is an error on all ranks.
class LossServer {
 public:
  /// `sharing`: the ranks that share this one's data, the first of which listens. `state`: of the model. All must
  /// outlive this. Collective, as the others.
  LossServer(LossServerOptions options, ServedModel& model, TrainingState& state, Arguments& arguments,
             ProcessGroupPtr world, ProcessGroupPtr sharing);
  void run();

 private:
  bool listens() const { return socket_ != nullptr; }
  /// Of a rank that listens: sends the reply to the last request, and looks for the next one. Returns what all ranks
  /// must agree on, why the request is refused, or that it is not there yet.
  std::string exchange();
  std::string summary_or_refusal() const;
  Message hello() const;
  /// Returns the request's bytes on all ranks that share data.
  void share_request();
  Message carry_out(const std::string& command);
  Message step();
  Message save();
  Message load();

  LossServerOptions options_;
  ServedModel& model_;
  TrainingState& state_;
  Arguments& arguments_;  // the state's
  ProcessGroupPtr world_, sharing_;
  std::unique_ptr<MessageSocket> socket_;  // null: the first rank of sharing_ listens
  std::string bytes_;                      // of the request
  Message request_, reply_;
  bool has_reply_ = false;
  std::string found_;  // of exchange(), for the request that is there
};

}  // namespace megashard
