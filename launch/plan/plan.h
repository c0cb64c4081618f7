#pragma once

namespace megashard {

/// `megashard plan`: whether a training fits, and how fast it will be, from a few steps of it on a
/// device of shapes without memory.
int run_plan(int argc, char** argv);

}  // namespace megashard
