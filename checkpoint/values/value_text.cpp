#include "checkpoint/values/value_text.h"

#include <c10/util/Exception.h>

#include <cmath>
#include <nlohmann/json.hpp>

#include "checkpoint/values/numpy_value.h"
#include "checkpoint/values/tensor_info.h"

namespace megashard {
namespace {

using nlohmann::json;

constexpr char kDigits[] = "0123456789abcdef";

std::string hex_text(const std::string& bytes) {
  std::string text;
  for (const char c : bytes) {
    const auto byte = static_cast<unsigned char>(c);
    text += kDigits[byte >> 4];
    text += kDigits[byte & 15];
  }
  return text;
}

/// "numpy int32[624]" for the record of a numpy array; empty for other values and damaged records.
std::string numpy_text(const Value& value) {
  try {
    const auto tensor = numpy_tensor(value);
    if (!tensor) return {};
    return "numpy " + torch_dtype_name(tensor->scalar_type()) + describe_sizes(tensor->sizes().vec());
  } catch (const c10::Error&) {
    return {};
  }
}

class TextWriter {
 public:
  explicit TextWriter(size_t max_characters) : max_(max_characters) {}

  std::string take(const Value& value) {
    write(value);
    if (text_.size() <= max_) return std::move(text_);
    auto end = max_;  // do not cut inside a character
    while (end > 0 && (static_cast<unsigned char>(text_[end]) & 0xc0) == 0x80) --end;
    return text_.substr(0, end) + "...";
  }

  void operator()(std::monostate) { text_ += "None"; }
  void operator()(bool value) { text_ += value ? "True" : "False"; }
  void operator()(int64_t value) { text_ += std::to_string(value); }
  void operator()(double value) {
    if (std::isfinite(value)) {
      text_ += json(value).dump();
    } else {
      text_ += std::isnan(value) ? "nan" : value > 0 ? "inf" : "-inf";
    }
  }
  void operator()(const std::string& value) { text_ += "\"" + printable(value.substr(0, max_ + 1)) + "\""; }
  void operator()(const Bytes& value) { text_ += std::to_string(value.data.size()) + " bytes"; }
  void operator()(const BigInt& value) { text_ += "int of " + std::to_string(value.little_endian.size()) + " bytes"; }
  void operator()(const List& value) { sequence("[", value.items, "]"); }
  void operator()(const Tuple& value) { sequence("(", value.items, ")"); }
  void operator()(const Dict& value) {
    text_ += "{";
    fields(value, ": ");
    text_ += "}";
  }
  void operator()(at::ScalarType value) { text_ += "torch." + torch_dtype_name(value); }
  void operator()(const TorchSize& value) { text_ += "torch.Size(" + describe_sizes(value.sizes) + ")"; }
  void operator()(const Global& value) { text_ += printable(value.name); }
  void operator()(const std::shared_ptr<const Object>& object) {
    if (object->opcode == Object::Opcode::kPersId) {
      text_ += "a storage";
      return;
    }
    text_ += printable(object->class_name) + "(";
    const auto& arguments = object->arguments.as_items();
    items(arguments);
    items(object->items, !arguments.empty());
    fields(object->entries, ": ");
    if (const auto* state = object->state.get_if<Dict>()) {
      fields(*state, "=");
    } else if (!object->state.is_none()) {
      text_ += ", state ";
      write(object->state);
    }
    text_ += ")";
  }

 private:
  bool is_full() const { return text_.size() > max_; }

  void write(const Value& value) {
    if (is_full()) return;
    if (const auto numpy = numpy_text(value); !numpy.empty()) {
      text_ += numpy;
    } else {
      std::visit(*this, value.data());
    }
  }

  void items(const std::vector<Value>& values, bool follows = false) {
    for (size_t i = 0; i < values.size() && !is_full(); ++i) {
      if (i > 0 || follows) text_ += ", ";
      write(values[i]);
    }
  }
  void sequence(const char* open, const std::vector<Value>& values, const char* close) {
    text_ += open;
    items(values);
    text_ += close;
  }
  void fields(const Dict& dict, const char* between) {
    for (size_t i = 0; i < dict.entries.size() && !is_full(); ++i) {
      const auto& [key, value] = dict.entries[i];
      if (i > 0) text_ += ", ";
      if (const auto* name = key.get_if<std::string>()) {
        text_ += printable(name->substr(0, max_));
      } else {
        write(key);
      }
      text_ += between;
      write(value);
    }
  }

  size_t max_;
  std::string text_;
};

struct JsonWriter {
  json operator()(std::monostate) const { return nullptr; }
  json operator()(bool value) const { return value; }
  json operator()(int64_t value) const { return value; }
  json operator()(double value) const { return value; }
  json operator()(const std::string& value) const { return value; }
  json operator()(const Bytes& value) const { return {{"class", "bytes"}, {"hex", hex_text(value.data)}}; }
  json operator()(const BigInt& value) const {
    return {{"class", "int"}, {"little_endian_hex", hex_text(value.little_endian)}};
  }
  json operator()(const List& value) const { return array(value.items); }
  json operator()(const Tuple& value) const { return array(value.items); }
  json operator()(const Dict& value) const { return fields(value); }
  json operator()(at::ScalarType value) const { return "torch." + torch_dtype_name(value); }
  json operator()(const TorchSize& value) const { return value.sizes; }
  json operator()(const Global& value) const { return {{"class", "name"}, {"name", value.name}}; }
  json operator()(const std::shared_ptr<const Object>& object) const {
    json record = {{"class", object->class_name}};
    if (object->opcode == Object::Opcode::kPersId) record["class"] = "storage";
    const auto& arguments = object->arguments;
    const bool has_arguments = arguments.get_if<Tuple>() == nullptr || !arguments.as_items().empty();
    if (has_arguments) record["arguments"] = value_json(arguments);
    if (!object->items.empty()) record["items"] = array(object->items);
    if (!object->entries.entries.empty()) record["entries"] = fields(object->entries);
    if (!object->state.is_none()) record["state"] = value_json(object->state);
    return record;
  }

  static json array(const std::vector<Value>& values) {
    auto list = json::array();
    for (const auto& value : values) list.push_back(value_json(value));
    return list;
  }
  static json fields(const Dict& dict) {
    auto object = json::object();
    for (const auto& [key, value] : dict.entries) {
      const auto* name = key.get_if<std::string>();
      object[name != nullptr ? *name : value_text(key)] = value_json(value);
    }
    return object;
  }
};

}  // namespace

std::string printable(const std::string& text) {
  std::string safe;
  for (size_t i = 0; i < text.size(); ++i) {
    const auto byte = static_cast<unsigned char>(text[i]);
    const auto next = static_cast<unsigned char>(i + 1 < text.size() ? text[i + 1] : 0);
    const bool c1 = byte == 0xc2 && next >= 0x80 && next < 0xa0;  // U+0080 to U+009F
    if (byte >= 0x20 && byte != 0x7f && !c1) {
      safe += text[i];
    } else {
      const auto shown = c1 ? next : byte;
      safe += {'\\', 'x', kDigits[shown >> 4], kDigits[shown & 15]};
      i += c1;
    }
  }
  return safe;
}

std::string value_text(const Value& value, size_t max_characters) { return TextWriter(max_characters).take(value); }

json value_json(const Value& value) { return std::visit(JsonWriter(), value.data()); }

}  // namespace megashard
