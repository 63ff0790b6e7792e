#include "dataset/source/path_pattern.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace ptc {
namespace {

using ::testing::ElementsAre;
using ::testing::SizeIs;

std::vector<std::string> expanded(const std::string& text) {
  const auto pattern = BracePattern::parse(text);
  if (!pattern) return {"error: " + pattern.error().message()};
  std::vector<std::string> all;
  uint64_t bytes = 0;
  const auto done = pattern.value().each([&](const std::string& path) -> Result<bool> {
    all.push_back(path);
    bytes += path.size();
    return true;
  });
  EXPECT_TRUE(done && done.value());
  EXPECT_EQ(all.size(), pattern.value().count());
  EXPECT_LE(bytes, pattern.value().bytes());
  return all;
}

TEST(PathPattern, BracesAreThoseOfWebDataset) {
  EXPECT_THAT(expanded("/d/{000..003}.tar"),
              ElementsAre("/d/000.tar", "/d/001.tar", "/d/002.tar", "/d/003.tar"));
  EXPECT_THAT(expanded("/d/{8..11}"), ElementsAre("/d/8", "/d/9", "/d/10", "/d/11"));
  EXPECT_THAT(expanded("/d/{08..11}"), ElementsAre("/d/08", "/d/09", "/d/10", "/d/11"));
  EXPECT_THAT(expanded("{3..1}{a,b}"), ElementsAre("3a", "3b", "2a", "2b", "1a", "1b"));
  EXPECT_THAT(expanded("{0..10..5}"), ElementsAre("0", "5", "10"));
  EXPECT_THAT(expanded("{c..e}"), ElementsAre("c", "d", "e"));
  EXPECT_THAT(expanded("{train,val-{0..1}}/x"), ElementsAre("train/x", "val-0/x", "val-1/x"));
  EXPECT_THAT(expanded("{-1..1}"), ElementsAre("-1", "0", "1"));
  EXPECT_THAT(expanded("{,x}y"), ElementsAre("y", "xy"));
}

TEST(PathPattern, OtherBracesStayAsTheyAre) {
  for (const char* text :
       {"plain", "{", "}", "{}", "{one}", "{1..}", "{a..10}", "{1..2", "a{b}c", "{1...3}"})
    EXPECT_THAT(expanded(text), ElementsAre(text)) << text;
  EXPECT_THAT(expanded("{x}{1..2}"), ElementsAre("{x}1", "{x}2"));
}

TEST(PathPattern, NoPatternTakesMuchMemory) {
  EXPECT_THAT(expanded("{1..1000000}"), SizeIs(1'000'000));
  for (const char* text : {"{1..1000001}", "{1..1000}{1..1001}", "{0..999999999999}",
                           "{1..9}{1..9}{1..9}{1..9}{1..9}{1..9}{1..9}{1..9}{1..9}"})
    EXPECT_THAT(expanded(text), SizeIs(1)) << text;
  EXPECT_THAT(expanded("{-9223372036854775808..5}x{1..2}"), SizeIs(2));  // the first is no range
  EXPECT_THAT(expanded(std::string(100'000, '{')), SizeIs(1));
}

TEST(PathPattern, NoPathIsLongerThanTheKernelTakes) {
  const auto good = [](const std::string& text) { return BracePattern::parse(text).has_value(); };
  EXPECT_TRUE(good("/" + std::string(4094, 'x')));
  EXPECT_FALSE(good("/" + std::string(4095, 'x')));
  EXPECT_FALSE(BracePattern::literal("/" + std::string(4095, 'x')).has_value());
  EXPECT_TRUE(good("/" + std::string(4080, 'x') + "{0..9}"));
  EXPECT_TRUE(good("/" + std::string(4072, 'x') + "{08..10}{x,y}"));
  EXPECT_FALSE(good("/" + std::string(2000, 'x') + "{0..9}{{,y},{" + std::string(1000, 'x') +
                    ",z}}" + std::string(1100, 'x')));
  EXPECT_FALSE(good("/" + std::string(4030, 'x') +
                    "{1..3..000000000001}{000000000000001..1}{1..10}{000000000000001..1}" +
                    std::string(60, 'x')));
}

TEST(PathPattern, PathsAreMadeOneByOne) {
  const auto pattern = BracePattern::parse("{a,b}{1..1000}");
  int seen = 0;
  const auto stopped =
      pattern.value().each([&](const std::string&) -> Result<bool> { return ++seen < 1500; });
  EXPECT_FALSE(stopped.value());
  EXPECT_EQ(seen, 1500);
  EXPECT_FALSE(pattern.value().each(
      [](const std::string&) -> Result<bool> { return invalid_argument("no"); }));
}

}  // namespace
}  // namespace ptc
