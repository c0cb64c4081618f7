#pragma once

#include <CLI/CLI.hpp>

#include <string>

namespace megashard {

/// A path, and the flag that gave it.
struct GivenPath {
  std::string path;
  std::string flag;
};

/// The folder of the step that a converter's source names: a step's own; DIR/best; of a training's DIR the step that a
/// run would load, which is told. Other paths stay as they are.
std::string step_folder(const std::string& path);

/// --overwrite of a converter.
void add_overwrite(CLI::App& app, bool& overwrite);

// Where a converter may write. Each throws a UsageError, before anything is read at length, for a
// target that holds what may be needed (folder_refusal), and, --overwrite or not, for one that is
// its source.

/// Of weights: `target` gets files.
void check_hf_target(const GivenPath& source, const GivenPath& target, bool overwrite);
/// Of a step: `target` gets the folder `step` ("release").
void check_step_target(const GivenPath& source, const GivenPath& target, const std::string& step, bool overwrite);
/// Of one file.
void check_file_target(const GivenPath& source, const GivenPath& target, bool overwrite);
/// Of a folder that is replaced as a whole.
void check_whole_folder(const GivenPath& source, const GivenPath& target, bool overwrite);

}  // namespace megashard
