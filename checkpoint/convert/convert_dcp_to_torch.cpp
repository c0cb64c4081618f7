#include "checkpoint/convert/convert_dcp_to_torch.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

#include <map>
#include <vector>

#include "checkpoint/dcp/dcp_metadata.h"
#include "checkpoint/dcp/dcp_reader.h"
#include "checkpoint/files/file_io.h"
#include "checkpoint/values/tensor_info.h"
#include "checkpoint/values/torch_archive.h"
#include "checkpoint/values/value_paths.h"
#include "checkpoint/values/value_tensors.h"

namespace megashard {
namespace {

/// Source of an entry data/N of the new archive: a whole tensor, or bytes of a data file.
struct StorageSource {
  std::string tensor{};  // its key
  const InputFile* file = nullptr;
  FileRange range{};
};

class DcpToTorch {
 public:
  explicit DcpToTorch(const std::string& folder) : reader_(folder, checked_format(folder), read_dcp_metadata(folder)) {
    std::vector<FlatValue> leaves;
    for (const auto& entry : reader_.entries()) {
      const auto* tensor = entry.tensor();
      leaves.push_back({entry.key, entry.path,
                        tensor != nullptr ? tensor_of(entry.key, *tensor)
                                          : value_of(entry.key, std::get<DcpBytes>(entry.stored).location)});
    }
    const auto keys = leaves.size();
    root_ = nest_values(std::move(leaves), keys);
  }

  void write(OutputFile& file, const ConvertProgress& progress) {
    int64_t bytes = 0;
    for (const auto& source : sources_) bytes += bytes_of(source);
    TensorCounter counter(progress, sources_.size(), bytes);
    write_stored_tree(file, root_, sources_.size(), [&](size_t number) {
      auto data = read(sources_[number]);
      counter.add(static_cast<int64_t>(data.nbytes()));
      return data;
    });
  }

 private:
  static CheckpointFormat checked_format(const std::string& folder) {
    const auto format = detect_format(folder);
    TORCH_CHECK_VALUE(format == CheckpointFormat::kTorchDcp, folder,
                      " is a torch_dist checkpoint; make it torch_dcp first (megashard convert torch_dist_to_dcp)");
    return format;
  }

  Value tensor_of(const std::string& key, const DcpTensor& tensor) {
    sources_.push_back({.tensor = key});
    return tensor_record(tensor.dtype, tensor.sizes, std::to_string(sources_.size() - 1));
  }

  /// Also copies the storages of its tensors.
  Value value_of(const std::string& key, const DcpLocation& location) {
    TORCH_CHECK(!location.file.empty(), reader_.path(), "/.metadata does not say where ", key, " is stored");
    const auto& file = files_.try_emplace(location.file, reader_.path() + "/" + location.file).first->second;
    const TorchArchive archive(file, location.range);
    auto renamed = rename_storages(read_root(archive), sources_.size());
    for (const auto& name : renamed.names) sources_.push_back({.file = &file, .range = archive.locate("data/" + name)});
    return std::move(renamed.value);
  }

  int64_t bytes_of(const StorageSource& source) const {
    return source.file == nullptr ? tensor_bytes(*reader_.find(source.tensor)) : source.range.length;
  }

  at::Tensor read(const StorageSource& source) {
    if (source.file == nullptr) return reader_.read_tensor(source.tensor);
    auto bytes = at::empty({source.range.length}, at::TensorOptions(at::kByte));
    source.file->read_at(bytes.data_ptr(), source.range.length, source.range.offset);
    return bytes;
  }

  DcpReader reader_;
  std::map<std::string, InputFile> files_;
  Dict root_;
  std::vector<StorageSource> sources_;
};

}  // namespace

void convert_dcp_to_torch(const std::string& dcp_folder, const std::string& torch_path, const ConvertProgress& progress,
                          bool overwrite) {
  const bool is_free = !path_exists(torch_path) || (overwrite && !is_directory(torch_path));
  TORCH_CHECK_VALUE(
      is_free, torch_path,
      " exists already, and --torch-save-path replaces nothing unasked, and never a folder: give another name, "
      "or --overwrite");
  check_step_folder(dcp_folder, "--dcp-checkpoint-dir");
  DcpToTorch conversion(dcp_folder);
  check_source_bytes(dcp_folder, progress);
  AtomicFile file(torch_path);
  conversion.write(file, progress);
  file.publish();
}

}  // namespace megashard
