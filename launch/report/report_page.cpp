#include "launch/report/report_page.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <set>

#include "launch/output/short_text.h"
#include "launch/report/line_chart.h"
#include "launch/report/page_style.h"
#include "launch/report/run_charts.h"
#include "launch/report/trace_drawing.h"

namespace megashard {
namespace {

std::string key_of(size_t color, const std::string& text) {
  return "<span><i class=\"key c" + std::to_string(color % kCurveColors) + "\"></i>" + html_text(text) + "</span>";
}

std::string cell(const std::string& text, const char* kind = "number") {
  return std::string("<td class=\"") + kind + "\">" + html_text(text) + "</td>";
}

std::string titles_row(const std::vector<std::string>& titles) {
  std::string row = "<tr>";
  for (size_t i = 0; i < titles.size(); ++i)
    row += (i == 0 ? "<th>" : "<th class=\"number\">") + html_text(titles[i]) + "</th>";
  return row + "</tr>\n";
}

/// Median of the finite values; NaN if there are none.
double median(std::vector<double> values) {
  std::erase_if(values, [](double value) { return !std::isfinite(value); });
  if (values.empty()) return std::nan("");
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

std::vector<double> numbers_of(const ReportedRun& run, const std::string& key) {
  const auto found = run.numbers.find(key);
  return found == run.numbers.end() ? std::vector<double>() : found->second;
}

double last_number(const ReportedRun& run, const std::string& key) {
  double last = std::nan("");
  for (const double value : numbers_of(run, key)) last = std::isfinite(value) ? value : last;
  return last;
}

double fold(const ReportedRun& run, const std::string& key, const double& (*better)(const double&, const double&)) {
  double best = std::nan("");
  for (const double value : numbers_of(run, key)) {
    if (std::isfinite(value)) best = std::isfinite(best) ? better(best, value) : value;
  }
  return best;
}

std::string state_of(const ReportedRun& run) {
  if (run.starts.empty()) return "unknown";
  return run.starts.back().end.empty() ? "goes on, or was killed" : run.starts.back().end;
}

std::string summary_section(const Report& report) {
  std::string html = "<div class=\"wide\"><table>\n" +
                     titles_row({"run", "step", "loss", "best validation loss", "median tokens/s", "median MFU",
                                 "peak memory", "time in steps", "restarts", "checkpoints", "state"});
  for (size_t i = 0; i < report.runs.size(); ++i) {
    const auto& run = report.runs[i];
    double seconds = 0;
    for (const double value : numbers_of(run, "step_s")) seconds += std::isfinite(value) ? value : 0;
    const double mfu = median(numbers_of(run, "mfu"));
    const auto restarts = run.starts.empty() ? std::string("-") : std::to_string(run.starts.size() - 1);
    html += "<tr><td>" + key_of(i, run.name) + "</td>" + cell(short_number(run.steps.back())) +
            cell(short_number(last_number(run, "loss"))) +
            cell(short_number(fold(run, "validation_loss", std::min<double>))) +
            cell(short_number(median(numbers_of(run, "tokens_per_s")))) + cell(percent_text(mfu)) +
            cell(byte_text(fold(run, "peak_memory_bytes", std::max<double>))) + cell(duration_text(seconds)) +
            cell(restarts) + cell(std::to_string(run.checkpoints.size())) + cell(state_of(run)) + "</tr>\n";
  }
  return html + "</table></div>\n";
}

std::string charts_section(const Report& report) {
  std::string html = "<h2>Curves</h2>\n<p class=\"keys\">";
  for (size_t i = 0; i < report.runs.size() && report.runs.size() > 1; ++i) html += key_of(i, report.runs[i].name);
  if (report.runs.size() == 1 && report.runs[0].numbers.contains("validation_loss"))
    html += key_of(0, "training") + key_of(1, "validation");
  html += "</p>\n<div class=\"charts\">\n";
  for (const auto& chart : charts_of(report.runs)) {
    const auto svg = svg_of(chart);
    if (!svg.empty())
      html +=
          "<div class=\"card\"><h3>" + html_text(chart.title) + "</h3>" + svg + "<div class=\"reading\"></div></div>\n";
  }
  return html + "</div>\n<p class=\"soft\">Dashed lines: a run went on from a checkpoint.</p>\n";
}

std::string memory_section(const Report& report) {
  std::string html, bars;
  std::vector<std::string> classes;
  for (const auto& run : report.runs) {
    if (!run.memory || run.memory->bytes <= 0) continue;
    bars += "<h3>" + html_text(run.name) + ": " + byte_text(static_cast<double>(run.memory->bytes)) + " in step " +
            std::to_string(run.memory->step) + "</h3><div class=\"bar\">";
    std::string rows;
    for (const auto& [name, bytes] : run.memory->parts) {
      const auto known = std::find(classes.begin(), classes.end(), name);
      const auto color = static_cast<size_t>(known - classes.begin()) % kCurveColors;
      if (known == classes.end()) classes.push_back(name);
      const double share = static_cast<double>(bytes) / static_cast<double>(run.memory->bytes);
      const auto text = byte_text(static_cast<double>(bytes));
      bars += "<div class=\"part c" + std::to_string(color) + "\" style=\"width:" + place_text(100 * share) +
              "%\" title=\"" + html_text(name) + ": " + text + "\"></div>";
      rows += "<tr><td>" + key_of(color, name) + "</td>" + cell(text) + cell(percent_text(share)) + "</tr>\n";
    }
    bars += "</div><div class=\"wide\"><table>\n" + rows + "</table></div>\n";
  }
  html = "<h2>Memory of the fullest moment</h2>\n";
  if (bars.empty()) return html + "<p class=\"soft\">Not measured: --log-memory tells it by class.</p>\n";
  return html + "<p class=\"soft\">Of rank 0, by class.</p>\n" + bars;
}

/// Memory section below a trace's drawing.
std::string memory_of(const ReportedTrace& trace) {
  const auto drawing = memory_drawing_of(trace);
  if (drawing.empty()) return "";
  std::string keys;
  for (size_t i = 0; i < trace.memory_classes.size(); ++i) keys += key_of(i, trace.memory_classes[i]);
  return "<p>Memory, at most " + byte_text(fullest_bytes(trace)) + "</p><div class=\"wide\">" + drawing +
         "</div><p class=\"keys\">" + keys + "</p>";
}

std::string traces_section(const Report& report) {
  std::string html = "<h2>Timeline</h2>\n";
  if (report.traces.empty())
    return html +
           "<p class=\"soft\">No trace: --profile writes one, and so does plan --trace; give it as --trace.</p>\n";
  html += "<p class=\"keys\"><span><i class=\"key computes\"></i>compute</span>"
          "<span><i class=\"key communicates\"></i>communication</span></p>\n";
  for (const auto& trace : report.traces) {
    const auto share = [&](double seconds) {
      return duration_text(seconds) + " (" + percent_text(trace.seconds > 0 ? seconds / trace.seconds : 0) + ")";
    };
    html += "<div class=\"card\"><h3>" + html_text(trace.path) + "</h3><p>" + duration_text(trace.seconds) +
            ": compute " + share(trace.compute) + ", communication " + share(trace.communication) +
            ", of which exposed " + share(trace.exposed) + ", nothing at all " + share(trace.idle) +
            "</p><div class=\"wide\">" + drawing_of(trace) + "</div>" + memory_of(trace) + "</div>\n";
  }
  return html;
}

std::string starts_table(const ReportedRun& run) {
  if (run.starts.empty()) return "<p class=\"soft\">No record of its starts: there is no file of events.</p>\n";
  std::string html =
      "<div class=\"wide\"><table>\n" + titles_row({"started", "after step", "ranks", "ended", "last step"});
  for (const auto& start : run.starts) {
    const bool is_last = &start == &run.starts.back();
    html += "<tr>" + cell(start.time, "") + cell(std::to_string(start.step)) + cell(std::to_string(start.world_size)) +
            cell(!start.end.empty() ? start.end
                 : is_last          ? "not yet, or killed"
                                    : "killed, or an error") +
            cell(std::to_string(start.last)) + "</tr>\n";
  }
  return html + "</table></div>\n";
}

/// Nothing where all went well.
std::string failed_saves_table(const ReportedRun& run) {
  if (run.failed_saves.empty()) return "";
  std::string html = "<div class=\"wide\"><table>\n" + titles_row({"save failed", "step", "why"});
  for (const auto& save : run.failed_saves)
    html += "<tr>" + cell(save.time, "") + cell(std::to_string(save.step)) + cell(save.why, "") + "</tr>\n";
  return html + "</table></div>\n";
}

std::string checkpoints_table(const ReportedRun& run) {
  if (run.checkpoints.empty()) return "<p class=\"soft\">No checkpoints were found.</p>\n";
  std::string html = "<p class=\"soft\">In " + html_text(run.save) + "</p>\n<div class=\"wide\"><table>\n" +
                     titles_row({"checkpoint", "size", "written", ""});
  for (const auto& step : run.checkpoints) {
    html += "<tr>" + cell(step.name, "") + cell(byte_text(static_cast<double>(step.bytes))) + cell(step.time) +
            cell(std::string(step.is_latest ? "latest" : "") + (step.is_latest && step.is_best ? ", " : "") +
                 (step.is_best ? "best" : "")) +
            "</tr>\n";
  }
  return html + "</table></div>\n";
}

std::string history_section(const Report& report) {
  std::string html = "<h2>Restarts and checkpoints</h2>\n<div class=\"histories\">\n";
  for (const auto& run : report.runs)
    html += "<div class=\"card\"><h3>" + html_text(run.name) + "</h3>\n" + starts_table(run) + failed_saves_table(run) +
            checkpoints_table(run) + "</div>\n";
  return html + "</div>\n";
}

}  // namespace

std::string report_page(const Report& report) {
  std::string page(kReportMark);
  page += "\n<html lang=\"en\"><head><meta charset=\"utf-8\">"
          "<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\"><title>megashard "
          "report</title>\n<style>";
  page += kPageStyle;
  page += "</style></head>\n<body>\n<h1>Report of " +
          (report.runs.size() == 1 ? html_text(report.runs[0].name) : std::to_string(report.runs.size()) + " runs") +
          "</h1>\n<p class=\"soft\">Written " + html_text(report.written) + "</p>\n";
  page += summary_section(report) + charts_section(report) + memory_section(report) + traces_section(report) +
          history_section(report) + configuration_section(report.runs);
  return page + "<script>" + kPageScript + "</script>\n</body></html>\n";
}

}  // namespace megashard
