#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoint/files/output_file.h"

namespace megashard {

/// The run that wrote a step, from its manifest. A folder holds steps of several runs if a run fine-tunes another one
/// there, or resumes from an earlier step.
struct RunHistory {
  struct Part {
    std::string id;
    int64_t last = 0;  ///< iteration of the step that the next run resumed from
  };
  std::string id{};            ///< empty: unknown, as in steps of converters and other programs
  std::vector<Part> before{};  ///< runs that it descends from, the first one first
};

/// Relation of a step to a run.
enum class Kinship {
  kOwn,   ///< this run wrote the step, or descends from it
  kLeft,  ///< an earlier run of its history wrote the step after the one that it resumed from
  kOther  ///< another run wrote the step
};

RunHistory new_run();  ///< with a unique id
/// A new run that resumes from a step of `run`.
RunHistory gone_on_from(RunHistory run, int64_t iteration);
/// `id` is the run that wrote the step of that iteration.
Kinship kinship(const RunHistory& run, const std::string& id, int64_t iteration);

/// STEP/manifest.json lists every other file of the step, so that damage is detected and located. PyTorch and Megatron
/// do not write it and ignore it.
///   {"format_version": 1, "iteration": 10, "files": {"__0_0.distcp": {"bytes": 4096, "crc32":
///   "0123abcd"}, ...}, "run": {"id": "0123456789abcdef", "before": [["fedcba9876543210", 5]]},
///   "crc32": "89abcdef"}
/// The last checksum is of the rest as compact JSON with sorted keys. "run" is absent if the run is unknown.
struct Manifest {
  int64_t iteration = 0;  ///< 0 for release
  std::vector<WrittenFile> files;
  RunHistory run{};
};

bool has_manifest(const std::string& folder);
void write_manifest(const std::string& folder, const Manifest& manifest);
/// Throws an error with the path if the manifest is missing, damaged or names a file outside the folder.
Manifest read_manifest(const std::string& folder);
Manifest parse_manifest(std::string_view json, const std::string& where);
/// The run in the manifest; empty without a manifest.
RunHistory run_of_step(const std::string& folder);

/// Damage of a file whose bytes have the checksum `found`; empty if none.
std::string checksum_damage(const std::string& folder, const WrittenFile& file, uint32_t found);

enum class VerifyDepth {
  kSizes,  ///< every file exists with its size
  kBytes,  ///< and has its checksum: reads everything
};

/// The first damaged file and its damage; empty if none. A step without a manifest is undamaged if its .metadata (and
/// metadata.json, if there is a common.pt) exists and the files that it names are long enough; bytes cannot be checked.
/// With `parts` processes, this one checks every parts-th file from `part` on. Throws UnreadableError if the state
/// cannot be determined now.
std::string step_damage(const std::string& folder, VerifyDepth depth, size_t part = 0, size_t parts = 1);
/// Throws the damage, with the remedy.
void verify_step(const std::string& folder, VerifyDepth depth);

}  // namespace megashard
