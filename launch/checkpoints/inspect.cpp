#include <fnmatch.h>

#include <CLI/CLI.hpp>

#include <algorithm>
#include <cstdio>
#include <iostream>
#include <nlohmann/json.hpp>
#include <set>

#include "checkpoint/checkpoint.h"
#include "checkpoint/inspect/checkpoint_diff.h"
#include "checkpoint/inspect/checkpoint_summary.h"
#include "checkpoint/steps/retention.h"
#include "checkpoint/values/value_text.h"
#include "framework/arguments/nearest_name.h"
#include "framework/diagnostics.h"
#include "launch/checkpoints/flag_mistakes.h"
#include "launch/checkpoints/inspect_summary.h"
#include "launch/output/help_format.h"
#include "launch/output/text_table.h"
#include "launch/shell/subcommands.h"

namespace megashard {
namespace {

using nlohmann::ordered_json;

struct InspectFlags {
  std::string path;
  std::vector<std::string> diff;
  std::optional<int64_t> ckpt_step;
  std::string filter;
  bool json = false;
  bool all = false;
  bool chunks = false;
  bool verify = false;

  bool wants(const std::string& name) const {
    return filter.empty() || ::fnmatch(filter.c_str(), name.c_str(), 0) == 0;
  }
};

void print_json(const ordered_json& json) {
  // names may be invalid UTF-8
  std::cout << json.dump(2, ' ', false, ordered_json::error_handler_t::replace) << "\n";
}

/// "2: __0_0.distcp, __1_0.distcp"
std::string chunk_text(const std::vector<StoredChunk>& chunks) {
  std::set<std::string> files;
  for (const auto& chunk : chunks) files.insert(chunk.file);
  std::string text = std::to_string(chunks.size());
  size_t shown = 0;
  for (const auto& file : files) {
    if (++shown > 3) return text + ", ... (" + std::to_string(files.size()) + " files)";
    text += (shown == 1 ? ": " : ", ") + printable(file);
  }
  return text;
}

struct Totals {
  int64_t tensors = 0;
  int64_t elements = 0;
  int64_t bytes = 0;
};

Totals totals_of(const CheckpointReader& reader, const InspectFlags& flags) {
  Totals totals;
  for (const auto& info : reader.tensors()) {
    if (!flags.wants(info.name)) continue;
    ++totals.tensors;
    totals.elements += checked_numel(info.sizes).value_or(0);
    totals.bytes += tensor_bytes(info);
  }
  return totals;
}

/// Keys selected by the flags that are not tensors: plain values and their parts.
std::vector<std::string> plain_keys(const CheckpointReader& reader, const InspectFlags& flags) {
  std::vector<std::string> keys;
  for (const auto& [key, path] : reader.value_keys()) {
    if (reader.find(key) == nullptr && flags.wants(key)) keys.push_back(key);
  }
  return keys;
}

ordered_json all_json(CheckpointReader& reader, const InspectFlags& flags) {
  const auto summary = summarise(reader);
  ordered_json json = {{"path", reader.path()}, {"format", reader.format()}};
  if (summary.iteration) json["iteration"] = *summary.iteration;
  json["summary"] = checkpoint_summary_json(summary);
  const auto totals = totals_of(reader, flags);
  json["totals"] = {{"tensors", totals.tensors}, {"elements", totals.elements}, {"bytes", totals.bytes}};
  json["files"] = ordered_json::array();
  for (const auto& [name, bytes] : summary.files) json["files"].push_back({{"name", name}, {"bytes", bytes}});
  json["tensors"] = ordered_json::array();
  for (const auto& info : reader.tensors()) {
    if (!flags.wants(info.name)) continue;
    auto chunks = ordered_json::array();
    for (const auto& chunk : reader.chunks(info.name)) {
      chunks.push_back({{"offsets", chunk.offsets},
                        {"shape", chunk.sizes},
                        {"file", chunk.file},
                        {"offset", chunk.range.offset},
                        {"bytes", chunk.range.length}});
    }
    json["tensors"].push_back({{"name", info.name},
                               {"dtype", torch_dtype_name(info.dtype)},
                               {"shape", info.sizes},
                               {"bytes", tensor_bytes(info)},
                               {"chunks", std::move(chunks)}});
  }
  json["values"] = ordered_json::array();
  for (const auto& key : plain_keys(reader, flags))
    json["values"].push_back({{"name", key}, {"value", value_json(reader.read_value(key))}});
  return json;
}

void print_tensors(const CheckpointReader& reader, const InspectFlags& flags) {
  TextTable table({"tensor", "dtype", "shape", "MiB", "chunks"}, {3});
  for (const auto& info : reader.tensors()) {
    if (!flags.wants(info.name)) continue;
    const auto chunks = reader.chunks(info.name);
    table.add({printable(info.name), torch_dtype_name(info.dtype), describe_sizes(info.sizes),
               mebibytes(tensor_bytes(info)), chunk_text(chunks)});
    if (!flags.chunks) continue;
    for (const auto& chunk : chunks) {
      table.add({"  at " + describe_sizes(chunk.offsets), "", describe_sizes(chunk.sizes),
                 mebibytes(chunk.range.length),
                 printable(chunk.file) + " at byte " + std::to_string(chunk.range.offset) + ", " +
                     std::to_string(chunk.range.length) + " bytes"});
    }
  }
  table.print();
}

void print_values(CheckpointReader& reader, const InspectFlags& flags) {
  TextTable table({"value", ""});
  for (const auto& key : plain_keys(reader, flags)) {
    const auto value = reader.read_value(key);
    const auto* fields = namespace_fields(value);
    table.add({printable(key), fields == nullptr ? value_text(value) : value.kind()});
    if (fields == nullptr) continue;
    for (const auto& [name, field] : fields->entries) {
      const auto* text = name.get_if<std::string>();
      table.add({"  " + (text == nullptr ? value_text(name) : printable(*text)), value_text(field)});
    }
  }
  table.print();
}

void print_all(CheckpointReader& reader, const InspectFlags& flags) {
  const auto summary = summarise(reader);
  print_checkpoint_summary(reader, summary);
  const auto totals = totals_of(reader, flags);
  const bool filters = !flags.filter.empty();
  if (filters) {
    std::cout << "  --filter       " << totals.tensors << " tensors, " << totals.elements << " elements, "
              << mebibytes(totals.bytes) << " MiB\n";
  }
  if (flags.all || flags.chunks || filters) print_tensors(reader, flags);
  if (flags.all || filters) print_values(reader, flags);
  if (!flags.all) {
    if (!flags.chunks && !filters) std::cout << "\n--all shows each tensor, value and file, --filter PATTERN some\n";
    return;
  }
  TextTable files({"file", "MiB"}, {1});
  for (const auto& [name, size] : summary.files) files.add({printable(name), size < 0 ? "missing" : mebibytes(size)});
  files.print();
}

/// `passed_over`: newer steps that were skipped, with the reasons.
int verify(CheckpointReader& reader, const std::vector<std::string>& passed_over, const InspectFlags& flags) {
  std::vector<std::string> faults;
  const auto add = [&](const std::string& fault) {
    faults.push_back(fault);
    if (!flags.json) std::cout << "damaged: " << printable(fault) << std::endl;
  };
  for (const auto& line : passed_over) add(line);
  const auto checked = verify_checkpoint(reader, add);
  if (flags.json) {
    print_json({{"path", reader.path()},
                {"format", reader.format()},
                {"bytes", checked.bytes},
                {"bytes_without_checksum", checked.without_checksum},
                {"faults", faults}});
  } else {
    std::cout << printable(reader.path()) << ": " << mebibytes(checked.bytes) << " MiB read";
    if (checked.without_checksum > 0)
      std::cout << ", of which " << mebibytes(checked.without_checksum) << " MiB have no checksum";
    std::cout << "; " << (faults.empty() ? "whole" : std::to_string(faults.size()) + " faults") << "\n";
  }
  return faults.empty() ? 0 : 1;
}

/// Throws if the filter matches nothing, with a suggestion: a part of a name needs asterisks.
void check_filter(const std::vector<CheckpointReader*>& readers, const InspectFlags& flags) {
  if (flags.filter.empty()) return;
  const auto part = "*" + flags.filter + "*";
  std::vector<std::string> names;
  int64_t with_part = 0;
  for (const auto* reader : readers) {
    for (const auto& info : reader->tensors()) names.push_back(info.name);
    for (const auto& [key, path] : reader->value_keys())
      if (reader->find(key) == nullptr) names.push_back(key);
  }
  for (const auto& name : names) {
    if (flags.wants(name)) return;
    with_part += ::fnmatch(part.c_str(), name.c_str(), 0) == 0;
  }
  throw UsageError("inspect: no tensor or value of " + readers[0]->path() + " fits --filter " +
                   printable(flags.filter) +
                   (with_part > 0 ? "; did you mean \"" + part + "\", which fits " + std::to_string(with_part) +
                                        (with_part == 1 ? " name?" : " names?")
                                  : did_you_mean(flags.filter, names)));
}

std::string or_dash(const std::string& text) { return text.empty() ? "-" : printable(text); }

void print_difference(const CheckpointDifference& difference, const InspectFlags& flags) {
  std::cout << "A " << printable(flags.diff[0]) << "\nB " << printable(flags.diff[1]) << "\n"
            << difference.equal_tensors << " tensors and " << difference.equal_values << " values are equal; "
            << difference.tensors.size() << " tensors and " << difference.values.size() << " values differ\n";
  TextTable tensors({"tensor", "A", "B", "elements", "largest |A - B|"}, {3, 4});
  for (const auto& each : difference.tensors) {
    char largest[32];
    std::snprintf(largest, sizeof largest, "%.6g", each.largest);
    const bool compared = each.differing > 0;
    tensors.add({printable(each.name), or_dash(each.a), or_dash(each.b),
                 compared ? std::to_string(each.differing) : "-", compared ? largest : "-"});
  }
  tensors.print();
  TextTable values({"value", "A", "B"});
  for (const auto& each : difference.values)
    values.add({printable(each.key), each.a.empty() ? "-" : each.a, each.b.empty() ? "-" : each.b});
  values.print();
}

ordered_json difference_json(const CheckpointDifference& difference, const InspectFlags& flags) {
  ordered_json json = {{"a", flags.diff[0]},
                       {"b", flags.diff[1]},
                       {"equal_tensors", difference.equal_tensors},
                       {"equal_values", difference.equal_values},
                       {"tensors", ordered_json::array()},
                       {"values", ordered_json::array()}};
  for (const auto& each : difference.tensors) {
    json["tensors"].push_back(
        {{"name", each.name}, {"a", each.a}, {"b", each.b}, {"differing", each.differing}, {"largest", each.largest}});
  }
  for (const auto& each : difference.values)
    json["values"].push_back({{"name", each.key}, {"a", each.a}, {"b", each.b}});
  return json;
}

void warn(const std::string& line) { std::cerr << "WARNING: " << printable(line) << std::endl; }

int diff(const InspectFlags& flags) {
  const auto a = open_checkpoint(flags.diff[0], flags.ckpt_step, warn);
  const auto b = open_checkpoint(flags.diff[1], flags.ckpt_step, warn);
  check_filter({a.get(), b.get()}, flags);
  const auto difference = diff_checkpoints(*a, *b, [&](const std::string& name) { return flags.wants(name); });
  if (flags.json) {
    print_json(difference_json(difference, flags));
  } else {
    print_difference(difference, flags);
  }
  return difference.any() ? 1 : 0;
}

int inspect(InspectFlags flags) {
  if (!flags.diff.empty() && !flags.path.empty()) throw UsageError("inspect takes a PATH or --diff A B, not both");
  if (flags.verify && !(flags.filter.empty() && flags.diff.empty()))
    throw UsageError("inspect: --verify reads all of one checkpoint; leave --filter and --diff out");
  for (auto& path : flags.diff) path = resolve_best_step(path);
  flags.path = resolve_best_step(flags.path);
  if (!flags.diff.empty()) return diff(flags);
  if (flags.path.empty()) throw UsageError("inspect takes a PATH, or --diff A B");
  std::vector<std::string> passed_over;
  const auto reader =
      open_checkpoint(flags.path, flags.ckpt_step, [&](const std::string& line) { passed_over.push_back(line); });
  if (flags.verify) return verify(*reader, passed_over, flags);
  for (const auto& line : passed_over) warn(line);
  check_filter({reader.get()}, flags);
  if (flags.json) {
    print_json(all_json(*reader, flags));
  } else {
    print_all(*reader, flags);
  }
  return 0;
}

}  // namespace

int run_inspect(int argc, char** argv) {
  InspectFlags flags;
  CLI::App app("shows, checks and compares checkpoints", "megashard inspect");
  app.formatter(std::make_shared<HelpFormat>());
  app.add_option(
      "path", flags.path,
      "step folder, directory of a training (its latest whole step; DIR/best: of --save-best), Hugging Face directory, "
      ".safetensors or torch.save file");
  app.add_option("--ckpt-step", flags.ckpt_step, "the step of this iteration");
  app.add_flag("--all", flags.all, "each tensor, value and file as well");
  app.add_option("--filter", flags.filter, "the tensors and values whose names fit this pattern (* and ?)")
      ->type_name("PATTERN");
  app.add_flag("--chunks", flags.chunks, "each tensor, with a line for each of its chunks");
  app.add_flag("--json", flags.json, "everything, as JSON");
  app.add_flag("--verify", flags.verify, "read every byte and name what is damaged (exit code 1)");
  app.add_option("--diff", flags.diff, "compare A with B by names (exit code 1 when they differ)")
      ->expected(2)
      ->type_name("A B");
  app.footer("Examples:\n"
             "  megashard inspect runs/a                        # the latest whole step\n"
             "  megashard inspect runs/a --all                  # with its tensors and values\n"
             "  megashard inspect runs/a/best --filter '*norm*' # the best one, of --save-best\n"
             "  megashard inspect --diff runs/a/iter_0000100 runs/b/iter_0000100");
  if (!parse_words(app, argc, argv, "inspect: ", "; megashard inspect --help lists the flags")) return 0;
  return inspect(flags);
}

}  // namespace megashard
