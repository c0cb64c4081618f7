#include "checkpoint/convert/step_conversion.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <charconv>
#include <filesystem>
#include <memory>
#include <utility>

#include "checkpoint/checkpoint.h"
#include "checkpoint/convert/folder_writer.h"
#include "checkpoint/torch_dist/torch_dist_keys.h"
#include "checkpoint/values/state_dict_keys.h"
#include "checkpoint/values/tensor_info.h"

namespace megashard {
namespace {

constexpr int64_t kMaxFileBytes = int64_t{5} * 1000 * 1000 * 1000;

/// "decoder.layers.3.mlp.linear_fc1" of 8: "decoder.layers.mlp.linear_fc1._extra_state/shard_3_8".
std::string extra_state_key(const std::string& module, const std::vector<TensorInfo>& tensors) {
  constexpr std::string_view kLayers = "layers.";
  const auto at = module.find(kLayers);
  if (at == std::string::npos) return module + "." + kExtraStateShard + "0_1";
  const auto number_at = at + kLayers.size();
  const auto dot = module.find('.', number_at);
  const auto layers = model_key(module.substr(0, number_at));
  int64_t count = 0;
  for (const auto& info : tensors) {
    if (!info.name.starts_with(layers)) continue;
    int64_t layer = 0;
    std::from_chars(info.name.data() + layers.size(), info.name.data() + info.name.size(), layer);
    count = std::max(count, layer + 1);
  }
  return module.substr(0, number_at) + module.substr(dot + 1) + "." + kExtraStateShard +
         module.substr(number_at, dot - number_at) + "_" + std::to_string(count);
}

void write_content(FolderWriter& writer, CheckpointFormat format, const StepContent& content,
                   const ConvertProgress& progress) {
  TensorCounter counter(progress, content.tensors.tensors.size(), total_bytes(content.tensors.tensors));
  for (const auto& info : content.tensors.tensors) {
    const bool full = writer.bytes_in_file() > kMaxFileBytes;
    if (full || content.file_starts.count(info.name) != 0) writer.next_file();
    writer.write(info.name, content.tensors.read(info.name));
    counter.add(tensor_bytes(info));
  }
  if (format != CheckpointFormat::kTorchDist || content.megatron_layout == nullptr) return;
  for (const auto& module : content.megatron_layout->stateful_modules)
    writer.write_object(extra_state_key(module, content.tensors.tensors), Value());
}

/// A writer for the step named as the folder.
StepWriter same_step(const std::string& save_dir, const std::string& folder) {
  auto path = std::filesystem::absolute(folder).lexically_normal();
  if (!path.has_filename()) path = path.parent_path();
  const auto step = step_named(path.filename().string(), folder);
  TORCH_CHECK_VALUE(step, folder, " is no step by its name: give a folder iter_0000100, or release");
  return step->is_release ? StepWriter::release(save_dir) : StepWriter(save_dir, step->iteration);
}

/// Throws if state is numbered, as by PyTorch's optimizer.state_dict(): only the model gives the names.
void refuse_numbers(const CheckpointReader& reader) {
  for (const auto& info : reader.tensors()) {
    const auto parts = split_optimizer_state_key(info.name);
    const bool is_number = parts && !parts->weight.empty() &&
                           std::all_of(parts->weight.begin(), parts->weight.end(), [](char c) { return isdigit(c); });
    TORCH_CHECK_VALUE(!is_number, reader.path(), " numbers the optimizer's state (", info.name,
                      ") and does not name it: convert with the model, by pretrain --load ... --ckpt-convert-format "
                      "torch_dist --ckpt-convert-save DIR");
  }
}

bool is_of_format(const std::string& key) {
  return key.find(kExtraStateShard) != std::string::npos || key.starts_with(kContentMetadata);
}

/// Drops optimizer state in buckets, whose layout is that of Megatron's own weights.
void drop_buckets(StepContent& content, const ConvertProgress& progress) {
  constexpr const char* kDistributed = ".distributed.";
  auto& tensors = content.tensors.tensors;
  const auto in_buckets = [](const TensorInfo& info) { return is_optimizer_bucket(info.name); };
  if (std::erase_if(tensors, in_buckets) == 0) return;
  std::erase_if(content.values.entries, [&](const auto& entry) {
    const auto& key = entry.first.as_string();
    return is_optimizer_key(key) && key.find(kDistributed) != std::string::npos;
  });
  progress("the optimizer's state is left out: buckets of Megatron's DistributedOptimizer have no "
           "place in another layout");
}

/// Adds the layout's description of the network to the step's args.
void complete_arguments(Dict& values, const MegatronLayout& layout) {
  const auto* args = values.find(kArgsKey);
  const auto* fields = args == nullptr ? nullptr : namespace_fields(*args);
  if (fields == nullptr) return;
  Dict complete = *fields;
  for (const auto& [name, value] : layout.arguments.entries) complete.set(name.as_string(), value);
  values.set(kArgsKey, make_namespace(std::move(complete)));
}

}  // namespace

void write_step(StepWriter step, CheckpointFormat format, const StepContent& content, const ConvertProgress& progress,
                bool overwrite) {
  step.begin_converted();
  std::string notice;
  try {
    FolderWriter writer(step.folder(), format, content.tensors.tensors);
    write_content(writer, format, content, progress);
    notice = step.commit_converted(writer.finish(content.values), overwrite);
  } catch (...) {
    step.abandon();
    throw;
  }
  if (!notice.empty()) progress(notice);
}

void convert_step(const StepConversion& options, const ConvertProgress& progress) {
  const auto& folder = options.load_dir;
  check_step_folder(folder, "--load-dir");
  const auto step = same_step(options.save_dir, folder);
  if (!options.overwrite) step.refuse_existing();
  StepNames found;
  const std::shared_ptr<CheckpointReader> reader = open_step_for({}, folder, &found);
  if (const auto told = found.told(); !told.empty()) progress(told);
  TORCH_CHECK_VALUE(reader->format() == format_name(options.from), folder, " is a ", reader->format(),
                    " checkpoint; this converter reads ", format_name(options.from));
  refuse_numbers(*reader);
  check_source_bytes(folder, progress);
  const auto* layout = options.megatron_layout;
  const bool to_megatron = options.to == CheckpointFormat::kTorchDist;
  StepContent content{.tensors = stream_of(reader),
                      .values = reader->read_values([](const auto& key) { return !is_of_format(key); }),
                      .megatron_layout = layout,
                      .file_starts = {}};
  if (layout != nullptr) {
    drop_buckets(content, progress);
    content.tensors = to_megatron ? as_megatron(std::move(content.tensors), layout->weights)
                                  : as_hugging_face(std::move(content.tensors), layout->weights);
    rename_groups(content.values, layout->weights, to_megatron);
    if (to_megatron) complete_arguments(content.values, *layout);
  }
  write_step(step, options.to, content, progress, options.overwrite);
}

}  // namespace megashard
