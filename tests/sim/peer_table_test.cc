// What nodes ask each other, in the simulator: as the daemon and the local cluster answer it
// (tests/reshard/peer_table_test.cc).
#include "reshard/cluster/peer_table.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/reshard/peer_calls_conformance.h"
#include "tests/sim/sim_cluster.h"
#include "tests/support/job_fixture.h"
#include "tests/support/peer_walk.h"

namespace ptc::sim {
namespace {

using namespace std::chrono_literals;
using ::testing::ElementsAreArray;

TEST(SimPeerTable, EveryRowIsAnsweredAsByADaemon) {
  const testing::TempDir dir;
  std::vector<std::string> failures, of_job, of_another;
  run({.seed = 1}, [&] {
    SimCluster cluster(2, 1, dir.path(), [&](const std::string& why) { failures.push_back(why); });
    for (const unsigned node : {0u, 1u}) cluster.start(node);
    for (const unsigned node : {0u, 1u})
      if (!cluster.wait_up(node, 60s)) failures.push_back("a node does not start");
    sleep(5s);  // both know of each other
    cluster.on(0, [&](JobStore& store) {
      const JobRef job = store.create_job("job").value();
      const testing::AskPeer ask = [&](const PeerRow& row, const std::string& request) {
        return cluster.member(0).ask("w1", row.method, request);
      };
      of_job = testing::answers_to_all(ask, {job->name(), job->id()});
      of_another = testing::answers_to_all(ask, {job->name(), "another"});
    });
  });
  EXPECT_TRUE(failures.empty()) << failures.front();
  EXPECT_THAT(of_job, ElementsAreArray(testing::expected_answers(true)));
  EXPECT_THAT(of_another, ElementsAreArray(testing::expected_answers(false)));
}

TEST(SimPeerTable, OfManyTheTimeOfEachBeginsWhenItIsAsked) {
  const testing::TempDir dir;
  std::vector<std::string> failures;
  run({.seed = 1}, [&] {
    SimCluster cluster(3, 1, dir.path(), [&](const std::string& why) { failures.push_back(why); });
    for (const unsigned node : {0u, 1u, 2u}) cluster.start(node);
    for (const unsigned node : {0u, 1u, 2u})
      if (!cluster.wait_up(node, 60s)) failures.push_back("a node does not start");
    sleep(5s);  // all know of each other
    cluster.network().cut(1, 0);
    const testing::ManyAsked asked{[&](const std::vector<Cluster::Question>& questions,
                                       std::chrono::milliseconds at_most, AfterAnswer then) {
                                     return cluster.member(0).ask_all(PeerMethod::kSpace, questions,
                                                                      {}, at_most, then);
                                   },
                                   "w1", "w2", row_of(PeerMethod::kSpace).deadline};
    cluster.on(0, [&](JobStore&) {
      for (const std::string& why :
           {asked.those_that_are_well_answer(), asked.who_asks_waits_no_longer_than_he_said()})
        if (!why.empty()) failures.push_back(why);
    });
    cluster.network().mend(1, 0);
  });
  EXPECT_TRUE(failures.empty()) << failures.front();
}

}  // namespace
}  // namespace ptc::sim
