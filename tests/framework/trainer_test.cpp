#include "framework/training/trainer.h"

#include <gmock/gmock.h>

#include "framework/arguments/argument_validation.h"
#include "tests/framework/token_files.h"
#include "tests/support/diagnostics.h"
#include "tests/support/run_ranks.h"

namespace megashard::testing {
namespace {

using ::testing::HasSubstr;

/// The loss of each token is a function of one weight and of how many forwards there were.
class OneWeight : public MultiModalModule {
 public:
  using Loss = std::function<at::Tensor(const at::Tensor& weight, int forwards)>;
  OneWeight(double value, Loss loss)
      : weight(register_parameter("weight", at::full({1}, value))), loss_(std::move(loss)) {}
  at::Tensor forward(ModelInput input) override {
    return loss_(weight, ++forwards).expand(input.tokens.sizes());
  }
  int64_t vocab_size() const override { return 50; }

  at::Tensor weight;
  int forwards = 0;

 private:
  Loss loss_;
};

Arguments small_run() {
  Arguments arguments;
  arguments.num_layers = 1;
  arguments.hidden_size = 8;
  arguments.num_attention_heads = 2;
  arguments.seq_length = arguments.max_position_embeddings = 8;
  arguments.micro_batch_size = 1;
  arguments.global_batch_size = 2;
  arguments.train_iters = 3;
  arguments.eval_iters = 0;
  arguments.log_interval = 1;
  arguments.lr = 1e-2;
  arguments.vocab_size = 50;
  arguments.data_path = {write_documents(fresh_prefix("tokens"), {40})};
  arguments.split = "100,0,0";
  return arguments;
}

/// Trains on one rank; what it printed.
std::string train(Arguments arguments, OneWeight& model, std::string* said = nullptr) {
  std::string printed;
  const auto print = [&printed](const std::string& line) { printed += line + "\n"; };
  CollectedDiagnostics told;
  validate_arguments(arguments, {}, told.sink());
  DataOptions data;
  data.data_path = arguments.data_path;
  data.split = *arguments.split;
  data.seq_length = *arguments.seq_length;
  data.vocab_size = model.vocab_size();
  run_fake_ranks(1, [&](const ProcessGroupPtr& world) {
    Trainer trainer(arguments, model, world, c10::kCPU, data,
                    {.print_on_first_rank = print,
                     .print_on_last_rank = print,
                     .stop_signal = [] { return false; },
                     .peak_memory_bytes = [] { return int64_t{1}; },
                     .program_start = std::chrono::steady_clock::now(),
                     .peak_tflops = {}});
    if (said == nullptr) {
      trainer.train();
    } else {
      *said = message_of([&] { trainer.train(); });
    }
  });
  return printed;
}

TEST(Trainer, AGradientThatIsNoNumberEndsItBeforeTheWeightsMove) {
  // The loss is finite, and its gradient at 0 is not.
  const auto root = [](const at::Tensor& weight, int) { return weight.sqrt(); };
  for (const double clip : {0.0, 1.0}) {
    OneWeight model(0, root);
    auto arguments = small_run();
    arguments.clip_grad = clip;
    std::string said;
    train(arguments, model, &said);
    EXPECT_THAT(said, HasSubstr("the norm of the gradients is inf at iteration 1"));
    EXPECT_THAT(said, HasSubstr("--no-check-for-nan-in-loss-and-grad"));
    EXPECT_EQ(model.weight.item<double>(), 0);
    EXPECT_EQ(model.forwards, 2);  // one step of two microbatches
  }
  OneWeight model(0, root);
  auto arguments = small_run();
  arguments.check_for_nan_in_loss_and_grad = false;
  train(arguments, model);
  EXPECT_EQ(model.forwards, 6);
}

}  // namespace
}  // namespace megashard::testing
