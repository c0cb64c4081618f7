#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "models/config/tensor_parallel_ranks.h"
#include "models/config/weight_files.h"
#include "models/layers/pass.h"

namespace megashard {

/// Expert parallelism: EP rank r of `ranks` has the experts [r N / ranks, (r + 1) N / ranks) of each layer's N.
struct ExpertPlacement {
  int64_t ranks = 1;
  int64_t rank = 0;

  bool has(int64_t expert, int64_t num_experts) const { return expert / (num_experts / ranks) == rank; }
};

/// How a rank builds and computes a network; not part of what the network is.
struct BuildContext {
  TensorParallelRanksPtr tensor_parallel = std::make_shared<TensorParallelRanks>();  ///< shared by all its modules
  ExpertPlacement experts{};
  int64_t mlp_tiles = 1;                    ///< number of sequence tiles that an MLP computes one by one
  std::optional<int64_t> logits_at_once{};  ///< maximum of the loss; unset: cross_entropy.h's
};

/// A size that tensor-parallel ranks divide among them.
struct SharedSize {
  int64_t size;
  const char* what;  ///< plural: "attention heads"
};

/// Description of a part, without ranks, flags and files. An open set: one file per kind.
class PartSpec {
 public:
  virtual ~PartSpec() = default;
  virtual std::shared_ptr<Part> build(const BuildContext& context) const = 0;

  /// Floating-point operations of forward and backward per token of a sequence of this length, as Megatron counts them.
  virtual double training_flops(int64_t sequence_length) const = 0;
  /// Sizes that --tensor-model-parallel-size must divide.
  virtual std::vector<SharedSize> sizes_over_ranks() const { return {}; }
  /// Throws if tensor-parallel ranks cannot share it, whatever their number.
  virtual void check_tensor_ranks(const std::string& /*model*/) const {}
  /// Throws if `ranks` ranks cannot share the rows of a sequence by exchanging heads (Ulysses). `model`: for the
  /// message; `tensor_parallel`: number of ranks that share the heads already.
  virtual void check_sequence_ranks(const std::string& /*model*/, int64_t /*ranks*/,
                                    int64_t /*tensor_parallel*/) const {}
  /// Throws if it cannot be trained on a ring of ranks with parts of a sequence.
  virtual void check_sequence_ring(const std::string& /*model*/) const {}
  /// True if it computes later tokens of a sequence from Pass::cache as from all tokens: because it keeps what it needs
  /// of earlier ones there, or needs none. False: generation computes the whole sequence for each token.
  virtual bool continues_from_cache() const { return false; }
  /// Paths, relative to the part, of Megatron's module (core_attn, qkv_linear, mlp, moe, ...: ActivationPlan); "" is
  /// the part itself. Empty if it has no such module.
  virtual std::vector<std::string> paths_of(const std::string& /*megatron_part*/) const { return {}; }
  /// Parameters and buffers, relative to the part, that stay in fp32 (FSDP2Mixin::keeps_fp32).
  virtual std::vector<std::string> names_in_fp32() const { return {}; }
  /// The tensors of the part, at `path` ("model.layers.0.mlp."), that files can have in other forms than the model.
  virtual std::vector<WeightGroup> weight_forms(const std::string& /*path*/, const WeightFiles& /*files*/) const {
    return {};
  }
  /// Megatron's name of the norm before the part: attn_norm or mlp_norm.
  virtual std::string norm_before() const = 0;
};

using PartSpecPtr = std::shared_ptr<const PartSpec>;

}  // namespace megashard
