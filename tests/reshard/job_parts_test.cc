// The parts of a job that stand alone: what each keeps, and when it lets go of it.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <boost/json/parse.hpp>
#include <filesystem>
#include <thread>

#include "reshard/job/hash_queue.h"
#include "reshard/job/part_shelf.h"
#include "reshard/job/plan_relays.h"
#include "reshard/job/taken_dirs.h"
#include "store/base/json.h"
#include "store/transport/transport.h"
#include "tests/support/job_fixture.h"

namespace ptc::testing {
namespace {

namespace fs = std::filesystem;
using ::testing::ElementsAre;
using ::testing::IsEmpty;

PartShelf::Part part_of(const std::string& plan, int64_t epoch) {
  PlanPart part;
  part.plan = plan;
  part.images = {{0, plan + "-0"}, {1, plan + "-1"}};
  part.copies = {{0, plan + "-copy"}};
  ReshardProgress done;
  done.checkpoint = plan;
  return {plan, part, epoch, done};
}

TEST(PartShelf, WhatIsDroppedGoesButForWhatWasDecidedOn) {
  PartShelf::ImageNames decided;
  std::vector<std::string> removed;
  PartShelf shelf([&](const std::string&) { return decided; },
                  [&](const std::string& image) { removed.push_back(image); });
  shelf.keep("id", part_of("plan", 7));
  shelf.drop("id", 6);  // of an earlier leader
  EXPECT_THAT(removed, IsEmpty());
  EXPECT_EQ(shelf.epochs().at("id"), 7);
  decided = {"plan-1"};
  shelf.drop("id", 7);
  EXPECT_THAT(removed, ElementsAre("plan-0", "plan-copy"));
  EXPECT_TRUE(shelf.empty());
  shelf.drop("id");
  EXPECT_EQ(removed.size(), 2u);
}

TEST(PartShelf, APartIsMadeOnceForAPlanAndIsTheLatestLeaders) {
  PartShelf shelf([](const std::string&) { return PartShelf::ImageNames(); },
                  [](const std::string&) {});
  EXPECT_FALSE(shelf.find("id", "plan", 1).value().has_value());
  shelf.keep("id", part_of("plan", 7));
  EXPECT_TRUE(shelf.has_of_other_plan("id", "another"));
  EXPECT_FALSE(shelf.has_of_other_plan("id", "plan"));
  EXPECT_FALSE(shelf.has_of_other_plan("other id", "plan"));
  EXPECT_FALSE(shelf.find("id", "another", 9).value().has_value());
  EXPECT_EQ(shelf.find("id", "plan", 9).value()->images.size(), 2u);
  EXPECT_EQ(shelf.epochs().at("id"), 9);
  EXPECT_EQ(shelf.find("id", "plan", 8).error().code(), Code::kCancelled);
}

TEST(PartShelf, PartsOfCommitsAreNoReshard) {
  PartShelf shelf([](const std::string&) { return PartShelf::ImageNames(); },
                  [](const std::string&) {});
  shelf.keep("a", part_of("commit", 0));
  EXPECT_FALSE(shelf.done().has_value());
  shelf.keep("b", part_of("reshard", 3));
  ASSERT_TRUE(shelf.done().has_value());
  EXPECT_EQ(shelf.done()->checkpoint, "reshard");
}

json::object window(const std::string& plan, int target, int begin) {
  return {{"plan", plan}, {"target", target}, {"window", begin}};
}

TEST(Arrivals, AnswersOnceAWindowIsThereAndNeverOfAnEndedPlan) {
  Arrivals arrivals;
  const PlanName plan{"id", "digest"};
  arrivals.begin(plan);
  std::jthread comes([&] { arrivals.arrived(plan, 2, 4096, ImageId{"image"}); });
  EXPECT_EQ(arrivals.answer(window("digest", 2, 4096), "id").value(), "image");
  arrivals.arrived({"id", "earlier"}, 3, 0, ImageId{"wrong"});
  arrivals.end(plan);
  EXPECT_EQ(arrivals.answer(window("digest", 3, 0), "id").error().code(), Code::kUnavailable);
  EXPECT_EQ(arrivals.answer(window("digest", 2, 4096), "id").value(), "image");
  EXPECT_EQ(arrivals.answer({{"plan", 3}}, "id").error().code(), Code::kInvalidArgument);
  arrivals.begin({"other", "later"});  // what has ended is forgotten
  arrivals.stop();
  EXPECT_EQ(arrivals.answer(window("digest", 2, 4096), "id").error().code(), Code::kUnavailable);
}

TEST(HashQueue, HashesWhatWasClosedAndLeavesWhatACommitTakes) {
  TempDir dir;
  const std::string incoming = dir.path().string() + "/incoming";
  write_ranks(llama_sample(), LayoutSpec(), incoming + "/base");
  write_ranks(llama_sample(), LayoutSpec(), incoming + "/taken");
  std::string file;
  for (const auto& entry : fs::directory_iterator(incoming + "/base/rank/0"))
    if (entry.path().extension() == ".safetensors") file = entry.path().filename();
  ASSERT_FALSE(file.empty());
  StepPool pool(1);
  HashQueue queue("job", incoming, [] { return HashQueue::Expected(); });
  queue.closed("taken/rank/0/" + file);
  queue.closed("base/rank/0/" + file);
  queue.closed("nonsense");
  queue.leave("taken");
  queue.start(pool);
  // Each but the last few bytes of the file, which are no tensor's.
  const uint64_t bytes = fs::file_size(incoming + "/base/rank/0/" + file);
  while (queue.hashes().bytes() == 0) std::this_thread::yield();
  queue.stop();
  EXPECT_LE(queue.hashes().bytes(), bytes);
  EXPECT_GT(queue.hashes().bytes(), bytes / 2);
}

/// Two nodes: this one, w1, and w0, which leads and answers what it is told to.
class Led final : public Cluster {
 public:
  const std::string& self() const override { return self_; }
  std::vector<std::string> alive() const override { return {"w0", "w1"}; }
  Result<std::string> call(const std::string& node, std::string_view method, const std::string&,
                           std::chrono::milliseconds, std::stop_token) override {
    EXPECT_EQ(node, "w0");
    EXPECT_EQ(method, "job/commit");
    ++asked;
    return outcome;
  }
  MetaTransaction::Compare fence() const override { return {"nodes/w1", 1}; }
  MetaTransaction::Compare fence_of(const std::string& node) const override {
    return {"nodes/" + node, 1};
  }
  std::shared_ptr<const MetaLease> lease() const override { return nullptr; }
  std::string outcome = "open";
  int asked = 0;

 private:
  const std::string self_ = "w1";
};

class TakenDirsTest : public ::testing::Test {
 protected:
  TakenDirsTest() {
    fs::create_directories(incoming_);
    write_file(incoming_ + "/rank/0/note.txt", "some bytes");
    images_ = ImageStore::open(dir_.path().string() + "/images").value();
    place_.name = "job";
    place_.dir = dir_.path().string() + "/job";
    place_.services.meta = meta_.get();
    place_.services.images = images_.get();
    place_.services.executor = &executor_;
    place_.services.node = "w1";
    place_.services.cluster = &cluster_;
    fence_ = meta_->commit({.puts = {{"nodes/w0", "here"}}}).value();
  }
  json::object request(const std::string& incoming = "base") const {
    return {{"incoming", incoming}, {"from", "w0"}, {"fence", fence_}};
  }
  TempDir dir_;
  const std::string incoming_ = dir_.path().string() + "/job/files/incoming/base";
  std::unique_ptr<MetaClient> meta_ = make_memory_meta();
  std::unique_ptr<ImageStore> images_;
  Executor executor_{1, make_loopback_transport()};
  Led cluster_;
  JobPlace place_;
  JobPeers peers_{"job", &cluster_};
  HashQueue hashing_{"job", dir_.path().string() + "/job/files/incoming",
                     [] { return HashQueue::Expected(); }};
  std::vector<std::string> dropped_;
  int followed_ = 0;
  int64_t fence_ = 0;
  TakenDirs taken_{place_,
                   peers_,
                   hashing_,
                   {[this] {
                      ++followed_;
                      return ok();
                    },
                    [this](const std::string& id) { dropped_.push_back(id); }, [] {}}};
};

TEST_F(TakenDirsTest, GoesWithTheDecisionAndBackWithout) {
  for (const bool decided : {false, true}) {
    ASSERT_NE(taken_.answer("take", request(), "id", "").value(), "");
    const json::object files = json::parse(R"({"files": [["rank/0/note.txt", 10]]})").as_object();
    EXPECT_TRUE(taken_.answer("adopt", files, "id", "").has_value());
    EXPECT_TRUE(taken_.answer("hide", {}, "id", "").has_value());
    EXPECT_FALSE(fs::exists(incoming_));
    if (decided) taken_.settle({}, {"id"});
    else taken_.untake("id");
    EXPECT_EQ(fs::exists(incoming_), !decided);
    EXPECT_FALSE(taken_.any());
    EXPECT_EQ(taken_.answer("hide", {}, "id", "").error().code(), Code::kConflict);
  }
  EXPECT_THAT(dropped_, ElementsAre("id"));
  EXPECT_EQ(taken_.answer("take", request(), "next", "").value(), "");  // there is none any more
  EXPECT_FALSE(taken_.holds("next"));
}

TEST_F(TakenDirsTest, GoesBackOnceTheNodeThatLeadsIsGone) {
  ASSERT_TRUE(taken_.answer("take", request(), "id", "").has_value());
  EXPECT_THAT(taken_.given_up().value(), IsEmpty());
  ASSERT_TRUE(meta_->commit({.puts = {{"nodes/w0", "started anew"}}}).has_value());
  const std::set<std::string> given_up = taken_.given_up().value();
  EXPECT_THAT(given_up, ElementsAre("id"));
  taken_.settle(given_up, {});
  EXPECT_FALSE(taken_.any());
  EXPECT_TRUE(fs::exists(incoming_));
}

TEST_F(TakenDirsTest, AnEarlierCommitOfTheDirectoryIsSettledFirst) {
  ASSERT_TRUE(taken_.answer("take", request(), "first", "").has_value());
  EXPECT_EQ(taken_.answer("take", request(), "second", "").error().code(), Code::kUnavailable);
  EXPECT_EQ(followed_, 0);
  cluster_.outcome = "given up";
  EXPECT_NE(taken_.answer("take", request(), "second", "").value(), "");
  EXPECT_EQ(followed_, 1);
  EXPECT_FALSE(taken_.holds("first"));
  EXPECT_TRUE(taken_.holds("second"));
  taken_.untake("second");
}

TEST_F(TakenDirsTest, NonsenseIsRefused) {
  for (const char* name : {"", ".hidden", "../up", "a/b"})
    EXPECT_EQ(taken_.answer("take", request(name), "id", "").error().code(), Code::kInvalidArgument)
        << name;
  EXPECT_EQ(taken_.note({{"from", "w0"}}, "id").error().code(), Code::kInvalidArgument);
  EXPECT_FALSE(taken_.any());
}

}  // namespace
}  // namespace ptc::testing
