#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <memory>
#include <optional>
#include <vector>

#include "framework/modules/adapters.h"
#include "framework/modules/multi_modal_module.h"
#include "framework/objectives/objectives.h"
#include "framework/serving/message.h"
#include "framework/serving/served_rows.h"
#include "framework/training/optimizers/optimizer.h"
#include "framework/training/train_step.h"
#include "parallel/collectives/process_group.h"
#include "parallel/fsdp/grad_scaler.h"

namespace megashard {

/// A model whose loss another process computes: that process gets log-probabilities, and gives the loss's gradient by
/// them. A step's gradient is the mean, over the ranks with different data, of each rank's sum over its forwards.
/// docs/serving_losses.md describes requests and replies. All functions but check() are collective: every rank carries
/// out the same requests, and ranks that share data get the same message.
class ServedModel {
 public:
  struct Options {
    ServedRowsOptions rows{};
    TrainStepOptions step{};     ///< clipping, loss scaler, and the ranks that share sequences; the rest is unused
    ProcessGroupPtr sharding{};  ///< ParallelGroups::sharding
    c10::Device device = c10::kCPU;
  };
  ServedModel(MultiModalModule& model, Optimizer& optimizer, const Options& options);

  MultiModalModule& model() const { return model_; }
  /// Throws c10::ValueError for a request of forward(), backward() or step that cannot be carried out.
  void check(const Message& request) const;
  /// Carries out forward, or forward_backward if the request has weights.
  Message forward(const Message& request);
  /// Carries out backward, through the forward before it, which has kept its graph.
  Message backward(const Message& request);
  /// Clips the gradients for update(), which steps by them, and then clears them.
  DeviceStats clip();
  void update();
  void zero_grad();

 private:
  /// Holds the loss's gradients by the numbers of a forward, as columns of whole sequences; undefined: it has none.
  struct Weights {
    at::Tensor log_probs, values, entropies;
    double aux = 1;
    bool has_any() const { return log_probs.defined() || values.defined() || entropies.defined(); }
  };
  struct Forward {
    ServedRows rows;
    SequenceShard sequence;
    ModelOutput output;
  };

  Weights weights_of(const Message& request, const ServedRows& rows) const;
  /// Runs backward, which adds to the gradients.
  void accumulate(const Forward& forward, const Weights& weights);
  /// Moves a column to the device, and multiplies it by the loss scale and by the ranks of a sequence, over which FSDP
  /// averages.
  at::Tensor scaled(const at::Tensor& weights, const SequenceShard& sequence) const;
  Message reply_of(const Forward& forward) const;

  MultiModalModule& model_;
  Optimizer& optimizer_;
  Options options_;
  std::unique_ptr<Objective> objective_;  // step_ needs one, and does not use it
  TrainStep step_;
  std::vector<HasAdapters*> adapters_;
  std::vector<at::Tensor> replicated_;  // parameters that fully_shard does not reduce
  std::optional<Forward> kept_;
  bool has_gradients_ = false;
};

}  // namespace megashard
