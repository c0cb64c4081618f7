#pragma once

#include <string>
#include <vector>

#include "framework/arguments/arguments.h"
#include "parallel/collectives/process_group.h"

namespace megashard {

/// A path of a flag, to which a run will write.
struct OutputPath {
  enum class Kind {
    kSharedFolder,  ///< one folder, into which all ranks write
    kFolder,        ///< each rank writes into it, on its own machine's disk maybe
    kFile,          ///< of the first rank
  };
  std::string flag;
  std::string path;
  Kind kind;
};

/// Those of the flags; `saves`: --save is one of them in this run.
std::vector<OutputPath> output_paths(const Arguments& arguments, bool saves);

/// Tries each, by making a folder and a file in it, or where it is to be made, and removes them:
/// what could be written an hour later is written now. Throws a UsageError with flag, path, reason
/// and remedy, the same on all ranks. Collective.
void try_output_paths(const std::vector<OutputPath>& paths, const ProcessGroupPtr& group);

}  // namespace megashard
