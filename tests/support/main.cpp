#include <gtest/gtest.h>

#include "tests/support/simulated_device.h"

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  if (megashard::testing::on_simulated_device()) megashard::testing::run_on_simulated_device();
  return RUN_ALL_TESTS();
}
