#include "store/codec/npy.h"

#include <cstring>
#include <random>

#include "expect_error.h"

namespace ptc {
namespace {

std::span<const std::byte> npy_bytes(const std::string& text) {
  return std::as_bytes(std::span(text));
}

std::string header(const std::string& dict, int major = 1) {
  std::string text = "\x93NUMPY";
  text += static_cast<char>(major);
  text += '\0';
  auto length = static_cast<uint32_t>(dict.size());
  std::string length_text(4, '\0');
  std::memcpy(length_text.data(), &length, 4);
  return text + length_text.substr(0, major == 1 ? 2 : 4) + dict;
}

std::string dict(const std::string& descr, const std::string& shape,
                 const std::string& fortran = "False") {
  return "{'descr': '" + descr + "', 'fortran_order': " + fortran + ", 'shape': " + shape + ", }\n";
}

Result<TensorEntry> parse_array(const std::string& head, uint64_t data_bytes,
                                std::optional<DType> declared = {}) {
  return parse_npy(npy_bytes(head), head.size() + data_bytes, declared);
}

TEST(Npy, WritesWhatNumPyWrites) {
  std::string written = write_npy_header(DType::kF32, {2, 3});
  EXPECT_EQ(written.size(), 128u);
  EXPECT_EQ(written.substr(0, 10), std::string("\x93NUMPY\x01\x00\x76\x00", 10));
  EXPECT_EQ(written.substr(10, 59), "{'descr': '<f4', 'fortran_order': False, 'shape': (2, 3), }");
  EXPECT_EQ(written.back(), '\n');
  EXPECT_NE(write_npy_header(DType::kI8, {}).find("'shape': (), }"), std::string::npos);
  EXPECT_NE(write_npy_header(DType::kI8, {7}).find("'shape': (7,), }"), std::string::npos);
  EXPECT_NE(write_npy_header(DType::kF4, {3, 4})
                .find("'|u1', 'fortran_order': False, 'shape': (3, 2), }"),
            std::string::npos);
  EXPECT_NE(write_npy_header(DType::kF4, {4, 3}).find("'shape': (6,), }"), std::string::npos);
}

TEST(Npy, RoundTrip) {
  std::mt19937_64 random(5);
  for (int i = 0; i <= static_cast<int>(DType::kU64); ++i) {
    auto dtype = static_cast<DType>(i);
    bool needs_declaration = dtype_npy_descr(dtype) == "|V1";
    Shape shape;
    for (uint64_t axes = random() % (kMaxAxes + 1); axes > 0; --axes) shape.push_back(random() % 4);
    std::string written = write_npy_header(dtype, shape);
    EXPECT_EQ(written.size() % 64, 0u);
    uint64_t bytes = array_bytes(shape, dtype).value();
    auto parsed =
        parse_array(written, bytes, needs_declaration ? std::optional(dtype) : std::nullopt);
    ASSERT_TRUE(is_ok(parsed));
    EXPECT_EQ(parsed.value().dtype, dtype);
    EXPECT_EQ(parsed.value().shape, shape);
    EXPECT_EQ(parsed.value().offset, written.size());
    EXPECT_EQ(parsed.value().bytes, bytes);
  }
  std::string longest = write_npy_header(DType::kU8, Shape(8, UINT64_MAX));
  EXPECT_EQ(longest.size() % 64, 0u);
}

TEST(Npy, ReadsEveryVersionAndSpelling) {
  for (int major : {1, 2, 3})
    EXPECT_EQ(parse_array(header(dict("<f8", "(2, 2)"), major), 32).value().dtype, DType::kF64);
  EXPECT_TRUE(
      is_ok(parse_array(header("{\"shape\":(3,),\"fortran_order\":True,\"descr\":\"=f2\"}"), 6)));
  EXPECT_EQ(parse_array(header(dict("<i4", "(3L, 2L)")), 24).value().shape, (Shape{3, 2}));
  EXPECT_TRUE(is_ok(parse_array(header(dict("<c8", "()")), 8)));
}

TEST(Npy, DeclaredTypes) {
  EXPECT_EQ(parse_array(header(dict("|V1", "(3,)")), 3, DType::kF8E5M2).value().dtype,
            DType::kF8E5M2);
  EXPECT_EQ(parse_array(header(dict("<u2", "(3,)")), 6, DType::kBF16).value().dtype, DType::kBF16);
  EXPECT_TRUE(has_error(parse_array(header(dict("<u2", "(3,)")), 6, DType::kF32),
                        Code::kInvalidArgument, "another size"));
  EXPECT_TRUE(has_error(parse_array(header(dict(">u2", "(3,)")), 6, DType::kBF16),
                        Code::kInvalidArgument, "big-endian"));
  EXPECT_TRUE(
      has_error(parse_array(header(dict("|O8", "(3,)")), 24, DType::kF64), Code::kInvalidArgument));
  EXPECT_TRUE(has_error(parse_array(header(dict("|u1", "(3,)")), 3, DType::kF4),
                        Code::kInvalidArgument, "another size"));
}

struct HostileArray {
  std::string head;
  uint64_t data_bytes;
  const char* message;
};
class NpyRefuses : public testing::TestWithParam<HostileArray> {};
TEST_P(NpyRefuses, AndSaysWhy) {
  EXPECT_TRUE(has_error(parse_array(GetParam().head, GetParam().data_bytes), Code::kInvalidArgument,
                        GetParam().message));
}
INSTANTIATE_TEST_SUITE_P(
    Headers, NpyRefuses,
    testing::Values(HostileArray{"", 0, "not an npy file"},
                    HostileArray{"\x93NUMPY", 0, "not an npy file"},
                    HostileArray{"PK\x03\x04 and more text", 0, "not an npy file"},
                    HostileArray{header(dict("<f4", "(1,)"), 4), 4, "version 4.0"},
                    HostileArray{std::string("\x93NUMPY\x02\0\xff\xff", 10), 0, "ends inside"},
                    HostileArray{std::string("\x93NUMPY\x02\0\xff\xff\xff\xff{}", 14), 0,
                                 "4294967295 bytes"},
                    HostileArray{header(""), 0, "'{' expected"},
                    HostileArray{header("{}"), 0, "must all be there"},
                    HostileArray{header("{'descr': '<f4', 'shape': ()}"), 4, "must all be there"},
                    HostileArray{header("{'descr': '<f4', 'descr': '<f4'}"), 4, "there twice"},
                    HostileArray{header("{'descr': __import__('os')}"), 0, "a string expected"},
                    HostileArray{header("{'extra': 1}"), 0, "key 'extra' is unknown"},
                    HostileArray{header("{'descr': [('a', '<f4')]}"), 0, "structured"},
                    HostileArray{header("{'descr': '<f4"), 0, "does not end"},
                    HostileArray{header("{'descr': '<f\\x34'}"), 0, "backslash"},
                    HostileArray{header(dict("<f4", "(1,)", "1")), 4, "True or False"},
                    HostileArray{header(dict("<f4", "(1,)", "True1")), 4, "',' or '}'"},
                    HostileArray{header(dict("<f4", "(1)")), 4, "',' expected"},
                    HostileArray{header(dict("<f4", "1")), 4, "'(' expected"},
                    HostileArray{header(dict("<f4", "(-1,)")), 4, "whole number"},
                    HostileArray{header(dict("<f4", "(2*3,)")), 4, "',' expected"},
                    HostileArray{header(dict("<f4", "(,)")), 4, "whole number"},
                    HostileArray{header(dict("<f4", "(18446744073709551616,)")), 4, "64 bits"},
                    HostileArray{header(dict("<f4", "(4294967296, 4294967296)")), 0, "elements"},
                    HostileArray{header(dict("<f4", "(1,1,1,1,1,1,1,1,1)")), 4, "at most 8"},
                    HostileArray{header(dict("<f4", "(2, 2)", "True")), 16, "Fortran"},
                    HostileArray{header(dict("<f4", "(2,)")), 7, "takes 8 bytes"},
                    HostileArray{header(dict("<f4", "(2,)")), 9, "takes 8 bytes"},
                    HostileArray{header(dict("<f4", "(2,)") + "x"), 8, "text after the end"},
                    HostileArray{header(dict(">f4", "(2,)")), 8, "big-endian"},
                    HostileArray{header(dict("|O8", "(2,)")), 16, "Python objects"},
                    HostileArray{header(dict("|S5", "(2,)")), 10, "text"},
                    HostileArray{header(dict("|V1", "(2,)")), 2, "user.ptc.dtype"}));

TEST(Npy, DamagedHeadersNeverCrash) {
  std::string good = write_npy_header(DType::kF16, {3, 5});
  std::mt19937_64 random(29);
  for (int trial = 0; trial < 20000; ++trial) {
    std::string bad = good.substr(0, random() % 4 == 0 ? random() % good.size() : good.size());
    for (uint64_t k = 1 + random() % 3; k > 0 && !bad.empty(); --k)
      bad[random() % bad.size()] = static_cast<char>(random());
    auto parsed = parse_npy(npy_bytes(bad), good.size() + 30);
    if (parsed) {
      EXPECT_EQ(parsed.value().offset + parsed.value().bytes, good.size() + 30);
    }
  }
}

}  // namespace
}  // namespace ptc
