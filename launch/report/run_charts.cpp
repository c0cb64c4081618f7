#include "launch/report/run_charts.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <map>
#include <set>
#include <string_view>

#include "framework/arguments/argument_table.h"
#include "launch/output/short_text.h"
#include "launch/report/page_style.h"

namespace megashard {
namespace {

struct KnownNumber {
  std::string_view key;
  const char* title;
  std::string (*value_text)(double value) = short_number;
  bool only_if_it_varies = false;
  double unit = 1;  ///< values are divided by it
  double exact_unit = 1;
  const char* exact_name = "";
};

constexpr KnownNumber of_seconds(std::string_view key, const char* title) {
  return {.key = key, .title = title, .value_text = duration_text, .exact_name = " s"};
}

constexpr std::array kKnownNumbers = {
    KnownNumber{"loss", "Loss"},
    KnownNumber{"grad_norm", "Norm of the gradients"},
    KnownNumber{"params_norm", "Norm of the parameters"},
    KnownNumber{"lr", "Learning rate"},
    KnownNumber{"tokens_per_s", "Tokens per second"},
    KnownNumber{.key = "mfu",
                .title = "Model FLOP utilization",
                .value_text = percent_text,
                .exact_unit = 0.01,
                .exact_name = " %"},
    of_seconds("step_s", "Time of a step"),
    of_seconds("data_wait_s", "Waited for data"),
    KnownNumber{"peak_memory_bytes", "Peak memory of a rank (MiB)", short_number, false, 1 << 20},
    KnownNumber{"loss_scale", "Loss scale"},
    KnownNumber{"skipped", "Skipped steps", short_number, true},
    KnownNumber{"zeros_in_grad", "Zeros in the gradients"},
    KnownNumber{"global_batch_size", "Global batch size", short_number, true},
};
constexpr std::string_view kValidationLoss = "validation_loss";
constexpr std::string_view kConsumed = "consumed_samples";  // a straight line

bool varies(const std::vector<ReportedRun>& runs, const std::string& key) {
  std::set<double> values;
  for (const auto& run : runs) {
    const auto found = run.numbers.find(key);
    if (found != run.numbers.end()) values.insert(found->second.begin(), found->second.end());
  }
  return values.size() > 1;
}

/// True if most steps have no value: drawn as points.
bool is_sparse(const std::vector<double>& values) {
  return 2 * std::ranges::count_if(values, [](double value) { return std::isfinite(value); }) <
         static_cast<std::ptrdiff_t>(values.size());
}

std::vector<double> in_units(std::vector<double> values, double unit) {
  for (double& value : values) value /= unit;
  return values;
}

LineChart chart_of(const std::vector<ReportedRun>& runs, const KnownNumber& number) {
  LineChart chart{.title = number.title,
                  .value_text = number.value_text,
                  .exact_unit = number.exact_unit,
                  .exact_name = number.exact_name};
  for (size_t i = 0; i < runs.size(); ++i) {
    const auto add = [&](std::string_view key, const std::string& name, size_t color, bool has_gaps) {
      const auto found = runs[i].numbers.find(std::string(key));
      if (found == runs[i].numbers.end()) return;
      chart.curves.push_back({.name = name,
                              .color = color % kCurveColors,
                              .steps = runs[i].steps,
                              .values = in_units(found->second, number.unit),
                              .has_gaps = has_gaps || is_sparse(found->second)});
    };
    const std::string of = runs.size() > 1 ? runs[i].name : "";
    const std::string space = of.empty() ? "" : " ";
    add(number.key, of.empty() ? number.title : of, i, false);
    // With several runs, each has a colour and points mark validation.
    if (number.key == "loss") add(kValidationLoss, of + space + "validation", runs.size() > 1 ? i : 1, true);
    for (size_t start = 1; start < runs[i].starts.size(); ++start)
      chart.restarts.push_back(static_cast<double>(runs[i].starts[start].step));
  }
  return chart;
}

}  // namespace

std::vector<LineChart> charts_of(const std::vector<ReportedRun>& runs) {
  std::set<std::string> keys;
  for (const auto& run : runs) {
    for (const auto& [key, values] : run.numbers) keys.insert(key);
  }
  const bool has_loss = keys.contains("loss");
  std::vector<LineChart> charts;
  for (const auto& number : kKnownNumbers) {
    const std::string key(number.key);
    if (keys.erase(key) > 0 && (!number.only_if_it_varies || varies(runs, key)))
      charts.push_back(chart_of(runs, number));
  }
  keys.erase(std::string(kConsumed));
  if (has_loss && keys.erase(std::string(kValidationLoss)) > 0) charts.front().title += " (points: validation)";
  for (const auto& key : keys) charts.push_back(chart_of(runs, {key, key.c_str()}));
  return charts;
}

namespace {

using Values = std::map<std::string, std::string>;

const Values& default_texts() {
  static const Values texts = [] {
    Values all;
    for (const auto& [name, value] : argument_values(Arguments())) all[name] = argument_text(value);
    return all;
  }();
  return texts;
}

std::string value_in(const ReportedRun& run, const std::string& name) {
  const auto given = run.arguments.find(name);
  if (given != run.arguments.end()) return given->second;
  const auto otherwise = default_texts().find(name);
  return otherwise == default_texts().end() ? "" : otherwise->second;
}

std::string arguments_table(const std::vector<const ReportedRun*>& runs, const std::set<std::string>& names) {
  std::string html = "<div class=\"wide\"><table>\n<tr><th>argument</th>";
  for (const auto* run : runs) html += "<th>" + html_text(run->name) + "</th>";
  html += "</tr>\n";
  for (const auto& name : names) {
    html += "<tr><td>" + html_text(name) + "</td>";
    for (const auto* run : runs) html += "<td>" + html_text(value_in(*run, name)) + "</td>";
    html += "</tr>\n";
  }
  return html + "</table></div>\n";
}

}  // namespace

std::string configuration_section(const std::vector<ReportedRun>& runs) {
  std::string html = "<h2>Configuration</h2>\n";
  std::vector<const ReportedRun*> known;
  std::set<std::string> names, different;
  for (const auto& run : runs) {
    if (run.starts.empty()) {
      html += "<p class=\"soft\">Of " + html_text(run.name) + " it is not known: there is no file of events.</p>\n";
      continue;
    }
    known.push_back(&run);
    for (const auto& [name, value] : run.arguments) names.insert(name);
  }
  if (known.empty()) return html;
  for (const auto& name : names) {
    const bool is_same = std::ranges::all_of(
        known, [&](const ReportedRun* run) { return value_in(*run, name) == value_in(*known[0], name); });
    if (!is_same) different.insert(name);
  }
  if (known.size() > 1) {
    html += "<h3>Differences</h3>\n";
    html += different.empty() ? "<p class=\"soft\">None.</p>\n" : arguments_table(known, different);
  }
  return html + "<details" + (known.size() == 1 ? " open" : "") +
         "><summary>All that differ from the defaults</summary>\n" + arguments_table(known, names) + "</details>\n";
}

}  // namespace megashard
