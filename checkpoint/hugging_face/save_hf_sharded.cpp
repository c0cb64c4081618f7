#include "checkpoint/hugging_face/save_hf_sharded.h"

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <utility>

#include "checkpoint/dcp/dcp_writer.h"
#include "checkpoint/files/work_progress.h"
#include "checkpoint/hugging_face/safetensors.h"
#include "checkpoint/values/box_runs.h"
#include "checkpoint/values/gather_values.h"
#include "checkpoint/values/tensor_info.h"
#include "parallel/collectives/agreement.h"

namespace megashard {
namespace {

/// A file of known length that several ranks fill at different offsets.
class PlacedFile {
 public:
  /// Creates the file with `bytes` zeros; replaces an existing one.
  static void create(const std::string& path, int64_t bytes);

  explicit PlacedFile(std::string path);  ///< opens a file that create() made, possibly on another rank
  ~PlacedFile();
  PlacedFile(const PlacedFile&) = delete;
  PlacedFile& operator=(const PlacedFile&) = delete;

  void write_at(const void* data, int64_t bytes, int64_t offset);
  /// Syncs this process's writes to disk (fsync).
  void sync();

 private:
  std::string path_;
  int descriptor_ = -1;
};

constexpr int64_t kMaxPlacedPerCall = 1 << 30;

int open_placed(const std::string& path, int flags) {
  const int descriptor = ::open(path.c_str(), O_WRONLY | O_CLOEXEC | flags, 0666);
  TORCH_CHECK(descriptor >= 0, "cannot write ", path, ": ", std::strerror(errno));
  return descriptor;
}

void PlacedFile::create(const std::string& path, int64_t bytes) {
  const int descriptor = open_placed(path, O_CREAT | O_TRUNC);
  const bool sized = ::ftruncate(descriptor, bytes) == 0;
  const std::string why = std::strerror(errno);
  ::close(descriptor);
  TORCH_CHECK(sized, "cannot make ", path, " ", bytes, " bytes long: ", why);
}

PlacedFile::PlacedFile(std::string path) : path_(std::move(path)), descriptor_(open_placed(path_, 0)) {}

PlacedFile::~PlacedFile() { ::close(descriptor_); }

void PlacedFile::write_at(const void* data, int64_t bytes, int64_t offset) {
  const auto* from = static_cast<const char*>(data);
  while (bytes > 0) {
    const auto put = ::pwrite(descriptor_, from, std::min(bytes, kMaxPlacedPerCall), offset);
    if (put < 0 && errno == EINTR) continue;
    TORCH_CHECK(put > 0, "writing ", path_, " at byte ", offset, " failed: ", std::strerror(errno));
    from += put;
    offset += put;
    bytes -= put;
  }
}

void PlacedFile::sync() {
  TORCH_CHECK(::fsync(descriptor_) == 0, "fsync of ", path_, " failed: ", std::strerror(errno));
}

int64_t bytes_of(const at::Tensor& tensor) { return static_cast<int64_t>(tensor.nbytes()); }

class ShardedSave {
 public:
  ShardedSave(const ShardedTensors& tensors, const HfSaveOptions& options) : tensors_(tensors), options_(options) {}

  RankPlan own_plan() const {
    auto plan = make_rank_plan(tensors_, {});
    for (auto& item : plan) item.dtype = written(item.key, item.dtype);
    return plan;
  }

  void make_plan(const std::string& directory, const std::vector<Value>& plans, const HfSaveOptions& options) {
    std::vector<RankPlan> decoded;
    for (const auto& sent : plans) decoded.push_back(plan_of(sent));
    plan_ = make_save_plan(decoded);
    std::vector<TensorInfo> infos;
    for (const auto& entry : plan_.metadata.entries) infos.push_back(*entry.tensor_info());
    folder_.emplace(directory, plan_hf_files(infos, options), options);
    const auto& files = folder_->plan().files;
    for (size_t i = 0; i < files.size(); ++i) {
      layouts_.push_back(layout_safetensors(files[i].name, files[i].tensors));
      const auto& layout = layouts_.back();
      for (size_t j = 0; j < layout.tensors.size(); ++j) places_[layout.tensors[j].name] = {i, layout.offsets[j]};
    }
  }

  void create_files() {
    folder_->begin();
    for (size_t i = 0; i < layouts_.size(); ++i) {
      PlacedFile::create(path(i), layouts_[i].file_bytes);
      PlacedFile(path(i)).write_at(layouts_[i].head.data(), static_cast<int64_t>(layouts_[i].head.size()), 0);
    }
  }

  void write(size_t rank) {
    std::map<size_t, std::unique_ptr<PlacedFile>> open;
    int64_t all_bytes = 0;
    for (const auto& write : plan_.writes[rank]) all_bytes += bytes_of(tensors_[write.item].second.local);
    LongWork work("save", all_bytes);
    for (const auto& write : plan_.writes[rank]) {
      const auto& entry = plan_.metadata.entries[write.entry];
      const auto& place = places_.at(entry.key);
      auto& file = open[place.file];
      if (file == nullptr) file = std::make_unique<PlacedFile>(path(place.file));
      const auto& held = tensors_[write.item].second.local;
      const auto local = held.detach().to(c10::kCPU, written(entry.key, held.scalar_type())).contiguous();
      const auto* data = static_cast<const char*>(local.const_data_ptr());
      const auto bytes = static_cast<int64_t>(local.element_size());
      const auto& tensor = *entry.tensor();
      const DcpChunk& box = tensor.chunks[write.chunk];
      for_each_run(tensor.sizes, box.offsets, box.sizes, [&](int64_t in_whole, int64_t in_box, int64_t count) {
        file->write_at(data + in_box * bytes, count * bytes, place.offset + in_whole * bytes);
      });
      work.add(bytes_of(held));
    }
    for (auto& [number, file] : open) file->sync();
  }

  /// Called on the rank that wrote the headers; syncs them first.
  void publish() {
    for (size_t i = 0; i < layouts_.size(); ++i) PlacedFile(path(i)).sync();
    folder_->publish();
  }

  void abandon() {
    if (folder_) folder_->abandon();
  }

 private:
  at::ScalarType written(const std::string& name, at::ScalarType held) const {
    if (!options_.dtype || !at::isFloatingType(held)) return held;
    return options_.in_fp32.contains(name) ? at::kFloat : *options_.dtype;
  }

  struct DataPlace {
    size_t file;
    int64_t offset;
  };
  std::string path(size_t file) const { return folder_->path(folder_->plan().files[file].name); }

  const ShardedTensors& tensors_;
  const HfSaveOptions& options_;
  SavePlan plan_;
  std::optional<HfFolderWriter> folder_;
  std::vector<SafetensorsLayout> layouts_;
  std::map<std::string, DataPlace> places_;
};

}  // namespace

void save_hf_sharded(const std::string& directory, const ShardedTensors& tensors, const ProcessGroupPtr& group,
                     const HfSaveOptions& options) {
  const auto rank = static_cast<size_t>(rank_in(group));
  ShardedSave save(tensors, options);
  const auto plans = gather_values(group, [&] { return plan_value(save.own_plan()); });
  try {
    all_or_throw(group, [&] {
      save.make_plan(directory, plans, options);
      if (rank == 0) save.create_files();
    });
    all_or_throw(group, [&] { save.write(rank); });
    all_or_throw(group, [&] {
      if (rank == 0) save.publish();
    });
  } catch (...) {
    if (rank == 0) save.abandon();
    meet_after_failure(group);
    throw;
  }
}

}  // namespace megashard
