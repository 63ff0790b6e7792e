#include "reshard/ptc/name_pattern.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <string>

namespace ptc {
namespace {

using ::testing::HasSubstr;

NamePattern pattern(std::string_view text) {
  auto parsed = NamePattern::parse(text);
  EXPECT_TRUE(parsed.has_value()) << text;
  return std::move(parsed).value();
}
bool matches(std::string_view text, std::string_view name) {
  return pattern(text).match(name).has_value();
}
std::string pattern_error(std::string_view text) {
  const auto parsed = NamePattern::parse(text);
  return parsed ? "accepted" : parsed.error().message();
}

TEST(NamePattern, LiteralsMatchTheWholeName) {
  EXPECT_TRUE(matches("norm.weight", "norm.weight"));
  EXPECT_FALSE(matches("norm.weight", "norm.weight2"));
  EXPECT_FALSE(matches("norm.weight", "anorm.weight"));
  EXPECT_FALSE(matches("norm.weight", ""));
}

TEST(NamePattern, OneStarStaysInsideAComponent) {
  EXPECT_TRUE(matches("a.*.b", "a.x_1.b"));
  EXPECT_FALSE(matches("a.*.b", "a.x.y.b"));
  EXPECT_FALSE(matches("a.*.b", "a..b"));
  EXPECT_TRUE(matches("*_norm", "q_norm_norm"));
}

TEST(NamePattern, TwoStarsCrossBorders) {
  EXPECT_TRUE(matches("cls.**", "cls.a.b"));
  EXPECT_TRUE(matches("cls.**", "cls."));
  EXPECT_TRUE(matches("**weight", "weight"));
  EXPECT_TRUE(matches("a**b**c", "abbc"));
  EXPECT_FALSE(matches("a**b**c", "acb"));
}

TEST(NamePattern, AlternativesMayBeEmptyAndMayOverlap) {
  EXPECT_TRUE(matches("x.{q,k,v}_proj", "x.k_proj"));
  EXPECT_FALSE(matches("x.{q,k,v}_proj", "x.o_proj"));
  EXPECT_TRUE(matches("w{,_scale}", "w"));
  EXPECT_TRUE(matches("w{,_scale}", "w_scale"));
  EXPECT_TRUE(matches("{a,ab}{c,bc}", "abc"));
  EXPECT_TRUE(matches("{a,ab}{c,bc}d", "abbcd"));
}

TEST(NamePattern, NumbersAreFoundWithTheirPlace) {
  const auto match = pattern("h.{layer}.experts.{expert}.w").match("h.17.experts.230.w");
  ASSERT_TRUE(match.has_value());
  EXPECT_EQ(match->layer, 17u);
  EXPECT_EQ(match->expert, 230u);
  EXPECT_EQ(match->layer_begin, 2u);
  EXPECT_EQ(match->layer_end, 4u);
  EXPECT_EQ(pattern("weight{expert}").match("weight7")->expert, 7u);
  EXPECT_FALSE(pattern("weight{expert}").match("weight7")->layer.has_value());
}

TEST(NamePattern, NumbersHaveOneForm) {
  EXPECT_TRUE(matches("h.{layer}.w", "h.0.w"));
  for (const char* name : {"h.00.w", "h.01.w", "h.+1.w", "h..w", "h.x.w", "h.1a.w",
                           "h.2147483648.w", "h.99999999999999999999.w"}) {
    EXPECT_FALSE(matches("h.{layer}.w", name)) << name;
  }
  EXPECT_TRUE(matches("h.{layer}.w", "h.2147483647.w"));
}

TEST(NamePattern, RefusesWhatItCannotMean) {
  EXPECT_THAT(pattern_error(""), HasSubstr("empty"));
  EXPECT_THAT(pattern_error("a***b"), HasSubstr("more than two '*'"));
  EXPECT_THAT(pattern_error("a{b"), HasSubstr("without its '}'"));
  EXPECT_THAT(pattern_error("a}b"), HasSubstr("without its '{'"));
  EXPECT_THAT(pattern_error("{layers}.x"), HasSubstr("neither {layer} nor {expert}"));
  EXPECT_THAT(pattern_error("{layer}.{layer}"), HasSubstr("{layer} twice"));
  EXPECT_THAT(pattern_error("{a,b*}"), HasSubstr("plain characters only"));
  EXPECT_THAT(pattern_error(std::string(2000, 'a')), HasSubstr("at most 1000"));
}

TEST(NamePattern, HostileNamesCostLittle) {
  std::string text = "**";
  for (int i = 0; i < 100; ++i) text += "a**";
  const NamePattern hostile = pattern(text + "b");
  const std::string name(NamePattern::kMaxNameLength, 'a');
  const auto start = std::chrono::steady_clock::now();
  EXPECT_FALSE(hostile.match(name).has_value());
  EXPECT_FALSE(pattern(text + "b**").match(name).has_value());
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(2));
  EXPECT_FALSE(matches("**", name + "a"));
}

}  // namespace
}  // namespace ptc
