#include "checkpoint/steps/async_saver.h"

#include <c10/util/Exception.h>
#include <sys/resource.h>

#include <algorithm>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <utility>

#include "checkpoint/files/run_in_threads.h"
#include "parallel/collectives/agreement.h"
#include "parallel/collectives/noted_progress.h"
#include "parallel/collectives/routed_process_group.h"
#include "parallel/collectives/wait_place.h"

namespace megashard {
namespace {

constexpr std::chrono::milliseconds kLookEvery{250};  // polling interval for progress
/// The save's thread detects a rank or disk that hangs, and names it, at the deadline.
constexpr int kDeadlineParts = 8;  // the caller gives up 1/8 of the deadline later
constexpr int kNiceness = 10;      // low priority: the thread uses the CPU time that training leaves

}  // namespace

struct AsyncSaver::Save {
  std::string name;
  std::shared_ptr<ShardSnapshot> snapshot;
  ShardedTensors copies;
  std::exception_ptr not_copied;  // this rank's error; the thread sends it to the other ranks
  Write write;
  std::function<void()> afterwards;
  ProcessGroupPtr group;

  std::mutex mutex;
  std::condition_variable changed;
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
  try {
    save->copies = snapshot_->take(tensors);
  } catch (...) {
    save->not_copied = std::current_exception();
  }
  save_ = save;
  auto threads = start_threads(1, [save] {
    ::setpriority(PRIO_PROCESS, 0, kNiceness);  // on Linux: for this thread and those that it starts
    save->run();
  });
  if (threads.empty()) {
    save->run();  // so that the other ranks do not wait forever
  } else {
    thread_ = std::move(threads[0]);
  }
}

void AsyncSaver::before_changes() const {
  if (save_ != nullptr) save_->snapshot->before_changes();
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
    options_.say("the checkpoint of " + save_->name + " is still being written: training waits");
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
                    c10::str("the checkpoint of ", save->name, " is not written, and nothing of it was for ", seconds,
                             " s: is its disk full, gone or very slow? It does not count"));
  }
  const auto failure = "the checkpoint of " + save->name + " was not saved: " + save->failure;
  if (save->has_lost_ranks) C10_THROW_ERROR(DistBackendError, failure);
  TORCH_CHECK(save->failure.empty(), failure);
}

}  // namespace megashard
