// A node that is alone: the same calls as in a cluster, and nobody is asked or waited for.
#include "reshard/cluster/lone_node.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "reshard/cluster/node_reports.h"
#include "reshard/cluster/tell.h"
#include "reshard/cluster/tombstones.h"

namespace ptc {
namespace {

using ::testing::ElementsAre;

TEST(LoneNodeTest, IsThereAndSaysWhatItDoesNotShare) {
  const LoneNode node("w0");
  EXPECT_EQ(node.self(), "w0");
  EXPECT_THAT(node.alive(), ElementsAre("w0"));
  EXPECT_TRUE(node.seen().empty());
  EXPECT_TRUE(node.traffic().empty());
  EXPECT_FALSE(node.shares_bytes());
  EXPECT_FALSE(node.shares_decisions());
  EXPECT_FALSE(node.remembers_removals());
}

TEST(LoneNodeTest, DecidesWithoutALeaseAndNamesNoFence) {
  const std::unique_ptr<MetaClient> meta = make_memory_meta();
  const LoneNode node("w0");
  EXPECT_EQ(node.lease(), nullptr);
  EXPECT_FALSE(node.fence().has_value());
  EXPECT_TRUE(check_trusted(node).has_value());
  EXPECT_TRUE(check_member(node).has_value());
  // Nor does it look for its own key, or for others'.
  ASSERT_TRUE(meta->commit({.puts = {{"nodes/w0", "of somebody else"}}}).has_value());
  ASSERT_TRUE(commit_fenced(*meta, node, {.puts = {{"jobs/a", "{}"}}}).has_value());
  const Result<int64_t> late =
      commit_fenced(*meta, node, {.compares = {{"jobs/a", 0}}, .puts = {{"jobs/a", "{}"}}});
  ASSERT_TRUE(late.has_error());
  EXPECT_EQ(late.error().code(), Code::kConflict);
  // That a node is in service is true of it, too.
  EXPECT_TRUE(commit_fenced(
                  *meta, node,
                  {.compares = {{std::string(kDrainedKeys) + "w0", 0}}, .puts = {{"jobs/b", "{}"}}})
                  .has_value());
  EXPECT_FALSE(meta->get(kMembership).value().has_value());
}

TEST(LoneNodeTest, HasNobodyToAsk) {
  LoneNode node("w0");
  const Result<std::string> answer = node.ask("w1", PeerMethod::kSpace, "");
  ASSERT_TRUE(answer.has_error());
  EXPECT_EQ(answer.error().code(), Code::kUnavailable);
  EXPECT_EQ(answer.error().message(), "there is no node 'w1'");
  EXPECT_EQ(node.fence_of("w1").revision, 0) << "it is not there";
  tell_others(node, "job");
  tell_others_of_data_set(node, {"job", "id"});
  NodeReports reports(node);
  EXPECT_TRUE(reports.heard().empty());
}

TEST(LoneNodeTest, ForgetsWhatWasRemovedOnceThatIsCarriedOut) {
  const std::unique_ptr<MetaClient> meta = make_memory_meta();
  const std::string tombstone = removed_job_key("id");
  ASSERT_TRUE(meta->commit({.puts = {{tombstone, removed_job_text("job", true)}}}).has_value());
  note_carried_out(*meta, LoneNode("w0"), tombstone);
  EXPECT_TRUE(read_tombstones(*meta).value().entries.empty());
}

}  // namespace
}  // namespace ptc
