#include "checkpoint/hugging_face/hf_weights.h"

#include <c10/util/Exception.h>

#include <filesystem>
#include <nlohmann/json.hpp>
#include <set>
#include <system_error>
#include <unordered_map>

#include "checkpoint/files/crc32.h"
#include "checkpoint/files/file_io.h"
#include "checkpoint/files/strict_json.h"
#include "checkpoint/hugging_face/mxfp4.h"
#include "checkpoint/hugging_face/safetensors.h"
#include "checkpoint/steps/folder_content.h"

namespace megashard {
namespace {

namespace fs = std::filesystem;

bool has_file(const std::string& directory, const std::string& start, const std::string& end) {
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(directory, error)) {
    const auto name = entry.path().filename().string();
    if (name.starts_with(start) && name.ends_with(end)) return true;
  }
  return false;
}

/// Message that explains why a directory has no safetensors weights, with the remedy. Recognises pickled weights, GGUF
/// files, PEFT adapters, steps and runs, shards without their index, and interrupted saves.
std::string why_no_weights(const std::string& directory) {
  if (hf_save_was_cut_short(directory))
    return directory + " has neither model.safetensors nor model.safetensors.index.json: a save into it was "
                       "cut short; save the model into it again";
  if (has_file(directory, "model-", ".safetensors"))
    return directory + " has pieces of a model but no model.safetensors.index.json, which names them; fetch "
                       "the directory again, whole";
  if (has_file(directory, "pytorch_model", ".bin"))
    return directory +
           " has pickled weights (pytorch_model*.bin) only; write safetensors once, with "
           "transformers: AutoModelForCausalLM.from_pretrained(\"" +
           directory + "\").save_pretrained(\"NEW_DIR\")";
  if (has_file(directory, "adapter_model", ""))
    return directory +
           " holds PEFT adapters, not a model; merge them first, with peft: "
           "PeftModel.from_pretrained(base_model, \"" +
           directory + "\").merge_and_unload().save_pretrained(\"NEW_DIR\")";
  if (has_file(directory, "", ".gguf"))
    return directory + " has a GGUF file, which is for inference by llama.cpp; give the original model's "
                       "directory, with safetensors";
  const auto kind = content_of(directory).kind;
  if (kind == FolderContent::Kind::kStep || kind == FolderContent::Kind::kRun)
    return directory + (kind == FolderContent::Kind::kRun ? " is a run's folder" : " is a step's folder") +
           ", and no Hugging Face directory; megashard convert dcp_to_hf and torch_dist_to_hf make "
           "one of a step";
  return directory + " has neither model.safetensors nor model.safetensors.index.json; save the model with "
                     "transformers' save_pretrained first, or fetch its weights";
}

constexpr int64_t kMaxIndexBytes = 256 << 20;

std::string name_of(const std::string& path) { return std::filesystem::path(path).filename().string(); }

class SafetensorsReader : public CheckpointReader {
 public:
  explicit SafetensorsReader(const std::string& path) : CheckpointReader(path) {}

  void add_file(const std::string& path) {
    const auto* file = files_.emplace_back(std::make_unique<SafetensorsFile>(path)).get();
    for (const auto& info : file->tensors()) {
      const auto [found, is_new] = file_of_.emplace(info.name, file);
      TORCH_CHECK(is_new, "tensor \"", info.name, "\" is in ", found->second->path(), " and again in ", path);
      add_tensor(info);
    }
    for (const auto& [name, value] : file->metadata()) {
      const auto key = (path == this->path() ? "" : name_of(path) + ":") + "__metadata__." + name;
      add_value({key, {key}}, value);
    }
  }

  /// The file that holds a tensor; null if none does.
  const SafetensorsFile* file_of(const std::string& key) const {
    const auto found = file_of_.find(key);
    return found == file_of_.end() ? nullptr : found->second;
  }

  std::string format() const override { return "safetensors"; }

  std::vector<StoredChunk> chunks(const std::string& key) const override {
    const auto* info = find(key);
    if (info == nullptr) return {};  // inside the header
    const auto& file = *file_of(key);
    return {{std::vector<int64_t>(info->sizes.size(), 0),
             info->sizes,
             name_of(file.path()),
             {file.data_offset(key), tensor_bytes(*info)}}};
  }

  std::vector<std::string> file_names() const override {
    std::vector<std::string> names;
    for (const auto& file : files_) names.push_back(name_of(file->path()));
    return names;
  }

  at::Tensor read_rows(const std::string& key, int64_t begin, int64_t count) override {
    tensor_at(key);
    const auto whole = file_of(key)->tensor(key);
    return whole.dim() == 0 ? whole : whole.narrow(0, begin, count);
  }

  void release(const std::string& key) override {
    tensor_at(key);
    file_of(key)->forget(key);
  }

  /// The format has no checksums, and opening has compared every range with the file's length, so only readability is
  /// checked.
  CheckedBytes verify(const FaultSink& fault) override {
    CheckedBytes checked;
    for (const auto& each : files_) {
      try {
        const InputFile file(each->path());
        crc32_of(file, 0, file.size());
        checked.bytes += file.size();
      } catch (const c10::Error& error) {
        fault(error.what_without_backtrace());
      }
    }
    checked.without_checksum = checked.bytes;
    return checked;
  }

 private:
  std::vector<std::unique_ptr<SafetensorsFile>> files_;
  std::unordered_map<std::string, const SafetensorsFile*> file_of_;
};

/// Files by which a directory's weights are opened; it has one of both.
struct OpenedBy {
  std::string single, index;
  bool is_in(const std::string& directory) const {
    return path_exists(directory + "/" + single) || path_exists(directory + "/" + index);
  }
};

OpenedBy opened_by(const std::string& stem) { return {stem + ".safetensors", stem + ".safetensors.index.json"}; }

OpenedBy opened_by_in(const std::string& directory) {
  const auto transformers = opened_by(HfSaveOptions().stem), diffusers = opened_by(kDiffusersStem);
  return !transformers.is_in(directory) && diffusers.is_in(directory) ? diffusers : transformers;
}

/// Adds the files of an index. Throws unless each holds the tensors that the index says.
void add_indexed_files(SafetensorsReader& reader, const std::string& directory, const OpenedBy& names) {
  const auto single = directory + "/" + names.single, index_path = directory + "/" + names.index;
  const auto file_names = parse_weight_map(read_small_file(index_path, kMaxIndexBytes), index_path);
  std::set<std::string> files;
  for (const auto& [name, file] : file_names) files.insert(file);
  TORCH_CHECK(files.contains(names.single) || !path_exists(single), directory,
              " has two sets of weights: ", names.single, ", which transformers reads, and the ", files.size(), " of ",
              names.index, "; move away the one that is not the model, the index with its files");
  std::vector<std::string> missing;
  for (const auto& file : files) {
    if (!path_exists(directory + "/" + file)) missing.push_back(file);
  }
  TORCH_CHECK(missing.empty(), index_path, " names ", files.size(), files.size() == 1 ? " file" : " files",
              ", of which ", listed(missing), missing.size() == 1 ? " is" : " are",
              " missing; fetch the directory again, whole");
  for (const auto& file : files) reader.add_file(directory + "/" + file);
  for (const auto& [name, file] : file_names) {
    const auto* found = reader.file_of(name);
    const auto path = directory + "/" + file;
    TORCH_CHECK(found != nullptr && found->path() == path, index_path, " says that tensor \"", name, "\" is in ", path,
                ", but it is not there");
  }
}

}  // namespace

bool has_hf_weights(const std::string& directory) { return opened_by_in(directory).is_in(directory); }

std::map<std::string, std::string> parse_weight_map(std::string_view text, const std::string& where) {
  const auto index = parse_strict_json(text, where);
  TORCH_CHECK(index.is_object() && index.contains("weight_map") && index["weight_map"].is_object(), where,
              " is no index: it has no weight_map");
  std::map<std::string, std::string> files;
  for (const auto& [name, file] : index["weight_map"].items()) {
    TORCH_CHECK(file.is_string() && is_plain_file_name(file.get_ref<const std::string&>()), where, ": tensor \"", name,
                "\" is not in a file of this folder");
    files.emplace(name, file.get<std::string>());
  }
  return files;
}

std::unique_ptr<CheckpointReader> open_hf_weights(const std::string& directory) {
  TORCH_CHECK_VALUE(is_directory(directory), "there is no Hugging Face directory ", directory);
  const auto names = opened_by_in(directory);
  auto reader = std::make_unique<SafetensorsReader>(directory);
  if (path_exists(directory + "/" + names.index)) {
    add_indexed_files(*reader, directory, names);
  } else {
    if (!names.is_in(directory)) TORCH_CHECK_VALUE(false, why_no_weights(directory));
    reader->add_file(directory + "/" + names.single);
  }
  return reader;
}

std::unique_ptr<CheckpointReader> open_hf_model(const std::string& directory) {
  return dequantise_mxfp4(open_hf_weights(directory));
}

std::unique_ptr<CheckpointReader> open_safetensors(const std::string& path) {
  auto reader = std::make_unique<SafetensorsReader>(path);
  reader->add_file(path);
  return reader;
}

void save_hf_weights(const std::string& directory, const std::vector<TensorInfo>& tensors,
                     const std::function<at::Tensor(const TensorInfo&)>& data, const HfSaveOptions& options) {
  HfFolderWriter folder(directory, plan_hf_files(tensors, options), options);
  try {
    folder.begin();
    for (const auto& file : folder.plan().files) {
      SafetensorsWriter writer(folder.path(file.name), file.tensors);
      for (const auto& info : writer.tensors()) writer.write(data(info));
      writer.finish();
    }
    folder.publish();
  } catch (...) {
    folder.abandon();
    throw;
  }
}

}  // namespace megashard
