#include "checkpoint/files/output_file.h"

#include <c10/util/Exception.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <utility>

#include "checkpoint/files/crc32.h"
#include "checkpoint/files/file_io.h"
#include "checkpoint/files/run_in_threads.h"
#include "parallel/collectives/noted_progress.h"

namespace megashard {
namespace {

constexpr int64_t kBlockAlignment = 2 << 20;
constexpr int kWriterThreads = 2;  // the disk has the next block while one is being acknowledged
constexpr int kMaxBlocks = kWriterThreads + 2;

/// Up to four blocks are in flight: at most half of the file.
int64_t block_bytes_of(int64_t file_bytes) {
  const bool large = file_bytes >= 8 * BlockWriter::kLargeBlockBytes;
  return large ? BlockWriter::kLargeBlockBytes : BlockWriter::kBlockBytes;
}

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

OutputFile::OutputFile(std::string path, int64_t expected_bytes)
    : path_(std::move(path)),
      block_bytes_(block_bytes_of(expected_bytes)),
      block_(BlockWriter::make_block(block_bytes_)) {
  descriptor_ = ::open(path_.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
  TORCH_CHECK(descriptor_ >= 0, "cannot create ", path_, ": ", errno_text());
  if (expected_bytes <= block_bytes_) return;
  has_reserved_ = ::fallocate(descriptor_, 0, 0, expected_bytes) == 0;
  const bool full = !has_reserved_ && (errno == ENOSPC || errno == EDQUOT);
  const auto why = errno_text();
  if (full) ::close(std::exchange(descriptor_, -1));
  TORCH_CHECK(!full, "there is no room for the ", expected_bytes, " bytes of ", path_, ": ", why);
}

OutputFile::~OutputFile() {
  writer_.reset();
  if (descriptor_ >= 0) ::close(descriptor_);
}

uint32_t OutputFile::write(const void* data, int64_t bytes) {
  const auto* from = static_cast<const char*>(data);
  uint32_t crc = 0;
  for (int64_t left = bytes; left > 0;) {
    if (position_ - block_begin_ == block_bytes_) {
      if (writer_ == nullptr) writer_ = std::make_unique<BlockWriter>(descriptor_, path_, block_bytes_);
      writer_->submit(std::move(block_), block_bytes_, block_begin_);
      block_ = writer_->take();
      block_begin_ = position_;
    }
    const auto filled = position_ - block_begin_;
    const auto part = std::min(left, block_bytes_ - filled);
    crc = copy_with_crc32(block_.get() + filled, from, part, crc);
    from += part;
    position_ += part;
    left -= part;
  }
  crc32_ = join_crc32(crc32_, crc, bytes);
  return crc;
}

void OutputFile::write_small() {
  const char* from = block_.get();
  for (int64_t left = position_; left > 0;) {
    const auto put = ::write(descriptor_, from, static_cast<size_t>(left));
    if (put < 0 && errno == EINTR) continue;
    TORCH_CHECK(put > 0, "writing ", path_, " failed: ", errno_text());
    from += put;
    left -= put;
  }
}

void OutputFile::write_rest() {
  const auto rest = position_ - block_begin_;
  const auto unused = std::min(block_bytes_ - rest, BlockWriter::kSectorBytes);
  std::memset(block_.get() + rest, 0, static_cast<size_t>(unused));
  writer_->submit(std::move(block_), rest, block_begin_);
  writer_->drain();
}

WrittenFile OutputFile::sync_and_close() {
  writer_ == nullptr ? write_small() : write_rest();
  if (writer_ != nullptr || has_reserved_) {  // padded to sectors, or reserved more than needed
    TORCH_CHECK(::ftruncate(descriptor_, position_) == 0, "giving ", path_, " its length of ", position_,
                " bytes failed: ", errno_text());
  }
  writer_.reset();
  const bool synced = ::fsync(descriptor_) == 0;
  const auto why = synced ? std::string() : errno_text();
  const bool closed = ::close(std::exchange(descriptor_, -1)) == 0;
  TORCH_CHECK(synced, "fsync of ", path_, " failed: ", why);
  TORCH_CHECK(closed, "closing ", path_, " failed: ", errno_text());
  return {std::filesystem::path(path_).filename().string(), position_, crc32_};
}

AtomicFile::AtomicFile(std::string path) : OutputFile(path + ".tmp"), final_path_(std::move(path)) {}

AtomicFile::~AtomicFile() {
  if (!is_published_) ::unlink(path().c_str());
}

WrittenFile AtomicFile::publish() {
  auto written = sync_and_close();
  rename_durably(path(), final_path_);
  is_published_ = true;
  written.name = std::filesystem::path(final_path_).filename().string();
  return written;
}

WrittenFile write_file_atomically(const std::string& path, std::string_view content) {
  AtomicFile file(path);
  file.write(content);
  return file.publish();
}

}  // namespace megashard
