// A loss or a gradient that is no number: who has it, in which of its samples, and where it comes from.
#include <ATen/ops/where.h>
#include <gmock/gmock.h>

#include <cmath>

#include "tests/framework/training/small_training.h"
#include "tests/support/message_of.h"
#include "tests/support/run_ranks.h"

namespace megashard::testing {
namespace {

using ::testing::HasSubstr;

constexpr int64_t kBad = 150;  // a token

/// x times its weight.
class StageImpl : public torch::nn::Module {
 public:
  StageImpl() : weight(register_parameter("weight", at::ones({4}))) {}
  at::Tensor forward(const at::Tensor& x, const at::Tensor& tokens) {
    return at::where(tokens == kBad, bad(x, tokens != kBad), x) * weight[0];
  }
  virtual at::Tensor bad(const at::Tensor& x, const at::Tensor& /*is_good*/) { return x; }
  at::Tensor weight;
};
class NanStageImpl : public StageImpl {
 public:
  at::Tensor bad(const at::Tensor& x, const at::Tensor& /*is_good*/) override { return x * NAN; }
};
/// Finite, with a gradient that is not.
class SteepStageImpl : public StageImpl {
 public:
  at::Tensor bad(const at::Tensor& x, const at::Tensor& is_good) override { return (x - x.detach() + is_good).sqrt(); }
};

template <class Second>
class ThreeStages : public MultiModalModule {
 public:
  ThreeStages()
      : first_(register_module("first", std::make_shared<Hooked<StageImpl>>())),
        second_(register_module("second", std::make_shared<Hooked<Second>>())),
        third_(register_module("third", std::make_shared<Hooked<StageImpl>>())) {}
  ModelOutput forward(Batch input) override {
    ++forwards;
    const auto& tokens = input.tokens();
    const auto hidden = second_->forward(first_->forward(tokens.to(at::kFloat) + 1, tokens), tokens);
    return {.token_losses = third_->forward(hidden, tokens)};
  }
  int64_t vocab_size() const override { return 200; }

  int forwards = 0;

 private:
  std::shared_ptr<Hooked<StageImpl>> first_;
  std::shared_ptr<Hooked<Second>> second_;
  std::shared_ptr<Hooked<StageImpl>> third_;
};

/// One step of four samples, one a micro batch; what the run ends with.
template <class Second>
std::string train(Arguments arguments, int ranks) {
  arguments.use_torch_fsdp2 = true;
  arguments.global_batch_size = 4;
  const SmallTraining training(arguments, ranks);
  std::string said;
  run_ranks(ranks, [&](const ProcessGroupPtr& world) {
    ThreeStages<Second> model;
    training.on_rank(world, model, quiet_callbacks(), [&](Trainer& trainer) {
      const auto message = message_of([&] { trainer.train(); });
      if (world->rank() == 0) said = message;
    });
  });
  return said;
}

/// Four documents, as many samples, of which document 2 has the bad token.
Arguments run_on_four_documents() {
  auto arguments = small_run();
  arguments.train_iters = 1;
  arguments.lr = 1e-3;
  const auto prefix = fresh_prefix("bad");
  IndexedDatasetWriter writer(prefix, TokenType::kInt32);
  for (int64_t document = 0; document < 4; ++document) {
    std::vector<int64_t> tokens(9, 1);
    if (document == 2) tokens[4] = kBad;
    writer.add_document(tokens);
  }
  writer.finish();
  arguments.data_path = {prefix};
  return arguments;
}

/// The sample with the token, by reading all of them.
int64_t bad_sample(const Arguments& arguments) {
  DataOptions options;
  options.data_path = arguments.data_path;
  options.split = *arguments.split;
  options.seq_length = *arguments.seq_length;
  options.vocab_size = 200;
  options.train_samples = 4;
  options.valid_samples = options.test_samples = 0;
  const auto samples = build_datasets(options).train;
  for (int64_t i = 0; i < 4; ++i) {
    const auto batch = samples->collate({i}, {.seq_length = 8, .vocab_size = 200});
    if ((batch.tokens() == kBad).any().item<bool>()) return i;
  }
  ADD_FAILURE();
  return -1;
}

std::string micro_batch_of(int64_t sample, int ranks) {
  return "micro batch " + std::to_string(sample / ranks + 1) + " of " + std::to_string(4 / ranks) + " (sample ";
}

TEST(NotFinite, ALossIsTracedToItsRankMicroBatchSampleAndModule) {
  const auto arguments = run_on_four_documents();
  const auto sample = bad_sample(arguments);
  for (const int ranks : {1, 2}) {
    const auto rank = "rank " + std::to_string(sample % ranks);
    const auto said = train<NanStageImpl>(arguments, ranks);
    EXPECT_THAT(said, HasSubstr("the loss of " + rank + " is "));
    EXPECT_THAT(said,
                HasSubstr(" at iteration 1, in " + (ranks == 1 ? "" : rank + ", ") + micro_batch_of(sample, ranks) +
                          std::to_string(sample) + " of " + arguments.data_path[0] + ", document"));
    EXPECT_THAT(said, HasSubstr("the first output that is not finite is that of second: lower the learning rate"));
  }
}

TEST(NotFinite, ANormIsTracedToItsMicroBatchAndParameter) {
  const auto arguments = run_on_four_documents();
  const auto sample = bad_sample(arguments);
  for (const int ranks : {1, 2}) {
    const auto said = train<SteepStageImpl>(arguments, ranks);
    EXPECT_THAT(said, HasSubstr("the norm of the gradients is "));
    EXPECT_THAT(said, HasSubstr(micro_batch_of(sample, ranks)));
    // second's own is finite: what it passes on is not.
    EXPECT_THAT(said, HasSubstr("a gradient that is not finite at first.weight, and the loss is finite"));
  }
}

}  // namespace
}  // namespace megashard::testing
