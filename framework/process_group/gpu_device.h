#pragma once

#include <filesystem>

#include "framework/arguments/parallel_arguments.h"

namespace megashard {

/// True if a driver's device files exist: nvidiactl, nvidia<N> of any GPU, or dxg (WSL2). Cheap, whereas loading the
/// CUDA module takes 350 MB.
bool has_gpu_files(const std::filesystem::path& devices = "/dev");

/// True if this process can use a GPU. Loads the CUDA module if a driver exists.
bool gpu_present();

/// Applies --device: installs the simulated device for kSim. Returns true if the run uses a CUDA device.
bool take_device(DeviceChoice device);

}  // namespace megashard
