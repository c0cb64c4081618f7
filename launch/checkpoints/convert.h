#pragma once

namespace megashard {

/// Runs `megashard convert CONVERTER --flag value ...`; flags may use `_` for `-`. argv[0] is "convert".
int run_convert(int argc, char** argv);

}  // namespace megashard
