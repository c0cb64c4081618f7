#include "framework/training/unit_planner.h"

#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <fstream>
#include <limits>
#include <utility>
#include <vector>

#include "framework/modules/wrap_policy.h"
#include "parallel/fsdp/fully_shard.h"

namespace megashard {
namespace {

// Steps, counted from one, after which something happens.
constexpr int kWarm = 1, kTraced = 3, kTimed = 6, kWarmAgain = 7, kTimedAgain = 10;

std::string with_unit(const char* format, double number) {
  char text[32];
  std::snprintf(text, sizeof text, format, number);
  return text;
}
std::string milliseconds(double seconds) { return with_unit("%.1f ms", seconds * 1e3); }

std::string cost(double latency, double bandwidth) {
  return with_unit("%.0f us", latency * 1e6) + with_unit(" + %.2f GB/s", bandwidth / 1e9);
}

void wait_for_device(c10::Device device) {
  if (!device.is_cpu()) c10::impl::VirtualGuardImpl(device.type()).synchronizeDevice(device.index());
}

template <class Collective>
double median_seconds(c10::Device device, Collective collective) {
  std::vector<double> seconds;
  for (int i = 0; i < 9; ++i) {
    wait_for_device(device);
    const auto begin = std::chrono::steady_clock::now();
    collective();
    wait_for_device(device);
    seconds.push_back(std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count());
  }
  std::ranges::nth_element(seconds, seconds.begin() + 4);
  return seconds[4];
}

ProcessGroupPtr sharding_group(const torch::nn::Module& model) {
  for (const auto& parameter : model.parameters()) {
    if (const auto groups = sharding_groups_of(parameter); !groups.empty()) return groups.front();
  }
  return nullptr;
}

}  // namespace

UnitPlanner::UnitPlanner(torch::nn::Module& model, ProcessGroupPtr world, c10::Device device,
                         UnitPlannerOptions options)
    : model_(model), world_(std::move(world)), device_(device), options_(std::move(options)) {}

void UnitPlanner::weights_updated(int64_t) {
  if (steps_ >= kTimedAgain) return;
  ++steps_;
  const double seconds = seconds_since_last_step();
  const bool timed = (steps_ > kTraced && steps_ <= kTimed) || steps_ > kWarmAgain;
  if (timed) fastest_ = std::min(fastest_, seconds);
  if (steps_ == kWarm) {
    if (sharding_group(model_) == nullptr) {
      options_.print("--fsdp2-plan auto: no parameter is shared between ranks, so there is nothing to plan");
      steps_ = kTimedAgain;
      return;
    }
    trace_ = std::make_unique<UnitTrace>(model_);
    traced_.units = trace_->units();
  } else if (steps_ <= kTraced) {
    auto events = trace_->take_events();
    // The faster of both, where both did the same.
    for (size_t i = 0; i < events.size() && events.size() == traced_.events.size(); ++i)
      events[i].seconds = std::min(events[i].seconds, traced_.events[i].seconds);
    traced_.events = std::move(events);
    traced_.units = trace_->units();
    if (steps_ == kTraced) trace_.reset();
  } else if (steps_ == kTimed) {
    plan();
  } else if (steps_ == kTimedAgain) {
    decide();
  }
  if (steps_ == kTraced || steps_ == kWarmAgain) fastest_ = std::numeric_limits<double>::max();
}

double UnitPlanner::seconds_since_last_step() {
  wait_for_device(device_);
  const auto last = std::exchange(last_step_, std::chrono::steady_clock::now());
  return std::chrono::duration<double>(last_step_ - last).count();
}

double UnitPlanner::of_slowest(double mine) const {
  const at::Tensor value = at::tensor({mine}, at::kDouble).to(device_);
  world_->all_reduce(value, ReduceOp::kMax).wait();
  return value.item<double>();
}

double UnitPlanner::gather_latency() const {
  const auto group = sharding_group(model_);
  const at::Tensor part = at::zeros({1}, device_), whole = at::zeros({group->size()}, device_);
  return median_seconds(device_, [&] { group->all_gather_into(whole, part).wait(); });
}

double UnitPlanner::reduce_latency() const {
  const auto group = sharding_group(model_);
  const at::Tensor part = at::zeros({1}, device_), whole = at::zeros({group->size()}, device_);
  return median_seconds(device_, [&] { group->reduce_scatter_into(part, whole, ReduceOp::kSum).wait(); });
}

void UnitPlanner::plan() {
  const auto count = static_cast<double>(traced_.events.size());
  if (of_slowest(count) != -of_slowest(-count)) {
    options_.print("--fsdp2-plan auto: ranks run other modules than each other, so the units stay as they are");
    steps_ = kTimedAgain;
    return;
  }
  // All ranks find the same plan: by the slowest one's computing, and by the transfers of the one that waits for
  // nobody.
  std::vector<double> values;
  for (const auto& event : traced_.events)
    values.push_back(event.kind == UnitTrace::Event::Kind::kCompute ? event.seconds : -event.seconds);
  for (const auto& unit : traced_.units) {
    for (const auto& part : unit.parts) values.push_back(part.forward_seconds);
  }
  values.insert(values.end(),
                {gather_latency(), reduce_latency(), fastest_, -static_cast<double>(options_.memory_budget())});
  const at::Tensor agreed = at::tensor(values, at::kDouble).to(device_);
  world_->all_reduce(agreed, ReduceOp::kMax).wait();
  const at::Tensor host = agreed.cpu();
  const double* value = host.const_data_ptr<double>();
  for (auto& event : traced_.events) event.seconds = std::abs(*value++);
  for (auto& unit : traced_.units) {
    for (auto& part : unit.parts) part.forward_seconds = *value++;
  }
  const LinkCosts link = link_costs(traced_, value[0], value[1]);
  before_ = value[2];
  present_ = unit_plan_of(model_);
  const bool runs_ahead = !device_.is_cpu();
  planned_ = search_plan(traced_, link, present_, static_cast<int64_t>(-value[3]), runs_ahead);
  const auto now = forecast_plan(traced_, link, present_, runs_ahead);
  const auto then = forecast_plan(traced_, link, planned_, runs_ahead);
  options_.print("--fsdp2-plan auto: gathers take " + cost(link.gather_latency, link.gather_bandwidth) +
                 ", reductions " + cost(link.reduce_latency, link.reduce_bandwidth) +
                 "; forward and backward wait for them " + milliseconds(now.exposed) + " of " +
                 milliseconds(now.seconds));
  if (planned_ == present_) {
    options_.print(c10::str("--fsdp2-plan auto: the ", present_.units.size(), " units stay as they are"));
    steps_ = kTimedAgain;
    return;
  }
  options_.print(c10::str("--fsdp2-plan auto: ", present_.units.size(), " units become ", planned_.units.size(),
                          ", prefetched ", planned_.forward_prefetch, " in forward and ", planned_.backward_prefetch,
                          " in backward; forecast ", milliseconds(then.seconds), " (waits ", milliseconds(then.exposed),
                          "), ", (then.gathered_peak - now.gathered_peak) / (1 << 20), " MiB more"));
  apply_unit_plan(model_, planned_);
}

void UnitPlanner::decide() {
  const double after = of_slowest(fastest_);
  const std::string times = "a step took " + milliseconds(before_) + ", and now takes " + milliseconds(after);
  if (after > before_) {
    apply_unit_plan(model_, present_);
    options_.print("--fsdp2-plan auto: " + times + ": the units are again what they were");
    return;
  }
  options_.print("--fsdp2-plan auto: " + times + ": the plan stays");
  if (world_->rank() != 0 || !options_.file) return;
  std::ofstream file(*options_.file);
  file << "# Written by --fsdp2-plan auto. --fsdp2-plan FILE reads it; docs/unit_plans.md says what may be changed.\n"
       << unit_plan_text(planned_);
  TORCH_CHECK(file.flush().good(), "the plan of units could not be written to ", *options_.file,
              ": check the folder and the disk");
}

}  // namespace megashard
