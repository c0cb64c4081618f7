#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace megashard {

class ProcessGroup;

/// Messages between ranks on one machine, without a network: the sender posts where its bytes are, in memory that both
/// map, and the receiver copies them from the sender's memory to their place (process_vm_readv; memcpy between ranks
/// that are threads). One copy, made by the thread that waits. As its group, used by one thread at a time.
class HostMessages {
 public:
  struct Slot;

  /// Finds the ranks of `group` that are on this machine and may read each other. Null if this rank has none. Reads
  /// MEGASHARD_HOST_MESSAGES (0: none). Collective: all members call it, over messages that work already.
  static std::unique_ptr<HostMessages> connect(ProcessGroup& group);
  ~HostMessages();

  /// Whether messages to and from `peer` go this way: the same on both sides.
  bool reaches(int peer) const;

  /// Offers bytes, which stay where they are until is_taken(). At most one message of a tag to a peer at a time.
  Slot* post(const void* data, size_t bytes, int peer, int tag);
  /// Whether the receiver has copied them: then the slot is free again, and nobody may ask any more.
  bool is_taken(Slot& slot);
  /// Takes an offer back. When it returns, no thread of this process reads the bytes.
  void withdraw(Slot& slot);
  /// What `peer` posted with this tag, to be read until close(); null if it has not. Throws if that is not of so many
  /// bytes.
  Slot* open(size_t bytes, int peer, int tag);
  /// A part of it: where it is, or, of another process, copied to `place`. Throws if the process has gone.
  const void* read(const Slot& slot, int peer, size_t offset, size_t bytes, void* place) const;
  void close(Slot& slot, int peer);
  /// Copies what `peer` posted with this tag; false if it has not.
  bool take(void* data, size_t bytes, int peer, int tag);

  /// How often peers have posted to this rank or taken from it; ask before looking at messages, and give it to
  /// sleep(), which ends when it has risen, or after `patience`.
  uint32_t news() const;
  void sleep(uint32_t seen, std::chrono::milliseconds patience);

  /// Shows all peers that this rank waits for that rank of the world; -1: for none.
  void show_wait_for(int rank);
  /// What `peer` shows; -1 too where it is not reached.
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
