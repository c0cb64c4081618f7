#pragma once

#include <CLI/CLI.hpp>

namespace megashard {

// Each declares a converter's flags; the callback that it sets converts.

void add_hf_to_dcp(CLI::App& app);
void add_dcp_to_hf(CLI::App& app);
void add_hf_to_torch_dist(CLI::App& app);
void add_torch_dist_to_hf(CLI::App& app);
void add_dcp_to_torch_dist(CLI::App& app);
void add_torch_dist_to_dcp(CLI::App& app);
void add_dcp_to_torch(CLI::App& app);
void add_torch_to_dcp(CLI::App& app);

}  // namespace megashard
