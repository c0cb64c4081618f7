#include "models/network/encoder.h"

#include <ATen/ops/cat.h>

#include <algorithm>
#include <iterator>

#include "parallel/fsdp/fully_shard.h"

namespace megashard {

bool any_is_sharded(const EncoderModules& modules) {
  return std::ranges::any_of(modules, [](const auto& named) {
    return std::ranges::any_of(named.second->parameters(), [](const at::Tensor& each) { return is_sharded(each); });
  });
}

namespace {

struct JoinedPlan : InputPlan {
  std::vector<std::shared_ptr<const InputPlan>> plans{};  ///< one for each encoder
};

at::Tensor in_one(const std::vector<at::Tensor>& parts) { return parts.size() == 1 ? parts[0] : at::cat(parts); }

class JoinedEncoder final : public Encoder {
 public:
  explicit JoinedEncoder(std::vector<std::shared_ptr<Encoder>> encoders) : encoders_(std::move(encoders)) {}

  EncoderModules modules() override {
    EncoderModules all;
    for (const auto& each : encoders_) std::ranges::move(each->modules(), std::back_inserter(all));
    return all;
  }

  void prepare(Batch& input) const override {
    const auto plan = std::make_shared<JoinedPlan>();
    for (const auto& each : encoders_) {
      each->prepare(input);
      plan->plans.push_back(std::move(input.plan));
    }
    input.plan = plan;
  }

  InjectedEmbeddings encode(const Batch& input) override {
    const auto* plan = dynamic_cast<const JoinedPlan*>(input.plan.get());
    TORCH_CHECK(plan != nullptr, "the input was not prepared: call the model, not its parts");
    InjectedEmbeddings all;
    std::vector<at::Tensor> token_indices, features;
    Batch own = input;
    for (size_t i = 0; i < encoders_.size(); ++i) {
      own.plan = plan->plans[i];
      auto found = encoders_[i]->encode(own);
      if (!found.features.defined()) continue;
      token_indices.push_back(std::move(found.token_indices));
      features.push_back(std::move(found.features));
      if (i > 0) continue;
      all.deepstack = std::move(found.deepstack);
      all.key_ends = std::move(found.key_ends);
    }
    if (features.empty()) return {};
    all.token_indices = in_one(token_indices);
    all.features = in_one(features);
    return all;
  }

 private:
  std::vector<std::shared_ptr<Encoder>> encoders_;
};

class JoinedSpec final : public EncoderSpec {
 public:
  explicit JoinedSpec(std::vector<EncoderSpecPtr> specs) : specs_(std::move(specs)) {}

  std::shared_ptr<Encoder> build() const override {
    std::vector<std::shared_ptr<Encoder>> encoders;
    for (const auto& each : specs_) encoders.push_back(each->build());
    return std::make_shared<JoinedEncoder>(std::move(encoders));
  }
  std::string owner_class() const override { return specs_.front()->owner_class(); }
  std::vector<EncoderTower> towers() const override {
    std::vector<EncoderTower> all;
    for (const auto& each : specs_) std::ranges::move(each->towers(), std::back_inserter(all));
    return all;
  }
  std::vector<int64_t> qkv_split_shapes(const std::string& name, const std::vector<int64_t>& sizes) const override {
    for (const auto& each : specs_) {
      if (auto shapes = each->qkv_split_shapes(name, sizes); !shapes.empty()) return shapes;
    }
    return {};
  }

 private:
  std::vector<EncoderSpecPtr> specs_;
};

}  // namespace

EncoderSpecPtr join_encoders(std::vector<EncoderSpecPtr> specs) {
  return std::make_shared<JoinedSpec>(std::move(specs));
}

}  // namespace megashard
