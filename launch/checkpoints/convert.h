#pragma once

namespace megashard {

/// `megashard convert CONVERTER --flag value ...`; flags may be written with `_` for `-`. argv[0]
/// is "convert".
int run_convert(int argc, char** argv);

}  // namespace megashard
