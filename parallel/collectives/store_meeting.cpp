#include "parallel/collectives/store_meeting.h"

#include <algorithm>
#include <chrono>
#include <iterator>
#include <sstream>
#include <stdexcept>
#include <thread>
#include <utility>

#include "parallel/collectives/deadline_store.h"
#include "parallel/collectives/start_wait.h"
#include "parallel/collectives/wait_error.h"

namespace megashard {
namespace {

using Milliseconds = std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;

constexpr size_t kMembersNamed = 8;  // maximum number of members named in a line

/// A value is its round and a text.
std::string round_and(int64_t round, const std::string& text) { return std::to_string(round) + " " + text; }

std::pair<int64_t, std::string> parted(const std::string& value) {
  const size_t end = value.find(' ');
  return {std::stoll(value.substr(0, end)), value.substr(end + 1)};
}

}  // namespace

StoreMeeting::StoreMeeting(c10::intrusive_ptr<c10d::Store> store, const ProcessGroup& group, std::string place,
                           std::string occasion)
    : store_(c10::make_intrusive<DeadlineStore>(std::move(store), [timeout = group.timeout()] { return timeout; })),
      group_(group),
      place_("megashard/" + std::move(place)),
      occasion_(std::move(occasion)) {}

std::vector<int> StoreMeeting::meet(const std::string& word, const std::function<void()>& look) {
  const auto started = Clock::now();
  const StartDeadline deadline(group_.timeout());
  const int64_t round = ++round_;
  const std::string verdict_key = place_ + "/verdict";
  std::string differ;
  try {
    store_->set(key_of(group_.rank()), round_and(round, word));
    if (store_->add(place_ + "/members", 1) == round * group_.size())
      store_->set(verdict_key, round_and(round, differing_members()));
    while (true) {
      if (store_->check({verdict_key})) {
        const auto [of_round, text] = parted(store_->get_to_str(verdict_key));
        differ = text;
        if (of_round == round) break;
      }
      if (deadline.left() == Milliseconds(0)) throw std::runtime_error(missing_ranks() + " did not come");
      if (look) look();
      std::this_thread::sleep_for(deadline.pause(group_.size()));
    }
  } catch (const std::exception& error) {
    throw_wait_error(occasion_.c_str(), group_, -1, Clock::now() - started, error);
  }
  std::istringstream numbers(differ);
  return {std::istream_iterator<int>(numbers), {}};
}

std::string StoreMeeting::word_of(int member) { return parted(store_->get_to_str(key_of(member))).second; }

void StoreMeeting::agree(const std::string& word) {
  const std::vector<int> others = meet(word);
  if (others.empty()) return;
  std::string text = c10::str("rank ", group_.ranks().front(), ": ", word_of(0));
  for (size_t i = 0; i < std::min(others.size(), kMembersNamed); ++i)
    text += c10::str("; rank ", group_.ranks().at(others[i]), ": ", word_of(others[i]));
  TORCH_CHECK(false, occasion_, " in group '", group_.name(), "' cannot go on, since its ranks differ: ", text);
}

/// 0: never arrived.
int64_t StoreMeeting::round_of(int member) {
  return store_->check({key_of(member)}) ? parted(store_->get_to_str(key_of(member))).first : 0;
}

/// "rank 3" or "ranks 1, 2 and 60 more", in world ranks.
std::string StoreMeeting::missing_ranks() {
  std::string names;
  size_t count = 0;
  for (int member = 0; member < group_.size(); ++member) {
    if (round_of(member) == round_) continue;
    if (++count <= kMembersNamed) names += (names.empty() ? "" : ", ") + std::to_string(group_.ranks().at(member));
  }
  if (count > kMembersNamed) names += " and " + std::to_string(count - kMembersNamed) + " more";
  return (count == 1 ? "rank " : "ranks ") + names;
}

/// "3 7": members whose word differs from the first member's.
std::string StoreMeeting::differing_members() {
  std::vector<std::string> keys;
  for (int member = 0; member < group_.size(); ++member) keys.push_back(key_of(member));
  const auto values = store_->multiGet(keys);
  std::string members;
  for (size_t member = 1; member < values.size(); ++member) {
    if (values[member] != values[0]) members += std::to_string(member) + " ";
  }
  return members;
}

}  // namespace megashard
