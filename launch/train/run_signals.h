#pragma once

#include "framework/arguments/arguments.h"
#include "framework/diagnostics.h"
#include "framework/training/trainer.h"

namespace megashard {

constexpr int kExitInterrupted = 130;  ///< what a shell expects of a program that SIGINT has ended

/// From now on Ctrl-C ends this process at once, with `message` on stderr where `speaks`: whatever
/// the ranks wait for. Where the caller ignores SIGINT (nohup), it stays ignored. With
/// --exit-signal-handler --exit-signal is noted for stop_request().
void watch_signals(const Arguments& arguments, const char* message, bool speaks, const DiagnosticSink& sink);
/// Another message for what is interrupted from now on.
void end_at_interrupt(const char* message);
/// From now on the first Ctrl-C is noted for stop_request(), and the second ends the process.
void finish_step_at_interrupt();

StopRequest stop_request();

}  // namespace megashard
