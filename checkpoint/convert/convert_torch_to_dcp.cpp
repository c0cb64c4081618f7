#include "checkpoint/convert/convert_torch_to_dcp.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

#include <filesystem>

#include "checkpoint/dcp/checkpoint_format.h"
#include "checkpoint/dcp/dcp_metadata.h"
#include "checkpoint/files/atomic_folder.h"
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

}  // namespace megashard
