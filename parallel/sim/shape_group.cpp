#include "parallel/sim/shape_group.h"

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "parallel/device/device_plan.h"
#include "parallel/sim/operation.h"
#include "parallel/sim/operation_costs.h"

namespace megashard::sim {
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
