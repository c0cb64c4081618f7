#include "framework/arguments/yaml_value.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

#include "tests/support/diagnostics.h"

namespace megashard {
namespace {

using testing::HasSubstr;
namespace fs = std::filesystem;

class ConfigurationFile : public testing::Test {
 protected:
  void SetUp() override { fs::create_directories(folder_); }
  void TearDown() override { fs::remove_all(folder_); }

  std::string file(const std::string& name, const std::string& text) const {
    std::ofstream(folder_ / name) << text;
    return folder_ / name;
  }
  static std::string refusal(const std::string& path) {
    return usage_error([&] { read_configuration(path, "--config"); });
  }

  // Open to a user without rights, unlike the test's own folder.
  fs::path folder_ = fs::temp_directory_path() / ("megashard_files_" + std::to_string(getpid()));
};

TEST_F(ConfigurationFile, IsRead) { EXPECT_EQ(read_configuration(file("good.yaml", "a: 1\n"), "--config"), "a: 1\n"); }

TEST_F(ConfigurationFile, EachFaultHasItsMessage) {
  const std::string none = folder_ / "none.yaml", link = folder_ / "link.yaml";
  EXPECT_EQ(refusal(none), "--config " + none + " cannot be read: there is no such file.");
  EXPECT_THAT(refusal("none.yaml"), HasSubstr("no such file, seen from " + fs::current_path().string()));
  fs::create_symlink(none, link);
  EXPECT_THAT(refusal(link), HasSubstr("it is a link to " + none + ", where there is nothing"));
  EXPECT_THAT(refusal(folder_), HasSubstr("it is a folder; name the file in it"));
  EXPECT_THAT(refusal(file("empty.yaml", " \n")), HasSubstr("empty.yaml is empty"));
  const std::string pipe = folder_ / "pipe";
  ASSERT_EQ(mkfifo(pipe.c_str(), 0600), 0);
  EXPECT_THAT(refusal(pipe), HasSubstr("it is no regular file"));
  EXPECT_THAT(refusal(file("good.yaml", "a: 1") + "/inside"), HasSubstr("there is no such file"));
}

TEST_F(ConfigurationFile, MayBeForbidden) {
  const auto path = file("secret.yaml", "a: 1");
  fs::permissions(path, fs::perms::none);
  constexpr uid_t kNobody = 65534;
  const bool was_root = geteuid() == 0;
  if (was_root) {
    ASSERT_EQ(seteuid(kNobody), 0);
  }
  const auto message = refusal(path);
  if (was_root) {
    ASSERT_EQ(seteuid(0), 0);
  }
  EXPECT_THAT(message, HasSubstr("Permission denied; give this user the right to read it"));
}

}  // namespace
}  // namespace megashard
