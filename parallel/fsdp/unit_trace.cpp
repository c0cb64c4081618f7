#include "parallel/fsdp/unit_trace.h"

#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/graph_task.h>

#include <fstream>
#include <nlohmann/json.hpp>
#include <unordered_map>
#include <utility>

#include "parallel/fsdp/detail/fsdp_state.h"
#include "parallel/fsdp/fsdp_controls.h"

namespace megashard {
namespace {

using torch::nn::Module;

struct Bytes {
  int64_t gathered = 0, reduced = 0;
};

void add_bytes(const FsdpParam& param, Bytes& bytes) {
  const int64_t numel = param.geometry().numel;
  bytes.gathered += numel * static_cast<int64_t>(c10::elementSize(param.compute_dtype()));
  if (param.trainable()) bytes.reduced += numel * static_cast<int64_t>(c10::elementSize(param.stored_dtype()));
}

}  // namespace

class UnitTrace::Clock : public std::enable_shared_from_this<Clock> {
 public:
  Clock(Module& root, FsdpState& state) : device_(state.device()) {
    add_unit("", root, state);
    for (const auto& item : root.named_modules("", /*include_self=*/false)) {
      const auto unit = fsdp_state(*item.value());
      if (unit != nullptr && !unit->groups().empty()) add_unit(item.key(), *item.value(), *unit);
    }
  }

  /// Installs hooks that time the forward of children without hooks.
  void watch_parts(Module& root) {
    const auto modules = root.named_modules("", /*include_self=*/false);
    for (size_t unit = 1; unit < units_.size(); ++unit) {
      for (size_t part = 0; part < units_[unit].parts.size(); ++part) {
        const auto& module = modules[units_[unit].parts[part].path];
        auto& hooked = dynamic_cast<HookedModule&>(*module);
        hooked.set_forward_hooks(std::make_shared<PartHooks>(shared_from_this(), unit, part));
        watched_.push_back(module);
      }
    }
  }
  void leave_parts() {
    for (const auto& module : watched_) dynamic_cast<HookedModule&>(*module).set_forward_hooks(nullptr);
  }

  void tell(UnitMoment moment, const FsdpState& state) {
    const double since = seconds_since_last();
    const size_t unit = places_.at(&state);
    const bool in_backward = torch::autograd::get_current_graph_task_id() != -1;
    switch (moment) {
      case UnitMoment::kGathered:
        events_.push_back({Event::Kind::kGather, unit, in_backward, since});
        return;
      case UnitMoment::kReduced:
        events_.push_back({Event::Kind::kReduce, unit, in_backward, since});
        return;
      case UnitMoment::kGather:
      case UnitMoment::kReduce:
      case UnitMoment::kResharded:
        if (begun_) events_.push_back({Event::Kind::kCompute, unit, in_backward, since});
        begun_ = true;
    }
    if (moment == UnitMoment::kResharded) events_.push_back({Event::Kind::kReshard, unit, in_backward, 0});
  }

  const std::vector<Unit>& units() const { return units_; }
  std::vector<Event> take_events() {
    begun_ = false;
    return std::exchange(events_, {});
  }

 private:
  class PartHooks final : public ForwardHooks {
   public:
    PartHooks(std::shared_ptr<Clock> clock, size_t unit, size_t part)
        : clock_(std::move(clock)), unit_(unit), part_(part) {}
    void pre_forward(TensorRefs) override { begin_ = clock_->now(); }
    void post_forward(TensorRefs) override {
      Part& part = clock_->units_[unit_].parts[part_];
      part.forward_seconds += std::chrono::duration<double>(clock_->now() - begin_).count();
      part.runs_again |= torch::autograd::get_current_graph_task_id() != -1;
    }
    void forward_failed() noexcept override {}
    void before_conversion() override {}
    void before_rebind(const char*) override {}

   private:
    std::shared_ptr<Clock> clock_;
    size_t unit_, part_;
    std::chrono::steady_clock::time_point begin_;
  };

  void add_unit(const std::string& path, const Module& module, const FsdpState& state) {
    const auto [place, is_first] = places_.emplace(&state, units_.size());
    if (is_first) units_.emplace_back();
    Unit& unit = units_[place->second];
    unit.modules.push_back(path);
    if (!is_first) return;
    Bytes bytes;
    for (const auto& group : state.groups()) {
      for (const auto& param : group->params()) add_bytes(*param, bytes);
    }
    unit.gathered_bytes = bytes.gathered;
    unit.reduced_bytes = bytes.reduced;
    if (!path.empty() && state.modules().size() == 1) add_parts(path, module, unit);
  }

  static void add_parts(const std::string& path, const Module& module, Unit& unit) {
    for (const auto& item : module.named_children()) {
      const auto* hooked = dynamic_cast<const HookedModule*>(item.value().get());
      Bytes bytes;
      for (const auto& parameter : item.value()->parameters()) {
        const FsdpParam* param = find_fsdp_param(parameter);
        if (param != nullptr) add_bytes(*param, bytes);
      }
      if (hooked == nullptr || hooked->forward_hooks() != nullptr || bytes.gathered * 10 < unit.gathered_bytes)
        continue;
      unit.parts.push_back({path + "." + item.key(), bytes.gathered, bytes.reduced});
    }
  }

  std::chrono::steady_clock::time_point now() const {
    if (!device_.is_cpu()) c10::impl::VirtualGuardImpl(device_.type()).synchronizeDevice(device_.index());
    return std::chrono::steady_clock::now();
  }
  double seconds_since_last() {
    const auto last = std::exchange(last_, now());
    return std::chrono::duration<double>(last_ - last).count();
  }

  c10::Device device_;
  std::vector<Unit> units_;
  std::unordered_map<const FsdpState*, size_t> places_;
  std::vector<Event> events_;
  std::vector<std::shared_ptr<Module>> watched_;
  std::chrono::steady_clock::time_point last_;
  bool begun_ = false;
};

UnitTrace::UnitTrace(Module& root) {
  const auto state = fsdp_state(root);
  TORCH_CHECK(state != nullptr && state->context() != nullptr,
              "a trace of units is of a model under fully_shard that has run once");
  root_ = state.get();
  clock_ = std::make_shared<Clock>(root, *state);
  clock_->watch_parts(root);
  state->context()->clock = [clock = clock_](UnitMoment moment, FsdpState& unit) { clock->tell(moment, unit); };
}

UnitTrace::~UnitTrace() {
  clock_->leave_parts();
  root_->context()->clock = nullptr;
}

const std::vector<UnitTrace::Unit>& UnitTrace::units() const { return clock_->units(); }
std::vector<UnitTrace::Event> UnitTrace::take_events() { return clock_->take_events(); }

ScheduleTrace::ScheduleTrace(torch::nn::Module& root) : root_(root) {
  set_schedule_observer(root, [this](const char* what, const std::string& group) {
    const std::chrono::duration<double, std::micro> since = std::chrono::steady_clock::now() - start_;
    const std::lock_guard lock(mutex_);
    events_.push_back({what, group, since.count()});
  });
}

ScheduleTrace::~ScheduleTrace() { set_schedule_observer(root_, nullptr); }

std::vector<ScheduleTrace::Event> ScheduleTrace::events() const {
  const std::lock_guard lock(mutex_);
  return events_;
}

void ScheduleTrace::clear() {
  const std::lock_guard lock(mutex_);
  events_.clear();
}

void ScheduleTrace::write_chrome_trace(const std::string& path, int rank) const {
  using nlohmann::json;
  json list = json::array();
  list.push_back({{"ph", "M"}, {"name", "process_name"}, {"pid", rank}, {"args", {{"name", c10::str("rank ", rank)}}}});
  for (const auto& event : events()) {
    json entry = {{"pid", rank}, {"tid", 0}, {"ts", event.microseconds}, {"cat", "fsdp"}};
    const bool begins = event.what == "unshard";
    if (begins || event.what == "reshard") {  // a bar on the group's own line
      entry.update({{"ph", begins ? "b" : "e"}, {"name", event.group}, {"id", event.group}});
    } else {
      entry.update({{"ph", "i"}, {"s", "p"}, {"name", event.what + " " + event.group}});
    }
    list.push_back(std::move(entry));
  }
  std::ofstream file(path);
  file << json{{"traceEvents", list}, {"displayTimeUnit", "ms"}} << "\n";
  TORCH_CHECK(file.flush().good(), "the schedule trace could not be written to ", path,
              ": check the folder and the disk");
}

}  // namespace megashard
