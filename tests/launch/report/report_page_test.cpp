#include "launch/report/report_page.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "launch/output/short_text.h"
#include "launch/report/line_chart.h"
#include "launch/report/page_style.h"

namespace megashard {
namespace {

using ::testing::DoubleEq;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

size_t count_of(const std::string& text, const std::string& part) {
  size_t count = 0;
  for (size_t at = text.find(part); at != text.npos; at = text.find(part, at + 1)) ++count;
  return count;
}

ReportedRun run_named(const std::string& name) {
  ReportedRun run{.name = name, .steps = {1, 2, 3}};
  run.numbers["loss"] = {3, 2, 1};
  return run;
}

TEST(ReportPage, TextOfFilesIsEscaped) {
  auto run = run_named("<b>&\"'");
  run.numbers["<i>"] = {1, 2, 3};
  run.starts = {{.time = "<u>"}};
  run.arguments["<s>"] = "<em>";
  const auto page = report_page({.runs = {run}});
  for (const char* tag : {"<b>", "<i>", "<u>", "<s>", "<em>"}) EXPECT_THAT(page, Not(HasSubstr(tag)));
  EXPECT_THAT(page, HasSubstr("&lt;b&gt;&amp;&quot;&#39;"));
}

TEST(ReportPage, NeedsNothingFromElsewhere) {
  const auto page = report_page({.runs = {run_named("a")}});
  EXPECT_TRUE(page.starts_with(kReportMark));
  for (const char* part : {"src=", "href=", "@import", "url("}) EXPECT_THAT(page, Not(HasSubstr(part)));
}

TEST(ReportPage, ShowsArgumentsThatDifferBetweenRuns) {
  auto one = run_named("one"), other = run_named("other");
  one.starts = other.starts = {{}};
  one.arguments = {{"lr", "0.25"}, {"hidden_size", "16"}};
  other.arguments = {{"hidden_size", "16"}, {"seed", "99"}};
  const auto page = report_page({.runs = {one, other}});
  const auto begin = page.find("<h3>Differences</h3>");
  const auto differences = page.substr(begin, page.find("</table>", begin) - begin);
  EXPECT_THAT(differences, HasSubstr("<td>seed</td><td>1234</td><td>99</td>")) << "the default beside it";
  EXPECT_THAT(differences, HasSubstr("<td>lr</td><td>0.25</td>"));
  EXPECT_THAT(differences, Not(HasSubstr("hidden_size")));
}

TEST(ReportPage, TellsHowEachLegEnded) {
  auto run = run_named("a");
  run.starts = {{.end = "interrupted", .last = 2}, {.step = 2, .last = 9}, {.step = 5, .last = 3}};
  const auto page = report_page({.runs = {run}});
  const auto begin = page.find("<th>started</th>");
  const auto table = page.substr(begin, page.find("</table>", begin) - begin);
  for (const char* cells :
       {"interrupted</td><td class=\"number\">2<", "killed, or an error</td><td class=\"number\">9<",
        "not yet, or killed</td><td class=\"number\">3<"})
    EXPECT_THAT(table, HasSubstr(cells));
}

TEST(ReportPage, TellsWhichSavesFailed) {
  auto run = run_named("a");
  EXPECT_THAT(report_page({.runs = {run}}), Not(HasSubstr("save failed")));
  run.failed_saves = {{.time = "now", .step = 20, .why = "the disk <is> full"}};
  EXPECT_THAT(report_page({.runs = {run}}),
              HasSubstr(">now</td><td class=\"number\">20</td><td class=\"\">the disk &lt;is&gt; full</td>"));
}

/// The tick labels of the value axis.
std::vector<std::string> value_ticks(const LineChart& chart) {
  std::vector<std::string> texts;
  const auto svg = svg_of(chart);
  const std::string begin = "<text class=\"y\"";
  for (size_t at = svg.find(begin); at != svg.npos; at = svg.find(begin, at + 1)) {
    const auto open = svg.find('>', at) + 1;
    texts.push_back(svg.substr(open, svg.find('<', open) - open));
  }
  EXPECT_EQ(texts.back(), "step");
  texts.pop_back();
  return texts;
}

TEST(LineChart, TicksOfAnAxisDiffer) {
  const auto chart = [](double least, double most) {
    return LineChart{
        .value_text = duration_text, .exact_name = " s", .curves = {{.steps = {1, 2}, .values = {least, most}}}};
  };
  EXPECT_THAT(value_ticks(chart(4e-7, 1.7e-6)), ElementsAre("0.5 us", "1 us", "1.5 us"));
  EXPECT_THAT(value_ticks(chart(0, 2e-3)), ElementsAre("0", "500 us", "1.0 ms", "1.5 ms", "2.0 ms"));
  EXPECT_THAT(value_ticks(chart(130, 145)), ElementsAre("130 s", "135 s", "140 s", "145 s")) << "all are 2 min";
}

TEST(LineChart, StepsAreAllInThousandsOrNone) {
  const auto svg_to = [](double last) {
    return svg_of(LineChart{.value_text = short_number, .curves = {{.steps = {0, last}, .values = {1, 2}}}});
  };
  EXPECT_THAT(svg_to(10000), HasSubstr(">2k</text>"));
  EXPECT_THAT(svg_to(10000), HasSubstr(">10k</text>"));
  EXPECT_THAT(svg_to(8000), HasSubstr(">8000</text>"));
}

TEST(LineChart, HasGapsWhereThereIsNoNumber) {
  const Curve curve{.name = "loss", .steps = {1, 2, 3, 4, 5}, .values = {5, 4, kNan, 2, 1}};
  const auto svg = svg_of(LineChart{.title = "Loss", .value_text = short_number, .curves = {curve}});
  EXPECT_EQ(count_of(svg, "<polyline"), 2u);
  EXPECT_THAT(svg, HasSubstr("points=\"58,10 ")) << "the largest value stands at the top left";
  auto joined = curve;
  joined.has_gaps = true;
  const auto dots = svg_of(LineChart{.title = "Loss", .value_text = short_number, .curves = {joined}});
  EXPECT_EQ(count_of(dots, "<polyline"), 1u);
  EXPECT_EQ(count_of(dots, "<circle"), 4u);
  EXPECT_EQ(svg_of(LineChart{.value_text = short_number, .curves = {{.steps = {1}, .values = {kNan}}}}), "");
}

TEST(LineChart, ALongCurveKeepsItsPeaks) {
  Curve curve{.name = "norm"};
  for (int step = 1; step <= 100000; ++step) {
    curve.steps.push_back(step);
    curve.values.push_back(step == 54321 ? 100 : 1);
  }
  const auto svg = svg_of(LineChart{.title = "Norm", .value_text = short_number, .curves = {curve}});
  EXPECT_LT(svg.size(), 40000u);
  EXPECT_EQ(count_of(svg, ",10 "), 1u) << "one point at the top";
}

TEST(LineChart, TicksAreRoundNumbers) {
  EXPECT_THAT(axis_ticks(0, 10), ElementsAre(0, 2, 4, 6, 8, 10));
  EXPECT_THAT(axis_ticks(3.9, 4.2), ElementsAre(DoubleEq(3.9), DoubleEq(4.0), DoubleEq(4.1), DoubleEq(4.2)));
  EXPECT_THAT(axis_ticks(2, 2), ElementsAre(2));
  EXPECT_EQ(axis_ticks(-1e-5, 1e-5)[2], 0);
}

TEST(HtmlText, PlacesAreShort) {
  EXPECT_EQ(place_text(58), "58");
  EXPECT_EQ(place_text(0.005), "0.01");
  EXPECT_EQ(place_text(100), "100");
}

}  // namespace
}  // namespace megashard
