#include "store/meta/etcd_json.h"

#include <gtest/gtest.h>

#include "expect_error.h"

namespace ptc {
namespace {

json::object parsed(std::string_view text) { return parse_json(text).value().as_object(); }

TEST(EtcdJson, BytesAreBase64) {
  EXPECT_EQ(to_base64(""), "");
  EXPECT_EQ(to_base64("f"), "Zg==");
  EXPECT_EQ(to_base64("fo"), "Zm8=");
  EXPECT_EQ(to_base64("foo"), "Zm9v");
  std::string bytes;
  for (int i = 0; i < 256; ++i) bytes += static_cast<char>(i);
  for (size_t from = 0; from < 256; ++from) {
    std::string part = bytes.substr(from);
    json::object object{{"key", to_base64(part)}};
    EXPECT_EQ(bytes_field(object, "key").value(), part);
  }
}

TEST(EtcdJson, WhatIsLeftOutIsEmptyOrZero) {
  EXPECT_EQ(bytes_field({}, "key").value(), "");
  EXPECT_EQ(number_field({}, "revision").value(), 0);
  EXPECT_FALSE(true_field({}, "more"));
  EXPECT_TRUE(object_field({}, "header").empty());
  EXPECT_TRUE(array_field({}, "kvs").empty());
}

TEST(EtcdJson, NumbersAreStrings) {
  EXPECT_EQ(number_field(parsed(R"({"a": "9223372036854775807"})"), "a").value(), INT64_MAX);
  EXPECT_EQ(number_field(parsed(R"({"a": 5})"), "a").value(), 5);
}

TEST(EtcdJson, RefusesWhatEtcdDoesNotSay) {
  for (const char* text :
       {R"({"a": "Zg"})", R"({"a": "Z!=="})", R"({"a": 1})", R"({"a": "Zm9v="})"})
    EXPECT_TRUE(has_error(bytes_field(parsed(text), "a"), Code::kCorrupt, "'a'")) << text;
  for (const char* text : {R"({"a": "9223372036854775808"})", R"({"a": ""})", R"({"a": "5x"})",
                           R"({"a": []})", R"({"a": 1.5})"})
    EXPECT_TRUE(has_error(number_field(parsed(text), "a"), Code::kCorrupt, "'a'")) << text;
  json::object foreign{{"key", to_base64("/other/kv/a")}};
  EXPECT_TRUE(has_error(entry_of(foreign, "/mine/kv/"), Code::kCorrupt, "'key'"));
}

TEST(EtcdJson, ErrorsOfEveryVersion) {
  auto failure = [](std::string_view text) {
    auto found = failure_of(parsed(text));
    return found ? fmt::format("{} {}", found->grpc_code, found->message) : "none";
  };
  EXPECT_EQ(failure(R"({"header": {"revision": "1"}})"), "none");
  EXPECT_EQ(failure(R"({"error": "no leader", "message": "no leader", "code": 14})"),
            "14 no leader");
  EXPECT_EQ(failure(R"({"code": 5, "message": "lease not found", "details": []})"),
            "5 lease not found");
  EXPECT_EQ(failure(R"({"error": {"grpc_code": 14, "http_code": 503, "message": "no leader"}})"),
            "14 no leader");
  EXPECT_EQ(failure(R"({"error": {"code": 14, "message": "no leader"}})"), "14 no leader");
  EXPECT_EQ(failure(R"({"error": 7})"), "0 no reason given");
}

}  // namespace
}  // namespace ptc
