#pragma once

#include <c10/core/Device.h>
#include <torch/nn/module.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "framework/training/listener.h"
#include "framework/training/unit_plan_search.h"
#include "parallel/collectives/process_group.h"

namespace megashard {

struct UnitPlannerOptions {
  std::function<int64_t()> memory_budget;  ///< bytes of this rank that a plan may take more; asked after some steps
  std::optional<std::string> file;         ///< where the first rank writes the plan; none: it is printed only
  std::function<void(const std::string& line)> print;
};

/// --fsdp2-plan auto. The first step warms up, the next two are traced, three are timed as they are; then the model's
/// units are regrouped as search_plan says, and after one more step three are timed again. What is slower than before
/// is taken back. All ranks decide alike, by the slowest of them.
class UnitPlanner : public Listener {
 public:
  /// `world`: the ranks that train. `model` is under fully_shard and outlives the planner.
  UnitPlanner(torch::nn::Module& model, ProcessGroupPtr world, c10::Device device, UnitPlannerOptions options);
  void weights_updated(int64_t step) override;

 private:
  double seconds_since_last_step();
  void plan();
  void decide();
  double of_slowest(double mine) const;
  /// Of a collective over the ranks that shard the model, of next to no bytes.
  double gather_latency() const;
  double reduce_latency() const;

  torch::nn::Module& model_;
  ProcessGroupPtr world_;
  c10::Device device_;
  UnitPlannerOptions options_;
  int steps_ = 0;
  std::chrono::steady_clock::time_point last_step_;
  std::unique_ptr<UnitTrace> trace_;
  StepTrace traced_;
  double fastest_ = 0;  // of the steps that are timed now
  double before_ = 0;   // the fastest of those without the plan
  UnitPlan present_, planned_;
};

}  // namespace megashard
