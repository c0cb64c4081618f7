#include "parallel/sim/process_group.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cstring>
#include <exception>
#include <string>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <utility>
#include <vector>

#include "parallel/collectives/group_store.h"
#include "parallel/collectives/process_group.h"
#include "parallel/device/device_plan.h"
#include "parallel/sim/findings.h"
#include "parallel/sim/graph_capture.h"
#include "parallel/sim/operation.h"
#include "parallel/sim/operation_costs.h"
#include "parallel/sim/settings.h"
#include "parallel/sim/tensor_memory.h"

namespace megashard::sim {
namespace {

constexpr int kSizesDiffer = -1;  // a call's detail: sizes differ between ranks

/// One rank's call, for the comparison.
struct Called {
  char operation[24] = {};
  char unit[104] = {};  // for the message only
  int64_t input_numel = 0;
  int64_t output_numel = 0;
  int32_t dtype = 0;
  int32_t detail = 0;  // reduction, root or distance

  bool matches(const Called& other) const {
    const bool same_sizes =
        detail == kSizesDiffer || (input_numel == other.input_numel && output_numel == other.output_numel);
    return std::strcmp(operation, other.operation) == 0 && same_sizes && dtype == other.dtype && detail == other.detail;
  }
  std::string text() const {
    return c10::str(operation, " of ", input_numel, " ", static_cast<at::ScalarType>(dtype), " elements",
                    unit[0] == '\0' ? "" : " in ", unit);
  }
};

class SimProcessGroup final : public ProcessGroup, public HasStore {
 public:
  SimProcessGroup(const NcclGroupOptions& options, GroupStorePtr world_store, ProcessGroupPtr gloo)
      : ProcessGroup(options.rank, options.ranks, options.name, options.timeout),
        options_(options),
        world_store_(std::move(world_store)),
        gloo_(std::move(gloo)) {}

  c10::DeviceType device_type() const override { return c10::kCUDA; }
  std::shared_ptr<GroupStore> store() const override { return options_.store; }
  c10::Device device() const override { return {c10::kCUDA, static_cast<c10::DeviceIndex>(options_.device)}; }

  Work all_gather_into(at::Tensor output, at::Tensor input) override {
    check_tensors("all_gather", Shapes::kGather, output, input);
    return run("all_gather", 0, output, input, [](ProcessGroup& gloo, const at::Tensor& out, const at::Tensor& in) {
      return gloo.all_gather_into(out, in);
    });
  }
  Work reduce_scatter_into(at::Tensor output, at::Tensor input, ReduceOp op) override {
    check_tensors("reduce_scatter", Shapes::kScatter, output, input);
    check_reduction("reduce_scatter", input, op);
    return run("reduce_scatter", static_cast<int>(op), output, input,
               [op](ProcessGroup& gloo, const at::Tensor& out, const at::Tensor& in) {
                 return gloo.reduce_scatter_into(out, in, op);
               });
  }
  Work all_reduce(at::Tensor tensor, ReduceOp op) override {
    check_tensor("all_reduce", tensor);
    check_reduction("all_reduce", tensor, op);
    return run("all_reduce", static_cast<int>(op), tensor, tensor,
               [op](ProcessGroup& gloo, const at::Tensor& out, const at::Tensor&) { return gloo.all_reduce(out, op); });
  }
  Work broadcast(at::Tensor tensor, int root) override {
    check_tensor("broadcast", tensor);
    check_root(root);
    return run("broadcast", root, tensor, tensor, [root](ProcessGroup& gloo, const at::Tensor& out, const at::Tensor&) {
      return gloo.broadcast(out, root);
    });
  }
  Work all_to_all_into(at::Tensor output, at::Tensor input, const Splits& splits) override {
    check_all_to_all(output, input, splits);
    const int detail = splits.equal() ? 0 : kSizesDiffer;
    return run("all_to_all", detail, output, input,
               [splits](ProcessGroup& gloo, const at::Tensor& out, const at::Tensor& in) {
                 return gloo.all_to_all_into(out, in, splits);
               });
  }
  Work shift_into(at::Tensor output, at::Tensor input, int distance) override {
    check_tensors("shift", Shapes::kEqual, output, input);
    return run("shift", distance, output, input,
               [distance](ProcessGroup& gloo, const at::Tensor& out, const at::Tensor& in) {
                 return gloo.shift_into(out, in, distance);
               });
  }
  void barrier() override {
    if (size() == 1) return;
    meet("barrier", {}, [](ProcessGroup& gloo) { gloo.barrier(); });
    SimDevice& device = SimDevice::at(options_.device);
    const std::lock_guard lock(device.mutex);
    device.host_waits_for_all("cudaDeviceSynchronize");
  }

  std::shared_ptr<ProcessGroup> subgroup(const std::vector<int>& members, const std::string& name) override {
    NcclGroupOptions options = options_;
    options.ranks = members_in_world(members, name);
    options.rank = place_in(members);
    options.name = name;
    return std::make_shared<SimProcessGroup>(options, world_store_, gloo_->subgroup(members, name));
  }

 private:
  template <class Exchange>
  Work run(const char* name, int detail, const at::Tensor& output, const at::Tensor& input, const Exchange& exchange) {
    if (size() == 1) {
      if (output.const_data_ptr() != input.const_data_ptr()) output.view({-1}).copy_(input.view({-1}), true);
      return Work();
    }
    const at::Tensor out = host_alias(output), in = host_alias(input);
    SimDevice& device = SimDevice::of(output.device());
    std::vector<Recording::Place> after;
    {
      Operation operation(device, c10::str(name, " of group '", this->name(), "'"));
      operation.reads(input);
      operation.writes(output);
      operation.is_collective(static_cast<int64_t>(std::max(output.nbytes(), input.nbytes())));
      after = operation.after();
    }
    Called mine;
    std::strncpy(mine.operation, name, sizeof(mine.operation) - 1);
    std::strncpy(mine.unit, current_unit().c_str(), sizeof(mine.unit) - 1);
    mine.input_numel = input.numel();
    mine.output_numel = output.numel();
    mine.dtype = static_cast<int32_t>(input.scalar_type());
    mine.detail = detail;
    at::Tensor sent;
    const bool keeps = device.recording.on() && !capture_of(device).running();
    if (keeps) sent = in.clone();
    // Without the device's lock: other ranks may wait for another thread of this rank.
    meet(name, mine, [&](ProcessGroup& gloo) { exchange(gloo, out, in).wait(); });
    const std::lock_guard lock(device.mutex);
    if (!device.recording.on()) return Work();
    const int agent = agent_of(current_stream(device.index));
    if (!keeps) {
      device.recording.add(agent, *interned(name), after,
                           [this, exchange, out, in] { exchange(*gloo_, out, in).wait(); });
      return Work();
    }
    // Other ranks do not run again: their data is kept, and this rank must send the same again.
    device.recording.add(agent, *interned(name), after, [out, in, sent, received = out.clone(), name = this->name()] {
      if (sent.numel() > 0 && std::memcmp(in.const_data_ptr(), sent.const_data_ptr(), sent.nbytes()) != 0)
        found("in another legal order a collective of group '" + name +
              "' sends other bits: its input is not ordered before it");
      std::memcpy(out.mutable_data_ptr(), received.const_data_ptr(), received.nbytes());
    });
    return Work();
  }

  /// Compares the calls of all ranks, then runs the exchange.
  template <class Exchange>
  void meet(const char* operation, Called mine, const Exchange& exchange) {
    if (mine.operation[0] == '\0') std::strncpy(mine.operation, operation, sizeof(mine.operation) - 1);
    ++calls_;
    const auto bytes = static_cast<int64_t>(sizeof(Called));
    at::Tensor sent = at::empty({bytes}, at::kByte), all = at::empty({bytes * size()}, at::kByte);
    std::memcpy(sent.mutable_data_ptr(), &mine, sizeof(Called));
    try {
      gloo_->all_gather_into(all, sent).wait();
    } catch (const std::exception& error) {
      tell_what_all_wait_for(mine, error);
    }
    const auto* first = static_cast<const char*>(all.const_data_ptr());
    for (int other = 0; other < size(); ++other) {
      Called theirs;
      std::memcpy(&theirs, first + other * bytes, sizeof(Called));
      if (mine.matches(theirs)) continue;
      const std::string message = c10::str("collective ", calls_, " of group '", name(), "' differs: rank ",
                                           ranks()[static_cast<size_t>(rank())], " calls ", mine.text(), ", rank ",
                                           ranks()[static_cast<size_t>(other)], " calls ", theirs.text(),
                                           "; on GPUs this hangs or gives wrong numbers");
      found(message);
      TORCH_CHECK(false, message);
    }
    exchange(*gloo_);
  }

  [[noreturn]] void tell_what_all_wait_for(const Called& mine, const std::exception& error) {
    const auto key = [](int rank) { return "sim_waits/" + std::to_string(rank); };
    auto& store = *world_store_->store;
    const int me = ranks()[static_cast<size_t>(rank())];
    std::string message = c10::str("a collective is not matched, which hangs on GPUs: rank ", me,
                                   " waits in collective ", calls_, " of group '", name(), "' (", mine.text(), ")");
    try {
      store.set(key(me), c10::str("collective ", calls_, " of group '", name(), "' (", mine.text(), ")"));
      for (const int other : ranks()) {
        if (other == me) continue;
        try {
          store.wait({key(other)}, std::chrono::milliseconds(1000));
          message += c10::str("; rank ", other, " waits in ", store.get_to_str(key(other)));
        } catch (const std::exception&) {
          message += c10::str("; rank ", other, " has not come and waits in no collective");
        }
      }
    } catch (const std::exception&) {
      // The store is gone with its rank: reports what is known.
    }
    found(message);
    const auto* torch_error = dynamic_cast<const c10::Error*>(&error);
    TORCH_CHECK(false, message, ": ", torch_error == nullptr ? error.what() : torch_error->what_without_backtrace());
  }

  NcclGroupOptions options_;
  GroupStorePtr world_store_;
  ProcessGroupPtr gloo_;
  int64_t calls_ = 0;
};

}  // namespace

ProcessGroupPtr make_process_group(const NcclGroupOptions& options) {
  if (settings().shapes) return make_shape_group(options);
  const auto part = std::make_shared<GroupStore>();
  part->store = c10::make_intrusive<c10d::PrefixStore>("sim", options.store->store);
  ProcessGroupPtr gloo = make_gloo_group(
      {.store = part, .rank = options.rank, .ranks = options.ranks, .name = options.name, .timeout = options.timeout});
  return std::make_shared<SimProcessGroup>(options, options.store, std::move(gloo));
}

namespace {

class ShapeGroup final : public ProcessGroup {
 public:
  explicit ShapeGroup(const NcclGroupOptions& options)
      : ProcessGroup(options.rank, options.ranks, options.name, options.timeout), options_(options) {}

  c10::DeviceType device_type() const override { return c10::kCUDA; }
  c10::Device device() const override { return {c10::kCUDA, static_cast<c10::DeviceIndex>(options_.device)}; }
  bool takes_narrow_sums() const override { return acts_as_cpu(device()); }

  Work all_gather_into(at::Tensor output, at::Tensor input) override {
    check_tensors("all_gather", Shapes::kGather, output, input);
    return run("all_gather", output, input);
  }
  Work reduce_scatter_into(at::Tensor output, at::Tensor input, ReduceOp op) override {
    check_tensors("reduce_scatter", Shapes::kScatter, output, input);
    check_reduction("reduce_scatter", input, op);
    return run("reduce_scatter", output, input);
  }
  Work all_reduce(at::Tensor tensor, ReduceOp op) override {
    check_tensor("all_reduce", tensor);
    check_reduction("all_reduce", tensor, op);
    return run("all_reduce", tensor, tensor);
  }
  Work broadcast(at::Tensor tensor, int root) override {
    check_tensor("broadcast", tensor);
    check_root(root);
    return run("broadcast", tensor, tensor);
  }
  Work all_to_all_into(at::Tensor output, at::Tensor input, const Splits& splits) override {
    check_all_to_all(output, input, splits);
    return run("all_to_all", output, input);
  }
  Work shift_into(at::Tensor output, at::Tensor input, int /*distance*/) override {
    check_tensors("shift", Shapes::kEqual, output, input);
    return run("shift", output, input);
  }
  void barrier() override {}
  std::vector<std::string> all_gather_strings(const std::string& mine) override {
    return std::vector<std::string>(static_cast<size_t>(size()), mine);
  }

  std::shared_ptr<ProcessGroup> subgroup(const std::vector<int>& members, const std::string& name) override {
    NcclGroupOptions options = options_;
    options.ranks = members_in_world(members, name);
    options.rank = place_in(members);
    options.name = name;
    return std::make_shared<ShapeGroup>(options);
  }

 private:
  Work run(const char* kind, const at::Tensor& output, const at::Tensor& input) const {
    Operation operation(SimDevice::of(output.device()), kind);
    operation.reads(input);
    operation.writes(output);
    if (size() == 1) return Work();  // a copy
    const auto bytes = static_cast<int64_t>(std::max(output.nbytes(), input.nbytes()));
    operation.is_collective(bytes, collective_seconds(kind, bytes, ranks()));
    return Work();
  }

  NcclGroupOptions options_;
};

}  // namespace

ProcessGroupPtr make_shape_group(const NcclGroupOptions& options) { return std::make_shared<ShapeGroup>(options); }

}  // namespace megashard::sim
