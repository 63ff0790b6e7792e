#include "store/codec/dcp_sharding.h"

#include <string>

#include "expect_error.h"

namespace ptc {
namespace {

/// Of a file with "w" [2, 3] and "b" [] whose header has that text.
Result<std::optional<DcpSharding>> sharding(const std::string& text) {
  SafetensorsHeader header;
  header.tensors = {{"w", DType::kF32, {2, 3}}, {"b", DType::kF32, {}}};
  if (!text.empty()) header.metadata["DCP_SHARDING_INFO"] = text;
  return dcp_sharding(header);
}

TEST(DcpSharding, OfPyTorchsWriterHasOffsets) {
  auto found = sharding(R"({"w": {"saved_offsets": [4, 0]}, "b": {"saved_offsets": []}})");
  ASSERT_TRUE(is_ok(found));
  ASSERT_TRUE(found.value().has_value());
  EXPECT_EQ(found.value()->boxes, (std::vector<Box>{{{4, 0}, {2, 3}}, {}}));
  EXPECT_TRUE(found.value()->wholes.empty());
  found = sharding("");
  ASSERT_TRUE(is_ok(found));
  EXPECT_FALSE(found.value().has_value());
}

TEST(DcpSharding, OfOursSaysTheWholeToo) {
  auto found = sharding(
      R"({"w": {"saved_offsets": [4, 0], "global_shape": [7, 3]},
          "b": {"saved_offsets": [], "global_shape": []}})");
  ASSERT_TRUE(is_ok(found));
  EXPECT_EQ(found.value()->wholes, (std::vector<Shape>{{7, 3}, {}}));
}

TEST(DcpSharding, RefusesWhatNoTensorHas) {
  const std::string b = R"(, "b": {"saved_offsets": [], "global_shape": []}})";
  for (const auto& [text, reason] : {
           std::pair<std::string, std::string>{"[]", "no JSON object"},
           {"{", "DCP_SHARDING_INFO"},
           {R"({"w": {"saved_offsets": [4, 0]}})", "does not say where tensor 'b'"},
           {R"({"w": {"saved_offsets": [4]})" + b, "does not say where tensor 'w', of 2 axes"},
           {R"({"w": {"saved_offsets": [-1, 0]})" + b, "no number of elements"},
           {R"({"w": {"saved_offsets": [9223372036854775807, 0]})" + b, "no number of elements"},
           {R"({"w": {"saved_offsets": [4, 0]})" + b, "does not say what tensor 'w'"},
           {R"({"w": {"saved_offsets": [4, 0], "global_shape": [6]})" + b, "does not say what"},
           {R"({"w": {"saved_offsets": [4, 0], "global_shape": [5, 3]})" + b, "within the whole"},
           {R"({"w": {"saved_offsets": [4, 0], "global_shape": ["6", 3]})" + b, "within"},
           {R"({"w": {"saved_offsets": [0, 0], "global_shape": [4294967296, 4294967296]})" + b, ""},
       })
    EXPECT_TRUE(has_error(sharding(text), Code::kInvalidArgument, reason)) << text;
}

}  // namespace
}  // namespace ptc
