#include "parallel/collectives/fake_process_group.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>

#include <numeric>

namespace megashard {

namespace {

class FakeProcessGroup final : public ProcessGroup {
 public:
  FakeProcessGroup(int rank, std::vector<int> ranks, std::string name, c10::DeviceType device_type)
      : ProcessGroup(rank, std::move(ranks), std::move(name), std::chrono::minutes(10)),
        device_type_(device_type),
        device_(ProcessGroup::device()) {}

  c10::DeviceType device_type() const override { return device_type_; }
  c10::Device device() const override { return device_; }

  Work all_gather_into(at::Tensor output, at::Tensor input) override {
    check_tensors("all_gather", Shapes::kGather, output, input);
    repeat(output, input.view({-1}));
    return Work();
  }

  Work reduce_scatter_into(at::Tensor output, at::Tensor input, ReduceOp op) override {
    check_tensors("reduce_scatter", Shapes::kScatter, output, input);
    check_reduction("reduce_scatter", input, op);
    if (output.numel() == 0) return Work();
    const at::AutoDispatchBelowADInplaceOrView raw;
    output.view({-1}).copy_(slice(input));
    return all_reduce(output, op);
  }

  Work all_reduce(at::Tensor tensor, ReduceOp op) override {
    check_tensor("all_reduce", tensor);
    check_reduction("all_reduce", tensor, op);
    const at::AutoDispatchBelowADInplaceOrView raw;
    if (op == ReduceOp::kSum) tensor.mul_(size());
    return Work();
  }

  Work broadcast(at::Tensor tensor, int root) override {
    check_tensor("broadcast", tensor);
    check_root(root);
    return Work();
  }

  Work all_to_all_into(at::Tensor output, at::Tensor input, const Splits& splits) override {
    check_all_to_all(output, input, splits);
    TORCH_CHECK(splits.equal(), "the ranks of a fake group send equal slices");
    if (input.numel() > 0) repeat(output, slice(input));
    return Work();
  }

  Work shift_into(at::Tensor output, at::Tensor input, int /*distance*/) override {
    check_tensors("shift", Shapes::kEqual, output, input);
    const at::AutoDispatchBelowADInplaceOrView raw;
    output.view({-1}).copy_(input.view({-1}));
    return Work();
  }

  void barrier() override {}

  std::shared_ptr<ProcessGroup> subgroup(const std::vector<int>& members, const std::string& name) override {
    std::vector<int> ranks = members_in_world(members, name);
    return std::make_shared<FakeProcessGroup>(place_in(members), std::move(ranks), name, device_type_);
  }

 private:
  at::Tensor slice(const at::Tensor& tensor) const {
    const at::AutoDispatchBelowADInplaceOrView raw;
    return tensor.view({size(), -1}).select(0, rank());
  }

  void repeat(const at::Tensor& output, const at::Tensor& row) const {
    if (row.numel() == 0) return;
    const at::AutoDispatchBelowADInplaceOrView raw;
    for (int i = 0; i < size(); ++i) {
      at::Tensor place = output.view({size(), -1}).select(0, i);
      if (!place.is_alias_of(row) || place.storage_offset() != row.storage_offset()) place.copy_(row);
    }
  }

  c10::DeviceType device_type_;
  c10::Device device_;
};

}  // namespace

ProcessGroupPtr make_fake_group(const FakeGroupOptions& options) {
  std::vector<int> ranks(static_cast<size_t>(options.world_size));
  std::iota(ranks.begin(), ranks.end(), 0);
  return std::make_shared<FakeProcessGroup>(options.rank, std::move(ranks), "world", options.device_type);
}

}  // namespace megashard
