#include "parallel/collectives/routed_process_group.h"

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include "parallel/collectives/gloo_process_group.h"
#include "parallel/collectives/group_store.h"

namespace megashard {

namespace {

class RoutedProcessGroup final : public ProcessGroup, public HasStore {
 public:
  RoutedProcessGroup(ProcessGroupPtr on_cpu, ProcessGroupPtr on_accelerator)
      : ProcessGroup(on_cpu->rank(), on_cpu->ranks(), on_cpu->name(), on_cpu->timeout()),
        on_cpu_(std::move(on_cpu)),
        on_accelerator_(std::move(on_accelerator)) {}

  c10::DeviceType device_type() const override { return on_accelerator_->device_type(); }
  c10::Device device() const override { return on_accelerator_->device(); }
  std::shared_ptr<GroupStore> store() const override {
    const auto* member = dynamic_cast<const HasStore*>(on_cpu_.get());
    return member == nullptr ? nullptr : member->store();
  }

  Work all_gather_into(at::Tensor output, at::Tensor input) override {
    return group_of(output).all_gather_into(output, input);
  }
  Work reduce_scatter_into(at::Tensor output, at::Tensor input, ReduceOp op) override {
    return group_of(output).reduce_scatter_into(output, input, op);
  }
  bool takes_narrow_sums() const override { return on_accelerator_->takes_narrow_sums(); }
  Work all_reduce(at::Tensor tensor, ReduceOp op) override { return group_of(tensor).all_reduce(tensor, op); }
  Work broadcast(at::Tensor tensor, int root) override { return group_of(tensor).broadcast(tensor, root); }
  Work all_to_all_into(at::Tensor output, at::Tensor input, const Splits& splits) override {
    return group_of(output).all_to_all_into(output, input, splits);
  }
  Work shift_into(at::Tensor output, at::Tensor input, int distance) override {
    return group_of(output).shift_into(output, input, distance);
  }
  void barrier() override { on_cpu_->barrier(); }
  at::Tensor allocate(int64_t numel, c10::ScalarType dtype, c10::Device device, GroupMemory memory) override {
    return (device.is_cpu() ? on_cpu_ : on_accelerator_)->allocate(numel, dtype, device, memory);
  }
  std::vector<std::string> all_gather_strings(const std::string& mine) override {
    return on_cpu_->all_gather_strings(mine);
  }

  void fail(std::exception_ptr failure) override { on_cpu_->fail(std::move(failure)); }

  std::shared_ptr<ProcessGroup> subgroup(const std::vector<int>& members, const std::string& name) override {
    return std::make_shared<RoutedProcessGroup>(on_cpu_->subgroup(members, name),
                                                on_accelerator_->subgroup(members, name));
  }
  std::shared_ptr<ProcessGroup> split(const std::vector<int>& members, const std::string& name) override {
    return std::make_shared<RoutedProcessGroup>(on_cpu_->split(members, name), on_accelerator_->split(members, name));
  }

  const ProcessGroupPtr& on_cpu() const { return on_cpu_; }

 private:
  ProcessGroup& group_of(const at::Tensor& tensor) const {
    return tensor.defined() && tensor.is_cpu() ? *on_cpu_ : *on_accelerator_;
  }

  ProcessGroupPtr on_cpu_;
  ProcessGroupPtr on_accelerator_;
};

}  // namespace

ProcessGroupPtr make_routed_group(ProcessGroupPtr on_cpu, ProcessGroupPtr on_accelerator) {
  TORCH_CHECK(on_cpu->device_type() == c10::kCPU && on_cpu->ranks() == on_accelerator->ranks(),
              "a routed group takes a group on the CPU and one on an accelerator, of the same ranks");
  return std::make_shared<RoutedProcessGroup>(std::move(on_cpu), std::move(on_accelerator));
}

ProcessGroupPtr make_host_group(const ProcessGroupPtr& group, const std::string& name) {
  if (group->device_type() == c10::kCPU) return make_group_apart(group, name);
  const auto* routed = dynamic_cast<const RoutedProcessGroup*>(group.get());
  TORCH_CHECK(routed != nullptr, "group '", group->name(), "' has no backend for the CPU, which ", name,
              " need: take --distributed-backend cpu:gloo,cuda:nccl");
  return make_group_apart(routed->on_cpu(), name);
}

bool has_host_backend(const ProcessGroupPtr& group) {
  return group->device_type() == c10::kCPU || dynamic_cast<const RoutedProcessGroup*>(group.get()) != nullptr;
}

}  // namespace megashard
