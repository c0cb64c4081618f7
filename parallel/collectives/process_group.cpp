#include "parallel/collectives/process_group.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <numeric>

#include "parallel/device/buffer_pool.h"

namespace megashard {

void Work::wait() {
  const std::shared_ptr<Task> task = std::move(task_);
  if (task != nullptr && !std::exchange(task->waited_for_, true)) task->finish();
}

ProcessGroup::ProcessGroup(int rank, std::vector<int> ranks, std::string name, std::chrono::milliseconds timeout)
    : rank_(rank), ranks_(std::move(ranks)), name_(std::move(name)), timeout_(timeout) {
  TORCH_CHECK(!ranks_.empty(), "group '", name_, "' has no ranks");
  TORCH_CHECK(0 <= rank_ && rank_ < size(), "group '", name_, "': rank ", rank_, " is not below its size, ", size());
}

c10::Device ProcessGroup::device() const {
  const c10::DeviceType type = device_type();
  if (type == c10::kCPU || type == c10::kMeta) return c10::Device(type);
  return c10::impl::VirtualGuardImpl(type).getDevice();
}

at::Tensor ProcessGroup::allocate(int64_t numel, c10::ScalarType dtype, c10::Device device, GroupMemory) {
  return pooled_empty(numel, dtype, device);
}

void ProcessGroup::fail(std::exception_ptr) {}

std::vector<std::string> ProcessGroup::all_gather_strings(const std::string& mine) {
  const auto bytes_here = at::TensorOptions().dtype(at::kByte).device(device());
  const auto gather = [&](const at::Tensor& on_cpu) {
    at::Tensor gathered = at::empty({size() * on_cpu.numel()}, bytes_here);
    all_gather_into(gathered, on_cpu.to(gathered.device())).wait();
    return gathered.cpu();
  };

  at::Tensor length = at::empty({static_cast<int64_t>(sizeof(int64_t))}, at::kByte);
  const auto my_length = static_cast<int64_t>(mine.size());
  std::memcpy(length.mutable_data_ptr(), &my_length, sizeof(my_length));
  const at::Tensor all_lengths = gather(length);
  std::vector<int64_t> lengths(ranks_.size());
  std::memcpy(lengths.data(), all_lengths.const_data_ptr(), lengths.size() * sizeof(int64_t));

  const int64_t longest = *std::max_element(lengths.begin(), lengths.end());
  std::vector<std::string> strings(ranks_.size());
  if (longest == 0) return strings;
  at::Tensor padded = at::zeros({longest}, at::kByte);
  std::memcpy(padded.mutable_data_ptr(), mine.data(), mine.size());
  const at::Tensor all_bytes = gather(padded);
  const char* first = static_cast<const char*>(all_bytes.const_data_ptr());
  for (size_t i = 0; i < strings.size(); ++i) {
    strings[i].assign(first + static_cast<int64_t>(i) * longest, static_cast<size_t>(lengths[i]));
  }
  return strings;
}

void ProcessGroup::check_tensor(const char* operation, const at::Tensor& tensor) const {
  TORCH_CHECK(tensor.defined(), operation, " of group '", name_, "': the tensor is undefined");
  TORCH_CHECK(tensor.device().type() == device_type(), operation, " of group '", name_, "' takes tensors on ",
              c10::DeviceTypeName(device_type(), true), ", got one on ", tensor.device());
  TORCH_CHECK(tensor.is_contiguous(), operation, " of group '", name_,
              "' takes contiguous tensors, got one with strides ", tensor.strides(), "; call contiguous() on it");
}

void ProcessGroup::check_tensors(const char* operation, Shapes shapes, const at::Tensor& output,
                                 const at::Tensor& input) const {
  check_tensor(operation, output);
  check_tensor(operation, input);
  const bool widens = shapes == Shapes::kScatter && takes_narrow_sums() && output.scalar_type() == at::kFloat &&
                      (input.scalar_type() == at::kBFloat16 || input.scalar_type() == at::kHalf);
  TORCH_CHECK(output.scalar_type() == input.scalar_type() || widens, operation, " of group '", name_,
              "' takes tensors of one dtype, got ", output.scalar_type(), " for the output and ", input.scalar_type(),
              " for the input");
  const int64_t out = output.numel();
  const int64_t in = input.numel();
  const bool fits = shapes == Shapes::kGather    ? out == in * size()
                    : shapes == Shapes::kScatter ? in == out * size()
                    : shapes == Shapes::kSliced  ? out == in && out % size() == 0
                                                 : out == in;
  TORCH_CHECK(fits, operation, " of group '", name_, "' over ", size(), " ranks cannot take an input of ", in,
              " elements to an output of ", out);
}

void ProcessGroup::check_all_to_all(const at::Tensor& output, const at::Tensor& input, const Splits& splits) const {
  if (splits.equal()) return check_tensors("all_to_all", Shapes::kSliced, output, input);
  check_tensor("all_to_all", output);
  check_tensor("all_to_all", input);
  const auto fits = [&](const std::vector<int64_t>& slices, const at::Tensor& whole) {
    return slices.size() == ranks_.size() && std::accumulate(slices.begin(), slices.end(), int64_t{0}) == whole.numel();
  };
  TORCH_CHECK(output.scalar_type() == input.scalar_type() && fits(splits.output, output) && fits(splits.input, input),
              "all_to_all of group '", name_, "' over ", size(), " ranks: slices of ", splits.input, " and ",
              splits.output, " elements are not those of an input of ", input.numel(), " ", input.scalar_type(),
              " and an output of ", output.numel(), " ", output.scalar_type());
}

void ProcessGroup::check_reduction(const char* operation, const at::Tensor& tensor, ReduceOp op) const {
  TORCH_CHECK(op != ReduceOp::kAvg || tensor.is_floating_point(), operation, " of group '", name_,
              "': an average needs a floating dtype, got ", tensor.scalar_type(), "; sum and divide instead");
}

void ProcessGroup::check_root(int root) const {
  TORCH_CHECK(0 <= root && root < size(), "broadcast of group '", name_, "': root ", root,
              " is no rank of this group of ", size(), " (roots count within the group)");
}

std::vector<int> ProcessGroup::members_in_world(const std::vector<int>& members, const std::string& name) const {
  const bool ascending = std::adjacent_find(members.begin(), members.end(), std::greater_equal<>()) == members.end();
  TORCH_CHECK(!members.empty() && ascending && members.front() >= 0 && members.back() < size(), "subgroup '", name,
              "' of group '", name_, "': members must be ascending ranks below ", size(), ", got ", members);
  std::vector<int> in_world;
  for (const int member : members) in_world.push_back(ranks_[static_cast<size_t>(member)]);
  return in_world;
}

int ProcessGroup::place_in(const std::vector<int>& members) const {
  const auto found = std::find(members.begin(), members.end(), rank_);
  TORCH_CHECK(found != members.end(), "subgroup of group '", name_, "': rank ", rank_, " is not among the members ",
              members, "; only members make a subgroup");
  return static_cast<int>(found - members.begin());
}

std::string ProcessGroup::next_store_prefix(const std::string& name, const std::vector<int>& members_in_world) {
  std::string key = name;
  for (const int member : members_in_world) key += "," + std::to_string(member);
  const int made = subgroups_made_[key]++;
  // A hash keeps the key short for any number of members; std::hash is equal in all processes of one program.
  return name + "/" + std::to_string(std::hash<std::string>()(key)) + "/" + std::to_string(made);
}

}  // namespace megashard
