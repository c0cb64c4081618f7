#include "framework/arguments/configuration_file.h"

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>

#include "framework/diagnostics.h"

namespace megashard {

namespace {

namespace fs = std::filesystem;

std::string why_missing(const fs::path& path) {
  std::error_code ignored;
  if (fs::is_symlink(path, ignored)) {
    return "it is a link to " + fs::read_symlink(path, ignored).string() + ", where there is nothing";
  }
  if (path.is_relative()) return "there is no such file, seen from " + fs::current_path(ignored).string();
  return "there is no such file";
}

/// The problem of the path; empty if there is none that its status shows.
std::string fault_of(const fs::path& path) {
  std::error_code error;
  const auto status = fs::status(path, error);
  if (status.type() == fs::file_type::not_found) return why_missing(path);
  if (error) return error.message() + "; give this user the right to read it";
  if (status.type() == fs::file_type::directory) return "it is a folder; name the file in it";
  if (status.type() != fs::file_type::regular) {
    return "it is no regular file, and every rank reads it; write it to a file first";
  }
  return "";
}

}  // namespace

std::string read_configuration(const std::string& path, const std::string& name) {
  const auto refuse = [&](const std::string& why) {
    throw UsageError(name + " " + path + " cannot be read: " + why + ".");
  };
  const std::string fault = fault_of(path);
  if (!fault.empty()) refuse(fault);
  std::ifstream file(path);
  if (!file) {
    const bool forbidden = errno == EACCES;
    refuse(std::string(std::strerror(errno)) + (forbidden ? "; give this user the right to read it" : ""));
  }
  std::string text{std::istreambuf_iterator<char>(file), {}};
  if (file.bad()) refuse(std::strerror(errno));
  if (text.find_first_not_of(" \t\r\n") == std::string::npos)
    throw UsageError(name + " " + path + " is empty; is it the right file?");
  return text;
}

}  // namespace megashard
