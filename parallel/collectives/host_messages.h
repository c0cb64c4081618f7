#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace megashard {

class ProcessGroup;

/// Messages between ranks on one machine without a network: the sender posts the address of its bytes in shared memory,
/// and the receiver copies them from the sender's memory (process_vm_readv; memcpy between ranks that are threads). One
/// copy, made by the waiting thread. Use from one thread at a time, like its group.
class HostMessages {
 public:
  struct Slot;

  /// Finds the ranks of `group` on this machine whose memory is mutually readable. Null if there are none, or if
  /// MEGASHARD_HOST_MESSAGES is 0. Collective: all members call it, over messages that already work.
  static std::unique_ptr<HostMessages> connect(ProcessGroup& group);
  ~HostMessages();

  /// True if messages to and from `peer` go this way; the same on both sides.
  bool reaches(int peer) const;

  /// Offers bytes; they must stay valid until is_taken(). At most one message per tag and peer at a time.
  Slot* post(const void* data, size_t bytes, int peer, int tag);
  /// True if the receiver has copied the bytes. The slot is then free; do not ask again.
  bool is_taken(Slot& slot);
  /// Withdraws an offer. After it returns, no thread of this process reads the bytes.
  void withdraw(Slot& slot);
  /// The message that `peer` posted with this tag, readable until close(); null if there is none. Throws if its size is
  /// not `bytes`.
  Slot* open(size_t bytes, int peer, int tag);
  /// Reads a part: returns its address, or copies it to `place` if it is in another process. Throws if the process is
  /// gone.
  const void* read(const Slot& slot, int peer, size_t offset, size_t bytes, void* place) const;
  void close(Slot& slot, int peer);
  /// Copies the message that `peer` posted with this tag; false if there is none.
  bool take(void* data, size_t bytes, int peer, int tag);

  /// Number of posts to this rank and copies from it by peers. Read it before polling and pass it to sleep(), which
  /// returns when it has grown or after `patience`.
  uint32_t news() const;
  void sleep(uint32_t seen, std::chrono::milliseconds patience);

  /// Shows all peers that this rank waits for a world rank; -1: for none.
  void show_wait_for(int rank);
  /// The rank that `peer` shows; -1 if none, or if `peer` is not reached.
  int awaited_by(int peer) const;

 private:
  class Segment;
  struct Peer;

  HostMessages(std::shared_ptr<Segment> own, std::vector<Peer> peers, int rank);

  std::shared_ptr<Segment> own_;
  std::vector<Peer> peers_;
  int rank_;
};

}  // namespace megashard
