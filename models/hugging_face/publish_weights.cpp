#include "models/hugging_face/publish_weights.h"

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "checkpoint/publishing/published_steps.h"
#include "checkpoint/steps/async_saver.h"
#include "models/hugging_face/save_hf_model.h"
#include "models/lora/lora.h"
#include "parallel/collectives/agreement.h"

namespace megashard {
namespace {

/// The copies in the dtypes of the files, in memory of their own.
ShardedTensors narrowed_copies(const ShardedTensors& copies, const HfSaveOptions& files) {
  ShardedTensors narrow = copies;
  for (auto& [name, piece] : narrow) {
    const bool is_narrow =
        files.dtype && at::isFloatingType(piece.local.scalar_type()) && !files.in_fp32.contains(name);
    const auto dtype = is_narrow ? *files.dtype : piece.local.scalar_type();
    piece.local = piece.local.to(at::kCPU, dtype, /*non_blocking=*/false, /*copy=*/true).contiguous();
  }
  return narrow;
}

class WeightPublisher final : public Listener {
 public:
  WeightPublisher(MegatronModule& model, const Arguments& arguments, const ProcessGroupPtr& world)
      : model_(model),
        arguments_(arguments),
        steps_(std::make_shared<PublishedSteps>(
            PublishedStepsOptions{.folder = *arguments.publish_weights,
                                  .full_interval = arguments.publish_full_interval,
                                  .keep_interval = arguments.save ? arguments.save_interval : std::nullopt})),
        saver_(world, {.deadline = world->timeout(), .what = "published model", .copies_beside = true}) {
    all_or_rethrow(world, [&] {
      if (world->rank() == 0) std::filesystem::create_directories(*arguments.publish_weights);
    });
  }

  void training_starts(const TrainingRun& run) override {
    print_ = run.print;
    publish(run.step);
  }
  void gradients_ready(int64_t /*step*/) override {
    timed([this] { saver_.before_changes(); });
  }
  void weights_updated(int64_t step) override {
    if (step % arguments_.publish_interval != 0) return;
    waits_.push_back({});
    timed([&] { publish(step); });
  }
  void steps_ended(int64_t /*step*/) override {
    saver_.wait();
    if (waits_.empty()) return;
    const Milliseconds most = std::ranges::max(waits_);
    print_(c10::str("published ", waits_.size(), " steps, for which training waited ", most.count(), " ms at most"));
  }

 private:
  using Milliseconds = std::chrono::duration<double, std::milli>;

  template <class Work>
  void timed(const Work& work) {
    const auto begin = std::chrono::steady_clock::now();
    work();
    if (!waits_.empty()) waits_.back() += std::chrono::steady_clock::now() - begin;
  }
  void publish(int64_t step) {
    HfWeights weights = arguments_.lora_r ? adapter_weights(model_, arguments_)
                                          : whole_weights(model_, arguments_, /*packs_experts=*/false);
    weights.files.dtype = at::kBFloat16;
    saver_.start("step " + std::to_string(step), weights.tensors,
                 [steps = steps_, step, files = std::move(weights.files)](const ShardedTensors& copies,
                                                                          const ProcessGroupPtr& group) {
                   steps->write(step, narrowed_copies(copies, files), group, files);
                 });
  }

  MegatronModule& model_;
  const Arguments& arguments_;
  std::shared_ptr<PublishedSteps> steps_;  // shared with the thread
  AsyncSaver saver_;
  std::vector<Milliseconds> waits_;  // of training for each step that was published
  std::function<void(const std::string&)> print_;
};

}  // namespace

std::shared_ptr<Listener> publish_weights(MegatronModule& model, const Arguments& arguments,
                                          const ProcessGroupPtr& world) {
  return std::make_shared<WeightPublisher>(model, arguments, world);
}

}  // namespace megashard
