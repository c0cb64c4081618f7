#include "launch/shell/completion.h"

#include <c10/util/StringUtil.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <sstream>

#include "framework/arguments/argument_table.h"
#include "framework/arguments/argument_value.h"
#include "framework/arguments/nearest_name.h"
#include "framework/diagnostics.h"

namespace megashard {
namespace {

/// A flag in a program's help.
struct HelpFlag {
  std::string name;  ///< "--lr-decay-style"
  bool takes_value = false;
  std::vector<std::string> choices{};  ///< choices of the value; empty: any
};

constexpr const char* kFlagLetters = "abcdefghijklmnopqrstuvwxyz0123456789-_";

/// The long name in "--json" or "-n,--processes".
std::string long_name(std::string word) {
  const auto begin = word.find("--");
  if (begin == word.npos) return "";
  word.erase(0, begin);
  return word.substr(0, word.find_first_not_of(kFlagLetters, 2));
}

/// Choices in "constant|linear"; empty for a type such as INT.
std::vector<std::string> choices_in(const std::string& word) {
  if (word.find('|') == word.npos) return {};
  auto choices = split_text(word, "|");
  std::erase_if(choices, [](const std::string& each) { return each.find_first_of("ABCDEFGHIJKLMNOPQRSTUVWXYZ") == 0; });
  return choices;
}

/// The flags of a program's --help, in order.
std::vector<HelpFlag> flags_in_help(const std::string& help) {
  std::vector<HelpFlag> flags;
  std::istringstream lines(help);
  for (std::string line; std::getline(lines, line);) {
    if (!line.starts_with("  -")) continue;
    for (std::string rest; line.ends_with('|') && std::getline(lines, rest);) {
      line += rest.substr(std::min(rest.find_first_not_of(' '), rest.size()));  // long lists of choices are wrapped
    }
    // An explanation follows two spaces.
    const std::string usage = line.substr(2, line.find("  ", 2) - 2);
    std::istringstream words(usage);
    std::string word, value;
    words >> word >> value;
    const std::string name = long_name(word);
    if (name.size() < 3 || std::ranges::find(flags, name, &HelpFlag::name) != flags.end()) continue;
    const bool takes_value = !value.empty() && !value.starts_with("-") && !word.ends_with(",");
    flags.push_back({name, takes_value, takes_value ? choices_in(value) : std::vector<std::string>{}});
  }
  return flags;
}

std::vector<std::string> names_of(const std::vector<HelpOfProgram>& programs) {
  std::vector<std::string> names;
  for (const auto& each : programs) names.push_back(each.name);
  return names;
}

std::vector<std::string> names_of(const std::vector<HelpFlag>& flags) {
  std::vector<std::string> names;
  for (const auto& each : flags) names.push_back(each.name);
  return names;
}

/// The subcommand of a line: the second word, or the one after `launch ... --`.
constexpr const char* kBashHead =
    R"(# bash completion of megashard; source it, or put it into /usr/share/bash-completion/completions.
_megashard() {
  local cur=${COMP_WORDS[COMP_CWORD]} prev=${COMP_WORDS[COMP_CWORD-1]} sub=${COMP_WORDS[1]} i first=1
  if [[ $sub == launch ]]; then
    for ((i = 2; i < COMP_CWORD; ++i)); do
      [[ ${COMP_WORDS[i]} == -- ]] && { sub=${COMP_WORDS[i+1]}; first=$((i + 1)); break; }
    done
  fi
  if ((COMP_CWORD == first)); then
    COMPREPLY=($(compgen -W "@PROGRAMS@" -- "$cur"))
    return
  fi
  local flags=
  case $sub in
)";

std::string bash(const std::vector<HelpOfProgram>& programs) {
  std::string head = kBashHead, values;
  head.replace(head.find("@PROGRAMS@"), 10, c10::Join(" ", names_of(programs)));
  for (const auto& program : programs) {
    const auto flags = flags_in_help(program.help);
    head += "    " + program.name + ") flags=\"" + c10::Join(" ", names_of(flags)) + "\" ;;\n";
    for (const auto& flag : flags) {
      if (flag.choices.empty()) continue;
      values += "    " + program.name + ":" + flag.name + ") COMPREPLY=($(compgen -W \"" +
                c10::Join(" ", flag.choices) + "\" -- \"$cur\")); return ;;\n";
    }
  }
  return head + "  esac\n  case $sub:$prev in\n" + values +
         "  esac\n  if [[ $cur == -* ]]; then\n    COMPREPLY=($(compgen -W \"$flags\" -- \"$cur\"))\n  else\n"
         "    COMPREPLY=($(compgen -f -- \"$cur\"))\n  fi\n}\ncomplete -o filenames -F _megashard megashard\n";
}

std::string zsh(const std::vector<HelpOfProgram>& programs) {
  std::string text =
      "#compdef megashard\n# zsh completion of megashard; put it into a folder of $fpath as _megashard.\n"
      "_megashard() {\n  local sub=$words[2] first=2 behind=${words[(i)--]}\n"
      "  if [[ $sub == launch && $behind -lt $CURRENT ]]; then\n"
      "    first=$((behind + 1)); sub=$words[first]\n  fi\n"
      "  if ((CURRENT == first)); then\n    local -a programs=(\n";
  for (const auto& program : programs) text += "      '" + program.name + ":" + program.purpose + "'\n";
  text += "    )\n    _describe program programs\n    return\n  fi\n  case $sub:$words[CURRENT-1] in\n";
  std::string flags_of;
  for (const auto& program : programs) {
    const auto flags = flags_in_help(program.help);
    flags_of += "      " + program.name + ") compadd -- " + c10::Join(" ", names_of(flags)) + " ;;\n";
    for (const auto& flag : flags) {
      if (!flag.choices.empty())
        text +=
            "    " + program.name + ":" + flag.name + ") compadd -- " + c10::Join(" ", flag.choices) + "; return ;;\n";
    }
  }
  return text + "  esac\n  if [[ $PREFIX == -* ]]; then\n    case $sub in\n" + flags_of +
         "    esac\n  else\n    _files\n  fi\n}\n_megashard \"$@\"\n";
}

/// fish offers no flags after --; after launch's -- this offers those of the command without launch.
constexpr const char* kFishHead =
    R"(# fish completion of megashard; put it into ~/.config/fish/completions as megashard.fish.
function __megashard_is_behind_launch
  set -l words (commandline -opc)
  test "$words[2]" = launch; and contains -- -- $words
end
function __megashard_behind_launch
  set -l words (commandline -opc) (commandline -ct)
  complete -C "megashard "(string join ' ' -- $words[(math 1 + (contains -i -- -- $words))..-1])
end
complete -c megashard -n __megashard_is_behind_launch -f -a '(__megashard_behind_launch)'
)";

std::string fish(const std::vector<HelpOfProgram>& programs) {
  std::string text = kFishHead;
  for (const auto& program : programs) {
    text += "complete -c megashard -n __fish_use_subcommand -f -a " + program.name + " -d '" + program.purpose + "'\n";
    for (const auto& flag : flags_in_help(program.help)) {
      text += "complete -c megashard -n '__fish_seen_subcommand_from " + program.name + "' -l " + flag.name.substr(2);
      if (!flag.choices.empty()) {
        text += " -x -a '" + c10::Join(" ", flag.choices) + "'";
      } else if (flag.takes_value) {
        text += " -r";
      }
      text += "\n";
    }
  }
  return text;
}

using nlohmann::ordered_json;

ordered_json json_value(const ArgumentValue& value) {
  return std::visit(
      [](const auto& each) {
        if constexpr (std::is_same_v<std::decay_t<decltype(each)>, std::monostate>)
          return ordered_json();
        else
          return ordered_json(each);
      },
      value);
}

/// A row of the table of pretrain's arguments, which infer and plan take, too.
ordered_json row_json(const Option& option) {
  static const Arguments defaults;
  constexpr const char* kTypes[] = {"none", "switch", "integer", "number", "text", "integers", "texts"};
  constexpr const char* kStatus[] = {"used", "without effect", "refused"};
  ordered_json row = {{"name", option.name},
                      {"flag", option.flag},
                      {"aliases", option.aliases},
                      {"group", option.group},
                      {"type", kTypes[static_cast<size_t>(option.type)]},
                      {"values", option.nargs},
                      {"switch_value", option.switch_value},
                      {"default", option.read ? json_value(option.read(defaults)) : ordered_json()},
                      {"choices", option.choices},
                      {"range", range_text(option.range)},
                      {"help", option.help},
                      {"status", kStatus[static_cast<size_t>(option.status)]}};
  if (!option.reason.empty()) row["reason"] = option.reason;
  return row;
}

/// For megashard's Python package, and other programs that show or check flags: {"arguments": [row, ...], "programs":
/// {"plan": [{"flag": "--fit", ...}, ...]}}. A program's flags are those in its help.
std::string flags_as_json(const std::vector<HelpOfProgram>& programs) {
  ordered_json json = {{"arguments", ordered_json::array()}, {"programs", ordered_json::object()}};
  for (const auto& option : option_table()) {
    if (option.status != OptionStatus::kComputed) json["arguments"].push_back(row_json(option));
  }
  for (const auto& program : programs) {
    auto& flags = json["programs"][program.name] = ordered_json::array();
    for (const auto& each : flags_in_help(program.help))
      flags.push_back({{"flag", each.name}, {"takes_value", each.takes_value}, {"choices", each.choices}});
  }
  return json.dump(1) + "\n";
}

/// Escapes lines for verbatim output in troff.
std::string verbatim(const std::string& text) {
  std::string lines = ".nf\n";
  for (const char letter : text) {
    if (letter == '\\' || letter == '-') lines += '\\';
    if ((letter == '.' || letter == '\'') && lines.ends_with('\n')) lines += "\\&";
    lines += letter;
  }
  return lines + (text.ends_with('\n') ? "" : "\n") + ".fi\n";
}

std::string page(const std::string& name, const std::string& purpose, const std::string& version,
                 const std::string& help) {
  return ".TH " + name + " 1 \"\" \"megashard " + version + "\"\n.SH NAME\n" + name + " \\- " + purpose +
         "\n.SH DESCRIPTION\n" + verbatim(help);
}

}  // namespace

std::string completion_script(const std::string& shell, const std::vector<HelpOfProgram>& programs) {
  if (shell == "bash") return bash(programs);
  if (shell == "zsh") return zsh(programs);
  if (shell == "fish") return fish(programs);
  if (shell == "json") return flags_as_json(programs);
  const auto hint = did_you_mean(shell, {"bash", "zsh", "fish", "json"});
  throw UsageError("completion takes bash, zsh, fish or json, got \"" + shell + "\"" + (hint.empty() ? "." : hint));
}

std::string manual_page(const std::vector<HelpOfProgram>& programs, const std::string& version) {
  std::string text;
  for (const auto& each : programs) text += "megashard-" + each.name + "(1): " + each.purpose + "\n";
  return page("megashard", "trains models, and what belongs to it", version, "megashard SUBCOMMAND [FLAGS]\n\n" + text);
}

std::string manual_page(const HelpOfProgram& program, const std::string& version) {
  return page("megashard-" + program.name, program.purpose, version, program.help);
}

}  // namespace megashard
