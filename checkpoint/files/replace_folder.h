#pragma once

#include <string>

namespace megashard {

/// The two folders change places at once, durably; false where the file system cannot do that.
bool swap_folders(const std::string& one, const std::string& other);

/// `fresh` gets the place of `old`, which is removed then. Where the file system cannot swap them,
/// `old` has the name `aside` for a moment in which nothing has its own.
void replace_folder(const std::string& old, const std::string& fresh, const std::string& aside);

}  // namespace megashard
