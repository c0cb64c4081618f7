#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "checkpoint/dcp/step_names.h"
#include "checkpoint/readers/checkpoint_reader.h"

namespace megashard {

/// A step's folder, a training's directory, a Hugging Face directory, a .safetensors file or a
/// torch.save file; throws ValueError for anything else. Of a training's directory it is the step that
/// a run would load (find_step.h): `notice` gets a line when that is not the tracker's. A folder and
/// `ckpt_step` are taken as they are, damaged or not.
std::unique_ptr<CheckpointReader> open_checkpoint(const std::string& path,
                                                  std::optional<int64_t> ckpt_step = std::nullopt,
                                                  const std::function<void(const std::string& line)>& notice = {});

/// A step's folder, torch_dcp or torch_dist; throws for others, as detect_format does.
std::unique_ptr<CheckpointReader> open_step(const std::string& folder);
/// The same for a model, with the keys of state_dict_keys.h where the step has others: these are put into `found`.
std::unique_ptr<CheckpointReader> open_step_for(const ModelNames& model, const std::string& folder,
                                                StepNames* found = nullptr);

}  // namespace megashard
