// A first program with FSDP2: one linear layer on random data, a distributed sampler, SGD, three epochs.
//
//   torchrun --no-python --nproc-per-node 4 ./linear_example [INIT_METHOD]
//
// INIT_METHOD is env:// (the default), tcp://HOST:PORT or file:///PATH. The first rank prints the order of its samples
// and the mean loss of each epoch over all ranks.

#include <ATen/ops/cross_entropy_loss.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/sgd.h>

#include <megashard/megashard.h>
#include <iomanip>
#include <iostream>

namespace {

constexpr int64_t kSamples = 250, kFeatures = 128, kClasses = 10, kBatch = 16;
constexpr int kEpochs = 3;

void train(const std::string& init_method) {
  const auto world = megashard::init_process_group(init_method);

  at::manual_seed(0);  // the same weights and data on every rank
  auto model = std::make_shared<megashard::Hooked<torch::nn::LinearImpl>>(kFeatures, kClasses);
  const at::Tensor features = at::randn({kSamples, kFeatures});
  const at::Tensor classes = at::randint(kClasses, {kSamples}, at::kLong);

  megashard::fully_shard(*model, world);
  torch::optim::SGD optimizer(model->parameters(), 0.1);

  for (int epoch = 0; epoch < kEpochs; ++epoch) {
    const auto samples = megashard::distributed_samples(
        {.total_samples = kSamples, .replicas = world->size(), .rank = world->rank(), .seed = 7}, epoch);
    const at::Tensor order = at::tensor(samples, at::kLong);
    if (world->rank() == 0) {
      std::cout << "epoch " << epoch << " samples";
      for (const int64_t sample : samples) std::cout << " " << sample;
      std::cout << std::endl;
    }
    at::Tensor sum = at::zeros({1}, at::kDouble);
    for (const auto& batch : order.split(kBatch)) {
      optimizer.zero_grad();
      const at::Tensor loss =
          at::cross_entropy_loss((*model)(features.index_select(0, batch)), classes.index_select(0, batch));
      loss.backward();
      optimizer.step();
      sum += loss.detach() * batch.size(0);
    }
    world->all_reduce(sum, megashard::ReduceOp::kSum).wait();
    const auto seen = static_cast<double>(order.numel() * world->size());
    if (world->rank() == 0) {
      std::cout << "epoch " << epoch << " loss " << std::fixed << std::setprecision(9) << sum.item<double>() / seen
                << std::endl;
    }
  }
  world->barrier();
}

}  // namespace

int main(int argc, char** argv) {
  try {
    train(argc > 1 ? argv[1] : "env://");
    return 0;
  } catch (const c10::Error& error) {
    std::cerr << "linear_example: " << error.what_without_backtrace() << "\n";
  } catch (const std::exception& error) {
    std::cerr << "linear_example: " << error.what() << "\n";
  }
  return 1;
}
