#pragma once

#include <stdexcept>
#include <string>

namespace megashard {

// Whether something can be written at a path, found out by writing.

/// Why nothing can be written there: the folder and the system's reason.
struct UnwritableError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

/// The folder itself, or where the first folder towards it is to be made. Throws UnwritableError
/// where no folder can be below what is there.
std::string nearest_folder(std::string path);
/// Makes a folder of a name that no other process gives one.
std::string make_trial_folder(const std::string& folder);
/// Makes a file, writes into it and removes it.
void write_trial_file(const std::string& path);
/// All of that at a path where a folder is, or is to be made; nothing stays.
void try_folder(const std::string& path);
/// A file that is there is opened to be written, and left as it is; of others the folder is tried.
void try_file(const std::string& path);

}  // namespace megashard
