#include "checkpoint/convert/convert_hf_to_step.h"

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <map>
#include <memory>
#include <unordered_map>

#include "checkpoint/convert/step_conversion.h"
#include "checkpoint/hugging_face/hf_weights.h"
#include "checkpoint/values/state_dict_keys.h"

namespace megashard {
namespace {

std::string key_of(const HfToStepOptions& options, const std::string& weight) {
  const auto name = options.weights.model_name(weight);
  if (!name.starts_with(options.hf_prefix)) return model_key(name);
  return model_key(options.dcp_prefix + name.substr(options.hf_prefix.size()));
}

bool is_fused(const HfToStepOptions& options, const TensorInfo& info) {
  const auto& parts = options.fused_linear_names;
  return info.sizes.size() == 3 && std::any_of(parts.begin(), parts.end(), [&](const std::string& part) {
           return info.name.find(part) != std::string::npos;
         });
}

/// The weights by their new keys, in the order of the files and of their data.
class HfSource {
 public:
  explicit HfSource(const HfToStepOptions& options) : options_(options), weights_(open_hf_model(options.hf_dir)) {
    std::map<std::string, std::vector<std::pair<std::string, std::string>>> files;  // source, name
    const auto add_to_file = [&](const std::string& source, const std::string& name) {
      files[weights_->chunks(source)[0].file].emplace_back(source, name);
    };
    auto all = weights_->tensors();
    for (const auto& info : all) {
      if (!options.weights.leaves_out(info.name)) add_to_file(info.name, info.name);
    }
    for (const auto& [target, source] : options.tie_weight_mapping) {
      const auto* info = weights_->find(source);
      TORCH_CHECK_VALUE(info != nullptr, "--tie-weight-mapping ", target, "=", source, ": ", options.hf_dir,
                        " has no weight ", source);
      if (weights_->find(target) != nullptr) continue;
      add_to_file(source, target);
      all.push_back({target, info->dtype, info->sizes});
    }
    if (options.check) options.check(all);
    for (const auto& [file, weights] : files) {
      if (!content_.tensors.tensors.empty()) content_.file_starts.insert(key_of(options, weights[0].second));
      for (const auto& [source, name] : weights) add(source, name);
    }
    const auto& tensors = weights_->tensors();
    TORCH_CHECK_VALUE(std::any_of(tensors.begin(), tensors.end(),
                                  [&](const auto& info) { return info.name.starts_with(options.hf_prefix); }),
                      "no weight in ", options.hf_dir, " has a name that begins with --hf-prefix \"", options.hf_prefix,
                      "\"; the first is ", tensors.empty() ? "not there" : tensors[0].name);
  }

  static StepContent content(const std::shared_ptr<HfSource>& source) {
    auto content = source->content_;
    content.tensors.where = source->options_.hf_dir;
    content.tensors.read = [source](const std::string& key) { return source->read(key); };
    return content;
  }

 private:
  void add(const std::string& source, const std::string& name) {
    auto info = *weights_->find(source);
    const auto key = key_of(options_, name);
    const auto [other, is_new] = source_of_.emplace(key, source);
    TORCH_CHECK_VALUE(is_new, "with --hf-prefix \"", options_.hf_prefix, "\" and --dcp-prefix \"", options_.dcp_prefix,
                      "\", the weights ", other->second, " and ", name, " would both get the key ", key);
    if (is_fused(options_, info)) info.sizes = {info.sizes[0] * info.sizes[1], info.sizes[2]};
    if (options_.to_bf16 && c10::isFloatingType(info.dtype)) info.dtype = at::kBFloat16;
    info.name = key;
    info_of_.emplace(key, info);
    content_.tensors.tensors.push_back(std::move(info));
  }

  at::Tensor read(const std::string& key) {
    if (!last_.empty()) weights_->release(last_);
    last_ = source_of_.at(key);
    const auto& info = info_of_.at(key);
    return weights_->read_tensor(last_).to(info.dtype).view(info.sizes);
  }

  const HfToStepOptions& options_;
  std::unique_ptr<CheckpointReader> weights_;
  StepContent content_;
  std::unordered_map<std::string, std::string> source_of_;
  std::unordered_map<std::string, TensorInfo> info_of_;
  std::string last_;  // source that is in memory
};

/// Arguments that Megatron requires in a checkpoint's args, besides the network's.
Value release_arguments(const MegatronLayout& layout) {
  auto arguments = layout.arguments;
  for (const char* size : {"tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size",
                           "expert_model_parallel_size", "world_size", "data_parallel_size"})
    arguments.set(size, 1);
  for (const char* count : {kIterationKey, "consumed_train_samples", "consumed_valid_samples"}) arguments.set(count, 0);
  arguments.set("no_save_optim", true);
  arguments.set("no_save_rng", true);
  return make_namespace(std::move(arguments));
}

}  // namespace

void convert_hf_to_step(const HfToStepOptions& options, const ConvertProgress& progress) {
  const auto step = StepWriter::release(options.save_dir);
  if (!options.overwrite) step.refuse_existing();
  auto content = HfSource::content(std::make_shared<HfSource>(options));
  content.tensors = as_model(std::move(content.tensors), options.weights);
  if (options.megatron_layout != nullptr) {
    content.tensors = as_megatron(std::move(content.tensors), options.megatron_layout->weights);
    content.megatron_layout = options.megatron_layout;
    content.file_starts.clear();
    content.values.set(kArgsKey, release_arguments(*options.megatron_layout));
  }
  content.values.set(kCheckpointVersionKey, kCheckpointVersion);
  if (options.format == CheckpointFormat::kTorchDist) content.values.set(kIterationKey, 0);
  write_step(step, options.format, content, progress, options.overwrite);
}

}  // namespace megashard
