#include "framework/process_group/gpu_device.h"

#include <algorithm>
#include <cctype>
#include <string>
#include <system_error>

#include "parallel/device/cuda_module.h"

namespace megashard {

bool has_gpu_files(const std::filesystem::path& devices) {
  std::error_code ignored;  // a missing folder has no files
  for (const auto& entry : std::filesystem::directory_iterator(devices, ignored)) {
    const auto name = entry.path().filename().string();
    if (name == "nvidiactl" || name == "dxg") return true;
    const std::string driver = "nvidia", number = name.substr(std::min(name.size(), driver.size()));
    if (name.starts_with(driver) && !number.empty() &&
        std::all_of(number.begin(), number.end(), [](unsigned char c) { return std::isdigit(c); }))
      return true;
  }
  return false;
}

bool gpu_present() { return has_gpu_files() && load_cuda_module().device_count() > 0; }

bool take_device(DeviceChoice device) {
  switch (device) {
    case DeviceChoice::kSim:
      use_simulated_device();
      return true;
    case DeviceChoice::kCpu:
      return false;
    case DeviceChoice::kCuda:
    case DeviceChoice::kAuto:
      break;
  }
  return gpu_present();
}

}  // namespace megashard
