#include "launch/report/reported_trace.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>

#include "framework/diagnostics.h"
#include "launch/report/trace_drawing.h"
#include "tests/checkpoint/files/temporary_folder.h"

namespace megashard {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr double kError = 1e-9;  // rounding of sums of a few doubles near 1e-5

class ReportedTraceTest : public ::testing::Test {
 protected:
  ReportedTrace read(const std::string& events) const {
    std::ofstream(path_) << "{\"traceEvents\": [" << events << "]}";
    return read_trace(path_);
  }
  static std::string span(const std::string& name, int row, int begin, int length, const std::string& category = "") {
    return "{\"ph\":\"X\",\"name\":\"" + name + "\",\"tid\":" + std::to_string(row) +
           ",\"ts\":" + std::to_string(begin) + ",\"dur\":" + std::to_string(length) +
           (category.empty() ? "" : ",\"cat\":\"" + category + "\"") + "}";
  }
  TemporaryFolder folder_;
  std::string path_ = folder_.file("trace.json");
};

TEST_F(ReportedTraceTest, CommunicationIsExposedWhileNothingIsComputed) {
  // compute: 1000..1010 and 1020..1030; communication: 1005..1025, in two overlapping spans
  const auto trace = read(span("aten::mm", 0, 1000, 10) + "," + span("aten::mm", 0, 1020, 10) + "," +
                          span("all_gather (x)", 34, 1005, 15) + "," + span("reduce_scatter (x)", 35, 1015, 10) + "," +
                          span("aten::add", 0, 1034, 1));
  EXPECT_NEAR(trace.seconds, 35e-6, kError);
  EXPECT_NEAR(trace.compute, 21e-6, kError);
  EXPECT_NEAR(trace.communication, 20e-6, kError);
  EXPECT_NEAR(trace.exposed, 10e-6, kError);
  EXPECT_NEAR(trace.idle, 4e-6, kError);
  EXPECT_EQ(trace.rows.size(), 3u);
}

TEST_F(ReportedTraceTest, ACollectiveWithinAnOperatorOfItsThreadIsNoCompute) {
  const auto trace = read(span("autograd", 7, 0, 100, "cpu_op") + "," +
                          span("FSDP::all_gather (layers.0)", 7, 40, 20, "user_annotation") + "," +
                          span("aten::copy_", 7, 45, 5, "cpu_op"));
  EXPECT_NEAR(trace.compute, 80e-6, kError);
  EXPECT_NEAR(trace.exposed, 20e-6, kError);
}

TEST_F(ReportedTraceTest, OfAGpuOnlyWhatTheDeviceDidCounts) {
  const auto trace = read(span("aten::mm", 7, 0, 1000, "cpu_op") + "," + span("gemm", 3, 10, 10, "kernel") + "," +
                          span("ncclDevKernel_AllGather", 4, 15, 10, "kernel"));
  EXPECT_NEAR(trace.seconds, 15e-6, kError);
  EXPECT_NEAR(trace.exposed, 5e-6, kError);
}

TEST_F(ReportedTraceTest, NamesInADrawingAreEscaped) {
  const auto svg = drawing_of(read(span("<script>&", 0, 0, 10)));
  EXPECT_THAT(svg, HasSubstr("&lt;script&gt;&amp;"));
  EXPECT_EQ(svg.find("<script"), svg.npos);
}

TEST_F(ReportedTraceTest, MemoryIsDrawnByItsClassesUponEachOther) {
  EXPECT_EQ(memory_drawing_of(read(span("aten::mm", 0, 1000, 100))), "");
  const auto counter = [](int at, const std::string& parts) {
    return R"(,{"ph":"C","name":"memory","ts":)" + std::to_string(at) + R"(,"args":{)" + parts + "}}";
  };
  const auto trace = read(span("aten::mm", 0, 1000, 100) + counter(1000, R"("z": 1048576)") +
                          counter(1050, R"("z": 1048576, "<b>": 3145728)") + R"(,{"ph":"C","name":"other"})");
  EXPECT_THAT(trace.memory_classes, ElementsAre("z", "<b>")) << "in the order of the file";
  ASSERT_EQ(trace.memory.size(), 2u);
  EXPECT_NEAR(trace.memory[1].at, 50e-6, kError);
  EXPECT_THAT(trace.memory[0].bytes, ElementsAre(1 << 20, 0));
  EXPECT_EQ(fullest_bytes(trace), 4 << 20);
  const auto svg = memory_drawing_of(trace);
  EXPECT_THAT(svg, HasSubstr("<polygon class=\"area c0\" points=\"110,135.5 555,135.5 555,135.5 1000,135.5 1000,178"));
  EXPECT_THAT(svg, HasSubstr("<polygon class=\"area c1\" points=\"110,135.5 555,135.5 555,8 1000,8 1000,135.5"));
  EXPECT_THAT(svg, HasSubstr("<title>&lt;b&gt;, at most 3.0 MiB</title>"));
  EXPECT_THAT(svg, HasSubstr(">2 MiB</text>"));
}

TEST_F(ReportedTraceTest, OtherFilesAreRefused) {
  const auto refusal = [&](const std::string& text) -> std::string {
    std::ofstream(path_) << text;
    try {
      read_trace(path_);
    } catch (const UsageError& error) {
      return error.what();
    }
    return "";
  };
  EXPECT_THAT(refusal("no JSON"), HasSubstr("is no Chrome trace"));
  EXPECT_THAT(refusal("{\"a\": 1}"), HasSubstr("is no Chrome trace"));
  EXPECT_THAT(refusal("[{\"ph\": \"i\"}, 3]"), HasSubstr("has no operators in it"));
  EXPECT_THAT(refusal("[{\"ph\": \"X\", \"ts\": \"1\", \"dur\": 2}]"), HasSubstr("has no operators in it"));
}

}  // namespace
}  // namespace megashard
