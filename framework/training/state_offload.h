#pragma once

#include <c10/core/Device.h>
#include <c10/core/Storage.h>
#include <torch/nn/module.h>

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "framework/training/optimizer.h"

namespace megashard {

/// Kinds of states by ROLL's names; several by |.
enum class StateKinds : unsigned {
  kNone = 0,
  kModelParams = 1,      ///< parameters with their gradients, and buffers
  kOptimizerStates = 2,  ///< with fp32 copies of parameters
  kOtherParams = 4,      ///< of ROLL's other strategies: nothing here belongs to it
  kAll = 7,
};
constexpr StateKinds operator|(StateKinds a, StateKinds b) {
  return static_cast<StateKinds>(static_cast<unsigned>(a) | static_cast<unsigned>(b));
}
constexpr bool contains(StateKinds kinds, StateKinds some) {
  return (static_cast<unsigned>(kinds) & static_cast<unsigned>(some)) != 0;
}

/// Moves the states of a sharded model between the device and pinned host memory, for a program
/// that trains and infers by turns (load_states and offload_states of ROLL's fsdp2 strategies).
/// Every tensor stays the one it is, with its views: only the memory under it goes and comes back
/// with the same bits. While it is gone, forward, backward, step and checkpoints throw an error.
/// On a CPU nothing is copied; the states are out of reach alike. Called between steps, by all
/// ranks in the same order. The device's cached memory is freed too, for other processes.
class StateOffload {
 public:
  struct Options {
    c10::Device device;  ///< of the model's mesh
    /// fully_shard keeps the parameters in host memory (offload_policy): they are left to it, and
    /// load and offload move the optimizer's states only, where those lie on the device.
    bool offload_policy = false;
    /// Without offload_policy ROLL leaves the optimizer's states on the device; false moves them
    /// when they are named.
    bool optimizer_states_stay = true;
  };

  /// `model` and `optimizer` (null: there is none) must outlive it. Everything is loaded.
  StateOffload(torch::nn::Module& model, Optimizer* optimizer, Options options);

  /// The memory comes back: copies run on the current stream, and the host waits for them.
  /// Without offload_policy the optimizer's states come with any call. Loaded ones are left alone.
  void load_states(StateKinds include = StateKinds::kAll);
  /// The host waits for the copies. If there is no host memory, it throws and nothing has moved.
  void offload_states(StateKinds include = StateKinds::kAll);

  /// Whether all of these kinds are where they are used.
  bool is_loaded(StateKinds kinds) const;
  /// Of states that are offloaded now.
  int64_t host_bytes() const;

 private:
  struct Away {
    c10::Storage storage;
    c10::DataPtr memory;  // of a CPU's storage
    at::Tensor host;      // of a device's, uint8
  };
  struct Kind {
    StateKinds kind;
    bool loaded = true;
    std::vector<Away> away{};
  };

  std::vector<c10::Storage> storages_of(StateKinds kind) const;
  void add_storage(const at::Tensor& tensor, std::vector<c10::Storage>& storages) const;
  bool moves(StateKinds kind, StateKinds include, bool loads) const;
  void move_out(Kind& kind);
  void move_in(Kind& kind);

  torch::nn::Module& model_;
  Optimizer* optimizer_;
  Options options_;
  std::array<Kind, 2> kinds_{Kind{StateKinds::kModelParams}, Kind{StateKinds::kOptimizerStates}};
};

/// The states that a phase needs, for as long as it lives: loaded by the constructor, offloaded by
/// the destructor. If that fails they stay on the device.
class LoadedStates {
 public:
  LoadedStates(StateOffload& states, StateKinds include) : states_(states), include_(include) {
    states_.load_states(include_);
  }
  ~LoadedStates();
  LoadedStates(const LoadedStates&) = delete;
  LoadedStates& operator=(const LoadedStates&) = delete;

 private:
  StateOffload& states_;
  StateKinds include_;
};

}  // namespace megashard
