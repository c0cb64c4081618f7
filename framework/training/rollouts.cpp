#include "framework/training/rollouts.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <filesystem>
#include <thread>
#include <utility>

#include "framework/data/conversation_dataset.h"
#include "framework/data/prime_rollouts.h"
#include "parallel/collectives/agreement.h"

namespace megashard {
namespace {

constexpr std::chrono::milliseconds kLookEvery{200};

/// The samples of this rank's micro batches, in order, of a set that all ranks share: micro batch j of rank r is number
/// j * ranks + r. Numbers beyond the set are left out, so that the last micro batches may be smaller, or empty.
std::vector<std::vector<int64_t>> samples_of_rank(int64_t samples, const RolloutOptions& options) {
  const int64_t together = options.micro_batch_size * options.ranks;
  std::vector<std::vector<int64_t>> micro_batches(static_cast<size_t>((samples + together - 1) / together));
  for (size_t j = 0; j < micro_batches.size(); ++j) {
    const int64_t number = static_cast<int64_t>(j) * options.ranks + options.rank;
    const int64_t begin = number * options.micro_batch_size, end = std::min(samples, begin + options.micro_batch_size);
    for (int64_t sample = begin; sample < end; ++sample) micro_batches[j].push_back(sample);
  }
  return micro_batches;
}

/// A micro batch without loss, for a rank that has fewer samples: the first sample, masked.
Batch without_loss(const SampleDataset& set, const BatchOptions& options) {
  Batch batch = set.collate({0}, options);
  batch.at(kLossMask).zero_();
  return batch;
}

}  // namespace

Rollouts::Rollouts(RolloutOptions options, ProcessGroupPtr world)
    : options_(std::move(options)), world_(std::move(world)) {}

std::string Rollouts::prime_file(int64_t step) const {
  return folder_of(step) + "/rank_" + std::to_string(options_.rank) + ".bin";
}

bool Rollouts::are_there(int64_t step) const {
  return std::filesystem::exists(prime_file(step)) || ConversationSet::exists(set_of(step));
}

StopRequest Rollouts::wait_for(int64_t step, const std::function<StopRequest()>& stop_request) {
  enum State : char { kWaits = 'w', kReady = 'r', kLate = 'l', kExit = 'e', kInterrupt = 'i' };
  const auto begin = std::chrono::steady_clock::now();
  const auto own_state = [&] {
    const StopRequest stop = stop_request();
    if (stop != StopRequest::kNone) return stop == StopRequest::kExit ? kExit : kInterrupt;
    if (are_there(step)) return kReady;
    return std::chrono::steady_clock::now() - begin > options_.timeout ? kLate : kWaits;
  };
  while (true) {
    const auto of_ranks = gather_or_throw(world_, [&] { return std::string(1, own_state()); });
    const auto has = [&](State state) { return std::ranges::count(of_ranks, std::string(1, state)) > 0; };
    wait_seconds_ = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    if (has(kInterrupt)) return StopRequest::kInterrupt;
    if (has(kExit)) return StopRequest::kExit;
    TORCH_CHECK(!has(kLate), "no rollouts arrived in ", folder_of(step), " within ", options_.timeout.count(),
                " min (--rollout-timeout-minutes): does the process that samples still run, and does it write for ",
                options_.ranks, " ranks?");
    if (!has(kWaits)) return StopRequest::kNone;
    std::this_thread::sleep_for(kLookEvery);
  }
}

std::vector<Batch> Rollouts::collate(int64_t step) {
  source_ = prime_file(step);
  std::vector<Batch> batches;
  if (std::filesystem::exists(source_)) {
    const PrimeRollouts rollouts(source_);
    for (int64_t i = 0; i < rollouts.size(); ++i) batches.push_back(rollouts.collate({i}, options_.batches));
    return batches;
  }
  const auto set = std::make_shared<const ConversationSet>(set_of(step));
  source_ = set->prefix() + kConversationsSuffix;
  SplitOptions sets = options_.sets;
  sets.last = set->size();
  const ConversationDataset rollouts(set, sets);
  for (const auto& samples : samples_of_rank(rollouts.size(), options_))
    batches.push_back(samples.empty() ? without_loss(rollouts, options_.batches)
                                      : rollouts.collate(samples, options_.batches));
  return batches;
}

std::vector<Batch> Rollouts::read(int64_t step) {
  std::vector<Batch> batches;
  const auto counts = gather_or_throw(world_, [&] {
    batches = collate(step);
    return std::to_string(batches.size());
  });
  for (size_t rank = 1; rank < counts.size(); ++rank) {
    TORCH_CHECK(counts[rank] == counts[0], "the rollouts in ", folder_of(step), " have ", counts[0],
                " micro batches for rank 0 and ", counts[rank], " for rank ", rank,
                "; every rank needs as many, filled up with some that have no loss");
  }
  return batches;
}

std::string Rollouts::microbatch_text(size_t microbatch, size_t microbatches) const {
  return c10::str("micro batch ", microbatch + 1, " of ", microbatches, " of ", source_);
}

}  // namespace megashard
