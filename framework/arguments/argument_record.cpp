#include "framework/arguments/argument_record.h"

#include <type_traits>

namespace megashard {
namespace {

template <class T>
constexpr bool kIsList = std::is_same_v<T, std::vector<int64_t>> || std::is_same_v<T, std::vector<std::string>>;

Value to_value(const ArgumentValue& value) {
  return std::visit(
      [](const auto& each) -> Value {
        using T = std::decay_t<decltype(each)>;
        if constexpr (std::is_same_v<T, std::monostate>) {
          return {};
        } else if constexpr (kIsList<T>) {
          List list;
          for (const auto& item : each) list.items.emplace_back(item);
          return list;
        } else {
          return each;
        }
      },
      value);
}

/// None unless all items are of that type.
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

}  // namespace megashard
