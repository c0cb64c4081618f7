#include "framework/arguments/saved_arguments.h"

#include <c10/util/StringUtil.h>

#include <string>
#include <type_traits>

#include "checkpoint/checkpoint.h"
#include "checkpoint/dcp/checkpoint_format.h"
#include "checkpoint/files/file_io.h"
#include "checkpoint/steps/find_step.h"
#include "checkpoint/steps/manifest.h"
#include "checkpoint/steps/retention.h"
#include "checkpoint/values/torch_archive.h"

namespace megashard {
namespace {

Value to_value(const ArgumentValue& value) {
  return std::visit(
      [](const auto& each) -> Value {
        using T = std::decay_t<decltype(each)>;
        if constexpr (std::is_same_v<T, std::monostate>) {
          return {};
        } else if constexpr (detail::kIsList<T>) {
          List list;
          for (const auto& item : each) list.items.emplace_back(item);
          return list;
        } else {
          return each;
        }
      },
      value);
}

/// A list of items of one type; None if any item has another type.
template <class T>
ArgumentValue to_list(const std::vector<Value>& items) {
  std::vector<T> list;
  for (const auto& item : items) {
    const auto* same = item.get_if<T>();
    if (same == nullptr) return std::monostate{};
    list.push_back(*same);
  }
  return list;
}

ArgumentValue to_argument(const Value& value) {
  if (const auto* flag = value.get_if<bool>()) return *flag;
  if (const auto* number = value.get_if<int64_t>()) return *number;
  if (const auto* number = value.get_if<double>()) return *number;
  if (const auto* text = value.get_if<std::string>()) return *text;
  const auto* list = value.get_if<List>();
  if (list == nullptr || list->items.empty()) return std::monostate{};
  return list->items.front().get_if<int64_t>() != nullptr ? to_list<int64_t>(list->items)
                                                          : to_list<std::string>(list->items);
}

/// Calls visit(option, ours, theirs) for options that both sides know and that differ.
template <class Visit>
void for_each_difference(const Arguments& arguments, const ArgumentRecord& saved, const Visit& visit) {
  for (const auto& [name, ours] : argument_values(arguments)) {
    if (std::holds_alternative<std::monostate>(ours)) continue;
    const auto* theirs = find_known(saved, name);
    if (theirs != nullptr && !same_value(ours, *theirs)) visit(*find_argument(name), ours, *theirs);
  }
}

bool must_match(const Option& option, const Arguments& arguments) {
  if (option.name == "num_query_groups" && !arguments.group_query_attention) return false;
  return option.on_resume == OnResume::kMustMatch;
}

std::string remedy(const Option& option, const ArgumentValue& theirs, const Arguments& arguments) {
  if (arguments.hf_model && option.name == "untie_embeddings_and_output_weights") {
    const bool was_tied = !std::get<bool>(theirs);
    return std::string("its model was ") + (was_tied ? "tied" : "not tied") +
           "; write \"tie_word_embeddings\": " + (was_tied ? "true" : "false") + " into " + *arguments.hf_model +
           "/config.json";
  }
  if (arguments.hf_model) {
    return "it was trained from another model than --hf-model " + *arguments.hf_model + "; give that one";
  }
  const bool has_flag = option.status == OptionStatus::kUsed && !option.is_switch();
  return "give " +
         (has_flag ? option.flag + " " + argument_text(theirs) : std::string("the flags of the run that wrote it")) +
         ", or --use-checkpoint-args";
}

/// Damage of the bytes of a step's args; empty if none.
std::string damage_of_args(const std::string& folder) {
  std::string damage;
  try {
    const auto reader = open_step(folder);
    if (!reader->is_value("args")) return "";
    for (const auto& chunk : reader->chunks("args")) {
      const InputFile file(folder + "/" + chunk.file);
      verify_archive(TorchArchive(file, chunk.range), "args", [&damage](const std::string& fault) { damage = fault; });
    }
  } catch (const UnreadableError&) {
    throw;
  } catch (const c10::Error& error) {
    damage = error.what_without_backtrace();
  }
  return damage;
}

}  // namespace

Dict to_dict(const ArgumentRecord& record) {
  Dict dict;
  for (const auto& [name, value] : record) dict.set(name, to_value(value));
  return dict;
}

ArgumentRecord to_record(const Dict& dict) {
  ArgumentRecord record;
  for (const auto& [name, value] : dict.entries) {
    if (const auto* text = name.get_if<std::string>()) {
      record.emplace_back(*text, to_argument(value));
    }
  }
  return record;
}

const ArgumentValue* find_known(const ArgumentRecord& record, const std::string& name) {
  for (const auto& [each, value] : record) {
    if (each == name) return std::holds_alternative<std::monostate>(value) ? nullptr : &value;
  }
  return nullptr;
}

void check_checkpoint_arguments(const Arguments& arguments, const ArgumentRecord& saved, const std::string& folder) {
  Mistakes mistakes;
  for_each_difference(
      arguments, saved, [&](const Option& option, const ArgumentValue& ours, const ArgumentValue& theirs) {
        const bool is_told = arguments.hf_model && !mistakes.none();  // the model differs, which one message reports
        if (is_told || !must_match(option, arguments)) return;
        mistakes.add("the checkpoint " + folder + " has " + option.name + " " + argument_text(theirs) +
                     ", and this run has " + argument_text(ours) + ": " + remedy(option, theirs, arguments) + ".");
      });
  mistakes.throw_if_any();
}

std::string changed_arguments(const Arguments& arguments, const ArgumentRecord& saved, bool takes_schedule) {
  std::vector<std::string> changes;
  for_each_difference(arguments, saved,
                      [&](const Option& option, const ArgumentValue& ours, const ArgumentValue& theirs) {
                        if (option.in_scheduler_state && takes_schedule) return;
                        if (option.status != OptionStatus::kUsed || option.on_resume == OnResume::kFree) return;
                        changes.push_back(option.name + " " + argument_text(theirs) + " -> " + argument_text(ours));
                      });
  return c10::Join(", ", changes);
}

void take_checkpoint_arguments(Arguments& arguments, const DiagnosticSink& sink) {
  if (!arguments.load) {
    throw UsageError("--use-checkpoint-args needs --load, the folder of the checkpoint to ask.");
  }
  if (arguments.hf_model) {
    throw UsageError("--use-checkpoint-args and --hf-model " + *arguments.hf_model +
                     " both say what the model is; leave one out.");
  }
  std::optional<CheckpointStep> step;
  value_errors_are_mistakes([&] {
    step = find_step(resolve_best_step(*arguments.load), nullptr,
                     {.ckpt_step = arguments.ckpt_step,
                      .depth = VerifyDepth::kSizes,  // the ranks verify the bytes together later
                      .further_damage = damage_of_args});
  });
  if (!step) {
    sink(Severity::kNotice,
         "--use-checkpoint-args: " + *arguments.load + " holds no checkpoint yet, so the flags count.");
    return;
  }
  const auto loaded = load_checkpoint(
      *step, {}, nullptr, {.strict = false, .wanted = [](const std::string& key) { return key == "args"; }});
  const Value* args = loaded.values.find("args");
  const Dict* fields = args == nullptr ? nullptr : namespace_fields(*args);
  if (fields == nullptr) {
    throw UsageError("--use-checkpoint-args: " + step->folder +
                     " keeps no args; give the network's flags, or --hf-model.");
  }
  const ArgumentRecord saved = to_record(*fields);
  std::vector<std::string> taken;
  for (const auto& option : option_table()) {
    if (!option.from_checkpoint || option.status != OptionStatus::kUsed || arguments.is_given(option.name)) continue;
    const auto* value = find_known(saved, option.name);
    if (value == nullptr || !option.write(*value, arguments)) continue;
    taken.push_back(option.name + " " + argument_text(*value));
  }
  sink(Severity::kNotice, "From the args of " + step->folder + ": " + c10::Join(", ", taken) + ".");
}

}  // namespace megashard
