#pragma once

namespace megashard {

/// Runs `megashard plan`: predicts from a few steps on a device without memory whether a training fits and how fast it
/// is.
int run_plan(int argc, char** argv);

}  // namespace megashard
