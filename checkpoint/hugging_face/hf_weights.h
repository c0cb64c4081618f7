#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoint/hugging_face/hf_files.h"
#include "checkpoint/readers/checkpoint_reader.h"

namespace megashard {

// What a model's weights are opened by; a directory has one of them.
inline constexpr const char* kHfWeightsFile = "model.safetensors";
inline constexpr const char* kHfIndexFile = "model.safetensors.index.json";

/// The weights of a Hugging Face model directory: model.safetensors, or the files that
/// model.safetensors.index.json names, one after the other. Opening maps the files and reads their
/// headers only; tensors are views as of SafetensorsFile::tensor. The files' __metadata__ are the
/// values. Throws, with the remedy, when the directory has no weights (or a save into it was cut short
/// while it replaced them), an index that is not one, a file it names is missing, or
/// model.safetensors lies beside an index that names others.
std::unique_ptr<CheckpointReader> open_hf_weights(const std::string& directory);
/// One .safetensors file.
std::unique_ptr<CheckpointReader> open_safetensors(const std::string& path);

/// The weight_map of a model.safetensors.index.json's content: the file of each tensor. `where`,
/// its path, begins the message of what is thrown for what is none or names a file of another folder.
std::map<std::string, std::string> parse_weight_map(std::string_view text, const std::string& where);

/// Writes the files of plan_hf_files, their index where there are several, and what
/// `options.beside` writes. `data` is asked for one tensor at a time, so memory stays at the
/// largest. The directory is created; weights of an earlier save there are replaced, and never
/// mixed with the new ones (HfFolderWriter says what a failure leaves).
void save_hf_weights(const std::string& directory, const std::vector<TensorInfo>& tensors,
                     const std::function<at::Tensor(const TensorInfo&)>& data, const HfSaveOptions& options = {});

}  // namespace megashard
