#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "checkpoint/dcp/step_names.h"
#include "checkpoint/readers/checkpoint_reader.h"

namespace megashard {

/// Opens a step's folder, a training's directory, a Hugging Face directory, a .safetensors file or a torch.save file;
/// throws ValueError for anything else. A training's directory gives the step that a run would load (find_step.h);
/// `notice` receives a line if that is not the tracker's. A step's folder and `ckpt_step` are opened without a check
/// for damage.
std::unique_ptr<CheckpointReader> open_checkpoint(const std::string& path,
                                                  std::optional<int64_t> ckpt_step = std::nullopt,
                                                  const std::function<void(const std::string& line)>& notice = {});

/// Opens a step's folder, torch_dcp or torch_dist. Throws for others, as detect_format does.
std::unique_ptr<CheckpointReader> open_step(const std::string& folder);
/// Opens a step for a model, with the keys of state_dict_keys.h also if the step has other ones, which are stored in
/// `found`.
std::unique_ptr<CheckpointReader> open_step_for(const ModelNames& model, const std::string& folder,
                                                StepNames* found = nullptr);

}  // namespace megashard
