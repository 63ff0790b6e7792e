#include "store/codec/torch_path.h"

#include <map>
#include <random>

#include "expect_error.h"

namespace ptc {
namespace {

using Kind = TorchStep::Kind;

TEST(TorchPath, TextsOfAPath) {
  const std::vector<TorchStep> path = {{Kind::kKey, "model"},       {Kind::kKey, "a.b"},
                                       {Kind::kNumberKey, {}, -3},  {Kind::kListIndex, {}, 0},
                                       {Kind::kTupleIndex, {}, 12}, {Kind::kKey, ""},
                                       {Kind::kKey, "é/%\n"}};
  EXPECT_EQ(torch_name(path), "model.a.b.-3.0.12..é/%\n");
  EXPECT_EQ(torch_path_text(path), "model.a%2Eb.%i-3.%l0.%t12.%.é%2F%25%0A");
  EXPECT_EQ(torch_path_text({}), "");
  EXPECT_EQ(parse_torch_path("").value(), std::vector<TorchStep>());
}

TEST(TorchPath, RefusesWhatIsNeverWritten) {
  for (const char* text : {".", "a.", ".a", "a..b", "%41", "%2", "%2e", "%i", "%i1x", "%i01",
                           "%l-1", "%t", "%x1", "a/b", "%i99999999999999999999", "\n"})
    EXPECT_TRUE(has_error(parse_torch_path(text), Code::kInvalidArgument)) << text;
}

TEST(TorchPath, RoundTripsAndNoTwoPathsHaveOneText) {
  const uint64_t seed = std::random_device()();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937_64 random(seed);
  const std::string pieces[] = {"",    "a",   ".", "/",    "%",          "0", "1", "-",
                                "%i1", "%2E", "é", "\x1f", "layers.0.w", "i", "l0"};
  std::map<std::string, std::vector<TorchStep>> seen;
  for (int trial = 0; trial < 50'000; ++trial) {
    std::vector<TorchStep> path(random() % 4);
    for (TorchStep& step : path) {
      step.kind = static_cast<Kind>(random() % 4);
      if (step.kind == Kind::kKey)
        for (uint64_t n = random() % 4; n > 0; --n)
          step.key += pieces[random() % std::size(pieces)];
      else
        step.number = static_cast<int64_t>(random() % 3) *
                      (step.kind == Kind::kNumberKey && random() % 2 == 0 ? -1 : 1);
    }
    const std::string text = torch_path_text(path);
    auto parsed = parse_torch_path(text);
    ASSERT_TRUE(is_ok(parsed)) << text;
    ASSERT_EQ(parsed.value(), path) << text;
    const auto [found, is_new] = seen.emplace(text, path);
    ASSERT_TRUE(is_new || found->second == path) << text;
  }
}

}  // namespace
}  // namespace ptc
