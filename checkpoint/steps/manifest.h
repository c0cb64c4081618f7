#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoint/files/file_io.h"
#include "checkpoint/steps/run_history.h"

namespace megashard {

/// STEP/manifest.json: every other file of the step, so that damage is found and named. PyTorch and
/// Megatron write none and do not mind it.
///   {"format_version": 1, "iteration": 10, "files": {"__0_0.distcp": {"bytes": 4096, "crc32":
///   "0123abcd"}, ...}, "run": {"id": "0123456789abcdef", "before": [["fedcba9876543210", 5]]},
///   "crc32": "89abcdef"}
/// The last one is of the rest, as compact JSON with sorted keys. "run" is left out where the run
/// is not known.
struct Manifest {
  int64_t iteration = 0;  ///< 0 for release
  std::vector<WrittenFile> files;
  RunHistory run{};
};

bool has_manifest(const std::string& folder);
void write_manifest(const std::string& folder, const Manifest& manifest);
/// Throws, naming the path, for what is missing, damaged or leads out of the folder.
Manifest read_manifest(const std::string& folder);
Manifest parse_manifest(std::string_view json, const std::string& where);
/// Of the manifest; without one the run is not known.
RunHistory run_of_step(const std::string& folder);

/// What is wrong with a file of the folder whose bytes have the checksum `found`; empty: nothing.
std::string checksum_damage(const std::string& folder, const WrittenFile& file, uint32_t found);

enum class VerifyDepth {
  kSizes,  ///< every file is there, with its length
  kBytes,  ///< and has its checksum: everything is read
};

/// The damaged file and what is wrong with it; empty: nothing. A step without manifest is whole
/// when its .metadata (and metadata.json, where there is a common.pt) is there, and the files that
/// it names reach as far as it says; bytes cannot be checked then. Of `parts` processes that share
/// the work, this one checks every parts-th file from `part` on. Throws UnreadableError when that
/// cannot be known now.
std::string step_damage(const std::string& folder, VerifyDepth depth, size_t part = 0, size_t parts = 1);
/// Throws that, and what can be done.
void verify_step(const std::string& folder, VerifyDepth depth);

}  // namespace megashard
