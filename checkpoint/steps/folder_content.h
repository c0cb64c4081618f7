#pragma once

#include <string>

namespace megashard {

/// What a folder holds that somebody may need.
struct FolderContent {
  enum class Kind { kNothing, kWeights, kStep, kRun } kind = Kind::kNothing;
  std::string name;  ///< by which it was told: "model.safetensors", ".metadata", "iter_0000100"
};

/// A step's folder is told before weights, and a run's before both. Files that a save left which
/// was cut short while it replaced a Hugging Face model are nothing; so is a folder that is not
/// there. Throws when it cannot be listed.
FolderContent content_of(const std::string& folder);

/// A checkpoint in `folder`, which find_step finds none in, that has another shape: weights, a step without its name,
/// or in a folder below, whose name stands before content.name ("dcp/.metadata"), a step or a run. kNothing: none.
FolderContent misplaced_checkpoint(const std::string& folder);

/// Why nothing is to be written into `folder`, which `flag` names: it holds weights, a step or a
/// run, and `overwrite` (--overwrite) was not given. With the remedy; empty: nothing stands
/// against it.
std::string content_refusal(const std::string& folder, const std::string& flag, bool overwrite);
/// The same, or that no file can be made in it, which is tried. Leaves nothing there.
std::string folder_refusal(const std::string& folder, const std::string& flag, bool overwrite);
/// The same for a file to be written, whose folder must be there; `overwrite`: it may be replaced.
std::string file_refusal(const std::string& path, const std::string& flag, bool overwrite);

}  // namespace megashard
