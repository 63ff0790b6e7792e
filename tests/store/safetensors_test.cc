#include "store/codec/safetensors.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <random>
#include <set>

#include "expect_error.h"

namespace ptc {
namespace {

std::span<const std::byte> bytes_of(const std::string& text) {
  return std::as_bytes(std::span(text));
}

/// The header of a file whose JSON is `text`.
std::string with_length(const std::string& text) {
  uint64_t length = text.size();
  std::string header(8, '\0');
  std::memcpy(header.data(), &length, 8);
  return header + text;
}

Result<SafetensorsHeader> parse(const std::string& text, uint64_t data_bytes) {
  std::string header = with_length(text);
  return parse_safetensors(bytes_of(header), header.size() + data_bytes);
}

TEST(Safetensors, ParsesWhatTheReferenceWrites) {
  auto parsed = parse(
      R"({"__metadata__":{"format":"pt"},"b":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]},)"
      R"("a.é":{"dtype":"BF16","shape":[],"data_offsets":[24,26]},)"
      R"("none":{"dtype":"I64","shape":[0,7],"data_offsets":[24,24]},)"
      R"("f4":{"dtype":"F4","shape":[3,2],"data_offsets":[26,29]}}   )",
      29);
  ASSERT_TRUE(is_ok(parsed));
  const SafetensorsHeader& header = parsed.value();
  EXPECT_EQ(header.metadata, (std::map<std::string, std::string>{{"format", "pt"}}));
  ASSERT_EQ(header.tensors.size(), 4u);
  EXPECT_EQ(header.tensors[0].name, "b");
  EXPECT_EQ(header.tensors[0].shape, (Shape{2, 3}));
  EXPECT_EQ(header.tensors[0].offset, header.data_offset);
  EXPECT_EQ(header.tensors[1].name, "none");
  EXPECT_EQ(header.tensors[1].bytes, 0u);
  EXPECT_EQ(header.tensors[2].name, "a.é");
  EXPECT_EQ(header.tensors[2].dtype, DType::kBF16);
  EXPECT_TRUE(header.tensors[2].shape.empty());
  EXPECT_EQ(header.tensors[2].bytes, 2u);
  EXPECT_EQ(header.tensors[3].offset, header.data_offset + 26);
}

TEST(Safetensors, AFileWithoutTensorsIsLegal) {
  auto parsed = parse("{}", 0);
  ASSERT_TRUE(is_ok(parsed));
  EXPECT_TRUE(parsed.value().tensors.empty());
}

struct Hostile {
  std::string text;
  uint64_t data_bytes;
  const char* message;
};
class SafetensorsRefuses : public testing::TestWithParam<Hostile> {};
TEST_P(SafetensorsRefuses, AndNamesIt) {
  EXPECT_TRUE(has_error(parse(GetParam().text, GetParam().data_bytes), Code::kInvalidArgument,
                        GetParam().message));
}

std::string one(const std::string& dtype, const std::string& shape, const std::string& offsets) {
  return R"({"w":{"dtype":")" + dtype + R"(","shape":)" + shape + R"(,"data_offsets":)" + offsets +
         "}}";
}

INSTANTIATE_TEST_SUITE_P(
    Headers, SafetensorsRefuses,
    testing::Values(
        Hostile{"", 0, "has no header"}, Hostile{" {}", 0, "does not begin with '{'"},
        Hostile{"[]", 0, "does not begin with '{'"}, Hostile{"{", 0, "too early"},
        Hostile{"{} x", 0, "more text"}, Hostile{std::string("{}\0\0", 4), 0, "more text"},
        Hostile{one("F32", "[2]", "[0,8]"), 7, "cut short"},
        Hostile{one("F32", "[2]", "[0,8]"), 9, "the file has 9"},
        Hostile{one("F32", "[2]", "[4,12]"), 12, "bytes 0 to 4"},
        Hostile{one("F32", "[2]", "[8,0]"), 8, "[begin, end]"},
        Hostile{one("F32", "[2]", "[0,9]"), 9, "takes 8 bytes"},
        Hostile{one("F32", "[2]", "[-8,0]"), 8, "[begin, end]"},
        Hostile{one("F32", "[2]", "[0.0,8.0]"), 8, "[begin, end]"},
        Hostile{one("F32", "[2]", "[0,8,8]"), 8, "[begin, end]"},
        Hostile{one("F32", "[2]", "[0,1e400]"), 8, "[begin, end]"},
        Hostile{one("F32", "[2]", "[0,18446744073709551616]"), 8, "[begin, end]"},
        Hostile{one("F32", "[2]", "[18446744073709551608,18446744073709551615]"), 8, "takes 8"},
        Hostile{one("F32", "[-2]", "[0,8]"), 8, "list of whole numbers"},
        Hostile{one("F32", "[2.0]", "[0,8]"), 8, "list of whole numbers"},
        Hostile{one("F32", "2", "[0,8]"), 8, "list of whole numbers"},
        Hostile{one("F32", "[4294967296,4294967296]", "[0,0]"), 0, "tensor 'w': shape"},
        Hostile{one("F32", "[0,4294967296,4294967296]", "[0,0]"), 0, "tensor 'w': shape"},
        Hostile{one("F64", "[2305843009213693952]", "[0,0]"), 0, "tensor 'w': shape"},
        Hostile{one("F32", "[1,1,1,1,1,1,1,1,1]", "[0,4]"), 4, "at most 8"},
        Hostile{one("F4", "[3]", "[0,2]"), 2, "whole bytes"},
        Hostile{one("F33", "[2]", "[0,8]"), 8, "tensor 'w': unknown dtype 'F33'"},
        Hostile{R"({"w":{"dtype":7,"shape":[],"data_offsets":[0,0]}})", 0, "'dtype'"},
        Hostile{R"({"w":{"shape":[],"data_offsets":[0,0]}})", 0, "'dtype'"},
        Hostile{R"({"w":{"dtype":"U8","shape":[1]}})", 1, "data_offsets"},
        Hostile{R"({"w":1})", 0, "an object"},
        Hostile{R"({"__metadata__":{"a":1}})", 0, "'a' must be a string"},
        Hostile{R"({"__metadata__":[]})", 0, "must be an object"},
        Hostile{
            R"({"w":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"w":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}})",
            2, "'w' is there twice"},
        Hostile{
            R"({"w":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"\u0077":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}})",
            1, "'w' is there twice"},
        Hostile{R"({"w":{"dtype":"U8","dtype":"I8","shape":[1],"data_offsets":[0,1]}})", 1,
                "'dtype' is there twice"},
        Hostile{
            R"({"v":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},"w":{"dtype":"U8","shape":[4],"data_offsets":[3,7]}})",
            7, "inside of tensor 'v'"},
        Hostile{
            R"({"v":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},"w":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}})",
            4, "inside of tensor 'v'"},
        Hostile{R"({"a\u0000b":{"dtype":"U8","shape":[],"data_offsets":[0,1]}})", 1, "NUL"},
        Hostile{"{\"\xff\":{\"dtype\":\"U8\",\"shape\":[],\"data_offsets\":[0,1]}}", 1,
                "not valid JSON"},
        Hostile{"{\"w\":" + std::string(100000, '[') + std::string(100000, ']') + "}", 0,
                "must be an object"},
        Hostile{"{\"w\":{\"more\":" + std::string(100000, '[') + std::string(100000, ']') + "}}", 0,
                "nested deeper"}));

TEST(Safetensors, ChecksTheLengthBeforeAnythingElse) {
  std::string header = with_length("{}");
  EXPECT_EQ(safetensors_header_bytes(bytes_of(header), 10).value(), 10u);
  EXPECT_TRUE(
      has_error(safetensors_header_bytes(bytes_of(header), 9), Code::kInvalidArgument, "ends"));
  EXPECT_TRUE(has_error(safetensors_header_bytes(bytes_of(header).first(7), 7),
                        Code::kInvalidArgument, "at least 8"));
  EXPECT_TRUE(has_error(safetensors_header_bytes({}, 0), Code::kInvalidArgument, "at least 8"));
  std::string huge(8, '\xff');
  EXPECT_TRUE(has_error(safetensors_header_bytes(bytes_of(huge), UINT64_MAX),
                        Code::kInvalidArgument, "100000000"));
  EXPECT_TRUE(has_error(parse_safetensors(bytes_of(header).first(9), 10), Code::kInvalidArgument));
}

TEST(Safetensors, WritesTheReferencesOrderAndForm) {
  std::vector<TensorEntry> tensors = {{"z", DType::kF16, {2}},
                                      {"b", DType::kF64, {1}},
                                      {"a", DType::kF16, {}},
                                      {"q", DType::kI64, {1, 1}},
                                      {"m", DType::kU8, {0}}};
  auto written = write_safetensors_header(tensors, {{"format", "pt"}}, 8);
  ASSERT_TRUE(is_ok(written));
  EXPECT_EQ(written.value().substr(8), R"({"__metadata__":{"format":"pt"},)"
                                       R"("q":{"dtype":"I64","shape":[1,1],"data_offsets":[0,8]},)"
                                       R"("b":{"dtype":"F64","shape":[1],"data_offsets":[8,16]},)"
                                       R"("a":{"dtype":"F16","shape":[],"data_offsets":[16,18]},)"
                                       R"("z":{"dtype":"F16","shape":[2],"data_offsets":[18,22]},)"
                                       R"("m":{"dtype":"U8","shape":[0],"data_offsets":[22,22]}})");
  EXPECT_EQ(written.value().size() % 8, 0u);
  std::string padded = write_safetensors_header(tensors, {}, 4096).value();
  EXPECT_EQ(padded.size(), 4096u);
  EXPECT_EQ(padded.find_last_not_of(' '), padded.rfind("}}") + 1);
  EXPECT_EQ(tensors[3].offset, 4096u + 18);
  EXPECT_EQ(tensors[3].name, "z");
}

TEST(Safetensors, WriterRefusesWhatNobodyCouldRead) {
  auto write = [](std::vector<TensorEntry> tensors, uint64_t align = 8) {
    return write_safetensors_header(tensors, {}, align);
  };
  EXPECT_TRUE(
      has_error(write({{"a", DType::kU8, {}}, {"b", DType::kF32, {}}, {"a", DType::kF32, {}}}),
                Code::kInvalidArgument, "two tensors are named 'a'"));
  EXPECT_TRUE(has_error(write({{"__metadata__", DType::kU8, {}}}), Code::kInvalidArgument));
  EXPECT_TRUE(
      has_error(write({{std::string("a\0", 2), DType::kU8, {}}}), Code::kInvalidArgument, "NUL"));
  EXPECT_TRUE(has_error(write({{"a\xff", DType::kU8, {}}}), Code::kInvalidArgument, "UTF-8"));
  EXPECT_TRUE(has_error(write({{"a", DType::kF4, {1}}}), Code::kInvalidArgument, "whole bytes"));
  std::vector<TensorEntry> huge;
  for (int i = 0; i < 8; ++i) huge.push_back({std::to_string(i), DType::kU8, {uint64_t{1} << 60}});
  EXPECT_TRUE(has_error(write(huge), Code::kInvalidArgument, "2^63"));
  EXPECT_TRUE(has_error(write({}, 12), Code::kInvalidArgument, "multiple of 8"));
}

TEST(Safetensors, RoundTripOfRandomCollections) {
  std::mt19937_64 random(17);
  const std::string alphabet[] = {"a",    ".",  "é", "\"", "\\", "\n", "/",
                                  "\x7f", "权", "_", "{",  ":",  ","};
  for (int trial = 0; trial < 300; ++trial) {
    std::vector<TensorEntry> tensors;
    for (uint64_t i = random() % 20; i > 0; --i) {
      TensorEntry entry;
      entry.name = std::to_string(i);
      for (uint64_t k = random() % 8; k > 0; --k) entry.name += alphabet[random() % 13];
      entry.dtype = static_cast<DType>(random() % 22);
      for (uint64_t k = random() % 4; k > 0; --k) entry.shape.push_back(random() % 5);
      if (dtype_bits(entry.dtype) < 8) entry.shape.push_back(4 * (random() % 3));
      tensors.push_back(entry);
    }
    std::map<std::string, std::string> metadata;
    if (trial % 3 == 0) metadata = {{"format", "pt"}, {"q\"", "{\"a\": [1]}"}};
    auto written = write_safetensors_header(tensors, metadata, trial % 2 == 0 ? 4096 : 8);
    ASSERT_TRUE(is_ok(written));
    uint64_t file_bytes = written.value().size();
    for (const TensorEntry& entry : tensors) file_bytes += entry.bytes;
    auto parsed = parse_safetensors(bytes_of(written.value()), file_bytes);
    ASSERT_TRUE(is_ok(parsed));
    EXPECT_EQ(parsed.value().metadata, metadata);
    EXPECT_EQ(parsed.value().data_offset % (trial % 2 == 0 ? 4096 : 8), 0u);
    ASSERT_EQ(parsed.value().tensors.size(), tensors.size());
    auto by_name = [](const TensorEntry& a, const TensorEntry& b) { return a.name < b.name; };
    std::sort(tensors.begin(), tensors.end(), by_name);
    std::sort(parsed.value().tensors.begin(), parsed.value().tensors.end(), by_name);
    for (size_t i = 0; i < tensors.size(); ++i) {
      const TensorEntry& got = parsed.value().tensors[i];
      EXPECT_EQ(got.name, tensors[i].name);
      EXPECT_EQ(got.dtype, tensors[i].dtype);
      EXPECT_EQ(got.shape, tensors[i].shape);
      EXPECT_EQ(got.offset, tensors[i].offset);
      EXPECT_EQ(got.bytes, tensors[i].bytes);
    }
  }
}

TEST(Safetensors, LongNamesThatBeginAlikeAreInOrder) {
  std::mt19937 random(5);
  const std::string alphabet[] = {"a", "b", ".", "\x7f", "é", "layers.1", "layers.10"};
  for (const size_t in_common : {0u, 6u, 7u, 8u, 5000u}) {
    std::set<std::string> names;
    while (names.size() < 500) {
      std::string name(in_common, 'm');
      for (uint64_t k = random() % 12; k > 0; --k) name += alphabet[random() % 7];
      names.insert(std::move(name));
    }
    names.erase("");
    std::vector<std::string> mixed(names.begin(), names.end());
    std::shuffle(mixed.begin(), mixed.end(), random);
    const Shape shape{2};
    std::vector<SafetensorsArray> arrays;
    for (const std::string& name : mixed)
      arrays.push_back({name, name.back() == 'a' ? DType::kI64 : DType::kU8, &shape});
    const SafetensorsLayout made = lay_out_safetensors(arrays, {}).value();
    std::vector<std::string> expected;
    for (const bool wide : {true, false})
      for (const std::string& name : names)
        if ((name.back() == 'a') == wide) expected.push_back(name);
    ASSERT_EQ(made.order.size(), expected.size());
    uint64_t offset = made.header.size();
    for (size_t i = 0; i < expected.size(); ++i) {
      ASSERT_EQ(mixed[made.order[i]], expected[i]);
      ASSERT_EQ(made.offsets[made.order[i]], offset);
      offset += expected[i].back() == 'a' ? 16 : 2;
    }
    EXPECT_EQ(made.bytes, offset);
    // The same where their places among more names are known, close by or far between.
    for (const uint32_t every : {1u, 3u, 1000u}) {
      for (size_t i = 0; i < arrays.size(); ++i)
        arrays[i].place =
            every * static_cast<uint32_t>(std::distance(names.begin(), names.find(mixed[i])));
      const SafetensorsLayout again = lay_out_safetensors(arrays, {}).value();
      EXPECT_EQ(again.header, made.header);
      EXPECT_EQ(again.order, made.order);
      EXPECT_EQ(again.offsets, made.offsets);
      arrays.push_back({mixed.front(), DType::kF32, &shape, arrays[0].place});
      EXPECT_TRUE(has_error(lay_out_safetensors(arrays, {}), Code::kInvalidArgument,
                            "two tensors are named"));
      arrays.pop_back();
    }
    arrays.push_back({mixed.front(), DType::kF32, &shape});
    EXPECT_TRUE(has_error(lay_out_safetensors(arrays, {}), Code::kInvalidArgument,
                          "two tensors are named"));
  }
}

TEST(Safetensors, EachByteOfANameIsReadBack) {
  for (size_t length = 1; length < 20; ++length) {
    for (size_t at = 0; at < length; ++at) {
      for (int byte = 0; byte < 256; ++byte) {
        std::string name(length, 'm');
        name[at] = static_cast<char>(byte);
        std::vector<TensorEntry> tensors = {{name, DType::kU8, {2}}};
        const auto header = write_safetensors_header(tensors, {});
        if (byte == 0 || byte >= 0x80) {
          ASSERT_TRUE(has_error(header, Code::kInvalidArgument, byte == 0 ? "NUL" : "UTF-8"));
          continue;
        }
        ASSERT_TRUE(is_ok(header));
        auto parsed = parse_safetensors(bytes_of(header.value()), header.value().size() + 2);
        ASSERT_TRUE(is_ok(parsed));
        ASSERT_EQ(parsed.value().tensors[0].name, name);
      }
    }
  }
}

TEST(Safetensors, DamagedHeadersNeverPassUnnoticedOrCrash) {
  std::vector<TensorEntry> tensors = {{"model.a", DType::kF16, {4, 4}},
                                      {"model.b", DType::kF4, {2, 4}}};
  std::string good = write_safetensors_header(tensors, {{"k", "v"}}, 8).value();
  uint64_t file_bytes = good.size() + 36;
  ASSERT_TRUE(is_ok(parse_safetensors(bytes_of(good), file_bytes)));
  std::mt19937_64 random(23);
  for (int trial = 0; trial < 20000; ++trial) {
    std::string bad = good;
    for (uint64_t k = 1 + random() % 3; k > 0; --k)
      bad[random() % bad.size()] = static_cast<char>(random());
    auto parsed = parse_safetensors(bytes_of(bad), file_bytes);
    if (!parsed) continue;
    uint64_t end = parsed.value().data_offset;  // what passes still tiles the file
    for (const TensorEntry& entry : parsed.value().tensors) {
      EXPECT_EQ(entry.offset, end);
      end += entry.bytes;
    }
    EXPECT_EQ(end, file_bytes);
  }
}

TEST(Safetensors, TwoHundredThousandTensorsTakeLinearTime) {
  std::vector<TensorEntry> tensors;
  for (int i = 0; i < 200000; ++i)
    tensors.push_back({"model.layers." + std::to_string(i) + ".weight", DType::kBF16, {4, 4}});
  auto begin = std::chrono::steady_clock::now();
  std::string header = write_safetensors_header(tensors, {}).value();
  auto parsed = parse_safetensors(bytes_of(header), header.size() + 200000 * 32);
  ASSERT_TRUE(is_ok(parsed));
  EXPECT_EQ(parsed.value().tensors.size(), 200000u);
  header.replace(header.find("layers.199999."), 14, "layers.199998.");  // now a duplicate
  EXPECT_TRUE(has_error(parse_safetensors(bytes_of(header), header.size() + 200000 * 32),
                        Code::kInvalidArgument, "twice"));
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(120));
}

}  // namespace
}  // namespace ptc
