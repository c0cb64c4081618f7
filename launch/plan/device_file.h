#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "parallel/device/device_plan.h"

namespace megashard {

/// Those that come with the program: "a100", "b200", ...
std::vector<std::string> device_names();

/// Of --device: a YAML file, or the name of one of those that come with the program ("h200"). Throws
/// UsageError.
DeviceModel read_device_model(const std::string& file_or_name);

/// Writes the numbers as such a file; `header`: its first lines, without the #. Throws UsageError.
void write_device_model(const std::string& path, const DeviceModel& model, const std::string& header);

/// "139GiB", "80GB", "512 MiB" or plain bytes; throws UsageError, which says what `what` takes.
int64_t parse_bytes(const std::string& text, const std::string& what);

}  // namespace megashard
