// Saves and loads of one rank: the twin of dcp_speed.py, which says what each command measures.
// Commands come line by line, each is answered by one JSON line.

#include <ATen/Functions.h>
#include <ATen/Parallel.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <iostream>
#include <sstream>

#include "checkpoint/checkpoint.h"
#include "checkpoint/dcp/dcp_writer.h"
#include "checkpoint/steps/async_saver.h"
#include "checkpoint/steps/checkpoint_directory.h"
#include "checkpoint/steps/find_step.h"

namespace megashard {
namespace {

using Clock = std::chrono::steady_clock;

template <class Work>
double seconds_of(const Work& work) {
  const auto start = Clock::now();
  work();
  return std::chrono::duration<double>(Clock::now() - start).count();
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values.empty() ? 0 : values[values.size() / 2];
}

/// One thread: products of a small batch, then a pass over 32 MiB as an optimizer makes.
class Step {
 public:
  void operator()() {
    for (int i = 0; i < 6; ++i) at::mm_out(y_, x_, w_);
    p_.add_(g_, 1e-6);
  }

 private:
  at::Tensor x_ = at::rand({256, 1024}), w_ = at::rand({1024, 1024}), y_ = at::empty({256, 1024});
  at::Tensor p_ = at::rand({8 << 20}), g_ = at::rand({8 << 20});
};

class Bench {
 public:
  explicit Bench(int64_t mebibytes) {
    for (int64_t i = 0; i < mebibytes / 16; ++i) {
      state_.emplace_back("model.w" + std::to_string(i),
                          ShardedTensor::replicated(at::full({2048, 2048}, static_cast<double>(i))));
    }
    values_.set("iteration", 1);
    for (const auto& [key, tensor] : state_) memory_.push_back(at::ones_like(tensor.local));
  }

  std::string answer(const std::string& command, const std::string& folder) {
    std::ostringstream out;
    if (command == "save") {
      out << "{\"seconds\": " << seconds_of([&] { save(folder, state_); }) << "}";
    } else if (command == "load") {
      out << "{\"seconds\": " << seconds_of([&] { load_checkpoint(CheckpointStep{folder}, state_, nullptr); }) << "}";
    } else if (command == "resume") {
      out << "{\"seconds\": " << seconds_of([&] { resume(folder); }) << "}";
    } else if (command == "clear") {
      for (const auto& [key, tensor] : state_) at::Tensor(tensor.local).zero_();
      out << "{}";
    } else if (command == "check") {
      bool equal = true;
      for (size_t i = 0; i < state_.size(); ++i)
        equal = equal && state_[i].second.local.eq(static_cast<double>(i)).all().item<bool>();
      out << "{\"equal\": " << (equal ? "true" : "false") << "}";
    } else if (command == "steps") {
      out << "{\"step\": " << median(seconds_of_steps(10)) << "}";
    } else {
      out << async_save(folder);
    }
    return out.str();
  }

 private:
  void save(const std::string& folder, const ShardedTensors& tensors) {
    save_checkpoint(folder, 1, tensors, values_, nullptr, {.plans = plans_});
  }

  std::vector<double> seconds_of_steps(int steps) {
    std::vector<double> seconds;
    for (int i = 0; i < steps; ++i) seconds.push_back(seconds_of([&] { step_(); }));
    return seconds;
  }

  /// As a training starts: every byte of the step is compared with its checksum, then loaded.
  void resume(const std::string& directory) { load_checkpoint(find_step(directory, nullptr).value(), state_, nullptr); }

  std::string async_save(const std::string& folder) {
    const double copy = seconds_of([&] {
      for (size_t i = 0; i < state_.size(); ++i) {
        const auto& from = state_[i].second.local;
        std::memcpy(memory_[i].mutable_data_ptr(), from.const_data_ptr(), from.nbytes());
      }
    });
    const auto before = seconds_of_steps(15);
    std::vector<double> during;
    const double stall = seconds_of(
        [&] { saver_.start("iteration 1", state_, [&](const auto& copies, const auto&) { save(folder, copies); }); });
    while (saver_.state() == AsyncSaver::State::kWriting) during.push_back(seconds_of([&] { step_(); }));
    saver_.wait();
    std::ostringstream out;
    out << "{\"memcpy\": " << copy << ", \"stall\": " << stall << ", \"step_before\": " << median(before)
        << ", \"step_during\": " << median(during) << ", \"steps_during\": " << during.size() << "}";
    return out.str();
  }

  ShardedTensors state_;
  Dict values_;
  std::shared_ptr<SavePlanCache> plans_ = std::make_shared<SavePlanCache>();
  std::vector<at::Tensor> memory_;
  Step step_;
  AsyncSaver saver_{nullptr};
};

}  // namespace
}  // namespace megashard

int main(int, char** argv) {
  at::set_num_threads(1);
  megashard::Bench bench(std::atoll(argv[1]));
  std::string command, folder;
  while (std::cin >> command >> folder) std::cout << bench.answer(command, folder) << std::endl;
}
