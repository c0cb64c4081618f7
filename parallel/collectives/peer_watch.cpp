#include "parallel/collectives/peer_watch.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>
#include <utility>

namespace megashard {
namespace {

using Clock = std::chrono::steady_clock;
using Milliseconds = std::chrono::milliseconds;

constexpr Milliseconds kPeriod{250};
constexpr Milliseconds kMoment{1};

Milliseconds until(Clock::time_point deadline) {
  return std::max(std::chrono::duration_cast<Milliseconds>(deadline - Clock::now()), kMoment);
}

}  // namespace

/// Thread of this process that wakes every wait on a message after a period, because a Gloo wait that ends by its own
/// timeout closes all connections.
class PeerWatch::Pulse {
 public:
  static std::shared_ptr<Pulse> of_this_process() {
    static std::mutex mutex;
    static std::weak_ptr<Pulse> shared;
    const std::lock_guard lock(mutex);
    auto pulse = shared.lock();
    if (pulse == nullptr) shared = pulse = std::make_shared<Pulse>();
    return pulse;
  }

  Pulse() : thread_([this] { beat(); }) {}
  ~Pulse() {
    {
      const std::lock_guard lock(mutex_);
      ends_ = true;
    }
    ended_.notify_one();
    thread_.join();
  }

  /// False: woken before the message was complete.
  bool wait(c10d::Work& message, Milliseconds patience) {
    const Waiting waiting(*this, message);
    return message.wait(patience);
  }

 private:
  struct Waiting {
    Waiting(Pulse& pulse, c10d::Work& message) : pulse(pulse), message(message) {
      const std::lock_guard lock(pulse.mutex_);
      pulse.waiting_.push_back(this);
    }
    ~Waiting() {
      const std::lock_guard lock(pulse.mutex_);
      std::erase(pulse.waiting_, this);
    }
    Waiting(const Waiting&) = delete;
    Waiting& operator=(const Waiting&) = delete;

    Pulse& pulse;
    c10d::Work& message;
    bool is_long = false;
  };

  void beat() {
    std::unique_lock lock(mutex_);
    while (!ended_.wait_for(lock, kPeriod, [this] { return ends_; })) {
      for (Waiting* waiting : waiting_) {
        if (std::exchange(waiting->is_long, true)) waiting->message.abort();  // ends this wait only
      }
    }
  }

  std::mutex mutex_;
  std::condition_variable ended_;
  bool ends_ = false;
  std::vector<Waiting*> waiting_;
  std::thread thread_;
};

PeerWatch::PeerWatch(c10::intrusive_ptr<c10d::ProcessGroupGloo> gloo)
    : gloo_(std::move(gloo)), unanswered_(static_cast<size_t>(gloo_->getSize())), pulse_(Pulse::of_this_process()) {}

bool PeerWatch::wait(c10d::Work& message, Clock::time_point deadline) { return pulse_->wait(message, until(deadline)); }

bool PeerWatch::is_through(c10d::Work& message, int peer) {
  try {
    throw_if_gone(peer);
    return false;
  } catch (const std::exception&) {
    try {  // a late wake-up ends one wait
      if (message.wait(kMoment) || message.wait(kMoment)) return true;
    } catch (const std::exception&) {
    }
    throw;
  }
}

void PeerWatch::throw_if_gone(int peer) {
  auto& unanswered = unanswered_[static_cast<size_t>(peer)];
  if (unanswered == nullptr) {
    std::vector<at::Tensor> byte{at::empty({1}, at::kByte)};
    unanswered = gloo_->recv(byte, peer, kTag);
  } else {
    unanswered->abort();
    unanswered->wait(kMoment);  // returns at once or throws
  }
}

}  // namespace megashard
