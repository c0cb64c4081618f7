#include <ATen/core/Tensor.h>
#include <ATen/cuda/MemPool.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>

#include <cstdlib>
#include <exception>
#include <thread>

#include "parallel/collectives/gloo_process_group.h"
#include "parallel/collectives/group_store.h"
#include "parallel/collectives/wait_error.h"
#include "parallel/cuda/kernels.h"
#include "parallel/device/cuda_module.h"

namespace megashard {

namespace {

c10d::ReduceOp nccl_op(ReduceOp op) {
  switch (op) {
    case ReduceOp::kSum:
      return c10d::ReduceOp::SUM;
    case ReduceOp::kAvg:
      return c10d::ReduceOp::AVG;
    case ReduceOp::kMax:
      return c10d::ReduceOp::MAX;
    case ReduceOp::kMin:
      return c10d::ReduceOp::MIN;
  }
  return c10d::ReduceOp::UNUSED;
}

/// A group of one needs no communicator; MEGASHARD_NCCL_SINGLE=1 gives it one all the same, to try
/// NCCL on a machine with a single GPU.
bool connects_alone() {
  const char* text = std::getenv("MEGASHARD_NCCL_SINGLE");
  return text != nullptr && std::string_view(text) == "1";
}

enum class Connects { kAtOnce, kAtFirstUse };

/// NCCL on the stream that is current at the call (asyncOp = false): what follows on that stream
/// comes after, so no handle is needed. NCCL chooses the order of addition. Its watchdog enforces
/// the deadline: it reports the collective and ends the process.
class NcclProcessGroup final : public ProcessGroup {
 public:
  /// `parent`: its communicator is split, which its members do together; null: by the store.
  explicit NcclProcessGroup(const NcclGroupOptions& options, Connects connects,
                            const c10::intrusive_ptr<c10d::ProcessGroupNCCL>& parent = nullptr)
      : ProcessGroup(options.rank, options.ranks, options.name, options.timeout), options_(options) {
    if (size() == 1 && !connects_alone()) return;
    auto nccl = c10d::ProcessGroupNCCL::Options::create();
    nccl->timeout = timeout();
    nccl->group_name = name();
    nccl->global_ranks_in_group.assign(ranks().begin(), ranks().end());
    if (parent != nullptr) {
      nccl->split_from = parent;
      nccl->split_color = ranks().front();
    }
    options_.store->store->setTimeout(timeout());
    const c10::cuda::CUDAGuard guard(device());
    nccl_ = c10::make_intrusive<c10d::ProcessGroupNCCL>(options_.store->store, rank(), size(), std::move(nccl));
    nccl_->setBoundDeviceId(device());
    if (connects == Connects::kAtOnce) nccl_->eagerConnectSingleDevice(device());
  }

  /// Waits for what is under way, unless this rank has failed: others may not come any more.
  ~NcclProcessGroup() override {
    if (nccl_ == nullptr) return;
    try {
      const c10::cuda::CUDAGuard guard(device());
      failed_ || std::uncaught_exceptions() > 0 ? nccl_->abort() : nccl_->shutdown();
    } catch (const std::exception&) {  // the ranks go their ways in any case
    }
  }

  c10::DeviceType device_type() const override { return c10::kCUDA; }
  c10::Device device() const override { return {c10::kCUDA, static_cast<c10::DeviceIndex>(options_.device)}; }

  at::Tensor allocate(int64_t numel, c10::ScalarType dtype, c10::Device device, GroupMemory memory) override {
    if (nccl_ == nullptr || !nccl_->supportsTensorAlloc(device.index()))
      return ProcessGroup::allocate(numel, dtype, device, memory);
    const auto options = at::TensorOptions().dtype(dtype).device(device);
    if (memory == GroupMemory::kRegistered) return nccl_->allocateTensor(numel, options);
    const FromPool scope(symmetric_pool(device), device.index());
    return at::empty({numel}, options);
  }

  Work all_gather_into(at::Tensor output, at::Tensor input) override {
    check_tensors("all_gather", Shapes::kGather, output, input);
    if (nccl_ == nullptr) return copy(output, input);
    c10d::AllgatherOptions options;
    options.asyncOp = false;
    return run("all_gather", [&] { return nccl_->_allgather_base(output, input, options); });
  }

  Work reduce_scatter_into(at::Tensor output, at::Tensor input, ReduceOp op) override {
    check_tensors("reduce_scatter", Shapes::kScatter, output, input);
    check_reduction("reduce_scatter", input, op);
    if (nccl_ == nullptr) return copy(output, input);
    c10d::ReduceScatterOptions options;
    options.reduceOp = nccl_op(op);
    options.asyncOp = false;
    return run("reduce_scatter", [&] { return nccl_->_reduce_scatter_base(output, input, options); });
  }

  Work all_reduce(at::Tensor tensor, ReduceOp op) override {
    check_tensor("all_reduce", tensor);
    check_reduction("all_reduce", tensor, op);
    if (nccl_ == nullptr) return Work();
    c10d::AllreduceOptions options;
    options.reduceOp = nccl_op(op);
    options.asyncOp = false;
    std::vector<at::Tensor> tensors{tensor};
    return run("all_reduce", [&] { return nccl_->allreduce(tensors, options); });
  }

  Work broadcast(at::Tensor tensor, int root) override {
    check_tensor("broadcast", tensor);
    check_root(root);
    if (nccl_ == nullptr) return Work();
    c10d::BroadcastOptions options;
    options.rootRank = root;
    options.asyncOp = false;
    std::vector<at::Tensor> tensors{tensor};
    return run("broadcast", [&] { return nccl_->broadcast(tensors, options); });
  }

  Work all_to_all_into(at::Tensor output, at::Tensor input, const Splits& splits) override {
    check_all_to_all(output, input, splits);
    if (nccl_ == nullptr) return copy(output, input);
    c10d::AllToAllOptions options;
    options.asyncOp = false;
    Splits given = splits;  // it takes them by reference to what may change
    at::Tensor flat_output = output.view({-1}), flat_input = input.view({-1});
    return run("all_to_all",
               [&] { return nccl_->alltoall_base(flat_output, flat_input, given.output, given.input, options); });
  }

  /// Messages to one rank and from one, in the form of an all-to-all: the host knows all sizes.
  Work shift_into(at::Tensor output, at::Tensor input, int distance) override {
    check_tensors("shift", Shapes::kEqual, output, input);
    const int next = rank_behind(distance), previous = rank_behind(-distance);
    if (nccl_ == nullptr || next == rank()) return copy(output, input);
    c10d::AllToAllOptions options;
    options.asyncOp = false;
    std::vector<int64_t> received(static_cast<size_t>(size())), sent(received);
    received[static_cast<size_t>(previous)] = sent[static_cast<size_t>(next)] = input.numel();
    at::Tensor flat_output = output.view({-1}), flat_input = input.view({-1});
    return run("shift", [&] { return nccl_->alltoall_base(flat_output, flat_input, received, sent, options); });
  }

  void barrier() override {
    if (nccl_ == nullptr) return;
    c10d::BarrierOptions options;
    options.device_ids = {options_.device};
    options.asyncOp = false;
    run("barrier", [&] { return nccl_->barrier(options); });
    c10::cuda::device_synchronize();
  }

  std::shared_ptr<ProcessGroup> subgroup(const std::vector<int>& members, const std::string& name) override {
    return std::make_shared<NcclProcessGroup>(part(members, name), Connects::kAtFirstUse);
  }

  std::shared_ptr<ProcessGroup> split(const std::vector<int>& members, const std::string& name) override {
    return std::make_shared<NcclProcessGroup>(part(members, name), Connects::kAtOnce, nccl_);
  }

 private:
  NcclGroupOptions part(const std::vector<int>& members, const std::string& name) {
    NcclGroupOptions options = options_;
    options.ranks = members_in_world(members, name);
    options.rank = place_in(members);
    options.name = name;
    options.store = std::make_shared<GroupStore>();
    options.store->store =
        c10::make_intrusive<c10d::PrefixStore>(next_store_prefix(name, options.ranks), options_.store->store);
    return options;
  }

  template <typename Call>
  Work run(const char* operation, Call call) {
    const auto started = std::chrono::steady_clock::now();
    try {
      call();
    } catch (const std::exception& error) {
      failed_ = true;
      throw_wait_error(operation, *this, -1, std::chrono::steady_clock::now() - started, error);
    }
    return Work();
  }

  /// While it lives, what this thread allocates on the device comes from the pool.
  class FromPool {
   public:
    FromPool(at::cuda::MemPool& pool, c10::DeviceIndex device) : pool_(pool), device_(device) {
      c10::cuda::CUDACachingAllocator::beginAllocateToPool(
          device_, pool_.id(),
          [thread = std::this_thread::get_id()](cudaStream_t) { return std::this_thread::get_id() == thread; });
    }
    ~FromPool() { c10::cuda::CUDACachingAllocator::endAllocateToPool(device_, pool_.id()); }
    FromPool(const FromPool&) = delete;
    FromPool& operator=(const FromPool&) = delete;

   private:
    at::cuda::MemPool& pool_;
    c10::DeviceIndex device_;
  };

  /// Of ncclMemAlloc's memory; every segment that it grows by becomes a window of the communicator.
  at::cuda::MemPool& symmetric_pool(c10::Device device) {
    if (symmetric_pool_ == nullptr) {
      const c10::cuda::CUDAGuard guard(device);
      symmetric_pool_ = std::make_unique<at::cuda::MemPool>(
          std::dynamic_pointer_cast<c10::cuda::CUDACachingAllocator::CUDAAllocator>(nccl_->getMemAllocator()));
      nccl_->registerMemPool(symmetric_pool_.get(), /*symm=*/true);
    }
    return *symmetric_pool_;
  }

  static Work copy(const at::Tensor& output, const at::Tensor& input) {
    if (output.const_data_ptr() != input.const_data_ptr()) output.view({-1}).copy_(input.view({-1}), true);
    return Work();
  }

  NcclGroupOptions options_;
  bool failed_ = false;
  std::unique_ptr<at::cuda::MemPool> symmetric_pool_;  // null: nobody asked
  c10::intrusive_ptr<c10d::ProcessGroupNCCL> nccl_;    // null in a group of one, mostly
};

int device_count() { return c10::cuda::device_count(); }
void set_device(int index) { c10::cuda::set_device(static_cast<c10::DeviceIndex>(index)); }
std::string device_name(int index) {
  cudaDeviceProp properties{};
  C10_CUDA_CHECK(cudaGetDeviceProperties(&properties, index));
  return properties.name;
}
std::string device_identity(int index) {
  cudaDeviceProp properties{};
  C10_CUDA_CHECK(cudaGetDeviceProperties(&properties, index));
  return std::string(properties.uuid.bytes, sizeof(properties.uuid.bytes));
}
at::Tensor pinned_bytes(int64_t bytes) {
  void* memory = nullptr;
  C10_CUDA_CHECK(cudaHostAlloc(&memory, static_cast<size_t>(bytes), cudaHostAllocDefault));
  return at::from_blob(
      memory, {bytes}, [](void* data) { C10_CUDA_CHECK_WARN(cudaFreeHost(data)); }, at::TensorOptions(at::kByte));
}
ProcessGroupPtr make_nccl_group(const NcclGroupOptions& options) {
  return std::make_shared<NcclProcessGroup>(options, Connects::kAtOnce);
}

}  // namespace

}  // namespace megashard

// What load_cuda_module() looks up by name.
extern "C" void megashard_cuda_module(megashard::CudaModule* module) {
  *module = {.device_count = megashard::device_count,
             .set_device = megashard::set_device,
             .device_name = megashard::device_name,
             .device_identity = megashard::device_identity,
             .pinned_bytes = megashard::pinned_bytes,
             .make_nccl_group = megashard::make_nccl_group,
             .take_findings = nullptr,
             .what_was_checked = nullptr,
             .log_host_syncs = nullptr,
             .take_host_syncs = nullptr,
             .kernels = megashard::kernels_of_module()};
}
