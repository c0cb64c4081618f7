#pragma once

#include <CLI/CLI.hpp>

namespace megashard {

// Each function declares a converter's flags and sets a callback that runs it.

void add_hf_to_dcp(CLI::App& app);
void add_dcp_to_hf(CLI::App& app);
void add_hf_to_torch_dist(CLI::App& app);
void add_torch_dist_to_hf(CLI::App& app);
void add_dcp_to_torch_dist(CLI::App& app);
void add_torch_dist_to_dcp(CLI::App& app);
void add_dcp_to_torch(CLI::App& app);
void add_torch_to_dcp(CLI::App& app);

}  // namespace megashard
