#include "reshard/checkpoint/shard_index.h"

#include "tests/store/expect_error.h"

namespace ptc {
namespace {

TEST(ShardIndexTest, NamesTheShards) {
  auto shards = parse_shard_index(
      R"({"metadata": {"total_size": 3, "weight_map": {"x": 1}, "list": [1, [null, "a"]]},
          "weight_map": {"a": "one.safetensors", "b": "sub/zw\u00e9i", "c": "one.safetensors"}, "more": 7})");
  ASSERT_TRUE(is_ok(shards));
  EXPECT_EQ(shards.value(), (ShardIndex{{"one.safetensors", {"a", "c"}}, {"sub/zwéi", {"b"}}}));
  EXPECT_TRUE(parse_shard_index(R"({"weight_map": {}})").value().empty());
}

TEST(ShardIndexTest, RefusesAndSaysWhy) {
  auto refused = [](const std::string& text, std::string_view why) {
    return has_error(parse_shard_index(text), Code::kInvalidArgument, why);
  };
  EXPECT_TRUE(refused("{}", "there is no 'weight_map'"));
  EXPECT_TRUE(refused("[]", "there is no 'weight_map'"));
  EXPECT_TRUE(refused(R"({"metadata": {"weight_map": {}}})", "there is no 'weight_map'"));
  EXPECT_TRUE(refused(R"({"weight_map": 1})", "'weight_map' is not an object"));
  EXPECT_TRUE(refused(R"({"weight_map": ["a"]})", "'weight_map' is not an object"));
  EXPECT_TRUE(refused(R"({"weight_map": {"a": 1}})", "'a' is said to be in 'something else'"));
  EXPECT_TRUE(
      refused(R"({"weight_map": {"a": {"b": "c"}}})", "'a' is said to be in 'something else'"));
  EXPECT_TRUE(refused(R"({"weight_map": {"a": ""}})", "'a' is said to be in ''"));
  EXPECT_TRUE(refused(R"({"weight_map": {"a")", "line 1: not valid JSON: the text ends too early"));
  EXPECT_TRUE(
      refused(R"({"weight_map": {"a": "x/../../b"}})", "not the name of a file beside the index"));
  EXPECT_TRUE(refused("{} x", "line 1: not valid JSON"));
  EXPECT_TRUE(refused("[[[[[[[[[[]]]]]]]]]]", "not valid JSON"));
}

}  // namespace
}  // namespace ptc
