#include "checkpoint/values/pickle_reader.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "checkpoint/values/pickle_writer.h"
#include "tests/support/message_of.h"

namespace megashard {
namespace {

using ::testing::HasSubstr;
using testing::message_of;

std::string raw(const char* bytes, size_t size) { return {bytes, size}; }
template <size_t N>
Value read(const char (&bytes)[N]) {
  return read_pickle(std::string_view(bytes, N - 1), "test");
}
template <size_t N>
std::string refused(const char (&bytes)[N]) {
  return message_of([&] { read_pickle(std::string_view(bytes, N - 1), "test"); });
}

TEST(Pickle, WhatIsWrittenIsRead) {
  Dict fields;
  fields.set("dtype", at::kBFloat16);
  Object unknown{"numpy.dtype", Object::Opcode::kReduce, Tuple{{"f8", false, true}}, Tuple{{3, "<"}}, {}, {}};
  Dict dict;
  dict.set("numbers", List{{0, 255, 256, -1, int64_t{1} << 40, -(int64_t{1} << 62), 1.5, -0.0}});
  dict.set("big", BigInt{raw("\0\0\0\0\0\0\0\0\1", 9)});
  dict.set("flags", Tuple{{true, false, Value(), Tuple(), List(), Dict()}});
  dict.set("bytes", Bytes{raw("\0\x7f\x80\xff", 4)});
  dict.set("no bytes", Bytes());
  dict.set("text", "gr\xc3\xb6\xc3\x9f"
                   "e");
  dict.set("size", TorchSize{{2, 3}});
  dict.set("name", Global{"torch.nn.functional.gelu"});
  dict.set("args", make_namespace(fields));
  dict.set("unknown", unknown);
  dict.set("again", List{{"text", "text", unknown}});
  const Value value(dict);
  EXPECT_EQ(read_pickle(write_pickle(value), "test"), value);
  EXPECT_EQ(*namespace_fields(read_pickle(write_pickle(value), "test").as_dict().at("args")), fields);
}

TEST(Pickle, NewerProtocolsAreRead) {
  // pickle.dumps({"a": [1, b"x"], "b": collections.OrderedDict(c=(1, 2, 3, 4))}, 4)
  const auto value = read("\x80\x04\x95>\x00\x00\x00\x00\x00\x00\x00}\x94(\x8c\x01"
                          "a\x94]\x94(K\x01"
                          "C\x01x\x94"
                          "e\x8c\x01"
                          "b\x94"
                          "\x8c\x0b"
                          "collections\x94\x8c\x0bOrderedDict\x94\x93\x94)R\x94\x8c\x01"
                          "c\x94(K\x01K\x02K\x03K\x04t\x94su.");
  EXPECT_EQ(value.as_dict().at("a"), Value(List{{1, Bytes{"x"}}}));
  EXPECT_EQ(value.as_dict().at("b").as_dict().at("c"), Value(Tuple{{1, 2, 3, 4}}));
}

TEST(Pickle, CallsAreRecordedAndNeverMade) {
  const auto value = read("cos\nsystem\nX\x04\0\0\0true\x85R.");
  ASSERT_NE(value.object(), nullptr);
  EXPECT_EQ(value.object()->class_name, "os.system");
  EXPECT_EQ(value.kind(), "an object of class os.system");
}

TEST(Pickle, DamagedAndHostileOnesAreRefused) {
  EXPECT_THAT(refused(""), HasSubstr("truncated"));
  EXPECT_THAT(refused("X\xff\xff\xff\xff"
                      "abc"),
              HasSubstr("truncated"));
  EXPECT_THAT(refused("\x8d\xff\xff\xff\xff\xff\xff\xff\xff"
                      "abc"),
              HasSubstr("truncated"));
  EXPECT_THAT(refused("\x80\x09N."), HasSubstr("protocol 9"));
  EXPECT_THAT(refused("."), HasSubstr("stack is empty"));
  EXPECT_THAT(refused("(."), HasSubstr("stack is empty"));
  EXPECT_THAT(refused("t."), HasSubstr("no mark"));
  EXPECT_THAT(refused("h\x05."), HasSubstr("never written"));
  EXPECT_THAT(refused("}(K\x01u."), HasSubstr("without a value"));
  EXPECT_THAT(refused("K\x01K\x02\x61."), HasSubstr("no list"));
  EXPECT_THAT(refused("K\x01)R."), HasSubstr("no class"));
  EXPECT_THAT(refused("cm\nf\n)R)R."), HasSubstr("no class"));  // calls the result of a call
  EXPECT_THAT(refused("V\\u12\n."), HasSubstr("escape"));
  EXPECT_THAT(refused("(i__main__\nX\n."), HasSubstr("opcode 105"));
  EXPECT_THAT(refused("]q\0h\0\x61."), HasSubstr("contain themselves"));  // a list inside itself
}

TEST(Pickle, OlderProtocolsAreRead) {
  // pickle.dumps([True, 2, -0.5, "\u00e9\u20ac", b"\xff", argparse.Namespace(a=1)], 0)
  const auto value = read("(lp0\nI01\naI2\naF-0.5\naV\xe9\\u20ac\np1\nac_codecs\nencode\np2\n("
                          "V\xff\np3\nVlatin1\np4\ntp5\n"
                          "Rp6\naccopy_reg\n_reconstructor\np7\n(cargparse\nNamespace\np8\nc__builtin__"
                          "\nobject\np9\nNtp10\n"
                          "Rp11\n(dp12\nVa\np13\nI1\nsba.");
  Dict fields;
  fields.set("a", 1);
  EXPECT_EQ(value, Value(List{{true, 2, -0.5, "\xc3\xa9\xe2\x82\xac", Bytes{"\xff"}, make_namespace(fields)}}));
}

TEST(Pickle, NestedClassesKeepTheirNames) {
  // An instance of Outer.Inner in module m: protocol 2, then 4. Both are the same record.
  const auto value = read("\x80\x02"
                          "c__builtin__\ngetattr\ncm\nOuter\nX\x05\0\0\0Inner\x86R)\x81.");
  ASSERT_NE(value.object(), nullptr);
  EXPECT_EQ(value.object()->class_name, "m:Outer.Inner");
  EXPECT_EQ(read("\x80\x04\x8c\x01m\x8c\x0bOuter.Inner\x93)\x81."), value);
  EXPECT_EQ(read_pickle(write_pickle(value), "test"), value);
  EXPECT_NE(write_pickle(value).find("getattr"), std::string::npos);
}

TEST(Pickle, NamesAreBounded) {
  std::string pickle = "X";  // builds a class name from two long strings, again and again
  pickle += raw("\xe8\x03\0\0", 4) + std::string(1000, 'm') + "q" + raw("\0", 1);
  for (int i = 0; i < 10000; ++i) pickle += "h" + raw("\0", 1) + "h" + raw("\0", 1) + "\x93" + "0";
  EXPECT_THAT(message_of([&] { read_pickle(pickle + "N.", "test"); }), HasSubstr("names of classes"));
}

TEST(Pickle, NestingAndGrowthAreBounded) {
  const auto deep = std::string(100000, ']') + std::string(99999, 'a') + ".";
  EXPECT_THAT(message_of([&] { read_pickle(deep, "test"); }), HasSubstr("nested deeper"));
  std::string laughs = "]q";  // each list holds the previous one ten times
  laughs += '\0';
  for (char i = 0; i < 20; ++i) {
    laughs += "](";
    for (int j = 0; j < 10; ++j) laughs += std::string("h") + i;
    laughs += "eq";
    laughs += static_cast<char>(i + 1);
  }
  EXPECT_THAT(message_of([&] { read_pickle(laughs + ".", "test"); }), HasSubstr("many times its size"));
  // A long list that contains itself: its size is counted before a hundred copies are made.
  const auto own = std::string("]q\0(h\0", 6) + std::string(100000, 'N') + "e.";
  EXPECT_THAT(message_of([&] { read_pickle(own, "test"); }), HasSubstr("many times its size"));
}

}  // namespace
}  // namespace megashard
