#include "checkpoint/values/numpy_value.h"

#include <ATen/ops/equal.h>
#include <ATen/ops/tensor.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/support/message_of.h"

namespace megashard {
namespace {

using ::testing::HasSubstr;

Value dtype_record(const char* code, const char* order) {
  const Value nothing;
  return Object{"numpy.dtype",
                Object::Opcode::kReduce,
                Tuple{{code, false, true}},
                Tuple{{3, order, nothing, nothing, nothing, -1, -1, 0}},
                {},
                {}};
}

Value array_record(const Value& dtype, Tuple sizes, bool fortran, std::string bytes) {
  return Object{"numpy.core.multiarray._reconstruct",
                Object::Opcode::kReduce,
                Tuple{{Global{"numpy.ndarray"}, Tuple{{0}}, Bytes{"b"}}},
                Tuple{{1, std::move(sizes), dtype, fortran, Bytes{std::move(bytes)}}},
                {},
                {}};
}

TEST(NumpyValue, ArraysAndScalarsBecomeTensors) {
  const auto dtype = dtype_record("i2", "<");
  const std::string bytes("\1\0\2\0\3\0\4\0\5\0\6\0", 12);
  const auto expected = at::tensor({1, 2, 3, 4, 5, 6}, at::kShort);
  const auto rows = numpy_tensor(array_record(dtype, {{2, 3}}, false, bytes));
  ASSERT_TRUE(rows.has_value());
  EXPECT_TRUE(at::equal(*rows, expected.view({2, 3})));
  const auto columns = numpy_tensor(array_record(dtype, {{2, 3}}, true, bytes));
  EXPECT_TRUE(at::equal(*columns, expected.view({3, 2}).t()));
  const Value buffer = Object{"builtins.bytearray", Object::Opcode::kReduce, Tuple{{Bytes{bytes}}}, {}, {}, {}};
  const Value newer = Object{
      "numpy._core.numeric._frombuffer", Object::Opcode::kReduce, Tuple{{buffer, dtype, Tuple{{6}}, "C"}}, {}, {}, {}};
  EXPECT_TRUE(at::equal(*numpy_tensor(newer), expected));
  const Value scalar = Object{"numpy._core.multiarray.scalar",
                              Object::Opcode::kReduce,
                              Tuple{{dtype, Bytes{std::string("\7\0", 2)}}},
                              {},
                              {},
                              {}};
  EXPECT_EQ(numpy_tensor(scalar)->item<int16_t>(), 7);
  EXPECT_EQ(numpy_tensor(scalar)->dim(), 0);
}

TEST(NumpyValue, OtherRecordsAreNoneAndWrongOnesAreRefused) {
  EXPECT_FALSE(numpy_tensor(Value(1)));
  EXPECT_FALSE(numpy_tensor(make_namespace({})));
  EXPECT_FALSE(numpy_tensor(array_record(dtype_record("i2", ">"), {{1}}, false, "ab")));
  EXPECT_FALSE(numpy_tensor(array_record(dtype_record("O8", "|"), {{1}}, false, "ab")));
  const auto dtype = dtype_record("i2", "<");
  EXPECT_THAT(testing::message_of([&] { numpy_tensor(array_record(dtype, {{3}}, false, "ab")); }),
              HasSubstr("sizes [3] and dtype int16 holds 2 bytes"));
  EXPECT_THAT(testing::message_of([&] {
                numpy_tensor(array_record(dtype, {{int64_t{1} << 61, 4}}, false, "ab"));
              }),
              HasSubstr("holds 2 bytes"));
}

}  // namespace
}  // namespace megashard
