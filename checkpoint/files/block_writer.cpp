#include "checkpoint/files/block_writer.h"

#include <c10/util/Exception.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "checkpoint/files/run_in_threads.h"
#include "parallel/collectives/noted_progress.h"

namespace megashard {
namespace {

constexpr int64_t kBlockAlignment = 2 << 20;
constexpr int kWriterThreads = 2;  // the disk has the next block while one is being acknowledged
constexpr int kMaxBlocks = kWriterThreads + 2;

}  // namespace

void BlockWriter::Release::operator()(char* block) const { std::free(block); }

BlockWriter::Block BlockWriter::make_block(int64_t bytes) {
  const auto size = static_cast<size_t>(bytes);
  void* memory = std::aligned_alloc(kBlockAlignment, size);
  TORCH_CHECK(memory != nullptr, "no memory for a block of ", bytes, " bytes to write from");
  ::madvise(memory, size, MADV_HUGEPAGE);
  return Block(static_cast<char*>(memory));
}

BlockWriter::BlockWriter(int descriptor, std::string path, int64_t block_bytes)
    : descriptor_(descriptor), path_(std::move(path)), block_bytes_(block_bytes), made_(1) {
  leave_page_cache_alone(true);
  free_.reserve(kMaxBlocks);
  threads_ = start_threads(kWriterThreads, [this] { work(); });
}

BlockWriter::~BlockWriter() {
  {
    const std::lock_guard lock(mutex_);
    closing_ = true;
    queue_.clear();
  }
  changed_.notify_all();
  for (auto& thread : threads_) thread.join();
}

/// No effect if the file system does not support O_DIRECT.
void BlockWriter::leave_page_cache_alone(bool alone) {
  const int flags = ::fcntl(descriptor_, F_GETFL);
  if (flags >= 0) ::fcntl(descriptor_, F_SETFL, alone ? flags | O_DIRECT : flags & ~O_DIRECT);
}

void BlockWriter::submit(Block full, int64_t bytes, int64_t offset) {
  std::unique_lock lock(mutex_);
  rethrow();
  queue_.push_back({std::move(full), bytes, offset});
  changed_.notify_all();
  if (threads_.empty()) take_job(lock);
}

BlockWriter::Block BlockWriter::take() {
  std::unique_lock lock(mutex_);
  if (free_.empty() && made_ < kMaxBlocks) {
    ++made_;
    lock.unlock();
    return make_block(block_bytes_);
  }
  changed_.wait(lock, [this] { return !free_.empty() || failure_ != nullptr; });
  rethrow();
  auto block = std::move(free_.back());
  free_.pop_back();
  return block;
}

void BlockWriter::drain() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return (queue_.empty() && writing_ == 0) || failure_ != nullptr; });
  rethrow();
}

void BlockWriter::rethrow() const {
  if (failure_ != nullptr) std::rethrow_exception(failure_);
}

void BlockWriter::work() {
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [this] { return closing_ || !queue_.empty(); });
    if (queue_.empty()) return;
    take_job(lock);
  }
}

/// Writes the first block of the queue.
void BlockWriter::take_job(std::unique_lock<std::mutex>& lock) {
  Job job = std::move(queue_.front());
  queue_.pop_front();
  ++writing_;
  lock.unlock();
  std::exception_ptr failure;
  try {
    write(job.block.get(), (job.bytes + kSectorBytes - 1) / kSectorBytes * kSectorBytes, job.offset);
  } catch (...) {
    failure = std::current_exception();
  }
  lock.lock();
  --writing_;
  if (failure_ == nullptr) failure_ = failure;
  free_.push_back(std::move(job.block));
  changed_.notify_all();
}

void BlockWriter::write(const char* from, int64_t bytes, int64_t offset) {
  bool direct = true;
  while (bytes > 0) {
    const auto put = ::pwrite(descriptor_, from, static_cast<size_t>(bytes), offset);
    if (put < 0 && errno == EINTR) continue;
    if (put < 0 && errno == EINVAL && std::exchange(direct, false)) {
      leave_page_cache_alone(false);  // O_DIRECT was accepted, but is not supported
      continue;
    }
    TORCH_CHECK(put > 0, "writing ", path_, " at byte ", offset, " failed: ", std::strerror(errno));
    // If the data went to the page cache, start writing it back now instead of all at the end.
    ::sync_file_range(descriptor_, offset, put, SYNC_FILE_RANGE_WRITE);
    from += put;
    offset += put;
    bytes -= put;
    note_progress();
  }
}

}  // namespace megashard
