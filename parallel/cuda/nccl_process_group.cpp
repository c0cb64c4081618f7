#include <ATen/core/Tensor.h>
#include <ATen/cuda/MemPool.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>

#include <algorithm>
#include <cstdlib>
#include <exception>
#include <memory>
#include <stdexcept>
#include <thread>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>

#include "parallel/collectives/gloo_process_group.h"
#include "parallel/collectives/group_store.h"
#include "parallel/collectives/start_wait.h"
#include "parallel/collectives/store_meeting.h"
#include "parallel/collectives/wait_error.h"
#include "parallel/cuda/kernels.h"
#include "parallel/device/buffer_pool.h"
#include "parallel/device/cuda_module.h"

namespace megashard {
namespace {

namespace allocator = c10::cuda::CUDACachingAllocator;

/// ncclMemAlloc memory, which NCCL can map into other GPUs, in a pool that holds nothing else.
struct WindowMemory {
  std::unique_ptr<at::cuda::MemPool> pool;
  at::Tensor bytes;
};

/// Scope in which this thread's allocations on the device come from the pool.
class FromPool {
 public:
  FromPool(at::cuda::MemPool& pool, c10::DeviceIndex device) : pool_(pool), device_(device) {
    allocator::beginAllocateToPool(device_, pool_.id(), [thread = std::this_thread::get_id()](cudaStream_t) {
      return std::this_thread::get_id() == thread;
    });
  }
  ~FromPool() {
    allocator::endAllocateToPool(device_, pool_.id());
    allocator::releasePool(device_, pool_.id());  // begin counts a user, end does not
  }
  FromPool(const FromPool&) = delete;
  FromPool& operator=(const FromPool&) = delete;

 private:
  at::cuda::MemPool& pool_;
  c10::DeviceIndex device_;
};

/// Allocates on `device`, the current one. Throws c10::OutOfMemoryError.
WindowMemory allocate_window(c10d::ProcessGroupNCCL& nccl, int64_t bytes, c10::Device device) {
  WindowMemory memory;
  memory.pool =
      std::make_unique<at::cuda::MemPool>(std::dynamic_pointer_cast<allocator::CUDAAllocator>(nccl.getMemAllocator()));
  const FromPool scope(*memory.pool, device.index());
  memory.bytes = at::empty({bytes}, at::TensorOptions(at::kByte).device(device));
  return memory;
}

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

/// A group of one rank needs no communicator; MEGASHARD_NCCL_SINGLE=1 creates one anyway, to test NCCL on a machine
/// with one GPU.
bool connects_alone() {
  const char* text = std::getenv("MEGASHARD_NCCL_SINGLE");
  return text != nullptr && std::string_view(text) == "1";
}

enum class Connects { kAtOnce, kAtFirstUse };

/// Maximum wait at the end of a group for running collectives and for other ranks, which may be gone.
constexpr std::chrono::seconds kEndsWithin{10};

// Operations named by errors.
constexpr const char* kConnecting = "connecting NCCL";
constexpr const char* kSharing = "sharing memory between GPUs (communication_memory: symmetric)";

/// NCCL on the stream that is current at the call (asyncOp = false): later work on that stream is ordered after it, so
/// no handle is needed. NCCL chooses the order of addition. Its watchdog enforces the deadline: it reports the
/// collective and ends the process.
class NcclProcessGroup final : public ProcessGroup, public HasStore {
 public:
  /// `parent`: splits its communicator, together with its other members; null: connects through the store.
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
    if (connects == Connects::kAtOnce) connect();
  }

  /// Closes after running collectives have ended; aborts if this rank has failed or other ranks do not arrive.
  ~NcclProcessGroup() override {
    if (nccl_ == nullptr) return;
    const bool has_failed = failed_ || std::uncaught_exceptions() > 0 || nccl_->getError() != c10d::ErrorType::SUCCESS;
    const auto close = [pools = pools_](c10d::ProcessGroupNCCL& nccl) {
      for (const auto& pool : pools) nccl.deregisterMemPool(pool.get());
      nccl.shutdown();
    };
    if (has_failed || !ends(close)) ends([](c10d::ProcessGroupNCCL& nccl) { nccl.abort(); });
  }

  c10::DeviceType device_type() const override { return c10::kCUDA; }
  std::shared_ptr<GroupStore> store() const override { return options_.store; }
  c10::Device device() const override { return {c10::kCUDA, static_cast<c10::DeviceIndex>(options_.device)}; }

  at::Tensor allocate(int64_t numel, c10::ScalarType dtype, c10::Device device, GroupMemory memory) override {
    if (nccl_ == nullptr || !nccl_->supportsTensorAlloc(device.index()))
      return ProcessGroup::allocate(numel, dtype, device, memory);
    const auto options = at::TensorOptions().dtype(dtype).device(device);
    if (memory == GroupMemory::kRegistered) return nccl_->allocateTensor(numel, options);
    return windows_.take(numel, dtype, c10::cuda::getCurrentCUDAStream(device.index()),
                         [&](int64_t bytes) { return new_window(bytes); });
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
    Splits given = splits;  // NCCL takes non-const references
    at::Tensor flat_output = output.view({-1}), flat_input = input.view({-1});
    return run("all_to_all",
               [&] { return nccl_->alltoall_base(flat_output, flat_input, given.output, given.input, options); });
  }

  /// One message to a rank and one from a rank, as an all-to-all: the host knows all sizes.
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

  /// NCCL's start has no deadline: all ranks meet first, then NCCL starts on its own thread.
  void connect() {
    agree("start", kConnecting, "NCCL");
    within_deadline(kConnecting,
                    [device = device()](c10d::ProcessGroupNCCL& nccl) { nccl.eagerConnectSingleDevice(device); });
    connected_ = true;
  }

  void agree(const std::string& place, const char* occasion, const std::string& word) {
    try {
      StoreMeeting(options_.store->store, *this, place, occasion).agree(word);
    } catch (const std::exception&) {
      failed_ = true;
      throw;
    }
  }

  template <typename Call>
  void within_deadline(const char* operation, Call call) {
    const auto started = std::chrono::steady_clock::now();
    try {
      if (is_through(StartDeadline(timeout()), std::move(call))) return;
      throw std::runtime_error("NCCL gives no answer, though all ranks came; NCCL_DEBUG=INFO tells where it waits");
    } catch (const std::exception& error) {
      failed_ = true;
      throw_wait_error(operation, *this, -1, std::chrono::steady_clock::now() - started, error);
    }
  }

  /// For calls that must not block the end, whatever their result.
  template <typename Call>
  bool ends(Call call) const {
    try {
      return is_through(StartDeadline(std::min<std::chrono::milliseconds>(timeout(), kEndsWithin)), call);
    } catch (const std::exception&) {  // the ranks end in any case
      return false;
    }
  }

  template <typename Call>
  bool is_through(const StartDeadline& deadline, Call call) const {
    return before<bool>(deadline,
                        [nccl = nccl_, device = device(), call] {
                          const c10::cuda::CUDAGuard guard(device);
                          call(*nccl);
                          return true;
                        })
        .has_value();
  }

  template <typename Call>
  Work run(const char* operation, Call call) {
    if (!connected_) connect();
    const auto started = std::chrono::steady_clock::now();
    try {
      if (nccl_->getError() != c10d::ErrorType::SUCCESS)
        throw std::runtime_error("NCCL has failed in an earlier collective; its own message says which");
      call();
    } catch (const std::exception& error) {
      failed_ = true;
      throw_wait_error(operation, *this, -1, std::chrono::steady_clock::now() - started, error);
    }
    return Work();
  }

  /// Creates a window of the communicator. Collective. Memory is registered with NCCL only after every rank has
  /// allocated it, so that no rank waits inside the allocator for one without memory.
  at::Tensor new_window(int64_t bytes) {
    if (!connected_) connect();
    const c10::cuda::CUDAGuard guard(device());
    WindowMemory memory;
    std::exception_ptr lacks;
    try {
      memory = allocate_window(*nccl_, bytes, device());
    } catch (const c10::Error&) {
      lacks = std::current_exception();
    }
    agree(c10::str("window/", pools_.size()), kSharing, c10::str(lacks ? "no memory for " : "", bytes, " bytes"));
    if (lacks) std::rethrow_exception(lacks);
    within_deadline(kSharing, [pool = memory.pool.get()](c10d::ProcessGroupNCCL& nccl) {
      nccl.registerMemPool(pool, /*symm=*/true);
    });
    pools_.push_back(std::move(memory.pool));
    return memory.bytes;
  }

  static Work copy(const at::Tensor& output, const at::Tensor& input) {
    if (output.const_data_ptr() != input.const_data_ptr()) output.view({-1}).copy_(input.view({-1}), true);
    return Work();
  }

  NcclGroupOptions options_;
  bool connected_ = false, failed_ = false;
  std::vector<std::shared_ptr<at::cuda::MemPool>> pools_;  // one window each
  KeptBuffers windows_;
  c10::intrusive_ptr<c10d::ProcessGroupNCCL> nccl_;  // null in a group of one rank (except MEGASHARD_NCCL_SINGLE)
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

// Looked up by name in load_cuda_module().
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
