#pragma once

#include <c10/core/Device.h>

#include <memory>

#include "framework/diagnostics.h"
#include "framework/training/listener.h"

namespace megashard {

/// Reports after each step which operations blocked the host for the device (--log-host-syncs). If the device cannot
/// report them: warns now and returns null.
std::shared_ptr<Listener> host_sync_log(c10::Device device, const DiagnosticSink& sink);

/// Prints what the device checked during this program, and throws its findings as one error. Call it at the end of a
/// run. Only the simulated device checks anything; see docs/simulated_device.md.
void log_findings(c10::Device device, const DiagnosticSink& sink);

}  // namespace megashard
