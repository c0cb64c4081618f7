#include "launch/report/configuration_table.h"

#include <algorithm>
#include <map>
#include <set>

#include "framework/arguments/argument_table.h"
#include "launch/report/html_text.h"

namespace megashard {
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
