#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "parallel/device/device_plan.h"

namespace megashard {

/// Names of the devices that are installed with the program: "a100", "b200", ...
std::vector<std::string> device_names();

/// Reads --device: a YAML file, or the name of an installed device ("h200"). Throws UsageError.
DeviceModel read_device_model(const std::string& file_or_name);

/// Writes such a file; `header` is its first lines, without #. Throws UsageError.
void write_device_model(const std::string& path, const DeviceModel& model, const std::string& header);

/// Parses "139GiB", "80GB", "512 MiB" or plain bytes. Throws UsageError that says what `what` accepts.
int64_t parse_bytes(const std::string& text, const std::string& what);

}  // namespace megashard
