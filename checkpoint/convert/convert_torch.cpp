#include "checkpoint/convert/convert_torch.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

#include <filesystem>
#include <map>
#include <vector>

#include "checkpoint/dcp/checkpoint_format.h"
#include "checkpoint/dcp/dcp_metadata.h"
#include "checkpoint/dcp/dcp_reader.h"
#include "checkpoint/files/atomic_folder.h"
#include "checkpoint/files/file_io.h"
#include "checkpoint/files/output_file.h"
#include "checkpoint/values/tensor_info.h"
#include "checkpoint/values/torch_archive.h"
#include "checkpoint/values/value_paths.h"
#include "checkpoint/values/value_tensors.h"

namespace megashard {
namespace {

constexpr int64_t kMaxExpansion = 32;  // for a view with stride 0 over the whole file

/// A safetensors header is JSON, preceded by its length.
bool is_safetensors(const InputFile& file) {
  std::string begin(9, '\0');
  if (file.size() < 9) return false;
  file.read_at(begin.data(), 9, 0);
  return begin[8] == '{';
}

const InputFile& checked_zip(const InputFile& file) {
  TORCH_CHECK_VALUE(!is_safetensors(file), file.path(),
                    " is a file of safetensors; hf_to_dcp reads the directory that it lies in");
  TORCH_CHECK_VALUE(
      is_zip(file), file.path(),
      " is no file of torch.save's zip format; an older one (before PyTorch 1.6) is read by torch.load and "
      "written anew by torch.save");
  return file;
}

const std::string& checked_path(const std::string& path) {
  TORCH_CHECK_VALUE(!is_directory(path), path,
                    " is a directory, and --torch-save-path takes a file that torch.save wrote");
  return path;
}

/// Writes the file's values nested; the reader of open_checkpoint would flatten them.
class TorchToDcp {
 public:
  explicit TorchToDcp(const std::string& path)
      : file_(checked_path(path)), archive_(checked_zip(file_), {0, file_.size()}) {
    const auto root = read_root(archive_);
    TORCH_CHECK_VALUE(root.get_if<Dict>() != nullptr, path, " holds ", root.kind(),
                      ", not a state dict: save model.state_dict(), or a dict of such");
    leaves_ = flatten_values(root.as_dict());
  }

  void write(const std::string& folder, const ConvertProgress& progress) {
    std::vector<TensorInfo> tensors;
    for (const auto& leaf : leaves_) {
      if (is_tensor_record(leaf.value)) tensors.push_back(info_of(leaf));
    }
    TensorCounter counter(progress, tensors.size(), total_bytes(tensors));
    OutputFile out(folder + "/" + data_file_);
    DcpMetadata metadata;
    for (const auto& leaf : leaves_) {
      const bool is_tensor = is_tensor_record(leaf.value);
      metadata.entries.push_back(is_tensor ? write_tensor(leaf, out) : write_value(leaf, out));
      if (is_tensor) counter.add(tensor_bytes(*metadata.entries.back().tensor_info()));
    }
    out.sync_and_close();
    write_dcp_metadata(folder, metadata);
  }

 private:
  StoredTensor stored_of(const FlatValue& leaf) const {
    auto found = stored_tensor(archive_, leaf.value);
    TORCH_CHECK_NOT_IMPLEMENTED(found.has_value(), file_.path(), ": ", leaf.key, " is no plain tensor but ",
                                leaf.value.kind(), "; make it dense and plain before saving it");
    return *std::move(found);
  }

  TensorInfo info_of(const FlatValue& leaf) const {
    const auto stored = stored_of(leaf);
    return {leaf.key, stored.dtype, stored.sizes};
  }

  DcpEntry write_tensor(const FlatValue& leaf, OutputFile& out) {
    const auto stored = stored_of(leaf);
    const auto bytes = tensor_bytes({leaf.key, stored.dtype, stored.sizes});
    TORCH_CHECK_VALUE(bytes / kMaxExpansion <= file_.size(), file_.path(), ": tensor ", leaf.key, " of sizes ",
                      describe_sizes(stored.sizes), " repeats a few elements; save it after contiguous()");
    const auto rows = stored.sizes.empty() ? 1 : stored.sizes[0];
    const auto range = write_stored_tensor(out, read_rows(file_, stored, 0, rows));
    const DcpChunk chunk{.offsets = std::vector<int64_t>(stored.sizes.size(), 0),
                         .sizes = stored.sizes,
                         .location = {data_file_, range}};
    return {.key = leaf.key,
            .path = leaf.path,
            .stored = DcpTensor{.dtype = stored.dtype, .sizes = stored.sizes, .chunks = {chunk}}};
  }

  DcpEntry write_value(const FlatValue& leaf, OutputFile& out) {
    const auto renamed = rename_storages(leaf.value, 0);
    const auto range = write_stored_tree(out, renamed.value, renamed.names.size(), [&](size_t i) {
      const auto from = archive_.locate("data/" + renamed.names[i]);
      auto bytes = at::empty({from.length}, at::TensorOptions(at::kByte));
      file_.read_at(bytes.data_ptr(), from.length, from.offset);
      return bytes;
    });
    return {.key = leaf.key, .path = leaf.path, .stored = DcpBytes{.location = {data_file_, range}}};
  }

  const std::string data_file_ = data_file_name(0);
  InputFile file_;
  TorchArchive archive_;
  std::vector<FlatValue> leaves_;
};

}  // namespace

void convert_torch_to_dcp(const std::string& torch_path, const std::string& dcp_folder, const ConvertProgress& progress,
                          bool overwrite) {
  if (!overwrite) refuse_existing(dcp_folder, "--dcp-checkpoint-dir");
  TorchToDcp conversion(torch_path);
  const auto target = std::filesystem::absolute(dcp_folder).lexically_normal();
  AtomicFolder folder((target.has_filename() ? target : target.parent_path()).string());
  folder.begin();
  try {
    conversion.write(folder.hidden(), progress);
    sync_directory(folder.hidden());
    if (!overwrite) refuse_existing(dcp_folder, "--dcp-checkpoint-dir");
    folder.publish();
  } catch (...) {
    folder.abandon();
    throw;
  }
}

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
