#include "launch/roll/hydra_defaults.h"

#include <gmock/gmock.h>

#include <filesystem>
#include <fstream>

#include "framework/arguments/yaml_value.h"
#include "tests/support/diagnostics.h"

namespace megashard {
namespace {

using testing::HasSubstr;

/// Files in a folder of the test.
class HydraDefaults : public testing::Test {
 protected:
  HydraDefaults() : folder_(std::filesystem::temp_directory_path() / ("hydra_" + std::to_string(::getpid()))) {
    write("config/envs.yaml", "a: 1\nb: {x: 1, y: 2}\nonly: 3\nlist: [1, 2]\n");
    write("config/placed.yaml", "# @package some.where\nq: 1\n");
    write("run/same.yaml", "s: 1\na: 7\n");
    write("run/group/one.yaml", "g: 1\n");
  }
  ~HydraDefaults() override { std::filesystem::remove_all(folder_); }

  void write(const std::string& name, const std::string& text) const {
    const auto path = folder_ / name;
    std::filesystem::create_directories(path.parent_path());
    std::ofstream(path) << text;
  }

  std::string compose(const std::string& text) const {
    const auto path = (folder_ / "run" / "main.yaml").string();
    YAML::Emitter out;
    out << YAML::Flow << compose_defaults(load_yaml(text, path), path);
    return out.c_str();
  }

  std::filesystem::path folder_;
};

// The expected maps are those that hydra-core 1.3.2 composes from these files.
TEST_F(HydraDefaults, AreMergedAsHydraDoes) {
  EXPECT_EQ(compose("defaults:\n  - ../config/envs@_here_\n  - same\n  - group/one\n  - ../config/placed\n"
                    "  - group@deep.er: one\na: 2\nb: {y: 5, z: 6}\nlist: [9]\n"),
            "{a: 2, b: {x: 1, y: 5, z: 6}, only: 3, list: [9], s: 1, group: {g: 1}, some: {where: {q: 1}}, deep: {er: "
            "{g: 1}}}");
  EXPECT_EQ(compose("defaults: [_self_, ../config/envs@_here_, same]\na: 2\nb: {y: 5, z: 6}\n"),
            "{a: 7, b: {y: 2, z: 6, x: 1}, only: 3, list: [1, 2], s: 1}");
}

TEST_F(HydraDefaults, MayNameFilesThatHaveDefaults) {
  write("run/outer.yaml", "defaults: [same]\na: 8\n");
  EXPECT_EQ(compose("defaults: [outer, ~]\nz: 1\n"), "{s: 1, a: 8, z: 1}");
  EXPECT_EQ(compose("a: 1\n"), "a: 1") << "as it is";
}

TEST_F(HydraDefaults, MistakesNameFileAndLine) {
  const auto message = [this](const std::string& text) { return usage_error([&] { compose(text); }); };
  EXPECT_THAT(message("defaults:\n  - missing"),
              HasSubstr("main.yaml:2: defaults names missing, but there is no file"));
  EXPECT_THAT(message("defaults: [../config/envs]"), HasSubstr("write ../config/envs@_here_ to merge it here"));
  EXPECT_THAT(message("defaults: [override group: one]"), HasSubstr("has override group; name the file itself"));
  EXPECT_THAT(message("defaults: same"), HasSubstr("takes a list of files"));
  EXPECT_THAT(message("defaults: [[same]]"), HasSubstr("takes files, as in [../config/envs@_here_]"));
  write("run/circle.yaml", "defaults: [circle]\n");
  EXPECT_THAT(message("defaults: [circle]"), HasSubstr("names files that name each other"));
}

}  // namespace
}  // namespace megashard
