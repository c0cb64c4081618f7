#include "checkpoint/values/pickle_writer.h"

#include <c10/util/Exception.h>

#include <cstring>
#include <unordered_map>

#include "checkpoint/values/tensor_info.h"

namespace megashard {
namespace {

class PickleWriter {
 public:
  std::string take(const Value& value) {
    out_ = std::string("\x80\x02", 2);
    write(value);
    out_ += '.';
    return std::move(out_);
  }

  void operator()(std::monostate) { out_ += 'N'; }
  void operator()(bool value) { out_ += value ? '\x88' : '\x89'; }

  void operator()(int64_t value) {
    if (value >= 0 && value < 256) {
      out_ += 'K';
      number(static_cast<uint64_t>(value), 1);
    } else if (value >= INT32_MIN && value <= INT32_MAX) {
      out_ += 'J';
      number(static_cast<uint64_t>(value), 4);
    } else {
      out_ += "\x8a\x08";
      number(static_cast<uint64_t>(value), 8);
    }
  }

  void operator()(const BigInt& value) {
    TORCH_CHECK(value.little_endian.size() < 256, "an int of ", value.little_endian.size(),
                " bytes is too large for a checkpoint");
    out_ += '\x8a';
    number(value.little_endian.size(), 1);
    out_ += value.little_endian;
  }

  void operator()(double value) {
    uint64_t bits = 0;
    std::memcpy(&bits, &value, sizeof bits);
    out_ += 'G';
    for (int shift = 56; shift >= 0; shift -= 8) out_ += static_cast<char>(bits >> shift);
  }

  void operator()(const std::string& value) {
    if (recall('s' + value)) return;
    plain_string(value);
    memorise('s' + value);
  }

  void operator()(const Bytes& value) {  // protocol 2 has no bytes: _codecs.encode(text, "latin1")
    global("_codecs.encode");
    std::string utf8;
    for (const char c : value.data) {
      const auto byte = static_cast<unsigned char>(c);
      if (byte < 0x80) {
        utf8 += c;
      } else {
        utf8 += static_cast<char>(0xc0 | byte >> 6);
        utf8 += static_cast<char>(0x80 | (byte & 0x3f));
      }
    }
    plain_string(utf8);
    (*this)(std::string("latin1"));
    out_ += "\x86R";
  }

  void operator()(const List& value) {
    out_ += ']';
    append(value.items);
  }

  void operator()(const Tuple& value) {
    const auto count = value.items.size();
    if (count == 0) {
      out_ += ')';
      return;
    }
    if (count > 3) out_ += '(';
    for (const auto& item : value.items) write(item);
    out_ += count > 3 ? 't' : static_cast<char>(0x84 + count);
  }

  void operator()(const Dict& value) {
    out_ += '}';
    set_entries(value);
  }

  void operator()(at::ScalarType value) { global("torch." + torch_dtype_name(value)); }

  void operator()(const TorchSize& value) {
    global("torch.Size");
    Tuple sizes;
    for (const auto size : value.sizes) sizes.items.emplace_back(size);
    (*this)(sizes);
    out_ += "\x85R";
  }

  void operator()(const Global& value) { global(value.name); }

  void operator()(const std::shared_ptr<const Object>& object) {
    if (object->opcode == Object::Opcode::kPersId) {
      write(object->arguments);
      out_ += 'Q';
      return;
    }
    global(object->class_name);
    write(object->arguments);
    out_ += object->opcode == Object::Opcode::kNewObj ? '\x81' : 'R';
    append(object->items);
    set_entries(object->entries);
    if (object->state.is_none()) return;
    write(object->state);
    out_ += 'b';
  }

 private:
  void write(const Value& value) { std::visit(*this, value.data()); }

  void number(uint64_t value, int bytes) {
    for (int i = 0; i < bytes; ++i) out_ += static_cast<char>(value >> (8 * i));
  }

  void plain_string(const std::string& value) {
    TORCH_CHECK(value.size() <= UINT32_MAX, "a string of ", value.size(), " bytes is too long for a checkpoint");
    out_ += 'X';
    number(value.size(), 4);
    out_ += value;
  }

  void append(const std::vector<Value>& items) {
    if (items.empty()) return;
    out_ += '(';
    for (const auto& item : items) write(item);
    out_ += 'e';
  }

  void set_entries(const Dict& dict) {
    if (dict.entries.empty()) return;
    out_ += '(';
    for (const auto& [key, value] : dict.entries) {
      write(key);
      write(value);
    }
    out_ += 'u';
  }

  void global(const std::string& name) {
    if (recall('g' + name)) return;
    const auto dot = name.rfind('.');
    TORCH_CHECK(dot != std::string::npos && name.find('\n') == std::string::npos, "\"", name,
                "\" is not the name of a class");
    const auto colon = name.find(':');
    if (colon != std::string::npos && colon < dot) {  // nested: getattr(Outer, "Name")
      auto outer = name.substr(0, dot);
      if (outer.find('.', colon) == std::string::npos) outer[colon] = '.';
      global("__builtin__.getattr");
      global(outer);
      (*this)(name.substr(dot + 1));
      out_ += "\x86R";
    } else {
      out_ += 'c' + name.substr(0, dot) + '\n' + name.substr(dot + 1) + '\n';
    }
    memorise('g' + name);
  }

  bool recall(const std::string& key) {
    const auto found = memo_.find(key);
    if (found == memo_.end()) return false;
    const bool is_short = found->second < 256;
    out_ += is_short ? 'h' : 'j';
    number(found->second, is_short ? 1 : 4);
    return true;
  }

  void memorise(const std::string& key) {
    const auto index = static_cast<uint32_t>(memo_.size());
    memo_.emplace(key, index);
    const bool is_short = index < 256;
    out_ += is_short ? 'q' : 'r';
    number(index, is_short ? 1 : 4);
  }

  std::string out_;
  std::unordered_map<std::string, uint32_t> memo_;
};

}  // namespace

std::string write_pickle(const Value& value) { return PickleWriter().take(value); }

}  // namespace megashard
