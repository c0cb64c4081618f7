#include <gtest/gtest.h>
#include <stdlib.h>

#include "tests/checkpoint/files/temporary_folder.h"
#include "tests/support/simulated_device.h"

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  // A separate testing::TempDir() for each process: a suite also runs in parallel with itself, with its tests in
  // another order.
  const megashard::TemporaryFolder folder;
  ::setenv("TEST_TMPDIR", folder.path().c_str(), /*replace=*/1);
  if (megashard::testing::on_simulated_device()) megashard::testing::run_on_simulated_device();
  return RUN_ALL_TESTS();
}
