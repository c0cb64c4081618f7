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

/// Stems of the names of diffusers' files.
inline constexpr const char* kDiffusersStem = "diffusion_pytorch_model";

/// True if the directory has weights: model.safetensors or model.safetensors.index.json, or files of these names with
/// diffusers' stem.
bool has_hf_weights(const std::string& directory);

/// Opens the weights of a Hugging Face model directory: model.safetensors, or the files listed by
/// model.safetensors.index.json in order; without both, diffusers' files. Maps the files and reads only their headers;
/// tensors are views as in SafetensorsFile::tensor. The files' __metadata__ becomes the values. Throws an error with
/// the remedy if the directory has no weights (or an interrupted save was replacing them), the index is invalid, a
/// listed file is missing, or model.safetensors lies beside an index of other files.
std::unique_ptr<CheckpointReader> open_hf_weights(const std::string& directory);
/// The same, with weights in MXFP4 as bf16 (mxfp4.h).
std::unique_ptr<CheckpointReader> open_hf_model(const std::string& directory);
/// Opens one .safetensors file.
std::unique_ptr<CheckpointReader> open_safetensors(const std::string& path);

/// The weight_map of the content of a model.safetensors.index.json: the file of each tensor. Throws an error that
/// begins with `where`, its path, if it is invalid or names a file outside its folder.
std::map<std::string, std::string> parse_weight_map(std::string_view text, const std::string& where);

/// Writes the files of plan_hf_files, an index if there are several, and calls `options.beside`. Calls `data` for
/// one tensor at a time, so memory is bounded by the largest. Creates the directory. Replaces weights of an earlier
/// save without mixing (HfFolderWriter describes the state after a failure).
void save_hf_weights(const std::string& directory, const std::vector<TensorInfo>& tensors,
                     const std::function<at::Tensor(const TensorInfo&)>& data, const HfSaveOptions& options = {});

}  // namespace megashard
