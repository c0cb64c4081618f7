#pragma once

#include <filesystem>

#include "framework/arguments/parallel_arguments.h"

namespace megashard {

/// Whether a driver's device files are there: nvidiactl, nvidia<N> of any GPU, or dxg (WSL2).
/// Costs nothing, where loading the CUDA module costs 350 MB.
bool has_gpu_files(const std::filesystem::path& devices = "/dev");

/// Whether this process can use a GPU. Loads the CUDA module where a driver is.
bool gpu_present();

/// Of --device: takes the simulated one for kSim. Whether the run has a CUDA device.
bool take_device(DeviceChoice device);

}  // namespace megashard
