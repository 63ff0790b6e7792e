// The picture of a plan: well-formed, complete, and safe with any names.
#include "reshard/plan/plan_svg.h"

#include <fmt/core.h>
#include <gmock/gmock.h>

#include <boost/property_tree/ptree.hpp>
#include <boost/property_tree/xml_parser.hpp>
#include <sstream>

namespace ptc {
namespace {

using boost::property_tree::ptree;
using ::testing::HasSubstr;
using ::testing::Not;
using Kind = PlanPicture::Kind;

ptree parsed(const std::string& svg) {
  std::istringstream stream(svg);
  ptree tree;
  boost::property_tree::read_xml(stream, tree);
  return tree.get_child("svg");
}

/// `from` ranks to `to` ranks of 4 MiB in all, everything evenly cut.
PlanPicture picture(uint32_t from, uint32_t to) {
  constexpr uint64_t kAll = 4 << 20;
  PlanPicture picture;
  picture.job = "llama";
  picture.checkpoint = "base";
  picture.from = fmt::format("tp{}-pp1-dp1", from);
  picture.to = fmt::format("tp{}-pp1-dp1", to);
  picture.remark = "running";
  for (uint32_t i = 0; i < from; ++i)
    picture.sources.push_back({fmt::format("rank {}", i), fmt::format("tp {}", i), kAll / from});
  for (uint32_t i = 0; i < to; ++i)
    picture.targets.push_back({fmt::format("rank {}", i), fmt::format("tp {}", i), kAll / to});
  for (uint32_t i = 0; i < std::max(from, to); ++i)
    picture.flows.push_back({i * from / std::max(from, to), i * to / std::max(from, to),
                             Kind::kLocal, kAll / std::max(from, to)});
  picture.local_bytes = kAll;
  picture.written_files = to;
  return picture;
}

TEST(PlanSvg, ShowsEveryRankEveryFlowAndTheTotals) {
  const std::string svg = plan_svg(picture(1, 4));
  const ptree tree = parsed(svg);
  EXPECT_EQ(tree.count("path"), 4u);
  EXPECT_EQ(tree.get<std::string>("title"), "llama / base: tp1-pp1-dp1 → tp4-pp1-dp1");
  for (const char* text :
       {"rank 3", "tp 3 · 1.0 MiB", "4.0 MiB in 4 files", "running", "4.0 MiB copied within a node",
        "0 B moved between nodes", "rank 0 → rank 2: 1.0 MiB copied within its node"})
    EXPECT_THAT(svg, HasSubstr(text));
}

TEST(PlanSvg, KeptCopiedAndMovedLookDifferent) {
  PlanPicture three = picture(3, 3);
  three.flows[0].kind = Kind::kKept;
  three.flows[2].kind = Kind::kMoved;
  const std::string svg = plan_svg(three);
  for (const char* style :
       {"<path class=\"kept\"", "<path class=\"local\"", "<path class=\"moved\""})
    EXPECT_THAT(svg, HasSubstr(style));
}

TEST(PlanSvg, NothingWasMovedYet) {
  const std::string svg = plan_svg(PlanPicture{.job = "llama"});
  EXPECT_EQ(parsed(svg).count("path"), 0u);
  EXPECT_THAT(svg, HasSubstr("Nothing has been resharded yet"));
}

TEST(PlanSvg, NamesAreTextAndNeverMarkup) {
  PlanPicture hostile = picture(2, 2);
  hostile.job = "</title><script>alert(1)</script>";
  hostile.checkpoint = "a\"b'c&d\x01\xff\xed\xa0\x80\xef\xbf\xbf";
  hostile.sources[0].label = "<img onerror='x'>";
  hostile.remark = "]]>";
  const std::string svg = plan_svg(hostile);
  EXPECT_THAT(svg, Not(HasSubstr("<script")));
  EXPECT_THAT(svg, Not(HasSubstr("<img")));
  EXPECT_THAT(svg, Not(HasSubstr("]]>")));
  EXPECT_THAT(parsed(svg).get<std::string>("title"), HasSubstr(hostile.job));
}

TEST(PlanSvg, EscapingKeepsCharactersAndReplacesTheRest) {
  EXPECT_EQ(xml_escaped("a<b>&\"'\tä€😀"), "a&lt;b&gt;&amp;&quot;&#39;\tä€😀");
  const std::string bad = "\xef\xbf\xbd";
  EXPECT_EQ(xml_escaped(std::string("\0", 1)), bad);
  EXPECT_EQ(xml_escaped("\x1b[31m"), bad + "[31m");
  EXPECT_EQ(xml_escaped("\xc3"), bad);                      // cut off
  EXPECT_EQ(xml_escaped("\xc0\xaf"), bad + bad);            // not the shortest form
  EXPECT_EQ(xml_escaped("\xed\xa0\x80"), bad + bad + bad);  // a surrogate
  EXPECT_EQ(xml_escaped("\xef\xbf\xbe"), bad + bad + bad);  // U+FFFE
}

TEST(PlanSvg, EverythingLiesWithinThePicture) {
  for (uint32_t from : {1, 2, 64}) {
    for (uint32_t to : {1, 3, 16, 64}) {
      const ptree tree = parsed(plan_svg(picture(from, to)));
      const double height = tree.get<double>("<xmlattr>.height");
      for (const auto& [name, element] : tree) {
        if (name != "rect" || element.get<std::string>("<xmlattr>.class") == "ground") continue;
        const double y = element.get<double>("<xmlattr>.y");
        EXPECT_GE(y, 0);
        EXPECT_LE(y + element.get<double>("<xmlattr>.height"), height) << from << " to " << to;
      }
    }
  }
}

TEST(PlanSvg, NoBytesAtAllIsAPictureToo) {
  PlanPicture empty = picture(2, 2);
  for (auto* blocks : {&empty.sources, &empty.targets})
    for (PlanPicture::Block& block : *blocks) block.bytes = 0;
  empty.flows.clear();
  EXPECT_THAT(plan_svg(empty), Not(HasSubstr("nan")));
  EXPECT_EQ(parsed(plan_svg(empty)).count("path"), 0u);
}

}  // namespace
}  // namespace ptc
