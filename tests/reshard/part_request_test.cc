// Who asks for a part of a plan and who is asked speak of the same one.
#include "reshard/job/part_request.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <boost/json/object.hpp>
#include <boost/json/serialize.hpp>

#include "store/base/json.h"
#include "tests/store/expect_error.h"

namespace ptc {
namespace {

PartRequest a_request() {
  PartRequest request;
  request.id = "base-1";
  request.generation = 7;
  request.stored = "stored-7-w0";
  request.revision = 12;
  request.wanted.spec.sizes = {.tp = 2};
  request.wanted.spec.optimizer = OptimizerCut::kZero1;
  request.wanted.placement.place_of_rank = {{"w0"}, {"w1", NodeMemory::cuda(1)}};
  request.wanted.replicas = 1;
  request.wanted.alive = {"w0", "w1"};
  request.epoch = 3;
  return request;
}

TEST(PartRequests, ComeAsTheyWereSent) {
  PartRequest request = a_request();
  for (const bool commits : {false, true}) {
    if (commits) request.commit = {"w0", 99};
    const auto got = PartRequest::from_text(request.to_text());
    ASSERT_TRUE(is_ok(got));
    EXPECT_EQ(got.value().to_text(), request.to_text());
    EXPECT_EQ(got.value().plan_text(), request.plan_text());
    EXPECT_EQ(got.value().epoch, 3);
    EXPECT_EQ(got.value().commit.has_value(), commits);
    if (commits) {
      EXPECT_EQ(got.value().commit->from, "w0");
      EXPECT_EQ(got.value().commit->fence, 99);
    }
  }
}

TEST(PartRequests, ThePlanIsTheSameInWhateverOrderItIsSaid) {
  PartRequest request = a_request();
  request.commit = {"w0", 99};
  const json::value value = parse_json(request.to_text()).value();
  std::vector<std::pair<std::string, json::value>> members;
  for (const auto& [key, member] : value.get_object()) members.emplace_back(key, member);
  for (size_t i = 0; i < members.size(); ++i) {
    std::rotate(members.begin(), members.begin() + 1, members.end());
    json::object turned;
    for (const auto& [key, member] : members) turned[key] = member;
    const auto got = PartRequest::from_text(json::serialize(turned));
    ASSERT_TRUE(is_ok(got));
    EXPECT_EQ(got.value().plan_text(), request.plan_text()) << members.front().first << " first";
  }
}

TEST(PartRequests, ThePlanDoesNotDependOnWhoAsks) {
  PartRequest request = a_request();
  const std::string plan = request.plan_text();
  request.epoch = 4;
  request.commit = {"w1", 5};
  EXPECT_EQ(request.plan_text(), plan);
  request.wanted.replicas = 0;
  EXPECT_NE(request.plan_text(), plan);
}

/// What is sent to a thousand nodes is no list of all ranks for each.
TEST(PartRequests, OfManyRanksAreShort) {
  PartRequest request = a_request();
  request.wanted.spec.sizes = {.tp = 8, .pp = 16, .dp = 128};
  request.wanted.placement.place_of_rank.clear();
  for (unsigned rank = 0; rank < 16384; ++rank)
    request.wanted.placement.place_of_rank.push_back({fmt::format("node-{:04}", rank / 16)});
  const std::string text = request.to_text();
  EXPECT_LT(text.size(), 20'000u);
  const auto got = PartRequest::from_text(text);
  ASSERT_TRUE(is_ok(got));
  EXPECT_EQ(got.value().wanted.placement.place_of_rank, request.wanted.placement.place_of_rank);
}

TEST(PartRequests, DamageIsRefused) {
  PartRequest request = a_request();
  for (const std::string_view text : {"", "[]", "{}", "{\"id\": 1}"})
    EXPECT_TRUE(has_error(PartRequest::from_text(text), Code::kInvalidArgument)) << text;
  for (const std::string_view id : {"", ".", "..", "a/b"}) {
    request.id = id;
    EXPECT_TRUE(has_error(PartRequest::from_text(request.to_text()), Code::kInvalidArgument)) << id;
  }
  request = a_request();
  request.stored = "stored-/../x";
  EXPECT_TRUE(has_error(PartRequest::from_text(request.to_text()), Code::kInvalidArgument));
  request = a_request();
  request.wanted.placement.place_of_rank.pop_back();
  EXPECT_TRUE(has_error(PartRequest::from_text(request.to_text()), Code::kInvalidArgument));
  for (const std::string_view ranks :
       {R"(["w0", 2, "w1"])", R"(["w0", -1, "w1", 3])", R"(["w0", 18446744073709551615, "w1", 3])",
        R"(["w0", 3])", R"([2, "w0"])", R"([[], 2])"}) {
    json::value value = parse_json(a_request().to_text()).value();
    value.as_object()["ranks"] = parse_json(ranks).value();
    EXPECT_TRUE(has_error(PartRequest::from_text(json::serialize(value)), Code::kInvalidArgument))
        << ranks;
  }
}

}  // namespace
}  // namespace ptc
