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

/// A model whose loss another process computes: it gets log-probabilities, and gives the loss's gradient by them. The
/// gradient of a step is the mean over the ranks with different data of the sums of their forwards. Requests and
/// replies: docs/serving_losses.md. check() is of one rank; all others are collective, and every rank carries out the
/// same requests, those that share data with the same message.
class ServedModel {
 public:
  struct Options {
    ServedRowsOptions rows{};
    TrainStepOptions step{};     ///< its clipping, its scaler and the ranks that share sequences
    ProcessGroupPtr sharding{};  ///< ParallelGroups::sharding
    c10::Device device = c10::kCPU;
  };
  ServedModel(MultiModalModule& model, Optimizer& optimizer, const Options& options);

  MultiModalModule& model() const { return model_; }
  /// Throws c10::ValueError for a request of forward(), backward() or step that cannot be carried out.
  void check(const Message& request) const;
  /// The command forward, or forward_backward if the request has weights.
  Message forward(const Message& request);
  /// The command backward, of the forward before, which has kept its graph.
  Message backward(const Message& request);
  /// Clips the gradients for update(), which steps by them, and then clears them.
  DeviceStats clip();
  void update();
  void zero_grad();

 private:
  /// Gradients of a loss by the numbers of a forward, as columns of whole sequences; undefined where it has none.
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
  void accumulate(const Forward& forward, const Weights& weights);
  /// A column on the device, times what FSDP's average over the ranks of a sequence and the loss scale ask for.
  at::Tensor scaled(const at::Tensor& weights, const SequenceShard& sequence) const;
  Message reply_of(const Forward& forward) const;

  MultiModalModule& model_;
  Optimizer& optimizer_;
  Options options_;
  std::unique_ptr<Objective> objective_;  // TrainStep's; computes nothing here
  TrainStep step_;
  std::vector<HasAdapters*> adapters_;
  std::vector<at::Tensor> replicated_;  // parameters that fully_shard does not reduce
  std::optional<Forward> kept_;
  bool has_gradients_ = false;
};

}  // namespace megashard
