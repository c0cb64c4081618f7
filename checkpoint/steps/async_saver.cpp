#include "checkpoint/steps/async_saver.h"

#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>
#include <sys/mman.h>
#include <sys/resource.h>

#include <algorithm>
#include <condition_variable>
#include <cstring>
#include <exception>
#include <mutex>
#include <utility>
#include <vector>

#include "checkpoint/files/run_in_threads.h"
#include "parallel/collectives/agreement.h"
#include "parallel/collectives/noted_progress.h"
#include "parallel/collectives/routed_process_group.h"
#include "parallel/collectives/wait_error.h"
#include "parallel/device/cuda_module.h"
#include "parallel/device/streams.h"

namespace megashard {
namespace {

constexpr int64_t kShardAlignment = 64;        // a cache line
constexpr int64_t kMinBytesPerCopy = 8 << 20;  // starting a thread takes as long as copying 0.5 MiB

struct Piece {
  char* to;
  const char* from;
  int64_t bytes;
};

/// Copies bytes [begin, end) of the concatenated pieces.
void copy_range(const std::vector<Piece>& pieces, int64_t begin, int64_t end) {
  for (const auto& piece : pieces) {
    const auto first = std::max<int64_t>(0, begin);
    const auto last = std::min(piece.bytes, end);
    if (first < last) std::memcpy(piece.to + first, piece.from + first, static_cast<size_t>(last - first));
    begin -= piece.bytes;
    end -= piece.bytes;
  }
}

void copy_pieces(const std::vector<Piece>& pieces) {
  int64_t total = 0;
  for (const auto& piece : pieces) total += piece.bytes;
  const auto parts = std::clamp<int64_t>(total / kMinBytesPerCopy, 1, at::get_num_threads());
  run_in_threads(parts, parts, [&](const NextItem& next) {
    while (const auto part = next()) copy_range(pieces, total * *part / parts, total * (*part + 1) / parts);
  });
}

/// Uses pages of 2 MiB if available: fewer page faults and TLB misses.
at::Tensor huge_pages(int64_t bytes) {
  const auto size = static_cast<size_t>(bytes);
  void* memory = ::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  TORCH_CHECK(memory != MAP_FAILED, "no host memory for a copy of this rank's ", bytes,
              " bytes of shards, which an asynchronous save needs: leave --async-save out");
  ::madvise(memory, size, MADV_HUGEPAGE);
  return at::from_blob(
      memory, {bytes}, [size](void* data) { ::munmap(data, size); }, at::TensorOptions(at::kByte));
}

c10::Device device_of(const ShardedTensors& tensors) {
  for (const auto& [key, tensor] : tensors) {
    if (!tensor.local.device().is_cpu()) return tensor.local.device();
  }
  return c10::kCPU;
}

int64_t place_of(const at::Tensor& shard) {
  const auto bytes = static_cast<int64_t>(shard.numel() * shard.element_size());
  return (bytes + kShardAlignment - 1) / kShardAlignment * kShardAlignment;
}

}  // namespace

void ShardSnapshot::make_room(int64_t bytes, bool for_device) {
  if (buffer_.defined() && buffer_.numel() >= bytes) return;
  buffer_.reset();  // free it before allocating the new one
  buffer_ = for_device ? load_cuda_module().pinned_bytes(bytes) : huge_pages(bytes);
}

ShardedTensors ShardSnapshot::take(const ShardedTensors& tensors) {
  const at::NoGradGuard no_grad;
  const auto device = device_of(tensors);
  int64_t total = kShardAlignment;
  for (const auto& [key, tensor] : tensors) total += place_of(tensor.local);
  make_room(total, !device.is_cpu());

  ShardedTensors copies = tensors;
  std::vector<Piece> pieces;
  std::vector<std::pair<at::Tensor, at::Tensor>> others;  // copy, shard
  int64_t offset = 0;
  for (auto& [key, tensor] : copies) {
    const at::Tensor live = tensor.local.detach();
    const auto bytes = static_cast<int64_t>(live.numel() * live.element_size());
    tensor.local = buffer_.narrow(0, offset, bytes).view(live.scalar_type()).view(live.sizes());
    offset += place_of(live);
    if (live.device().is_cpu() && live.is_contiguous()) {
      pieces.push_back({static_cast<char*>(tensor.local.mutable_data_ptr()),
                        static_cast<const char*>(live.const_data_ptr()), bytes});
    } else {
      others.emplace_back(tensor.local, live);
    }
  }
  copy_pieces(pieces);
  copied_.reset();
  std::optional<c10::StreamGuard> beside;
  if (!device.is_cpu()) beside.emplace(copying_stream(device));
  for (const auto& [copy, live] : others) {
    copy.copy_(live, /*non_blocking=*/true);
    if (!live.device().is_cpu()) live.record_stream(*stream_);  // training may free it meanwhile
  }
  if (!device.is_cpu()) {
    copied_.emplace(device.type());
    copied_->record(*stream_);
  }
  return copies;
}

c10::Stream ShardSnapshot::copying_stream(c10::Device device) {
  if (!stream_ || stream_->device() != device)
    stream_ = c10::impl::VirtualGuardImpl(device.type()).getStreamFromGlobalPool(device);
  order_streams(current_stream(device), *stream_);
  return *stream_;
}

void ShardSnapshot::before_changes() const {
  if (!copied_) return;
  copied_->block(current_stream(stream_->device()));
}

void ShardSnapshot::wait() const {
  if (copied_) copied_->synchronize();
}

namespace {

constexpr std::chrono::milliseconds kLookEvery{250};  // polling interval for progress
/// The save's thread detects a rank or disk that hangs, and names it, at the deadline.
constexpr int kDeadlineParts = 8;  // the caller gives up 1/8 of the deadline later
constexpr int kNiceness = 10;      // low priority: the thread uses the CPU time that training leaves

}  // namespace

struct AsyncSaver::Save {
  std::string name;
  std::shared_ptr<ShardSnapshot> snapshot;
  ShardedTensors live;  // shards that the thread has yet to copy
  ShardedTensors copies;
  std::exception_ptr not_copied;  // this rank's error; the thread sends it to the other ranks
  Write write;
  std::function<void()> afterwards;
  ProcessGroupPtr group;

  std::mutex mutex;
  std::condition_variable changed;
  bool has_copies = false;
  bool has_ended = false;
  std::string failure;          // empty: none
  bool has_lost_ranks = false;  // the failure was not agreed on by all ranks

  /// Returns false if nothing has progressed for `patience`.
  bool wait_while_it_moves(std::chrono::milliseconds patience) {
    using Clock = std::chrono::steady_clock;
    std::unique_lock lock(mutex);
    int64_t seen = progress_seen();
    auto moved = Clock::now();
    while (!changed.wait_for(lock, std::min(patience, kLookEvery), [this] { return has_ended; })) {
      const int64_t now = progress_seen();
      if (now != std::exchange(seen, now)) moved = Clock::now();
      if (Clock::now() - moved >= patience) return false;
    }
    return true;
  }

  void copy(const ShardedTensors& tensors) {
    try {
      copies = snapshot->take(tensors);
    } catch (...) {
      not_copied = std::current_exception();
    }
    const std::lock_guard lock(mutex);
    live.clear();
    has_copies = true;
    changed.notify_all();
  }

  void wait_for_copies() {
    std::unique_lock lock(mutex);
    changed.wait(lock, [this] { return has_copies; });
    snapshot->before_changes();
  }

  void run() noexcept {
    std::string why;
    bool lost = false;
    try {
      const std::string what = "save of " + name;
      const WaitPlace place(what.c_str());
      all_or_throw(group, [this] {
        if (not_copied != nullptr) std::rethrow_exception(not_copied);
        snapshot->wait();
      });
      write(copies, group);
    } catch (const std::exception& error) {
      why = error_text(error);
      lost = dynamic_cast<const c10::DistError*>(&error) != nullptr;
    }
    copies.clear();
    write = nullptr;
    const std::lock_guard lock(mutex);
    failure = std::move(why);
    has_lost_ranks = lost;
    has_ended = true;
    changed.notify_all();
  }
};

AsyncSaver::AsyncSaver(const ProcessGroupPtr& training, AsyncSaverOptions options)
    : group_(training == nullptr || training->size() == 1 ? nullptr : make_host_group(training, "asynchronous saves")),
      options_(std::move(options)),
      snapshot_(std::make_shared<ShardSnapshot>()) {}

AsyncSaver::~AsyncSaver() {
  try {
    wait();
  } catch (const std::exception&) {  // callers that need the error have called wait()
  }
}

void AsyncSaver::start(const std::string& name, const ShardedTensors& tensors, Write write,
                       std::function<void()> afterwards) {
  wait();
  auto save = std::make_shared<Save>();
  save->name = name;
  save->snapshot = snapshot_;
  save->write = std::move(write);
  save->afterwards = std::move(afterwards);
  save->group = group_;
  if (options_.copies_beside && device_of(tensors).is_cpu()) {
    save->live = tensors;
  } else {
    save->copy(tensors);
  }
  save_ = save;
  auto threads = start_threads(1, [save] {
    if (!save->has_copies) save->copy(save->live);
    ::setpriority(PRIO_PROCESS, 0, kNiceness);  // on Linux: for this thread and those that it starts
    save->run();
  });
  if (threads.empty()) {
    if (!save->has_copies) save->copy(save->live);
    save->run();  // so that the other ranks do not wait forever
  } else {
    thread_ = std::move(threads[0]);
  }
}

void AsyncSaver::before_changes() const {
  if (save_ != nullptr) save_->wait_for_copies();
}

AsyncSaver::State AsyncSaver::state() const {
  if (save_ == nullptr) return State::kIdle;
  const std::lock_guard lock(save_->mutex);
  if (!save_->has_ended) return State::kWriting;
  return save_->failure.empty() ? State::kWritten : State::kFailed;
}

void AsyncSaver::wait() {
  if (save_ == nullptr) return;
  if (state() == State::kWriting && options_.say) {
    options_.say(std::string("the ") + options_.what + " of " + save_->name +
                 " is still being written: training waits");
  }
  const auto save = std::exchange(save_, nullptr);
  const bool ended = save->wait_while_it_moves(options_.deadline + options_.deadline / kDeadlineParts);
  if (ended) {
    if (thread_.joinable()) thread_.join();
    if (save->afterwards) save->afterwards();
  } else {  // the thread owns what it needs
    thread_.detach();
    snapshot_ = std::make_shared<ShardSnapshot>();
  }
  const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(options_.deadline).count();
  if (!ended) {
    C10_THROW_ERROR(DistBackendError,
                    c10::str("the ", options_.what, " of ", save->name, " is not written, and nothing of it was for ",
                             seconds, " s: is its disk full, gone or very slow? It does not count"));
  }
  const auto failure = std::string("the ") + options_.what + " of " + save->name + " was not saved: " + save->failure;
  if (save->has_lost_ranks) C10_THROW_ERROR(DistBackendError, failure);
  TORCH_CHECK(save->failure.empty(), failure);
}

}  // namespace megashard
