#include "parallel/fsdp/collective_order.h"

#include <algorithm>
#include <condition_variable>
#include <cstring>
#include <mutex>
#include <sstream>
#include <stdexcept>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#include "parallel/collectives/deadline_store.h"
#include "parallel/collectives/group_store.h"
#include "parallel/collectives/store_meeting.h"
#include "parallel/fsdp/detail/fsdp_state.h"

namespace megashard {
namespace {

using Milliseconds = std::chrono::milliseconds;

constexpr Milliseconds kTick{250};
constexpr std::chrono::seconds kAsksFor{2};  // waits for the other ranks after a failure
constexpr const char* kComparing = "comparing the order of collectives (--check-collective-order)";

/// Key prefix of an object; the count of earlier objects is the same on every rank.
std::string next_place(const ProcessGroup& group, c10d::Store& store) {
  return c10::str("order/", store.add(c10::str("megashard/orders/", group.rank()), 1));
}

/// One line per collective: kind (g: gather, r: reduce), index of the root's group, and its name, as in "g17 layers.3".
/// Ranks are compared by index, because with expert parallelism they name their experts differently.
std::string trail_text(const CollectiveTrail& trail, FsdpState& root) {
  std::unordered_map<const std::string*, size_t> numbers;
  for (const auto* state : root.ensure_context().states) {
    for (const auto& group : state->groups()) numbers.emplace(&group->name(), numbers.size());
  }
  std::string text;
  const size_t count = trail.count.load(std::memory_order_acquire);
  for (size_t i = 0; i < count; ++i) {
    const auto& [what, group] = trail.events[i];
    const bool gathers = std::strcmp(what, "unshard") == 0;
    if (gathers || std::strcmp(what, "reduce") == 0)
      text += (gathers ? "g" : "r") + std::to_string(numbers[group]) + " " + *group + "\n";
  }
  return text;
}

std::string without_name(const std::string& line) { return line.substr(0, line.find(' ')); }

std::vector<std::string> trail_lines(const std::string& text) {
  std::istringstream stream(text);
  std::vector<std::string> lines;
  for (std::string line; std::getline(stream, line);) lines.push_back(line);
  return lines;
}

std::string without_names(const std::string& text) {
  std::string kept;
  for (const auto& line : trail_lines(text)) kept += without_name(line) + " ";
  return kept;
}

struct RankTrail {
  int rank;
  std::string text;
};

/// Describes where the two ranks diverge; empty if they do not. `whole`: the step is complete, so neither adds more.
std::string parting(int64_t step, const RankTrail& a, const RankTrail& b, bool whole) {
  if (b.rank < a.rank) return parting(step, b, a, whole);
  const auto of_a = trail_lines(a.text), of_b = trail_lines(b.text);
  const auto [in_a, in_b] = std::ranges::mismatch(of_a, of_b, {}, without_name, without_name);
  if (in_a == of_a.end() && in_b == of_b.end()) return {};
  if (!whole && (in_a == of_a.end() || in_b == of_b.end())) return {};
  const auto does = [](const auto& lines, auto at) {
    if (at == lines.end()) return std::string("does nothing more");
    return (at->starts_with('g') ? "gathers" : "reduces the gradients of") + at->substr(at->find(' '));
  };
  return c10::str("the ranks part in step ", step, ": as collective ", in_a - of_a.begin() + 1, " of the step, rank ",
                  a.rank, " ", does(of_a, in_a), ", and rank ", b.rank, " ", does(of_b, in_b),
                  "; all ranks must run the same modules in the same order: look for a branch in forward that depends "
                  "on the rank or on its data");
}

}  // namespace

struct CollectiveOrder::Watch {
  Watch(std::shared_ptr<FsdpState> of_root, ProcessGroupPtr world, const c10::intrusive_ptr<c10d::Store>& raw_store)
      : root(std::move(of_root)),
        trail(std::make_shared<CollectiveTrail>()),
        group(std::move(world)),
        store(c10::make_intrusive<DeadlineStore>(raw_store, [] { return Milliseconds(kAsksFor); })),
        place(next_place(*group, *store)),
        hashes(raw_store, *group, place + "/hashes", kComparing),
        trails(raw_store, *group, place + "/trails", kComparing) {}

  ~Watch() {
    {
      const std::lock_guard lock(mutex);
      over = true;
    }
    changed.notify_all();
    if (thread.joinable()) thread.join();
  }

  void set_running(bool now) {
    trail->is_on = now;
    if (!thread.joinable()) thread = std::thread([this] { run(); });
    const std::lock_guard lock(mutex);
    running = now;
    changed.notify_all();
  }

  /// During a step, checks regularly whether another rank has failed; that rank then needs this rank's progress, even
  /// if this one hangs.
  void run() {
    std::unique_lock lock(mutex);
    while (!over) {
      changed.wait(lock, [this] { return over || running; });
      changed.wait_for(lock, kTick, [this] { return over || !running; });
      if (over || !running) continue;
      lock.unlock();
      try {
        if (store->check({failed_key()})) post();
      } catch (const std::exception&) {  // the store is gone, and the rank that asked with it
      }
      lock.lock();
    }
  }

  /// For a step that is complete on all ranks.
  std::string compare(const std::string& text) {
    const auto look = [this] {
      if (posted) throw std::runtime_error("another rank has failed");
    };
    const auto others = hashes.meet(std::to_string(std::hash<std::string>()(without_names(text))), look);
    if (others.empty()) return {};
    trails.meet(text, look);
    const RankTrail first{group->ranks().front(), trails.word_of(0)};
    const RankTrail other{group->ranks().at(others.front()), trails.word_of(others.front())};
    hashes.meet("read");  // the store ends with its rank: no rank leaves before all have read
    return parting(step, first, other, /*whole=*/true);
  }

  std::string failed_key() const { return "megashard/" + place + "/failed"; }
  std::string trail_key(int member) const { return c10::str("megashard/", place, "/trail/", member); }

  void post() {
    if (!posted.exchange(true)) store->set(trail_key(group->rank()), text());
  }

  std::string text() const { return trail_text(*trail, *root); }

  std::shared_ptr<FsdpState> root;
  std::shared_ptr<CollectiveTrail> trail;
  ProcessGroupPtr group;
  c10::intrusive_ptr<c10d::Store> store;
  std::string place;
  StoreMeeting hashes, trails;
  int64_t step = 0;
  std::mutex mutex;
  std::condition_variable changed;
  bool running = false, over = false;
  std::atomic<bool> posted{false};
  std::thread thread;  // started with the first checked step
};

CollectiveOrder::CollectiveOrder(const torch::nn::Module& root, ProcessGroupPtr world) {
  const auto state = fsdp_state(root);
  const auto* member = dynamic_cast<const HasStore*>(world.get());
  if (state == nullptr || member == nullptr || world->size() == 1 || member->store() == nullptr) return;
  const auto store = member->store()->store;
  watch_ = std::make_unique<Watch>(state, std::move(world), store);
  state->ensure_context().trail = watch_->trail;
}

CollectiveOrder::~CollectiveOrder() {
  if (watch_ != nullptr) watch_->trail->is_on = false;
}

void CollectiveOrder::begin_step(int64_t step) {
  if (watch_ == nullptr) return;
  watch_->step = step;
  watch_->trail->count = 0;
  watch_->set_running(true);
}

void CollectiveOrder::end_step() {
  if (watch_ == nullptr) return;
  Watch& watch = *watch_;
  watch.trail->is_on = false;
  std::string sentence;
  try {
    sentence = watch.compare(watch.text());
  } catch (const c10::DistBackendError&) {
    sentence = why_it_failed();
    if (sentence.empty()) throw;
  }
  watch.set_running(false);
  TORCH_CHECK(sentence.empty(), sentence);
}

std::string CollectiveOrder::why_it_failed() noexcept {
  if (watch_ == nullptr) return {};
  Watch& watch = *watch_;
  try {
    watch.store->set(watch.failed_key(), std::string("1"));
    watch.post();
    const RankTrail mine{watch.group->ranks().at(watch.group->rank()), watch.text()};
    std::vector<int> asked;  // the first member asks all others; they ask only it
    for (int member = 0; member < watch.group->size(); ++member) {
      if (member != watch.group->rank() && (member == 0 || watch.group->rank() == 0)) asked.push_back(member);
    }
    const auto until = std::chrono::steady_clock::now() + kAsksFor;
    while (!asked.empty() && std::chrono::steady_clock::now() < until) {
      for (size_t i = 0; i < asked.size();) {
        if (!watch.store->check({watch.trail_key(asked[i])})) {
          ++i;
          continue;
        }
        const RankTrail theirs{watch.group->ranks().at(asked[i]), watch.store->get_to_str(watch.trail_key(asked[i]))};
        if (auto sentence = parting(watch.step, mine, theirs, /*whole=*/false); !sentence.empty()) return sentence;
        asked.erase(asked.begin() + static_cast<std::ptrdiff_t>(i));
      }
      std::this_thread::sleep_for(kTick / 5);
    }
  } catch (const std::exception&) {  // the store is gone: no rank can be asked
  }
  return {};
}

}  // namespace megashard
