#include "checkpoint/convert_dcp_to_hf.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/equal.h>
#include <c10/util/Exception.h>

#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>

#include "checkpoint/dcp_reader.h"
#include "checkpoint/file_io.h"
#include "checkpoint/hf_weights.h"

namespace megashard {
namespace {

namespace fs = std::filesystem;

constexpr int64_t kMostConfigBytes = 64 << 20;
constexpr const char* kHead = "lm_head.weight";
constexpr const char* kEmbeddings = "embed_tokens.weight";

/// Config, tokenizer, generation settings, ...: whatever is no weights.
bool is_asset(const fs::path& path) {
  const auto name = path.filename().string();
  const auto extension = path.extension().string();
  const bool weights = extension == ".safetensors" || extension == ".bin" || extension == ".pt" ||
                       extension == ".pth" || extension == ".gguf" || name.ends_with(".index.json");
  return !name.starts_with(".") && !weights;
}

void copy_assets(const std::string& from, const std::string& to) {
  if (fs::weakly_canonical(from) == fs::weakly_canonical(to)) return;
  for (const auto& entry : fs::directory_iterator(from)) {
    if (!entry.is_regular_file() || !is_asset(entry.path())) continue;
    std::error_code error;
    fs::copy_file(entry.path(), fs::path(to) / entry.path().filename(),
                  fs::copy_options::overwrite_existing, error);
    TORCH_CHECK(!error, "cannot copy ", entry.path().string(), " to ", to, ": ", error.message());
  }
}

std::optional<nlohmann::ordered_json> read_config(const std::string& directory) {
  const auto path = directory + "/config.json";
  if (directory.empty() || !path_exists(path)) return std::nullopt;
  auto config =
      nlohmann::ordered_json::parse(read_small_file(path, kMostConfigBytes), nullptr, false);
  TORCH_CHECK(config.is_object(), path, " is not a JSON object");
  return config;
}

class DcpToHf {
 public:
  DcpToHf(const DcpToHfOptions& options, const ConvertProgress& progress)
      : options_(options), progress_(progress), reader_(checked_folder(options.load_dir)) {
    TORCH_CHECK(options.model_assets_dir.empty() || is_directory(options.model_assets_dir),
                "there is no directory ", options.model_assets_dir, " for --model-assets-dir");
    config_ = read_config(options.model_assets_dir);
  }

  void run() {
    collect();
    settle_tied_weights();
    size_t done = 0;
    save_hf_weights(
        options_.save_dir, infos_,
        [&](const TensorInfo& info) {
          if (++done % 100 == 0 || done == infos_.size()) {
            progress_(std::to_string(done) + " of " + std::to_string(infos_.size()) + " tensors");
          }
          return reader_.read_tensor(*entries_.at(info.name)).to(info.dtype);
        },
        options_.most_shard_bytes);
    if (options_.model_assets_dir.empty()) return;
    copy_assets(options_.model_assets_dir, options_.save_dir);
    if (untied_) write_file_atomically(options_.save_dir + "/config.json", config_->dump(2) + "\n");
  }

 private:
  static std::string checked_folder(const std::string& folder) {
    const bool is_root = path_exists(folder + "/latest_checkpointed_iteration.txt") &&
                         !path_exists(folder + "/.metadata");
    TORCH_CHECK(!is_root, folder, " holds steps; give one of its folders to --load-dir, such as ", folder,
                "/iter_0000100 or ", folder, "/release");
    return folder;
  }

  void collect() {
    const auto prefix = "model." + options_.dcp_prefix;
    for (const auto& entry : reader_.entries()) {
      const bool is_weight =
          entry.is_tensor && entry.key.starts_with(prefix) && !entry.key.ends_with("_extra_state");
      if (!is_weight) continue;
      const auto name = options_.hf_prefix + entry.key.substr(prefix.size());
      const bool convert = options_.to_bf16 && c10::isFloatingType(entry.dtype);
      infos_.push_back({name, convert ? at::kBFloat16 : entry.dtype, entry.sizes});
      entries_[name] = &entry;
    }
    TORCH_CHECK(!infos_.empty(), options_.load_dir, " has no tensor whose key begins with \"", prefix, "\"");
  }

  void settle_tied_weights() {
    const bool tied = config_ && config_->contains("tie_word_embeddings") &&
                      (*config_)["tie_word_embeddings"] == true;
    if (!tied) return;
    const TensorInfo* head = find_ending(kHead);
    const TensorInfo* embeddings = find_ending(kEmbeddings);
    if (head == nullptr || embeddings == nullptr) return;
    const auto& head_name = head->name;
    if (at::equal(reader_.read_tensor(*entries_.at(head_name)),
                  reader_.read_tensor(*entries_.at(embeddings->name)))) {
      std::erase_if(infos_,
                    [name = head_name](const TensorInfo& info) { return info.name == name; });
    } else {
      progress_(
          head_name +
          " differs from the embeddings: config.json says tie_word_embeddings: false from now on");
      (*config_)["tie_word_embeddings"] = false;
      untied_ = true;
    }
  }

  const TensorInfo* find_ending(const std::string& ending) const {
    for (const auto& info : infos_) {
      if (info.name.ends_with(ending)) return &info;
    }
    return nullptr;
  }

  const DcpToHfOptions& options_;
  const ConvertProgress& progress_;
  DcpReader reader_;
  std::optional<nlohmann::ordered_json> config_;
  std::vector<TensorInfo> infos_;
  std::map<std::string, const DcpEntry*> entries_;  // by Hugging Face name
  bool untied_ = false;
};

}  // namespace

void convert_dcp_to_hf(const DcpToHfOptions& options, const ConvertProgress& progress) {
  DcpToHf(options, progress).run();
}

}  // namespace megashard
