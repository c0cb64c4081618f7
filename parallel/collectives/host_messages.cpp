#include "parallel/collectives/host_messages.h"

#include <c10/util/Exception.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <map>
#include <mutex>
#include <new>
#include <sstream>
#include <string>
#include <system_error>

#include "parallel/collectives/process_group.h"

namespace megashard {

using Clock = std::chrono::steady_clock;

namespace {

constexpr size_t kSlots = 256;  // messages in flight from one rank to another
/// Time to poll before sleeping; waking a thread takes about as long. Other threads run meanwhile.
constexpr std::chrono::microseconds kAwake{50};

std::string first_word_of(const char* path) {
  std::ifstream file(path);
  std::string word;
  file >> word;
  return word;
}

std::string target_of(const char* link) {
  char text[256];
  const ssize_t length = readlink(link, text, sizeof(text));
  return {text, length < 0 ? 0 : static_cast<size_t>(length)};
}

/// Copies from another process's memory; false if the process is gone or forbids it.
bool copy_from(pid_t process, void* to, uint64_t from, size_t bytes) {
  for (size_t done = 0; done < bytes;) {
    const iovec here{static_cast<char*>(to) + done, bytes - done};
    const iovec there{reinterpret_cast<void*>(from + done), bytes - done};
    const ssize_t copied = process_vm_readv(process, &here, 1, &there, 1, 0);
    if (copied <= 0) {
      if (copied < 0 && errno == EINTR) continue;
      return false;
    }
    done += static_cast<size_t>(copied);
  }
  return true;
}

}  // namespace

struct HostMessages::Slot {
  enum State : uint32_t { kFree, kPosted, kBeingTaken, kTaken };
  std::atomic<uint32_t> state;
  int32_t tag;
  uint64_t address;  // in the sender's memory
  uint64_t bytes;
};

/// Memory that a rank shares with its peers: a bell that they ring, and its offers to each of them.
class HostMessages::Segment {
 public:
  struct Table {
    std::atomic<uint32_t> used;  // number of slots used so far
    Slot slots[kSlots];
  };
  struct Bell {
    std::atomic<uint32_t> rung;
    std::atomic<uint32_t> asleep;
    std::atomic<int32_t> awaited;  // 1 + the rank that this one waits for; 0: none
  };

  /// Creates a zeroed segment. Null if the system gives no shared memory.
  static std::shared_ptr<Segment> make(int tables) {
    const int file = memfd_create("megashard-messages", MFD_CLOEXEC);
    if (file < 0) return nullptr;
    auto segment = std::shared_ptr<Segment>(new Segment(file, tables));
    if (ftruncate(file, static_cast<off_t>(segment->bytes())) != 0 || !segment->map()) return nullptr;
    return segment;
  }

  /// Maps another process's segment. Null if it may not be opened.
  static std::shared_ptr<Segment> open(pid_t process, int file, int tables) {
    const std::string path = "/proc/" + std::to_string(process) + "/fd/" + std::to_string(file);
    auto segment = std::shared_ptr<Segment>(new Segment(::open(path.c_str(), O_RDWR | O_CLOEXEC), tables));
    if (!segment->map()) return nullptr;
    segment->close_file();
    return segment;
  }

  ~Segment() {
    if (memory_ != nullptr) munmap(memory_, bytes());
    close_file();
  }
  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;

  int file() const { return file_; }
  void close_file() {
    if (file_ >= 0) ::close(file_);
    file_ = -1;
  }
  Bell& bell() const { return *static_cast<Bell*>(memory_); }
  Table& table(int peer) const {
    return reinterpret_cast<Table*>(static_cast<char*>(memory_) + kTables)[static_cast<size_t>(peer)];
  }

  void ring() const {
    bell().rung.fetch_add(1);
    if (bell().asleep.exchange(0) != 0) syscall(SYS_futex, &bell().rung, FUTEX_WAKE, 1, nullptr, nullptr, 0);
  }

 private:
  static constexpr size_t kTables = 64;  // offset of the tables in bytes

  Segment(int file, int tables) : file_(file), tables_(static_cast<size_t>(tables)) {}
  size_t bytes() const { return kTables + tables_ * sizeof(Table); }
  bool map() {
    if (file_ < 0) return false;
    void* memory = mmap(nullptr, bytes(), PROT_READ | PROT_WRITE, MAP_SHARED, file_, 0);
    if (memory == MAP_FAILED) return false;
    memory_ = memory;
    return true;
  }

  int file_;
  size_t tables_;
  void* memory_ = nullptr;
};

struct HostMessages::Peer {
  std::shared_ptr<Segment> segment{};  // null: not reached
  pid_t process = 0;                   // 0: this one
};

namespace {

/// Lets other ranks find a rank's segment and test whether they can read its memory.
struct Card {
  std::string machine{};  // machine and process-id namespace; empty: no segment
  pid_t process = 0;
  int file = -1;
  uint64_t segment = 0;  // its address in that process

  std::string text() const {
    std::ostringstream out;
    out << machine << ' ' << process << ' ' << file << ' ' << segment;
    return out.str();
  }
  static Card parse(const std::string& text) {
    Card card;
    std::istringstream(text) >> card.machine >> card.process >> card.file >> card.segment;
    return card;
  }
};

std::string this_machine() {
  return first_word_of("/proc/sys/kernel/random/boot_id") + "/" + target_of("/proc/self/ns/pid");
}

bool is_wanted() {
  const char* given = std::getenv("MEGASHARD_HOST_MESSAGES");
  return given == nullptr || std::string_view(given) != "0";
}

}  // namespace

HostMessages::HostMessages(std::shared_ptr<Segment> own, std::vector<Peer> peers, int rank)
    : own_(std::move(own)), peers_(std::move(peers)), rank_(rank) {}
HostMessages::~HostMessages() = default;

std::unique_ptr<HostMessages> HostMessages::connect(ProcessGroup& group) {
  // Segments of ranks that are threads of this process, by address; such ranks share one mapping.
  static std::mutex mutex;
  static std::map<uint64_t, std::weak_ptr<Segment>> of_threads;

  const auto own = is_wanted() ? Segment::make(group.size()) : nullptr;
  Card card;
  if (own != nullptr) {
#ifdef PR_SET_PTRACER
    prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY, 0, 0, 0);  // if Yama lets only parents read
#endif
    card = {this_machine(), getpid(), own->file(), reinterpret_cast<uint64_t>(own.get())};
    const std::lock_guard lock(mutex);
    std::erase_if(of_threads, [](const auto& entry) { return entry.second.expired(); });
    of_threads[card.segment] = own;
  }
  const auto cards = group.all_gather_strings(card.text());
  std::vector<Peer> peers(cards.size());
  std::string readable(cards.size(), '0');
  for (size_t i = 0; i < cards.size(); ++i) {
    const Card theirs = Card::parse(cards[i]);
    if (own == nullptr || theirs.machine != card.machine || static_cast<int>(i) == group.rank()) continue;
    Peer& peer = peers[i];
    if (theirs.process == card.process) {
      const std::lock_guard lock(mutex);
      const auto found = of_threads.find(theirs.segment);
      if (found != of_threads.end()) peer.segment = found->second.lock();
    } else {
      peer = {Segment::open(theirs.process, theirs.file, group.size()), theirs.process};
      uint64_t probe = 0;
      if (!copy_from(theirs.process, &probe, theirs.segment, sizeof(probe))) peer.segment = nullptr;
    }
    if (peer.segment != nullptr) readable[i] = '1';
  }
  const auto answers = group.all_gather_strings(readable);
  bool any = false;
  for (size_t i = 0; i < peers.size(); ++i) {
    if (answers[i][static_cast<size_t>(group.rank())] != '1') peers[i].segment = nullptr;
    any |= peers[i].segment != nullptr;
  }
  if (!any) return nullptr;
  own->close_file();
  return std::unique_ptr<HostMessages>(new HostMessages(own, std::move(peers), group.rank()));
}

bool HostMessages::reaches(int peer) const { return peers_[static_cast<size_t>(peer)].segment != nullptr; }

HostMessages::Slot* HostMessages::post(const void* data, size_t bytes, int peer, int tag) {
  auto& table = own_->table(peer);
  uint32_t place = 0;
  while (place < kSlots && table.slots[place].state.load(std::memory_order_relaxed) != Slot::kFree) ++place;
  TORCH_CHECK(place < kSlots, "more than ", kSlots, " messages to rank ", peer, " are under way: wait for some");
  Slot& slot = table.slots[place];
  slot.tag = tag;
  slot.address = reinterpret_cast<uint64_t>(data);
  slot.bytes = bytes;
  slot.state.store(Slot::kPosted, std::memory_order_release);
  if (place >= table.used.load(std::memory_order_relaxed)) table.used.store(place + 1, std::memory_order_release);
  peers_[static_cast<size_t>(peer)].segment->ring();
  return &slot;
}

bool HostMessages::is_taken(Slot& slot) {
  if (slot.state.load(std::memory_order_acquire) != Slot::kTaken) return false;
  slot.state.store(Slot::kFree, std::memory_order_relaxed);
  return true;
}

void HostMessages::withdraw(Slot& slot) {
  uint32_t expected = Slot::kPosted;
  if (slot.state.compare_exchange_strong(expected, Slot::kFree) || expected != Slot::kBeingTaken) return;
  // Another process does no harm here, and may have died while reading.
  for (const auto deadline = Clock::now() + std::chrono::seconds(1); Clock::now() < deadline; sched_yield())
    if (slot.state.load(std::memory_order_acquire) != Slot::kBeingTaken) return;
}

HostMessages::Slot* HostMessages::open(size_t bytes, int peer, int tag) {
  auto& table = peers_[static_cast<size_t>(peer)].segment->table(rank_);
  const uint32_t used = table.used.load(std::memory_order_acquire);
  for (uint32_t place = 0; place < used; ++place) {
    Slot& slot = table.slots[place];
    uint32_t expected = Slot::kPosted;
    if (slot.state.load(std::memory_order_acquire) != expected || slot.tag != tag) continue;
    if (!slot.state.compare_exchange_strong(expected, Slot::kBeingTaken)) continue;  // withdrawn
    if (slot.bytes == bytes) return &slot;
    close(slot, peer);
    TORCH_CHECK(false, "rank ", peer, " sent ", slot.bytes, " bytes where this rank takes ", bytes);
  }
  return nullptr;
}

const void* HostMessages::read(const Slot& slot, int peer, size_t offset, size_t bytes, void* place) const {
  const pid_t process = peers_[static_cast<size_t>(peer)].process;
  if (process == 0) return reinterpret_cast<const char*>(slot.address) + offset;
  const bool is_there = copy_from(process, place, slot.address + offset, bytes);
  TORCH_CHECK(is_there, "the memory of rank ", peer, " cannot be read: ", std::strerror(errno));
  return place;
}

void HostMessages::close(Slot& slot, int peer) {
  slot.state.store(Slot::kTaken, std::memory_order_release);
  peers_[static_cast<size_t>(peer)].segment->ring();
}

bool HostMessages::take(void* data, size_t bytes, int peer, int tag) {
  Slot* slot = open(bytes, peer, tag);
  if (slot == nullptr) return false;
  const void* found = read(*slot, peer, 0, bytes, data);
  if (found != data) std::memcpy(data, found, bytes);
  close(*slot, peer);
  return true;
}

uint32_t HostMessages::news() const { return own_->bell().rung.load(); }

void HostMessages::sleep(uint32_t seen, std::chrono::milliseconds patience) {
  for (const auto deadline = Clock::now() + kAwake; Clock::now() < deadline; sched_yield())
    if (news() != seen) return;
  auto& bell = own_->bell();
  bell.asleep.store(1);
  const timespec limit{patience.count() / 1000, (patience.count() % 1000) * 1'000'000};
  syscall(SYS_futex, &bell.rung, FUTEX_WAIT, seen, &limit, nullptr, 0);
}

void HostMessages::show_wait_for(int rank) { own_->bell().awaited.store(rank + 1); }

int HostMessages::awaited_by(int peer) const {
  const auto& segment = peers_[static_cast<size_t>(peer)].segment;
  return segment == nullptr ? -1 : segment->bell().awaited.load() - 1;
}

}  // namespace megashard
