// A user's model for `megashard pretrain --model-plugin ./libmymodel.so --model my_model`. docs/user_models.md explains
// it step by step.

#include <ATen/ops/arange.h>
#include <ATen/ops/cross_entropy_loss.h>
#include <ATen/ops/cumsum.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>

#include <megashard/megashard.h>

namespace {

/// Mixes into each token the mean of the tokens up to and including it.
struct MixBlockImpl : torch::nn::Module {
  explicit MixBlockImpl(int64_t width)
      : mix(register_module("mix", torch::nn::Linear(width, width))),
        out(register_module("out", torch::nn::Linear(width, width))) {}
  at::Tensor forward(at::Tensor x) {  // [B, T, C]
    const auto counts = at::arange(1, x.size(1) + 1, x.options()).view({1, -1, 1});
    return x + out(mix(at::cumsum(x, 1) / counts).tanh());
  }
  torch::nn::Linear mix, out;
};
using MixBlock = megashard::Hooked<MixBlockImpl>;  // hooked: can be a unit or recomputed
using Head = megashard::Hooked<torch::nn::LinearImpl>;

class MyModel : public megashard::MultiModalModule, public megashard::FSDP2Mixin, public megashard::WeightInitMixin {
 public:
  explicit MyModel(const megashard::ArgumentView& arguments)
      : vocab_size_(arguments.get<int64_t>("padded_vocab_size").value_or(256)) {  // --vocab-size and end of document
    const int64_t width = arguments.get<int64_t>("hidden_size").value_or(64);
    embed_ = register_module("embed", torch::nn::Embedding(vocab_size_, width));
    blocks_ = register_module("blocks", torch::nn::ModuleList());
    for (int64_t i = 0; i < arguments.get<int64_t>("num_layers").value_or(2); ++i)
      blocks_->push_back(std::make_shared<MixBlock>(width));
    head_ = register_module("head", std::make_shared<Head>(width, vocab_size_));
  }

  megashard::ModelOutput forward(megashard::Batch input) override {
    at::Tensor x = embed_(input.tokens());
    for (const auto& block : *blocks_) x = block->as<MixBlock>()->operator()(x);
    const at::Tensor logits = (*head_)(x);  // [B, T, V]
    if (!input.labels().defined()) return {.logits = logits};
    return {.token_losses = at::cross_entropy_loss(logits.transpose(1, 2), input.labels(), {}, at::Reduction::None)};
  }
  int64_t vocab_size() const override { return vocab_size_; }
  /// Gives the head Megatron's name in checkpoints of --ckpt-format torch_dist.
  megashard::ShardedTensors sharded_state_dict() override {
    auto tensors = MultiModalModule::sharded_state_dict();
    for (auto& [name, tensor] : tensors)
      if (name.starts_with("head.")) name = "output_layer" + name.substr(4);
    return tensors;
  }

 protected:
  // The model's defaults, if the FSDP2 file has none.

  void set_recompute_modules_to_wrap() override {  // every second block
    if (request().config.sub_modules_to_wrap) return FSDP2Mixin::set_recompute_modules_to_wrap();
    for (size_t i = 0; i < blocks_->size(); i += 2) recompute_matching({"blocks." + std::to_string(i)});
  }
  /// Keeps the head unsharded between forward and backward; makes each block a unit.
  void set_fullyshard_modules_to_wrap() override {
    if (request().config.sub_modules_to_wrap) return FSDP2Mixin::set_fullyshard_modules_to_wrap();
    auto head_options = options();
    head_options.reshard_after_forward = false;
    megashard::fully_shard(*head_, head_options);
    shard_matching({"blocks.{*}"});
  }
  void set_modules_to_prefetch(int forward, int backward) override {  // one ahead
    FSDP2Mixin::set_modules_to_prefetch(std::max(forward, 1), std::max(backward, 1));
  }

 private:
  int64_t vocab_size_;
  torch::nn::Embedding embed_{nullptr};
  torch::nn::ModuleList blocks_{nullptr};
  std::shared_ptr<Head> head_;
};

}  // namespace

extern "C" const megashard::ModelPlugin* megashard_model_plugin() {
  static const megashard::ModelPlugin plugin{.add_models = [](megashard::ModelRegistry& models) {
    models.add("my_model",
               [](const megashard::ArgumentView& arguments) { return std::make_shared<MyModel>(arguments); });
  }};
  return &plugin;
}
