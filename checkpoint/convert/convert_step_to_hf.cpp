#include "checkpoint/convert/convert_step_to_hf.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/equal.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string_view>
#include <unordered_map>

#include "checkpoint/checkpoint.h"
#include "checkpoint/convert/tensor_stream.h"
#include "checkpoint/files/file_io.h"
#include "checkpoint/hugging_face/hf_files.h"
#include "checkpoint/hugging_face/hf_weights.h"
#include "checkpoint/values/state_dict_keys.h"
#include "checkpoint/values/tensor_info.h"

namespace megashard {
namespace {

/// num_experts of the config, of the language model's part if there are several parts; 0 if there is none.
int64_t expert_count(const nlohmann::ordered_json& config) {
  for (const auto* part : {"thinker_config", "text_config"}) {
    if (config.contains(part) && config[part].is_object()) return expert_count(config[part]);
  }
  const auto found = config.find("num_experts");
  return found != config.end() && found->is_number_integer() ? found->get<int64_t>() : 0;
}

class StepToHf {
 public:
  StepToHf(const StepToHfOptions& options, const ConvertProgress& progress)
      : options_(options),
        progress_(progress),
        config_(config_of(options.model_assets_dir)),
        stream_(model_of(options, progress)) {}

  void run() {
    collect();
    if (options_.check) options_.check(infos_);
    check_source_bytes(options_.load_dir, progress_);
    if (config_ && options_.change_config) {
      options_.change_config(*config_);
      config_changed_ = true;
    }
    settle_tied_weights();
    TensorCounter counter(progress_, infos_.size(), total_bytes(infos_));
    HfSaveOptions saving{.max_shard_bytes = options_.max_shard_bytes, .stem = options_.stem};
    if (!options_.model_assets_dir.empty()) saving.beside = [this](const std::string& folder) { write_assets(folder); };
    save_hf_weights(
        options_.save_dir, infos_,
        [&](const TensorInfo& info) {
          counter.add(tensor_bytes(info));
          return read(info.name).to(info.dtype).view(info.sizes);
        },
        saving);
  }

 private:
  static std::optional<nlohmann::ordered_json> config_of(const std::string& assets) {
    TORCH_CHECK_VALUE(assets.empty() || is_directory(assets), "there is no directory ", assets,
                      " for --model-assets-dir");
    return read_hf_config(assets);
  }

  /// The step's weights, with Hugging Face's names also if it has Megatron's.
  static TensorStream model_of(const StepToHfOptions& options, const ConvertProgress& progress) {
    const auto& folder = options.load_dir;
    check_step_folder(folder, "--load-dir");
    StepNames found;
    const std::shared_ptr<CheckpointReader> reader = open_step_for(options.names, folder, &found);
    if (const auto told = found.told(); !told.empty()) progress(told);
    const auto format = reader->format();
    TORCH_CHECK_VALUE(format == format_name(options.format), folder, " is a ", format, " checkpoint; ",
                      format == "torch_dcp" ? "dcp_to_hf" : "torch_dist_to_hf", " reads it");
    auto stream = stream_of(reader);
    std::erase_if(stream.tensors,
                  [](const TensorInfo& info) { return !is_model_key(info.name) || is_extra_state(info.name); });
    if (options.megatron_layout != nullptr)
      stream = as_hugging_face(std::move(stream), options.megatron_layout->weights);
    return as_published(std::move(stream), options.weights);
  }

  void write_assets(const std::string& folder) const {
    copy_hf_assets(options_.model_assets_dir, folder);
    if (config_changed_) write_hf_config(folder, *config_);
  }

  void collect() {
    const auto prefix = model_key(options_.dcp_prefix);
    bool found = false;
    for (const auto& stored : stream_.tensors) {
      const bool renamed = stored.name.starts_with(prefix);
      found = found || renamed;
      auto info = stored;
      info.name =
          renamed ? options_.hf_prefix + stored.name.substr(prefix.size()) : stored.name.substr(kModelPrefix.size());
      info.name = options_.weights.published_name(info.name);
      if (options_.to_bf16 && c10::isFloatingType(info.dtype)) info.dtype = at::kBFloat16;
      if (is_fused(stored)) info.sizes = split(stored);
      const bool is_new = keys_.emplace(info.name, stored.name).second;
      TORCH_CHECK_VALUE(is_new, "with --dcp-prefix \"", options_.dcp_prefix, "\" and --hf-prefix \"",
                        options_.hf_prefix, "\", two weights would both get the name ", info.name);
      infos_.push_back(std::move(info));
    }
    TORCH_CHECK_VALUE(found, options_.load_dir, " has no tensor whose key begins with \"", prefix, "\"",
                      infos_.empty() ? "" : "; its first is " + stream_.tensors[0].name);
  }

  at::Tensor read(const std::string& name) const { return stream_.read(keys_.at(name)); }

  bool is_fused(const TensorInfo& stored) const {
    if (stored.sizes.size() != 2) return false;
    const auto& parts = options_.fused_linear_names;
    return std::any_of(parts.begin(), parts.end(), [&](const std::string& part) {
      return stored.name.find(part) != std::string::npos &&
             (stored.name.ends_with(part) || stored.name.find("experts.") != std::string::npos);
    });
  }

  std::vector<int64_t> split(const TensorInfo& stored) const {
    const auto experts = config_ ? expert_count(*config_) : 0;
    TORCH_CHECK_VALUE(experts > 0, "--fused-linear-names: ", stored.name,
                      " cannot be split, because there is no num_experts in the config.json of --model-assets-dir");
    TORCH_CHECK_VALUE(stored.sizes[0] % experts == 0, "--fused-linear-names: ", stored.name, " has ", stored.sizes[0],
                      " rows, which ", experts, " experts do not divide");
    return {experts, stored.sizes[0] / experts, stored.sizes[1]};
  }

  void settle_tied_weights() {
    const bool tied = config_ && config_->contains("tie_word_embeddings") && (*config_)["tie_word_embeddings"] == true;
    if (!tied) return;
    const TensorInfo* head = find_ending(kHeadWeight);
    const TensorInfo* embeddings = find_ending(kEmbeddingsWeight);
    if (head == nullptr || embeddings == nullptr) return;
    const auto& head_name = head->name;
    if (at::equal(read(head_name), read(embeddings->name))) {
      std::erase_if(infos_, [name = head_name](const TensorInfo& info) { return info.name == name; });
    } else {
      progress_(head_name + " differs from the embeddings: config.json says tie_word_embeddings: false from now on");
      (*config_)["tie_word_embeddings"] = false;
      config_changed_ = true;
    }
  }

  const TensorInfo* find_ending(const std::string& ending) const {
    for (const auto& info : infos_) {
      if (info.name.ends_with(ending)) return &info;
    }
    return nullptr;
  }

  const StepToHfOptions& options_;
  const ConvertProgress& progress_;
  std::optional<nlohmann::ordered_json> config_;
  TensorStream stream_;
  std::vector<TensorInfo> infos_;
  std::unordered_map<std::string, std::string> keys_;  // by Hugging Face name
  bool config_changed_ = false;
};

}  // namespace

void convert_step_to_hf(const StepToHfOptions& options, const ConvertProgress& progress) {
  StepToHf(options, progress).run();
}

}  // namespace megashard
