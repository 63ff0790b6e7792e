// Nodes that can have no further thread: what they ask others they ask one after the other, and
// nobody ends of it.
#include <filesystem>

#include "tests/reshard/cluster_fixture.h"
#include "tests/support/no_threads.h"

namespace ptc::testing {
namespace {

TEST_F(ClusterTest, WhatIsDecidedIsToldWithoutThreads) {
  ASSERT_TRUE(cluster_.store(0).create_job("job").has_value());
  write(0, LayoutSpec());
  commit(0);
  cluster_.wait_settled();
  {
    const NoThreads none;
    ASSERT_TRUE(cluster_.store(0).create_job("other").has_value());
    for (unsigned node : {1u, 2u}) EXPECT_NE(cluster_.store(node).find("other"), nullptr);
    JobRef job = cluster_.job(0, "job");
    EXPECT_TRUE(job->save_layout(R"({"tp": 1, "pp": 1, "dp": 1, "keep": 3})").has_value());
    EXPECT_TRUE(job->pin_checkpoint("base", true).has_value());
    Result<std::string> verified = job->verify("base");
    EXPECT_TRUE(verified.has_value()) << verified.error().message();
    write(0, LayoutSpec());
    std::filesystem::rename(incoming(0), job->files_dir() + "/incoming/next");
    Result<> refused = job->commit("next", "next");
    ASSERT_TRUE(refused.has_error());
    EXPECT_EQ(refused.error().errno_value(), EAGAIN) << refused.error().message();
    EXPECT_TRUE(cluster_.store(0).remove_job("other", true).has_value());
    EXPECT_GT(NoThreads::refused(), 0);
  }
  Result<> committed = cluster_.job(0, "job")->commit("next", "next");
  EXPECT_TRUE(committed.has_value()) << committed.error().message();
  cluster_.wait_settled();
  for (unsigned node : {0u, 1u, 2u})
    EXPECT_NE(cluster_.job(node, "job")->find_checkpoint("next"), nullptr);
}

}  // namespace
}  // namespace ptc::testing
