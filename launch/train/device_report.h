#pragma once

#include <c10/core/Device.h>

#include <functional>

#include "framework/diagnostics.h"

namespace megashard {

/// Prints, when called after each step, what made the host wait for the device in it
/// (--log-host-syncs). A device that cannot say: a warning now, and nothing later.
std::function<void()> host_sync_log(c10::Device device, const DiagnosticSink& sink);

/// What the device found wrong with this program, at the end of a run: prints what was checked, and
/// throws the findings as one error. Only the simulated device looks; see docs/simulated_device.md.
void tell_findings(c10::Device device, const DiagnosticSink& sink);

}  // namespace megashard
