#include "dataset/source/source_spec.h"

#include "tests/store/expect_error.h"

namespace ptc {
namespace {

TEST(SourceSpec, ReadsAllKeys) {
  auto spec = parse_source(
      R"({"format": "tar", "shards": ["/data/a", "/data/b-*.tar"], "on_error": "skip",
          "fingerprint": "content"})");
  ASSERT_TRUE(is_ok(spec));
  EXPECT_EQ(spec.value().format, SourceFormat::kTar);
  EXPECT_EQ(spec.value().shards, (std::vector<std::string>{"/data/a", "/data/b-*.tar"}));
  EXPECT_EQ(spec.value().on_error, OnError::kSkip);
  EXPECT_TRUE(spec.value().fingerprint_of_all_content);
}

TEST(SourceSpec, OnlyShardsAreRequired) {
  auto spec = parse_source(R"({"shards": "/data"})");
  ASSERT_TRUE(is_ok(spec));
  EXPECT_EQ(spec.value(), (SourceSpec{.format = {}, .shards = {"/data"}}));
  EXPECT_EQ(parse_source(R"({"shards": "/data", "format": "auto"})").value(), spec.value());
  EXPECT_EQ(parse_source(R"({"shards": "/data", "format": "jsonl"})").value().format,
            SourceFormat::kJsonl);
}

TEST(SourceSpec, ErrorsSayWhereAndWhat) {
  auto refused = [](std::string_view text, std::string_view message) {
    return has_error(parse_source(text), Code::kInvalidArgument, message);
  };
  EXPECT_TRUE(refused("", "not valid JSON"));
  EXPECT_TRUE(refused("[]", "line 1, column 1: a source is a JSON object"));
  EXPECT_TRUE(refused("{}", "'shards' is missing"));
  EXPECT_TRUE(refused(R"({"shards": []})", "empty list"));
  EXPECT_TRUE(refused(R"({"shards": [3]})", "column 13: a path of shards"));
  EXPECT_TRUE(refused(R"({"shards": "data"})", "begins with '/'"));
  EXPECT_TRUE(refused(R"({"shards": "/a\u0000b"})", "must be a text"));
  EXPECT_TRUE(refused("{\n \"shard\": \"/data\"}",
                      "line 2, column 2: unknown key 'shard' (did you mean 'shards'?)"));
  EXPECT_TRUE(refused(R"({"shards": "/data", "format": "zip"})", "'format' must be"));
  EXPECT_TRUE(refused(R"({"shards": "/data", "format": 1})", "'format' must be"));
  EXPECT_TRUE(refused(R"({"shards": "/data", "on_error": "ignore"})", "'on_error' must be"));
  EXPECT_TRUE(refused(R"({"shards": "/data", "fingerprint": "all"})", "'fingerprint' must be"));
}

}  // namespace
}  // namespace ptc
