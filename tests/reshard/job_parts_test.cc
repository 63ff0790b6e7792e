// The parts of a job that stand alone: what each keeps, and when it lets go of it.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <boost/json/parse.hpp>
#include <filesystem>
#include <thread>

#include "reshard/cluster/lone_node.h"
#include "reshard/job/checkpoint_files.h"
#include "reshard/job/commit_attempt.h"
#include "reshard/job/commits_led.h"
#include "reshard/job/decisions.h"
#include "reshard/job/hash_queue.h"
#include "reshard/job/mender.h"
#include "reshard/job/part_maker.h"
#include "reshard/job/part_shelf.h"
#include "reshard/job/plan_relays.h"
#include "reshard/job/resharder.h"
#include "reshard/job/taken_dirs.h"
#include "reshard/job/verifier.h"
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
  return {plan, part, epoch, done, 0};
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

/// A node makes a part of a checkpoint while it still tidies up after that one's commit: nothing is
/// decided of the part yet.
TEST(PartShelf, WhatCameSinceADecisionWasReadStays) {
  std::vector<std::string> removed;
  PartShelf shelf([](const std::string&) { return PartShelf::ImageNames(); },
                  [&](const std::string& image) { removed.push_back(image); });
  shelf.keep("before", part_of("commit", 0));
  shelf.keep("again", part_of("reshard", 3));
  const uint64_t read = shelf.now();
  shelf.keep("since", part_of("flip", 3));
  EXPECT_TRUE(shelf.find("again", "reshard", 3).value().has_value());
  for (const char* id : {"before", "again", "since"}) shelf.drop_of_before(read, id);
  EXPECT_THAT(removed, ElementsAre("commit-0", "commit-1", "commit-copy"));
  EXPECT_TRUE(shelf.epochs().contains("since"));
  EXPECT_TRUE(shelf.epochs().contains("again"));
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

TEST(Arrivals, ANodeThatSeesOtherImagesIsAskedInVain) {
  const PlanName plan{"id", "digest"};
  const auto there = std::make_shared<const Image>(ImageId{"image"}, MemoryPlace{"w1"}, 8);
  StoredState both, one;
  both.images = {{"a", there, 0, "model.safetensors"}, {"b", there, 0, "model.safetensors"}};
  one.images = both.images;
  one.images[0].image = nullptr;
  Arrivals arrivals;
  arrivals.begin(name_among_relays(plan, both));
  arrivals.arrived(name_among_relays(plan, both), 2, 0, ImageId{"image"});
  auto ask = [&](const StoredState& seen) {
    return arrivals.answer(window(name_among_relays(plan, seen).digest, 2, 0), "id");
  };
  EXPECT_EQ(ask(both).value(), "image");
  EXPECT_EQ(ask(one).error().code(), Code::kBusy);
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
  while (queue.hashes().bytes() <= bytes / 2) std::this_thread::yield();
  queue.stop();
  EXPECT_LE(queue.hashes().bytes(), bytes);  // and nothing of the other
}

TEST(HashQueue, WhatIsMappedForWritingIsNotHashed) {
  TempDir dir;
  const std::string incoming = dir.path().string() + "/incoming", rank = "base/rank/0/";
  fs::create_directories(incoming + "/" + rank);
  const auto sum_of = [&](const HashQueue& queue, const std::string& name) {
    struct stat st {};
    EXPECT_EQ(stat((incoming + "/" + rank + name).c_str(), &st), 0);
    return queue.hashes().find(version_of(st), "file");
  };
  write_file(incoming + "/" + rank + "mapped", "some bytes");
  write_file(incoming + "/" + rank + "other", "others");
  UniqueFd fd(open((incoming + "/" + rank + "mapped").c_str(), O_RDWR));
  void* bytes = mmap(nullptr, 10, PROT_READ | PROT_WRITE, MAP_SHARED, fd.get(), 0);
  ASSERT_NE(bytes, MAP_FAILED);
  fd.reset();
  UniqueFd reader(open((incoming + "/" + rank + "mapped").c_str(), O_RDONLY));
  if (fcntl(reader.get(), F_SETLEASE, F_RDLCK) == 0 || errno != EAGAIN) {
    munmap(bytes, 10);
    GTEST_SKIP() << "this file system does not say by a lease who writes";
  }
  reader.reset();
  const auto comes = [&](const HashQueue& queue, const std::string& name) {
    const auto until = std::chrono::steady_clock::now() + std::chrono::minutes(1);
    while (!sum_of(queue, name) && std::chrono::steady_clock::now() < until)
      std::this_thread::yield();
    return sum_of(queue, name).has_value();
  };
  StepPool pool(1);
  HashQueue queue("job", incoming, [] { return HashQueue::Expected(); });
  queue.closed(rank + "mapped");
  queue.closed(rank + "other");
  queue.start(pool);
  EXPECT_TRUE(comes(queue, "other"));
  EXPECT_FALSE(sum_of(queue, "mapped"));
  munmap(bytes, 10);
  queue.closed(rank + "mapped");
  EXPECT_TRUE(comes(queue, "mapped"));
  queue.stop();
}

TEST(HashCache, WhatIsForgottenIsNotPutBack) {
  const FileVersion file{1, 2, 3, 4, 5}, with_another_name{1, 2, 3, 4, 6}, rewritten{1, 2, 3, 7, 7};
  HashCache hashes;
  const Checksum sum;
  const HashCache::Ticket before = hashes.begin(file);
  hashes.put(file, before, "first", sum);
  EXPECT_TRUE(hashes.find(file, "first"));
  hashes.forget(file.inode);  // somebody opens it for writing, while it is being hashed
  hashes.put(file, before, "second", sum);
  EXPECT_FALSE(hashes.find(file, "first"));
  EXPECT_FALSE(hashes.find(file, "second"));
  const HashCache::Ticket after = hashes.begin(file);
  hashes.put(file, before, "first", sum);
  EXPECT_FALSE(hashes.find(file, "first"));
  hashes.put(file, after, "first", sum);
  EXPECT_EQ(hashes.begin(file), after);
  hashes.renew(file, with_another_name);
  EXPECT_TRUE(hashes.find(with_another_name, "first"));
  EXPECT_NE(hashes.begin(rewritten), after);
  EXPECT_FALSE(hashes.find(with_another_name, "first"));
}

TEST(HashCache, OfMoreThanThereIsRoomForTheOldestGo) {
  HashCache hashes;
  const auto file = [](uint64_t inode) { return FileVersion{1, inode, 3, 4, 5}; };
  for (uint64_t inode = 1; inode <= HashCache::kMostFiles + 10; ++inode)
    hashes.put(file(inode), hashes.begin(file(inode)), "all", Checksum());
  EXPECT_EQ(hashes.files(), HashCache::kMostFiles);
  EXPECT_FALSE(hashes.find(file(10), "all"));
  EXPECT_TRUE(hashes.find(file(11), "all"));
  // Few files of many tensors take as much.
  const HashCache::Ticket ticket = hashes.begin(file(1));
  for (size_t sum = 0; sum < HashCache::kMostSums; ++sum)
    hashes.put(file(1), ticket, std::to_string(sum), Checksum());
  EXPECT_EQ(hashes.files(), 1u);
  EXPECT_TRUE(hashes.find(file(1), "0"));
  hashes.forget(1);
  EXPECT_EQ(hashes.files(), 0u);
}

/// Two nodes: this one, w1, and w0, which leads and answers what it is told to.
class Led final : public Cluster {
 public:
  const std::string& self() const override { return self_; }
  std::vector<std::string> alive() const override { return {"w0", "w1"}; }
  Result<std::string> call(const std::string& node, const PeerRow& row, const std::string&,
                           std::chrono::milliseconds, std::stop_token) override {
    EXPECT_EQ(node, "w0");
    EXPECT_EQ(row.method, PeerMethod::kCommit);
    ++asked;
    return outcome;
  }
  std::optional<MetaTransaction::Compare> fence() const override {
    return MetaTransaction::Compare{"nodes/w1", 1};
  }
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
  JobPeers peers_{{"job", "id"}, cluster_};
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
    ASSERT_NE(taken_.answer(PeerMethod::kTake, request(), "id", "").value(), "");
    const json::object files = json::parse(R"({"files": [["rank/0/note.txt", 10]]})").as_object();
    EXPECT_TRUE(taken_.answer(PeerMethod::kAdopt, files, "id", "").has_value());
    EXPECT_TRUE(taken_.answer(PeerMethod::kHide, {}, "id", "").has_value());
    EXPECT_TRUE(fs::is_empty(incoming_));  // its name is shown
    if (decided) taken_.settle({}, {"id"});
    else taken_.untake("id");
    EXPECT_EQ(fs::is_empty(incoming_), decided);
    if (decided) {
      const auto heard =
          taken_.hear(fs::path(incoming_).filename(), "made", {},
                      [](const std::string& id) { return id == "id" ? "made" : ""; });
      EXPECT_TRUE(heard && heard->has_value());
      EXPECT_FALSE(fs::exists(incoming_));
    }
    EXPECT_FALSE(taken_.any());
    EXPECT_EQ(taken_.answer(PeerMethod::kHide, {}, "id", "").error().code(), Code::kConflict);
  }
  EXPECT_THAT(dropped_, ElementsAre("id"));
  EXPECT_EQ(taken_.answer(PeerMethod::kTake, request(), "next", "").value(),
            "");  // there is none any more
  EXPECT_FALSE(taken_.holds("next"));
}

TEST_F(TakenDirsTest, GoesBackOnceTheNodeThatLeadsIsGone) {
  ASSERT_TRUE(taken_.answer(PeerMethod::kTake, request(), "id", "").has_value());
  EXPECT_THAT(taken_.given_up().value(), IsEmpty());
  ASSERT_TRUE(meta_->commit({.puts = {{"nodes/w0", "started anew"}}}).has_value());
  const std::set<std::string> given_up = taken_.given_up().value();
  EXPECT_THAT(given_up, ElementsAre("id"));
  taken_.settle(given_up, {});
  EXPECT_FALSE(taken_.any());
  EXPECT_TRUE(fs::exists(incoming_));
}

TEST_F(TakenDirsTest, AnEarlierCommitOfTheDirectoryIsSettledFirst) {
  ASSERT_TRUE(taken_.answer(PeerMethod::kTake, request(), "first", "").has_value());
  EXPECT_EQ(taken_.answer(PeerMethod::kTake, request(), "second", "").error().code(),
            Code::kUnavailable);
  EXPECT_EQ(followed_, 0);
  cluster_.outcome = "given up";
  EXPECT_NE(taken_.answer(PeerMethod::kTake, request(), "second", "").value(), "");
  EXPECT_EQ(followed_, 1);
  EXPECT_FALSE(taken_.holds("first"));
  EXPECT_TRUE(taken_.holds("second"));
  taken_.untake("second");
}

TEST_F(TakenDirsTest, NonsenseIsRefused) {
  for (const char* name : {"", ".hidden", "../up", "a/b"})
    EXPECT_EQ(taken_.answer(PeerMethod::kTake, request(name), "id", "").error().code(),
              Code::kInvalidArgument)
        << name;
  EXPECT_EQ(taken_.note({{"from", "w0"}}, "id").error().code(), Code::kInvalidArgument);
  EXPECT_FALSE(taken_.any());
}

/// The parts of a job of a store that is alone, as far as a test needs them.
class PartsTest : public ::testing::Test, public JobListener {
 protected:
  PartsTest() {
    place_.name = "job";
    place_.id = "id of the job";
    place_.dir = dir_.path().string() + "/job";
    fs::create_directories(place_.incoming_dir());
    images_ = ImageStore::open(dir_.path().string() + "/images").value();
    place_.services.meta = meta_.get();
    place_.services.images = images_.get();
    place_.services.executor = &executor_;
    place_.services.node = "w1";
    place_.services.cluster = &alone_;
    place_.listener = this;
    JobDecision creates("job");
    creates.create(place_.id, "2026-01-01T00:00:00Z");
    creates.put(
        LayoutEdit{R"({"format": "ptc-layout/1", "tp": 1, "pp": 1, "dp": 1})", Layout(), 1});
    creates.put(InForce{LayoutSpec(), 0, {}});
    EXPECT_TRUE(meta_->commit(std::move(creates).transaction()).has_value());
    take_over();
  }
  /// What is agreed on of the layout and the checkpoints is known.
  void take_over() {
    JobRecord record = JobRecord::read(*meta_, "job").value();
    knowledge_.update([&](KnownJob& known) {
      known.saved = record.saved;
      known.in_force = record.in_force;
      for (const auto& [name, entry] : record.checkpoints) {
        static_cast<Agreed<CheckpointEntry>&>(known.checkpoints[name]) = entry;
        known.checkpoints[name].where = std::make_shared<const StoredState>();
      }
    });
  }
  void put_checkpoint(const std::string& name, const CheckpointEntry& entry) {
    JobDecision decision("job");
    decision.put(name, entry);
    EXPECT_TRUE(place_.commit(std::move(decision)).has_value());
  }
  /// A whole one; its store lives as long as the test.
  CheckpointRef commit_in_another_store() {
    another_ =
        JobStore::open({.directory = another_dir_.path().string(), .node = "w1", .copy_threads = 1},
                       this)
            .value();
    const JobRef job = another_->create_job("job").value();
    write_ranks(llama_sample(), LayoutSpec(), job->files_dir() + "/incoming/base");
    EXPECT_TRUE(job->commit("base", "base").has_value());
    return job->find_checkpoint("base");
  }
  void names_changed() override {}
  void checkpoint_changed(const std::string&, const std::string&) override {}
  Result<> contents_mended(const std::string&, const std::string& checkpoint) override {
    refreshed_.push_back(checkpoint);
    return caches_answer_ ? ok() : Result<>(make_error(Code::kUnavailable, "not now"));
  }

  TempDir dir_, another_dir_;
  std::unique_ptr<MetaClient> meta_ = make_memory_meta();
  std::unique_ptr<ImageStore> images_;
  Executor executor_{1, make_loopback_transport()};
  LoneNode alone_{"w1"};
  JobPlace place_;
  JobPeers peers_{{"job", "id"}, alone_};
  JobKnowledge knowledge_{[] {}};
  Activities activities_;
  CheckpointFiles files_{place_, peers_, knowledge_, activities_};
  Decisions decisions_{place_, files_, knowledge_};
  std::vector<std::string> synced_, refreshed_;
  bool caches_answer_ = true;
  const Verifier::SyncAbout about_ = [this](const std::string& id) {
    synced_.push_back(id);
    return ok();
  };
  Verifier verifier_{place_, peers_, knowledge_, about_};
  Mender mender_{place_, peers_, knowledge_, verifier_, decisions_, about_};
  Doubts doubts_;
  Arrivals arrivals_;
  PartShelf shelf_{[](const std::string&) { return PartShelf::ImageNames(); },
                   [](const std::string&) {}};
  HashQueue hashing_{"job", place_.incoming_dir(), [] { return HashQueue::Expected(); }};
  StagedParts staged_{place_};
  TakenDirs taken_{
      place_, peers_, hashing_, {[] { return ok(); }, [](const std::string&) {}, [] {}}};
  PartMaker maker_{{place_, peers_, knowledge_, files_, verifier_, shelf_, arrivals_, taken_,
                    activities_, about_}};
  CommitsLed commits_{{place_, peers_, knowledge_, files_, decisions_, maker_, hashing_, staged_,
                       taken_, activities_, doubts_, [] { return ok(); }, [] {}}};
  std::unique_ptr<JobStore> another_;  // last: it tells this listener
};

TEST_F(PartsTest, DecisionsAreOfThisJobAndNotOfAnotherOfItsName) {
  auto put_anew = [&](const std::string& id) {
    JobDecision again("job");
    again.create(id, "2026-01-02T00:00:00Z");
    MetaTransaction transaction = std::move(again).transaction();
    transaction.compares.clear();
    ASSERT_TRUE(meta_->commit(std::move(transaction)).has_value());
  };
  // Of all that they change there is nothing yet in the other job, nor was there in this one.
  auto decide = [&] {
    JobDecision decision("job");
    decision.rests_on(Agreed<LastSequence>());
    decision.put(LastSequence{7});
    decision.put_rules("{}");
    return place_.commit(std::move(decision));
  };
  put_anew("id of another");
  const Result<int64_t> first = decide();
  ASSERT_TRUE(first.has_error());
  EXPECT_EQ(first.error().code(), Code::kNotFound);
  put_anew(place_.id);
  ASSERT_TRUE(place_.existence().has_value());
  put_anew("id of another");
  const Result<int64_t> late = decide();  // it was seen before
  ASSERT_TRUE(late.has_error());
  EXPECT_EQ(late.error().code(), Code::kConflict);
  EXPECT_EQ(decide().error().code(), Code::kNotFound);
  EXPECT_FALSE(JobRecord::read(*meta_, "job").value().rules_text.has_value());
}

TEST_F(PartsTest, CheckpointFilesAreDraftsUntilWhatNamesTheirImagesIsHere) {
  ASSERT_TRUE(files_.make_directory_of("id").has_value());
  CheckpointRecord record;
  record.id = "id";
  record.stored = "stored-2-a.json";
  const json::object request{{"files", json::parse(R"([["stored-1.json", 3, ""]])")}};
  EXPECT_TRUE(files_.keep("id", request, "one").has_value());
  const json::object piece{{"offset", 1}, {"most", 9}, {"sum", false}};
  EXPECT_EQ(files_.piece(piece, {"id", "stored-1.json"}).value(), "{\"bytes\":3}\nne");
  EXPECT_EQ(files_.piece(piece, {"id", "stored-2-a.json"}).error().code(), Code::kNotFound);
  EXPECT_EQ(files_.piece({}, {"id", "stored-1.json"}).error().code(), Code::kInvalidArgument);
  EXPECT_TRUE(files_.has("id", CheckpointFiles::kDraftMark));
  EXPECT_TRUE(files_.remove_stale("id", record.stored).has_value());
  EXPECT_TRUE(files_.has("id", "stored-1.json"));  // what is newer is not here yet
  const json::object newer{{"files", json::parse(R"([["stored-2-a.json", 3, ""]])")}};
  EXPECT_TRUE(files_.keep("id", newer, "two").has_value());
  EXPECT_TRUE(files_.remove_stale("id", record.stored).has_value());
  EXPECT_FALSE(files_.has("id", "stored-1.json"));
  EXPECT_TRUE(files_.has("id", record.stored));
  // Written before it is decided on, and meanwhile nodes come and go.
  const json::object next{{"files", json::parse(R"([["stored-3-b.json", 3, ""]])")}};
  EXPECT_TRUE(files_.keep("id", next, "new").has_value());
  EXPECT_TRUE(files_.remove_stale("id", record.stored).has_value());
  EXPECT_TRUE(files_.has("id", "stored-3-b.json"));
  EXPECT_TRUE(files_.remove_stale("id", "stored-3-b.json").has_value());
  EXPECT_FALSE(files_.has("id", record.stored));
}

TEST_F(PartsTest, FilesThatCannotBeOnesAreNotKept) {
  for (const char* text : {R"([["../up", 1, ""]])", R"([[".hidden", 1, ""]])", R"([["a", 9, ""]])",
                           R"([["a", -1, ""]])", R"([["a", 1]])", R"(["a"])", R"([[1, 1, ""]])",
                           R"([["a", 1, 1]])", "7"})
    EXPECT_EQ(files_.keep("id", {{"files", json::parse(text)}}, "x").error().code(),
              Code::kInvalidArgument)
        << text;
  EXPECT_EQ(files_.keep("id", {}, "x").error().code(), Code::kInvalidArgument);
}

TEST_F(PartsTest, AMendingIsCountedUnlessSomethingElseWasDecided) {
  put_checkpoint("base", {"id", 1, 1, "stored-1.json"});
  EXPECT_FALSE(decisions_.count_mending("base", "id").value());  // it is not known here
  take_over();
  EXPECT_TRUE(decisions_.count_mending("base", "id").value());
  EXPECT_EQ(knowledge_.now()->checkpoints.at("base").mended, 1);
  EXPECT_EQ(JobRecord::read(*meta_, "job").value().checkpoints.at("base").mended, 1);
  EXPECT_FALSE(decisions_.count_mending("base", "another").value());
  put_checkpoint("base", {"id", 1, 2, "stored-2.json"});
  EXPECT_EQ(decisions_.count_mending("base", "id").error().code(), Code::kConflict);
  EXPECT_EQ(knowledge_.now()->checkpoints.at("base").mended, 1);
}

TEST_F(PartsTest, WhatCannotBeVerifiedIsSaid) {
  put_checkpoint("base", {"id", 1, 1, "stored-1.json"});
  take_over();
  knowledge_.update([](KnownJob& known) {
    known.damaged["bad"].why = "torn";
    known.damaged["away"].lost = true;
  });
  EXPECT_EQ(verifier_.find("base").value().id, "id");
  EXPECT_EQ(verifier_.find("none").error().code(), Code::kNotFound);
  EXPECT_EQ(verifier_.find("bad").error().code(), Code::kCorrupt);
  EXPECT_EQ(verifier_.find("away").error().code(), Code::kUnavailable);
  EXPECT_TRUE(verifier_.find_stored("id", "stored-1.json").has_value());
  EXPECT_THAT(synced_, IsEmpty());
  EXPECT_EQ(verifier_.find_stored("id", "stored-2.json").error().code(), Code::kBusy);
  EXPECT_THAT(synced_, ElementsAre("id"));
  EXPECT_EQ(verifier_.answer({{"images", 7}}, "id", "stored-1.json").error().code(),
            Code::kInvalidArgument);
}

TEST_F(PartsTest, WhatIsRemovedOrMovedWhileItIsReadIsNotDamaged) {
  const CheckpointRef checkpoint = commit_in_another_store();
  put_checkpoint("base", {"id", 1, 1, "stored-1.json"});
  take_over();
  auto gone = std::make_shared<StoredState>(*checkpoint->stored());
  gone->images.front().image.reset();
  CheckpointRecord record = knowledge_.now()->checkpoints.at("base");
  record.checkpoint = checkpoint;
  record.where = gone;
  const Result<Findings> found = verifier_.examine(record, nullptr);
  ASSERT_TRUE(found.has_value()) << found.error().message();
  EXPECT_FALSE(found.value().good());
  knowledge_.update([](KnownJob& known) { known.checkpoints.at("base").stored = "stored-2.json"; });
  EXPECT_EQ(verifier_.examine(record, nullptr).error().code(), Code::kBusy);
  knowledge_.update([](KnownJob& known) { known.checkpoints.at("base").id = "of another"; });
  EXPECT_EQ(verifier_.examine(record, nullptr).error().code(), Code::kNotFound);
  knowledge_.update([](KnownJob& known) { known.checkpoints.erase("base"); });
  EXPECT_EQ(verifier_.examine(record, nullptr).error().code(), Code::kNotFound);
}

TEST_F(PartsTest, CachesAreSeenToUntilTheyAnswer) {
  EXPECT_TRUE(mender_.refresh());
  caches_answer_ = false;
  mender_.note_to_refresh({"base"});
  EXPECT_FALSE(mender_.refresh());
  EXPECT_FALSE(mender_.refresh());
  caches_answer_ = true;
  EXPECT_TRUE(mender_.refresh());
  EXPECT_TRUE(mender_.refresh());
  EXPECT_THAT(refreshed_, ElementsAre("base", "base", "base"));
}

TEST_F(PartsTest, AskedForAPartByNonsenseNothingIsMade) {
  for (const char* text : {"", "{}", "[]", R"({"id": ".", "generation": 1})"})
    EXPECT_EQ(maker_.make_for(text).error().code(), Code::kInvalidArgument) << text;
  EXPECT_TRUE(shelf_.empty());
}

TEST_F(PartsTest, WhatIsReadToCompareEndsWhenItIsStopped) {
  const CheckpointRef checkpoint = commit_in_another_store();
  CheckpointRecord record;
  record.checkpoint = checkpoint;
  record.where = checkpoint->stored();
  ChangePlan change;  // a copy of a file in which a box of this tensor is
  change.same_states = true;
  NodeParts parts(1);
  parts.front().second.sums.push_back({0, Box(), Checksum()});
  std::stop_source stop;
  const Result<> read =
      maker_.compare(record, *record.where, change, parts, true, stop.get_token());
  EXPECT_TRUE(read.has_value()) << read.error().message();
  stop.request_stop();
  const Result<> cut = maker_.compare(record, *record.where, change, parts, true, stop.get_token());
  ASSERT_TRUE(cut.has_error());
  EXPECT_EQ(cut.error().code(), Code::kCancelled) << cut.error().message();
}

TEST_F(PartsTest, ARefusedCommitIsSaidBesideItsDirectory) {
  const auto soon = [] { return CommitsLed::Clock::now() + std::chrono::seconds(20); };
  EXPECT_EQ(commits_.commit("base", ".hidden", soon()).error().code(), Code::kInvalidArgument);
  EXPECT_EQ(knowledge_.now()->counts.commits_refused, 1u);
  EXPECT_TRUE(fs::exists(place_.incoming_dir() + "/base.error"));
  EXPECT_EQ(commits_.outcome_of("of another"), "given up");
  EXPECT_EQ(commits_.commit("none", "new", soon()).error().code(), Code::kNotFound);
  ASSERT_TRUE(commits_.close());
  EXPECT_EQ(commits_.commit("none", "new", soon()).error().code(), Code::kNotFound);
  EXPECT_THAT(knowledge_.now()->last_error->what, ::testing::HasSubstr("being removed"));
  commits_.reopen();
  for (const auto& attempt : commits_.stop()) attempt->stop();
  EXPECT_FALSE(commits_.look_after());
}

TEST_F(PartsTest, AnEditOfAJobWithoutCheckpointsIsInForceAtOnce) {
  StepPool pool(1);
  Resharder resharder{{place_, peers_, knowledge_, files_, decisions_, maker_, verifier_, mender_,
                       shelf_, activities_, doubts_, [] { return Result<Followed>(Followed()); },
                       [](const std::string&, const std::string&) { return ok(); }, [] {}}};
  resharder.start(pool);
  knowledge_.wait(
      [](const KnownJob& known) { return known.in_force.revision == 1 && !known.leads; });
  resharder.stop();
  EXPECT_EQ(JobRecord::read(*meta_, "job").value().in_force.revision, 1);
  EXPECT_TRUE(knowledge_.now()->settled());
}

}  // namespace
}  // namespace ptc::testing
