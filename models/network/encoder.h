#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "checkpoint/weights/weight_map.h"
#include "framework/batch.h"

namespace megashard {

/// Features that take the places of tokens in a decoder; undefined: none.
struct InjectedEmbeddings {
  at::Tensor token_indices;           ///< [N] int64: of the B * T tokens, which the features replace
  at::Tensor features;                ///< [N, C]
  std::vector<at::Tensor> deepstack;  ///< each [M, C]: added to the first M of these tokens after layer 0, 1, ...
  at::Tensor key_ends{};              ///< KeySpan::key_ends; undefined: causal

  template <class F>
  void visit_tensors(F&& f) {
    f(token_indices);
    f(features);
    f(deepstack);
    f(key_ends);
  }
};

using EncoderModules = std::vector<std::pair<std::string, std::shared_ptr<torch::nn::Module>>>;

/// True if a parameter is sharded: every rank must run the modules then, whether or not it has items.
bool any_is_sharded(const EncoderModules& modules);

/// Modules beside the decoder that map a batch's items (pictures, audio) to features for marked tokens.
class Encoder {
 public:
  virtual ~Encoder() = default;
  /// Its modules in `model`, by their names there, in the order of their forward.
  virtual EncoderModules modules() = 0;
  /// MultiModalModule::prepare: on the host, for whole sequences. Leaves what encode() needs in Batch::plan. Throws one
  /// error for items that do not fit the tokens.
  virtual void prepare(Batch& input) const = 0;
  virtual InjectedEmbeddings encode(const Batch& input) = 0;
};

/// A module of an encoder that has layers.
struct EncoderTower {
  std::string name;           ///< "visual"
  std::string megatron_name;  ///< "image_encoder"
  /// Pattern of its layers, relative to the module: units of FSDP2, and the modules that a recompute of towers names.
  /// Empty: none.
  std::string layers{};
  bool casts_inputs = true;  ///< false: inputs of it and of modules in it keep their dtype under mixed precision
};

/// Description of an encoder. An open set: one file per kind.
class EncoderSpec {
 public:
  virtual ~EncoderSpec() = default;
  virtual std::shared_ptr<Encoder> build() const = 0;
  /// Class of the module `model`, which holds encoder and decoder, for wrap policies.
  virtual std::string owner_class() const = 0;
  virtual std::vector<EncoderTower> towers() const = 0;
  /// Forms of its weights in files, besides the model's own. `path`: that of the module `model`, with its dot.
  virtual std::vector<WeightGroup> weight_forms(const std::string& /*path*/) const { return {}; }
  /// MegatronModule::qkv_split_shapes of its weights.
  virtual std::vector<int64_t> qkv_split_shapes(const std::string& /*name*/,
                                                const std::vector<int64_t>& /*sizes*/) const {
    return {};
  }
};

using EncoderSpecPtr = std::shared_ptr<const EncoderSpec>;

/// One encoder of the modules of all; only the first has deepstack features.
EncoderSpecPtr join_encoders(std::vector<EncoderSpecPtr> specs);

}  // namespace megashard
