#pragma once

#include <stdexcept>
#include <string>

namespace megashard {

// Tests whether a path is writable by writing to it.

/// Reason why nothing can be written: the folder and the system's message.
struct UnwritableError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

/// Returns `path` if it exists, else its nearest existing parent. Throws UnwritableError if that is not a folder.
std::string nearest_folder(std::string path);
/// Creates a folder with a unique name.
std::string make_trial_folder(const std::string& folder);
/// Creates a file, writes to it and removes it.
void write_trial_file(const std::string& path);
/// Tests a folder that exists or is to be created. Leaves nothing behind.
void try_folder(const std::string& path);
/// Tests a file. An existing one is opened for writing and not changed; otherwise its folder is tested.
void try_file(const std::string& path);

}  // namespace megashard
