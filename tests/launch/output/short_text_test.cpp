#include "launch/output/short_text.h"

#include <gtest/gtest.h>

#include <limits>

namespace megashard {
namespace {

TEST(ShortText, NumbersHaveFourDigits) {
  EXPECT_EQ(short_number(4.08921217918396), "4.089");
  EXPECT_EQ(short_number(0), "0");
  EXPECT_EQ(short_number(8.154e-7), "8.154e-07");
  EXPECT_EQ(short_number(9999), "9999");
  EXPECT_EQ(short_number(448501.5), "448.5k");
  EXPECT_EQ(short_number(-2e9), "-2G");
  EXPECT_EQ(short_number(std::numeric_limits<double>::quiet_NaN()), "-");
}

TEST(ShortText, BytesAndTimesHaveUnits) {
  EXPECT_EQ(byte_text(239050752), "228.0 MiB");
  EXPECT_EQ(byte_text(2048), "0.002 MiB");
  EXPECT_EQ(byte_text(0), "0 MiB");
  EXPECT_EQ(percent_text(0.4123), "41.2 %");
  EXPECT_EQ(byte_text(3.5 * (1 << 30)), "3.50 GiB");
  EXPECT_EQ(duration_text(0), "0.0 ms");
  EXPECT_EQ(duration_text(60e-6), "60 us");
  EXPECT_EQ(duration_text(1.5e-6), "1.5 us");
  EXPECT_EQ(duration_text(0.0416), "41.6 ms");
  EXPECT_EQ(duration_text(119), "119.0 s");
  EXPECT_EQ(duration_text(300), "5 min");
  EXPECT_EQ(duration_text(7500), "2 h 05 min");
}

}  // namespace
}  // namespace megashard
