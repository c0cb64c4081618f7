#include "checkpoint/pickle_reader.h"

#include <c10/util/Exception.h>

#include <charconv>
#include <cstring>
#include <deque>
#include <unordered_map>

#include "checkpoint/pickle_graph.h"

namespace megashard {
namespace {

class PickleReader {
 public:
  PickleReader(std::string_view pickle, const std::string& where) : in_(pickle), where_(where) {}

  const PickleNode* run() {
    while (true) {
      opcode_at_ = at_;
      const auto opcode = static_cast<unsigned char>(take(1)[0]);
      if (opcode == '.') return pop();
      if (!scalar(opcode) && !container(opcode) && !memo(opcode) && !making(opcode)) {
        fail("opcode " + std::to_string(opcode) +
             " is not part of the pickles that checkpoints hold");
      }
    }
  }

  size_t position() const { return opcode_at_; }

 private:
  using Kind = PickleNode::Kind;

  [[noreturn]] void fail(const std::string& what) const {
    TORCH_CHECK(false, where_, ": at byte ", opcode_at_, ": ", what);
  }

  // Input.
  std::string_view take(uint64_t bytes) {
    if (bytes > in_.size() - at_) fail("the pickle is truncated");
    const auto part = in_.substr(at_, bytes);
    at_ += bytes;
    return part;
  }
  uint64_t number(int bytes) {
    const auto part = take(static_cast<uint64_t>(bytes));
    uint64_t value = 0;
    for (int i = bytes - 1; i >= 0; --i) value = value << 8 | static_cast<unsigned char>(part[i]);
    return value;
  }
  std::string line() {
    const auto end = in_.find('\n', at_);
    if (end == std::string_view::npos) fail("the pickle is truncated");
    const auto part = take(end - at_ + 1);
    return std::string(part.substr(0, part.size() - 1));
  }

  // Stack.
  PickleNode* make(Kind kind) {
    return &nodes_.emplace_back(PickleNode{kind, {}, {}, nullptr, {}});
  }
  void push(PickleNode* node) { stack_.push_back(node); }
  void push(Value leaf) {
    auto* node = make(Kind::kLeaf);
    node->leaf = std::move(leaf);
    push(node);
  }
  PickleNode* pop() {
    if (stack_.size() <= (marks_.empty() ? 0 : marks_.back())) fail("the stack is empty");
    auto* node = stack_.back();
    stack_.pop_back();
    return node;
  }
  PickleNode* top() {
    if (stack_.size() <= (marks_.empty() ? 0 : marks_.back())) fail("the stack is empty");
    return stack_.back();
  }
  std::vector<const PickleNode*> pop_to_mark() {
    if (marks_.empty()) fail("there is no mark");
    std::vector<const PickleNode*> items(stack_.begin() + static_cast<int64_t>(marks_.back()),
                                         stack_.end());
    stack_.resize(marks_.back());
    marks_.pop_back();
    return items;
  }
  std::vector<const PickleNode*> pop_items(int count) {
    std::vector<const PickleNode*> items(static_cast<size_t>(count));
    for (int i = count - 1; i >= 0; --i) items[i] = pop();
    return items;
  }
  void push_container(Kind kind, std::vector<const PickleNode*> items) {
    auto* node = make(kind);
    node->items = std::move(items);
    push(node);
  }

  // Opcodes, by what they do; false: not one of these.
  bool scalar(unsigned char opcode) {
    switch (opcode) {
      case 0x80: {
        const auto protocol = number(1);
        if (protocol > 5) fail("protocol " + std::to_string(protocol) + " is newer than 5");
        return true;
      }
      case 0x95:
        number(8);
        return true;  // FRAME: a hint for streams
      case 'N':
        push(Value());
        return true;
      case 0x88:
        push(true);
        return true;
      case 0x89:
        push(false);
        return true;
      case 'K':
        push(static_cast<int64_t>(number(1)));
        return true;
      case 'M':
        push(static_cast<int64_t>(number(2)));
        return true;
      case 'J':
        push(int64_t{static_cast<int32_t>(number(4))});
        return true;
      case 'I':
        text_int(line());
        return true;
      case 'L':
        text_int(line());
        return true;
      case 0x8a:
        long_int(take(number(1)));
        return true;
      case 0x8b:
        long_int(take(number(4)));
        return true;
      case 'G':
        big_endian_double();
        return true;
      case 'F':
        text_double(line());
        return true;
      case 'X':
        push(std::string(take(number(4))));
        return true;
      case 0x8c:
        push(std::string(take(number(1))));
        return true;
      case 0x8d:
        push(std::string(take(number(8))));
        return true;
      case 'T':
        push(std::string(take(number(4))));
        return true;
      case 'U':
        push(std::string(take(number(1))));
        return true;
      case 'B':
        push(Bytes{std::string(take(number(4)))});
        return true;
      case 'C':
        push(Bytes{std::string(take(number(1)))});
        return true;
      case 0x8e:
        push(Bytes{std::string(take(number(8)))});
        return true;
      case 0x96:
        push(Bytes{std::string(take(number(8)))});
        return true;
      default:
        return false;
    }
  }

  bool container(unsigned char opcode) {
    switch (opcode) {
      case '(':
        marks_.push_back(stack_.size());
        return true;
      case '0':
        pop();
        return true;
      case '1':
        pop_to_mark();
        return true;
      case '2':
        push(top());
        return true;
      case ')':
        push_container(Kind::kTuple, {});
        return true;
      case ']':
        push_container(Kind::kList, {});
        return true;
      case '}':
        push_container(Kind::kDict, {});
        return true;
      case 0x8f:
        push_container(Kind::kSet, {});
        return true;
      case 't':
        push_container(Kind::kTuple, pop_to_mark());
        return true;
      case 'l':
        push_container(Kind::kList, pop_to_mark());
        return true;
      case 'd':
        push_container(Kind::kDict, even(pop_to_mark()));
        return true;
      case 0x91:
        push_container(Kind::kFrozenSet, pop_to_mark());
        return true;
      case 0x85:
      case 0x86:
      case 0x87:
        push_container(Kind::kTuple, pop_items(opcode - 0x84));
        return true;
      case 'a':
        add_items(pop_items(1));
        return true;
      case 'e':
      case 0x90:
        add_items(pop_to_mark());
        return true;
      case 's':
        add_entries(pop_items(2));
        return true;
      case 'u':
        add_entries(even(pop_to_mark()));
        return true;
      default:
        return false;
    }
  }

  bool memo(unsigned char opcode) {
    switch (opcode) {
      case 'q':
        memo_[number(1)] = top();
        return true;
      case 'r':
        memo_[number(4)] = top();
        return true;
      case 'p':
        memo_[memo_index(line())] = top();
        return true;
      case 0x94:
        memo_[memo_.size()] = top();
        return true;
      case 'h':
        recall(number(1));
        return true;
      case 'j':
        recall(number(4));
        return true;
      case 'g':
        recall(memo_index(line()));
        return true;
      default:
        return false;
    }
  }

  bool making(unsigned char opcode) {
    switch (opcode) {
      case 'c': {
        auto module = line();
        push_global(module + "." + line());
        return true;
      }
      case 0x93: {
        const auto names = pop_items(2);
        const auto* module = names[0]->leaf.get_if<std::string>();
        const auto* name = names[1]->leaf.get_if<std::string>();
        if (module == nullptr || name == nullptr) fail("a class whose name is not a string");
        push_global(*module + "." + *name);
        return true;
      }
      case 'R':
        make_object(Kind::kCalled);
        return true;
      case 0x81:
        make_object(Kind::kNew);
        return true;
      case 'Q':
        push_container(Kind::kPersistent, pop_items(1));
        return true;
      case 'b': {
        const auto* state = pop();
        auto* object = top();
        if (object->kind != Kind::kCalled && object->kind != Kind::kNew)
          fail("state for something that is no object");
        object->state = state;
        return true;
      }
      default:
        return false;
    }
  }

  void push_global(std::string name) {
    auto* node = make(Kind::kGlobal);
    node->name = std::move(name);
    push(node);
  }

  void make_object(Kind kind) {
    const auto* arguments = pop();
    const auto* callable = pop();
    if (callable->kind != Kind::kGlobal) fail("a call of something that is no class");
    if (arguments->kind != Kind::kTuple) fail("arguments that are no tuple");
    auto* node = make(kind);
    node->name = callable->name;
    node->arguments = arguments;
    push(node);
  }

  void add_items(std::vector<const PickleNode*> items) {
    auto* target = top();
    const bool fits =
        target->kind == Kind::kList || target->kind == Kind::kSet || target->is_object();
    if (!fits) fail("items for something that is no list");
    target->items.insert(target->items.end(), items.begin(), items.end());
  }

  void add_entries(std::vector<const PickleNode*> items) {
    auto* target = top();
    if (target->kind != Kind::kDict && !target->is_object())
      fail("entries for something that is no dict");
    auto& into = target->is_object() ? target->entries : target->items;
    into.insert(into.end(), items.begin(), items.end());
  }

  std::vector<const PickleNode*> even(std::vector<const PickleNode*> items) const {
    if (items.size() % 2 != 0) fail("a key without a value");
    return items;
  }

  uint64_t memo_index(const std::string& text) const {
    uint64_t index = 0;
    const auto result = std::from_chars(text.data(), text.data() + text.size(), index);
    if (result.ec != std::errc() || result.ptr != text.data() + text.size())
      fail("a memo index that is no number");
    return index;
  }
  void recall(uint64_t index) {
    const auto found = memo_.find(index);
    if (found == memo_.end()) fail("memo entry " + std::to_string(index) + " was never written");
    push(found->second);
  }

  void text_int(std::string text) {
    if (text == "00" || text == "01") return push(text == "01");
    if (text.ends_with('L')) text.pop_back();
    int64_t value = 0;
    const auto result = std::from_chars(text.data(), text.data() + text.size(), value);
    if (result.ec != std::errc() || result.ptr != text.data() + text.size())
      fail("\"" + text + "\" is no int");
    push(value);
  }
  void text_double(const std::string& text) {
    double value = 0;
    const auto result = std::from_chars(text.data(), text.data() + text.size(), value);
    if (result.ec != std::errc() || result.ptr != text.data() + text.size())
      fail("\"" + text + "\" is no float");
    push(value);
  }
  void long_int(std::string_view bytes) {
    if (bytes.size() > 8) return push(BigInt{std::string(bytes)});
    uint64_t value = bytes.empty() || (bytes.back() & 0x80) == 0 ? 0 : ~uint64_t{0};
    for (size_t i = bytes.size(); i-- > 0;)
      value = value << 8 | static_cast<unsigned char>(bytes[i]);
    push(static_cast<int64_t>(value));
  }
  void big_endian_double() {
    uint64_t bits = 0;
    for (const char c : take(8)) bits = bits << 8 | static_cast<unsigned char>(c);
    double value = 0;
    std::memcpy(&value, &bits, sizeof value);
    push(value);
  }

  std::string_view in_;
  const std::string& where_;
  size_t at_ = 0;
  size_t opcode_at_ = 0;
  std::deque<PickleNode> nodes_;  // owns all; references among them may be cyclic
  std::vector<PickleNode*> stack_;
  std::vector<size_t> marks_;
  std::unordered_map<uint64_t, PickleNode*> memo_;
};

}  // namespace

Value read_pickle(std::string_view pickle, const std::string& where) {
  PickleReader reader(pickle, where);
  return pickle_tree(reader.run(), pickle.size(), where);
}

}  // namespace megashard
