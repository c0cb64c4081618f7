#include "checkpoint/values/pickle_reader.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <deque>
#include <unordered_map>

#include "checkpoint/values/pickle_graph.h"
#include "checkpoint/values/pickle_input.h"

namespace megashard {
namespace {

constexpr size_t kMaxNodes = size_t{1} << 26;  // about 8 GB
constexpr size_t kMaxClassNameBytes = 4096;

class PickleReader {
 public:
  PickleReader(std::string_view pickle, const std::string& where)
      : in_(pickle, where), names_left_(4 * pickle.size() + kMaxClassNameBytes) {
    none_ = make(Kind::kLeaf);
    no_items_ = make(Kind::kTuple);
    for (const bool value : {false, true}) {
      flags_[value] = make(Kind::kLeaf);
      flags_[value]->leaf = value;
    }
  }

  const PickleNode* run() {
    while (true) {
      const auto opcode = in_.opcode();
      if (opcode == '.') return pop();
      if (!scalar(opcode) && !text(opcode) && !container(opcode) && !memo(opcode) && !making(opcode)) {
        in_.fail("opcode " + std::to_string(opcode) + " is not part of the pickles that checkpoints hold");
      }
    }
  }

 private:
  using Kind = PickleNode::Kind;

  // Stack.
  PickleNode* make(Kind kind) {
    if (nodes_.size() >= kMaxNodes) in_.fail("more objects than a checkpoint's pickle holds");
    return &nodes_.emplace_back(PickleNode{.kind = kind});
  }
  void push(PickleNode* node) { stack_.push_back(node); }
  void push(Value leaf) {
    auto* node = make(Kind::kLeaf);
    node->leaf = std::move(leaf);
    push(node);
  }
  PickleNode* pop() {
    if (stack_.size() <= (marks_.empty() ? 0 : marks_.back())) in_.fail("the stack is empty");
    auto* node = stack_.back();
    stack_.pop_back();
    return node;
  }
  PickleNode* top() {
    if (stack_.size() <= (marks_.empty() ? 0 : marks_.back())) in_.fail("the stack is empty");
    return stack_.back();
  }
  std::vector<const PickleNode*> pop_to_mark() {
    if (marks_.empty()) in_.fail("there is no mark");
    std::vector<const PickleNode*> items(stack_.begin() + static_cast<int64_t>(marks_.back()), stack_.end());
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

  // Opcodes by kind; return false for opcodes of another kind.
  bool scalar(unsigned char opcode) {
    switch (opcode) {
      case 0x80: {
        const auto protocol = in_.number(1);
        if (protocol > 5) in_.fail("protocol " + std::to_string(protocol) + " is newer than 5");
        return true;
      }
      case 0x95:
        in_.number(8);
        return true;  // FRAME: a hint for streams
      case 'N':
        push(none_);
        return true;
      case 0x88:
      case 0x89:
        push(flags_[opcode == 0x88]);
        return true;
      case 'K':
        push(static_cast<int64_t>(in_.number(1)));
        return true;
      case 'M':
        push(static_cast<int64_t>(in_.number(2)));
        return true;
      case 'J':
        push(int64_t{static_cast<int32_t>(in_.number(4))});
        return true;
      case 0x8a:
        push(in_.long_int(in_.take(in_.number(1))));
        return true;
      case 0x8b:
        push(in_.long_int(in_.take(in_.number(4))));
        return true;
      case 'G':
        push(in_.big_endian_double());
        return true;
      case 'X':
      case 'T':
        push(std::string(in_.take(in_.number(4))));
        return true;
      case 0x8c:
      case 'U':
        push(std::string(in_.take(in_.number(1))));
        return true;
      case 0x8d:
        push(std::string(in_.take(in_.number(8))));
        return true;
      case 'B':
        push(Bytes{std::string(in_.take(in_.number(4)))});
        return true;
      case 'C':
        push(Bytes{std::string(in_.take(in_.number(1)))});
        return true;
      case 0x8e:
        push(Bytes{std::string(in_.take(in_.number(8)))});
        return true;
      case 0x96:  // bytearray: a call in older protocols
        push_global("builtins", ".", "bytearray");
        push(Bytes{std::string(in_.take(in_.number(8)))});
        push_container(Kind::kTuple, pop_items(1));
        make_object(Kind::kCalled);
        return true;
      default:
        return false;
    }
  }

  /// Opcodes of protocol 0.
  bool text(unsigned char opcode) {
    switch (opcode) {
      case 'I':
      case 'L':
        push(in_.text_int(in_.line()));
        return true;
      case 'F':
        push(in_.text_double(in_.line()));
        return true;
      case 'V':
        push(in_.escaped_text(in_.line()));
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
        push(no_items_);
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
        memorise(in_.number(1));
        return true;
      case 'r':
        memorise(in_.number(4));
        return true;
      case 'p':
        memorise(in_.text_index(in_.line()));
        return true;
      case 0x94:
        memorise(memo_.size());
        return true;
      case 'h':
        recall(in_.number(1));
        return true;
      case 'j':
        recall(in_.number(4));
        return true;
      case 'g':
        recall(in_.text_index(in_.line()));
        return true;
      default:
        return false;
    }
  }

  bool making(unsigned char opcode) {
    switch (opcode) {
      case 'c': {
        auto module = in_.line();
        push_global(std::move(module), ".", in_.line());
        return true;
      }
      case 0x93: {
        const auto names = pop_items(2);
        const auto* module = names[0]->text();
        const auto* name = names[1]->text();
        if (module == nullptr || name == nullptr) in_.fail("a class whose name is not a string");
        push_global(*module, name->find('.') == std::string::npos ? "." : ":", *name);
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
        if (!object->is_object()) in_.fail("state for something that is no object");
        object->state = state;
        return true;
      }
      default:
        return false;
    }
  }

  /// Names may combine strings that the memo repeats; their total is limited to a multiple of the pickle.
  void push_global(std::string name, const char* between, const std::string& rest) {
    if (name.find(':') != std::string::npos || rest.find(':') != std::string::npos)
      in_.fail("a class with a colon in its name");
    if (rest.size() + name.size() >= std::min(kMaxClassNameBytes, names_left_))
      in_.fail("names of classes take more than checkpoints need");
    name += between + rest;
    names_left_ -= name.size();
    auto* node = make(Kind::kGlobal);
    node->leaf = std::move(name);
    push(node);
  }

  void make_object(Kind kind) {
    const auto* arguments = pop();
    const auto* callable = pop();
    if (callable->kind != Kind::kGlobal && callable->kind != Kind::kCalled)
      in_.fail("a call of something that is no class");
    if (arguments->kind != Kind::kTuple) in_.fail("arguments that are no tuple");
    auto* node = make(kind);
    node->callable = callable;
    node->arguments = arguments;
    push(node);
  }

  void add_items(std::vector<const PickleNode*> items) {
    auto* target = top();
    const bool fits = target->kind == Kind::kList || target->kind == Kind::kSet || target->is_object();
    if (!fits) in_.fail("items for something that is no list");
    target->items.insert(target->items.end(), items.begin(), items.end());
  }

  void add_entries(std::vector<const PickleNode*> items) {
    auto* target = top();
    if (target->kind != Kind::kDict && !target->is_object()) in_.fail("entries for something that is no dict");
    auto& into = target->is_object() ? target->entries : target->items;
    into.insert(into.end(), items.begin(), items.end());
  }

  std::vector<const PickleNode*> even(std::vector<const PickleNode*> items) const {
    if (items.size() % 2 != 0) in_.fail("a key without a value");
    return items;
  }

  void memorise(uint64_t index) {
    if (memo_.size() >= kMaxNodes) in_.fail("more memo entries than a checkpoint's pickle holds");
    memo_[index] = top();
  }
  void recall(uint64_t index) {
    const auto found = memo_.find(index);
    if (found == memo_.end()) in_.fail("memo entry " + std::to_string(index) + " was never written");
    push(found->second);
  }

  PickleInput in_;
  size_t names_left_;
  std::deque<PickleNode> nodes_;  // owns all nodes; references may be cyclic
  std::vector<PickleNode*> stack_;
  std::vector<size_t> marks_;
  std::unordered_map<uint64_t, PickleNode*> memo_;
  PickleNode* none_;  // shared constants, which take one byte each to write
  PickleNode* no_items_;
  PickleNode* flags_[2];
};

}  // namespace

Value read_pickle(std::string_view pickle, const std::string& where) {
  PickleReader reader(pickle, where);
  return pickle_tree(reader.run(), pickle.size(), where);
}

}  // namespace megashard
