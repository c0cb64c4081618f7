#pragma once

#include <string>

namespace megashard {

/// The most valuable content of a folder.
struct FolderContent {
  enum class Kind { kNothing, kWeights, kStep, kRun } kind = Kind::kNothing;
  std::string name;  ///< file or folder that identified it: "model.safetensors", ".metadata", "iter_0000100"
};

/// Classifies a folder: steps before weights, runs before both. Files that an interrupted save left while it replaced a
/// Hugging Face model are kNothing, and so is a missing folder. Throws if the folder cannot be listed.
FolderContent content_of(const std::string& folder);

/// A checkpoint in `folder` that find_step does not recognise: weights, a step in a folder without a step's name, or a
/// step or run in a subfolder, which then is part of content.name ("dcp/.metadata"). kNothing: none.
FolderContent misplaced_checkpoint(const std::string& folder);

/// Reason, with the remedy, why `folder`, the value of `flag`, must not be written to: it contains weights, a step or a
/// run, and `overwrite` (--overwrite) is not set. Empty if it may be written.
std::string content_refusal(const std::string& folder, const std::string& flag, bool overwrite);
/// As content_refusal; also tries to create a file in the folder. Leaves nothing behind.
std::string folder_refusal(const std::string& folder, const std::string& flag, bool overwrite);
/// As folder_refusal, for a file whose folder must exist. `overwrite`: it may be replaced.
std::string file_refusal(const std::string& path, const std::string& flag, bool overwrite);

}  // namespace megashard
