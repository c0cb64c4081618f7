#include <CLI/CLI.hpp>

#include <fstream>

#include "checkpoint/files/output_file.h"
#include "framework/diagnostics.h"
#include "framework/training/training_log.h"
#include "launch/checkpoints/flag_mistakes.h"
#include "launch/output/help_format.h"
#include "launch/output/terminal.h"
#include "launch/report/report_page.h"
#include "launch/shell/subcommands.h"

namespace megashard {
namespace {

/// The file to replace must be an earlier report: `--out metrics.jsonl` would destroy a run's record.
void check_report_file(const std::string& path) {
  std::error_code error;
  if (!std::filesystem::exists(path, error)) return;
  require(std::filesystem::is_regular_file(path, error), "--out " + path + " is no file; give the name of one.");
  std::string head(kReportMark.size(), '\0');
  std::ifstream(path).read(head.data(), static_cast<std::streamsize>(head.size()));
  require(head == kReportMark, "--out " + path + " is there and is no report; remove it, or give another name.");
}

void write_report(const std::string& path, const std::string& page) {
  try {
    write_file_atomically(path, page);
  } catch (const std::exception& error) {
    throw UsageError("--out " + path + " cannot be written: " + error.what());
  }
}

}  // namespace

int run_report(int argc, char** argv) {
  CLI::App app("one HTML page about runs: curves, memory, timeline, restarts, checkpoints", "megashard report");
  app.formatter(std::make_shared<HelpFormat>());
  std::vector<std::string> paths, traces;
  std::string out;
  app.add_option("RUN", paths, "the file of --metrics-file, or a folder that has it; a run may still go on")
      ->required()
      ->type_name("...");
  app.add_option("--trace", traces,
                 "Chrome traces of `--profile` or of `plan --trace`, besides those that the runs have written")
      ->type_name("FILE");
  app.add_option("--out", out,
                 "the page; an earlier one is replaced; unset: report.html in the run's folder, of several in this one")
      ->type_name("FILE");
  app.footer("Examples:\n"
             "  megashard report runs/a                          # writes runs/a/report.html\n"
             "  megashard report runs/a runs/b --out ab.html     # two runs, and how their flags differ\n"
             "  megashard report metrics.jsonl --trace plan.json # with the timeline of a planned step");
  if (!parse_words(app, argc, argv, "", "; `megashard report --help` lists the flags")) return 0;
  Report report{.written = log_time_now()};
  int64_t steps = 0;
  for (const auto& path : paths) {
    report.runs.push_back(read_run(path));
    steps += static_cast<int64_t>(report.runs.back().steps.size());
    for (const auto& trace : report.runs.back().traces) {
      if (std::filesystem::exists(trace)) report.traces.push_back(read_trace(trace));
    }
  }
  if (out.empty())
    out = paths.size() > 1 ? "report.html"
                           : std::filesystem::path(report.runs[0].metrics_file).parent_path() / "report.html";
  check_report_file(out);
  for (const auto& trace : traces) report.traces.push_back(read_trace(trace));
  write_report(out, report_page(report));
  print_line("wrote " + out + ": " + std::to_string(paths.size()) + (paths.size() == 1 ? " run, " : " runs, ") +
             std::to_string(steps) + " steps");
  return 0;
}

}  // namespace megashard
