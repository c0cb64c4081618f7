#pragma once

#include "framework/arguments/arguments.h"
#include "framework/diagnostics.h"
#include "framework/training/trainer.h"

namespace megashard {

constexpr int kExitInterrupted = 130;  ///< exit code that shells expect of a program ended by SIGINT

/// Makes Ctrl-C end this process at once, whatever the ranks wait for, with `message` on stderr if `speaks`. If the
/// caller ignores SIGINT (nohup), it stays ignored. With --exit-signal-handler, --exit-signal is recorded for
/// stop_request().
void watch_signals(const Arguments& arguments, const char* message, bool speaks, const DiagnosticSink& sink);
/// Replaces the message of later interrupts.
void end_at_interrupt(const char* message);
/// Makes the first Ctrl-C set stop_request(), and the second end the process.
void finish_step_at_interrupt();

StopRequest stop_request();

}  // namespace megashard
