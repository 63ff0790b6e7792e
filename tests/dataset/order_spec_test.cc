#include "dataset/plan/order_spec.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace ptc {
namespace {

using testing::HasSubstr;

std::string refusal(std::string_view text) {
  const auto parsed = OrderSpec::parse(text);
  return parsed ? "accepted" : parsed.error().message();
}
OrderSpec spec_of(std::string_view text) { return OrderSpec::parse(text).value(); }
std::string refused_check(std::string_view text, uint64_t dp,
                          std::optional<uint64_t> samples = std::nullopt) {
  const auto checked = spec_of(text).check(dp, samples);
  return checked ? "fits" : checked.error().message();
}

TEST(OrderSpec, Defaults) {
  const OrderSpec spec = spec_of(R"({"batch": 8})");
  EXPECT_EQ(spec, (OrderSpec{.batch = 8}));
}

TEST(OrderSpec, All) {
  const OrderSpec spec =
      spec_of(R"({"format": "ptc-order/1", "seed": 18446744073709551615, "batch": 12,
    "tail": "pad", "shuffle": "block:64", "assign": "micro:2", "uneven": true, "epochs": 3, "round": "down"})");
  EXPECT_EQ(spec, (OrderSpec{.seed = UINT64_MAX,
                             .batch = 12,
                             .tail = Tail::kPad,
                             .shuffle = {.kind = ShuffleKind::kBlock, .block = 64},
                             .assign = {.kind = Assign::Kind::kMicro, .micro = 2},
                             .uneven = true,
                             .epochs = 3,
                             .round_down = true}));
}

TEST(OrderSpec, RefusalsSayWhereAndWhat) {
  EXPECT_EQ(refusal("{\n  \"seed\": 1\n}"),
            "line 1, column 1: 'batch' is missing: the samples of a global batch");
  EXPECT_EQ(refusal("{\"batch\": 8,\n \"seeds\": 1}"),
            "line 2, column 2: unknown key 'seeds' (did you mean 'seed'?)");
  EXPECT_THAT(refusal("[8]"), HasSubstr("line 1, column 1: an order is a JSON object"));
  EXPECT_THAT(refusal("{\"batch\": 8,,}"), HasSubstr("line 1, column 13"));
  EXPECT_THAT(refusal("{\"batch\": 8, \"batch\": 9}"), HasSubstr("batch"));
  for (const char* bad : {"0", "-1", "1.5", "\"8\"", "null", "2147483649"}) {
    EXPECT_EQ(refusal(fmt::format("{{\"batch\": {}}}", bad)),
              "line 1, column 11: 'batch' must be a whole number from 1 to 2147483648");
  }
  const std::pair<const char*, const char*> words[] = {
      {R"("tail": "cut")", "'tail' must be \"carry\""},
      {R"("tail": 3)", "'tail' must be a text"},
      {R"("shuffle": "local")", "'shuffle' must be \"global\""},
      {R"("shuffle": "block:0")", "the block of 'block:0'"},
      {R"("assign": "micro:x")", "micro-batch must be a whole number"},
      {R"("assign": "rows")", "'assign' must be \"contig\""},
      {R"("uneven": 1)", "'uneven' must be true or false"},
      {R"("epochs": 0)", "'epochs' must be a whole number from 1"},
      {R"("round": "up")", "'round' can only be \"down\""},
      {R"("format": "ptc-order/2")", "'format' must be \"ptc-order/1\""},
  };
  for (const auto& [member, message] : words) {
    EXPECT_THAT(refusal(fmt::format("{{\"batch\": 8, {}}}", member)),
                testing::AllOf(HasSubstr("line 1, column "), HasSubstr(message)))
        << member;
  }
}

TEST(OrderSpec, WhatDoesNotFitTheRanks) {
  EXPECT_EQ(refused_check(R"({"batch": 8})", 4), "fits");
  EXPECT_THAT(refused_check(R"({"batch": 10})", 4), HasSubstr("the nearest that do are 8 and 12"));
  EXPECT_EQ(refused_check(R"({"batch": 10, "uneven": true})", 4), "fits");
  EXPECT_THAT(refused_check(R"({"batch": 3, "uneven": true})", 4),
              HasSubstr("less than a sample for each"));
  EXPECT_THAT(refused_check(R"({"batch": 10, "uneven": true, "assign": "stride"})", 4),
              HasSubstr("contig"));
  EXPECT_EQ(refused_check(R"({"batch": 12, "assign": "micro:3"})", 4), "fits");
  EXPECT_THAT(refused_check(R"({"batch": 12, "assign": "micro:2"})", 4),
              HasSubstr("whole micro-batches of 2"));
}

TEST(OrderSpec, WhatDoesNotFitTheSamples) {
  EXPECT_THAT(refused_check(R"({"batch": 2000000000, "tail": "pad"})", 1),
              HasSubstr("at most 1048576"));
  EXPECT_THAT(refused_check(R"({"batch": 2000000000, "tail": "pad"})", 2000, 20),
              HasSubstr("repeats at most 1048576"));
  EXPECT_EQ(refused_check(R"({"batch": 2000000000, "tail": "pad"})", 2000, 2'000'000'000), "fits");
  EXPECT_EQ(refused_check(R"({"batch": 8, "tail": "drop"})", 4, 8), "fits");
  EXPECT_THAT(refused_check(R"({"batch": 8, "tail": "drop"})", 4, 7), HasSubstr("leaves nothing"));
  EXPECT_EQ(refused_check(R"({"batch": 8})", 4, 7), "fits");
  EXPECT_THAT(refused_check(R"({"batch": 8, "epochs": 5})", 4, kMaxSamples / 4),
              HasSubstr("can be counted"));
}

}  // namespace
}  // namespace ptc
