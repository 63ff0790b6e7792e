// One node's part of a plan, and all of them together: what is made, what of it stays, and for
// whom.
#include "reshard/job/part_maker.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mount.h>

#include <algorithm>
#include <atomic>
#include <filesystem>
#include <thread>

#include "reshard/checkpoint/file_format.h"
#include "reshard/job/drain.h"
#include "reshard/job/part_request.h"
#include "reshard/job/wanted_states.h"
#include "tests/support/job_nodes.h"
#include "tests/support/synthetic_model.h"

namespace ptc::testing {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::IsSubsetOf;

/// A change of a checkpoint as the node sees it: what PartMaker is given.
struct Wanted {
  CheckpointRecord record;
  WantedState state;
  std::shared_ptr<const ChangePlan> change;
};

Wanted want(JobNode& node, const Layout& layout) {
  Wanted wanted;
  wanted.record = node.record();
  wanted.state =
      wanted_state(node.place, *wanted.record.checkpoint, layout, node.cluster.alive()).value();
  wanted.change =
      plan_change(*wanted.record.checkpoint, *wanted.record.where, wanted.state).value();
  return wanted;
}

Wanted want(JobNode& node, const std::string& layout) {
  return want(node, Layout::parse(layout).value());
}

Result<NodeParts> make_all(JobNode& node, const Wanted& wanted, Fences& fences, int64_t epoch = 1) {
  const auto activity = node.activities.begin({Activity::Kind::kReshard, "base", "", ""});
  return node.maker.make_all(wanted.record, *wanted.record.where, wanted.state, *wanted.change,
                             *activity, fences, epoch);
}

Result<NodeParts> make_all(JobNode& node, const Wanted& wanted, int64_t epoch = 1) {
  Fences fences;
  return make_all(node, wanted, fences, epoch);
}

std::set<std::string> images_of(const PlanPart& part) {
  std::set<std::string> ids;
  for (const auto* list : {&part.images, &part.copies})
    for (const auto& [number, id] : *list) ids.insert(id);
  return ids;
}

std::string text_of(JobNode& node, const std::string& image) {
  const ImageRef there = node.store.open(ImageId{image}).value();
  const auto bytes = there->host_bytes().value();
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

/// The file has the tensors that ranks of its state hold, as the oracle cuts them, and no others.
void expect_cut(const std::string& content, const std::string& path,
                const std::map<std::string, SlowPart>& parts) {
  SCOPED_TRACE(path);
  const auto bytes = std::as_bytes(std::span(content.data(), content.size()));
  const FileFormat& format = format_of(path, false);
  const auto outline = format.outline(read_at(bytes), content.size(), {});
  ASSERT_TRUE(outline.has_value()) << outline.error().message();
  const auto header = format.tensors({outline.value(), content.size()}, path, {});
  ASSERT_TRUE(header.has_value()) << header.error().message();
  EXPECT_EQ(header.value().tensors.size(), parts.size());
  for (const TensorEntry& entry : header.value().tensors) {
    const auto part = parts.find(entry.name);
    ASSERT_NE(part, parts.end()) << entry.name;
    EXPECT_EQ(std::vector<uint64_t>(entry.shape.begin(), entry.shape.end()), part->second.shape)
        << entry.name;
    EXPECT_TRUE(content.substr(entry.offset, entry.bytes) == part->second.bytes) << entry.name;
  }
}

/// Every image that the plan asks for is where it shall be, and says what the oracle says.
void expect_made(JobNodes& nodes, const Wanted& wanted, const NodeParts& parts,
                 const Sample& sample) {
  const LayoutSpec& spec = wanted.state.spec;
  std::map<uint32_t, RankParts> by_state;
  for (uint64_t rank = 0; rank < spec.sizes.world_size(); ++rank) {
    const uint32_t state = state_index(spec, state_of(spec, spec.coords(rank)));
    if (!by_state.contains(state)) by_state.emplace(state, slow_rank(sample, spec, rank));
  }
  const ChangePlan& change = *wanted.change;
  std::set<uint32_t> made;
  for (const auto& [name, part] : parts) {
    JobNode* node = nullptr;
    for (unsigned i = 0; i < nodes.size(); ++i)
      if (nodes[i].place.node_key() == name) node = &nodes[i];
    ASSERT_NE(node, nullptr) << name;
    EXPECT_THAT(images_of(part), IsSubsetOf(node->images()));
    for (const auto& [number, image] : part.images) {
      EXPECT_TRUE(made.insert(number).second);
      const StateFile& target = change.targets.at(number);
      EXPECT_EQ(change.nodes[target.layout.node], name);
      if (target.path.empty()) continue;  // padding: no rank's file
      expect_cut(text_of(*node, image), target.path, by_state.at(target.owner)[target.path]);
    }
    for (const auto& [number, image] : part.copies) {
      const ChangePlan::OtherCopy& copy = change.copies.at(number);
      EXPECT_EQ(change.nodes[copy.node], name);
      const int32_t file = wanted.record.where->images[copy.source_image].written;
      EXPECT_EQ(text_of(*node, image).size(),
                wanted.record.checkpoint->manifest().files[file].bytes);
    }
  }
  for (uint32_t i = 0; i < change.targets.size(); ++i)
    EXPECT_EQ(made.contains(i), !change.transfers.images[i].kept.has_value()) << i;
}

class PartMakerTest : public ::testing::Test {
 protected:
  /// A checkpoint whose bytes are on `on`, in one file.
  void commit(unsigned on = 0) {
    nodes_[on].commit(sample_, LayoutSpec());
    nodes_.follow();
    for (unsigned i = 0; i < nodes_.size(); ++i) before_.push_back(nodes_[i].images());
  }
  /// On no node there is more than what was there after the commit.
  void expect_nothing_left() {
    for (unsigned i = 0; i < nodes_.size(); ++i) {
      SCOPED_TRACE(JobNodes::name(i));
      EXPECT_EQ(nodes_[i].images(), before_[i]);
      EXPECT_TRUE(nodes_[i].shelf.empty());
      EXPECT_FALSE(nodes_[i].activities.any_reshard());
    }
  }
  /// What `asker` asks of another node for its part.
  std::string request(const Wanted& wanted, int64_t epoch) {
    return PartRequest{.id = wanted.record.id,
                       .generation = wanted.record.generation,
                       .stored = wanted.record.stored,
                       .revision = nodes_[0].knowledge.now()->saved.revision,
                       .wanted = wanted.state,
                       .epoch = epoch}
        .to_text();
  }

  const Sample sample_ = llama_sample(true);
  JobNodes nodes_{3};
  std::vector<std::set<std::string>> before_;
};

const std::string kOnThree =
    R"({"tp": 1, "pp": 1, "dp": 3, "optimizer": "zero1", "devices": ["w0:0", "w1:0", "w2:0"]})";
const std::string kOnOthers = R"({"tp": 2, "pp": 1, "dp": 1, "devices": ["w1:0", "w2:0"]})";

TEST(PartMakerProperty, WhatIsMadeIsWhatTheOracleCuts) {
  const uint64_t first = test_seed();
  std::cout << "PTC_SEED=" << first << "\n";
  const char* cases = std::getenv("PTC_CASES");
  const int count = std::getenv("PTC_SEED") ? 1 : cases ? std::atoi(cases) : 8;
  for (int i = 0; i < count && !::testing::Test::HasFailure(); ++i) {
    SCOPED_TRACE(fmt::format("PTC_SEED={}", first + i));
    std::mt19937_64 random(first + i);
    const Sample sample = make_sample(random, random_model(random, random() % 2 == 0));
    const Model model = synthetic_model(sample.config, sample.tensors);
    const LayoutSpec written = random_layout(random, sample, model, 8);
    const bool alone = random() % 3 == 0;
    JobNodes nodes(alone ? 1 : 1 + random() % 3,
                   alone ? JobNodes::Kind::kAlone : JobNodes::Kind::kCluster);
    ASSERT_TRUE(nodes[0].edit(layout_json(written)).has_value());
    nodes[0].commit(sample, written);
    nodes.follow();
    Layout layout;
    layout.spec = random_layout(random, sample, model, 8);
    layout.replicas = random() % 2;
    SCOPED_TRACE(fmt::format("{}: {} -> {}, {} nodes, {} replicas", sample.config,
                             layout_json(written), layout_json(layout.spec), nodes.size(),
                             layout.replicas));
    const unsigned leader = random() % nodes.size();
    const Wanted wanted = want(nodes[leader], layout);
    const auto parts = make_all(nodes[leader], wanted, alone ? 0 : 1);
    ASSERT_TRUE(parts.has_value()) << parts.error().message();
    expect_made(nodes, wanted, parts.value(), sample);
    const PartMaker& maker = nodes[leader].maker;
    const Result<> compared = maker.compare(wanted.record, *wanted.record.where, *wanted.change,
                                            parts.value(), /*known=*/true, {});
    EXPECT_TRUE(compared.has_value()) << compared.error().message();
    // Put together it is the whole checkpoint.
    const Checkpoint& checkpoint = *wanted.record.checkpoint;
    auto images = maker.compose(checkpoint, *wanted.record.where, *wanted.change, parts.value());
    ASSERT_TRUE(images.has_value()) << images.error().message();
    auto stored = checkpoint.make_stored(layout.spec, std::move(images).value());
    ASSERT_TRUE(stored.has_value()) << stored.error().message();
    wanted.record.checkpoint->replace_stored(stored.value());
    EXPECT_THAT(checkpoint.lost_tensors(), IsEmpty());
    expect_layout(checkpoint, sample, layout.spec);
    expect_model(checkpoint, sample);
  }
}

TEST_F(PartMakerTest, ADecisionNamesTheNodesThatMakeSomething) {
  commit();
  Fences fences;
  const Wanted wanted = want(nodes_[0], kOnOthers);
  ASSERT_TRUE(make_all(nodes_[0], wanted, fences).has_value());
  std::set<std::pair<std::string, int64_t>> named;
  for (const auto& [key, revision] : fences) named.emplace(key, revision);
  std::set<std::pair<std::string, int64_t>> expected;
  for (const char* node : {"w1", "w2"}) {
    const auto fence = nodes_[0].cluster.fence_of(node);
    expected.emplace(fence.key, fence.revision);
    expected.emplace(drained_key(node), 0);
  }
  EXPECT_EQ(named, expected);  // this node's own every decision names
}

TEST_F(PartMakerTest, APartThatFailsLeavesNothing) {
  commit(1);
  const Wanted wanted = want(nodes_[0], kOnThree);
  // The source says nothing at the n-th look, and there is no other.
  int fails_at = 0;
  for (bool failed = true; failed; ++fails_at) {
    SCOPED_TRACE(fails_at);
    std::atomic<int> items = 0;
    const auto meanwhile = nodes_.fetches.during([&](const std::string&) -> std::optional<Error> {
      if (items++ < fails_at) return std::nullopt;
      return make_error(Code::kUnavailable, "it is away");
    });
    const auto parts = make_all(nodes_[0], wanted, fails_at + 1);
    failed = parts.has_error();
    if (failed) EXPECT_EQ(parts.error().code(), Code::kUnavailable) << parts.error().message();
    else nodes_[0].maker.give_up(wanted.record, parts.value(), fails_at + 1);
    expect_nothing_left();
  }
  EXPECT_GT(fails_at, 2);
}

TEST_F(PartMakerTest, WhoseSourceIsGoneLeavesNothing) {
  commit(1);
  const Wanted wanted =
      want(nodes_[0], R"({"tp": 2, "pp": 1, "dp": 1, "devices": ["w0:0", "w2:0"]})");
  nodes_[1].knowledge.update([](KnownJob& known) { known.checkpoints.clear(); });  // held by nobody
  for (const std::string& id : before_[1]) ASSERT_TRUE(nodes_[1].store.remove({id}).has_value());
  before_[1].clear();
  const auto parts = make_all(nodes_[0], wanted);
  ASSERT_TRUE(parts.has_error());
  EXPECT_EQ(parts.error().code(), Code::kUnavailable) << parts.error().message();
  expect_nothing_left();
}

TEST_F(PartMakerTest, WhereOneNodeFailsAllThatTheOthersMadeGoes) {
  commit();
  const Wanted wanted = want(nodes_[0], kOnThree);
  for (const Code code : {Code::kNoSpace, Code::kUnavailable, Code::kInternal}) {
    const auto meanwhile =
        nodes_.asks.during([&](const std::string& node, PeerMethod method) -> std::optional<Error> {
          if (node != "w2" || method != PeerMethod::kPart) return std::nullopt;
          return Error(code, "not this one");
        });
    const auto parts = make_all(nodes_[0], wanted);
    ASSERT_TRUE(parts.has_error());
    EXPECT_EQ(parts.error().code(), code);
    EXPECT_THAT(parts.error().message(), ::testing::HasSubstr("w2"));
    expect_nothing_left();
  }
}

TEST_F(PartMakerTest, StoppedHalfWayNothingStays) {
  commit(1);
  const Wanted wanted = want(nodes_[0], kOnThree);
  // Of the n-th item on its way nothing comes after the edit; at the first node or at the third.
  for (const unsigned at : {0u, 2u}) {
    for (int stops_at = 0; stops_at < 3; ++stops_at) {
      SCOPED_TRACE(fmt::format("{} of w{}", stops_at, at));
      std::atomic<int> items = 0;
      const auto meanwhile = nodes_.fetches.during([&](const std::string&) -> std::optional<Error> {
        if (items++ == stops_at) nodes_[at].activities.stop_reshards();
        return std::nullopt;
      });
      const auto parts = make_all(nodes_[0], wanted, 10 * at + stops_at + 1);
      if (parts.has_value())  // it was the other node's last
        nodes_[0].maker.give_up(wanted.record, parts.value(), 10 * at + stops_at + 1);
      else EXPECT_EQ(parts.error().code(), Code::kCancelled) << parts.error().message();
      expect_nothing_left();
    }
  }
}

TEST(PartMakerAlone, StoppedAtWhateverMomentAllIsThereOrNothing) {
  const Sample sample = llama_sample(true, 4);
  JobNodes nodes(1, JobNodes::Kind::kAlone);
  JobNode& node = nodes[0];
  node.commit(sample, LayoutSpec());
  const std::set<std::string> before = node.images();
  const Wanted wanted = want(node, R"({"tp": 2, "pp": 2, "dp": 1})");
  const uint64_t bytes = wanted.change->transfers.totals.total_bytes;
  int stopped = 0;
  for (uint64_t i = 0; i <= 16; ++i) {
    const auto activity = node.activities.begin({Activity::Kind::kReshard, "base", "", ""});
    if (i == 0) node.activities.stop_reshards();
    std::jthread stops([&](const std::stop_token& end) {
      while (!end.stop_requested() && activity->bytes_done() < i * bytes / 16)
        std::this_thread::yield();
      node.activities.stop_reshards();
    });
    Fences fences;
    const auto parts = node.maker.make_all(wanted.record, *wanted.record.where, wanted.state,
                                           *wanted.change, *activity, fences, 0);
    stops = {};
    if (parts.has_error()) {
      ++stopped;
      EXPECT_EQ(parts.error().code(), Code::kCancelled) << parts.error().message();
    } else {
      expect_made(nodes, wanted, parts.value(), sample);
      node.maker.give_up(wanted.record, parts.value(), 0);
    }
    EXPECT_EQ(node.images(), before) << i;
  }
  EXPECT_GT(stopped, 0);
}

/// A store of a few pages more than the least that is left free.
class SmallStore {
 public:
  SmallStore() { mounted_ = ::mount("ptcfs-test", path(), "tmpfs", 0, "size=96k") == 0; }
  ~SmallStore() {
    if (mounted_) ::umount2(path(), MNT_DETACH);
  }
  bool is_there() const { return mounted_; }
  const char* path() const { return dir_.path().c_str(); }

 private:
  TempDir dir_;
  bool mounted_ = false;
};

TEST(PartMakerSpace, WithoutSpaceNothingStays) {
  const SmallStore small;
  if (!small.is_there()) GTEST_SKIP() << "no tmpfs can be mounted here";
  const Sample sample = llama_sample(true, 8);
  JobNodes nodes(2, JobNodes::Kind::kCluster, small.path());
  nodes[1].commit(sample, LayoutSpec());
  nodes.follow();
  const std::set<std::string> there = nodes[1].images();
  // Each of its files fits, and all of them do not.
  const Wanted wanted = want(nodes[1], R"({"tp": 1, "pp": 8, "dp": 1, "devices": ["w1:0", "w0:0",
      "w0:0", "w0:0", "w0:0", "w0:0", "w0:0", "w0:0"]})");
  const auto parts = make_all(nodes[1], wanted);
  ASSERT_TRUE(parts.has_error());
  EXPECT_EQ(parts.error().code(), Code::kNoSpace) << parts.error().message();
  EXPECT_THAT(nodes[0].images(), IsEmpty());
  EXPECT_EQ(nodes[1].images(), there);
  EXPECT_TRUE(nodes[0].shelf.empty());
  EXPECT_TRUE(std::filesystem::is_empty(small.path())) << "unfinished files";
}

/// A copy of a file without tensors has the checksum of the commit, or is none.
TEST_F(PartMakerTest, ACopyOfWhatIsDamagedIsNotKept) {
  commit();
  const std::string to_w1 = R"({"tp": 1, "pp": 1, "dp": 1, "devices": ["w0:0"], "replicas": 1})";
  const Wanted wanted = want(nodes_[0], to_w1);
  ASSERT_FALSE(wanted.change->copies.empty());
  const StoredImage& source =
      wanted.record.where->images[wanted.change->copies.front().source_image];
  auto mender = ImageMender::open(*source.image).value();
  const std::string right = text_of(nodes_[0], source.id), wrong(right.size(), '?');
  ASSERT_TRUE(mender.write(0, std::as_bytes(std::span(wrong))).has_value());
  const auto parts = make_all(nodes_[0], wanted);
  ASSERT_TRUE(parts.has_error());
  EXPECT_EQ(parts.error().code(), Code::kCorrupt) << parts.error().message();
  expect_nothing_left();
  ASSERT_TRUE(mender.write(0, std::as_bytes(std::span(right))).has_value());
  EXPECT_TRUE(make_all(nodes_[0], wanted, 2).has_value());
}

/// What was damaged before is found by its sum, and who asked gives all of it up.
TEST_F(PartMakerTest, WhatIsMadeOfDamagedBytesDoesNotCompare) {
  commit();
  const Wanted wanted = want(nodes_[0], kOnOthers);
  const StoredState& stored = *wanted.record.where;
  const auto damaged =
      std::find_if(stored.images.begin(), stored.images.end(),
                   [](const auto& image) { return image.path == "model.safetensors"; });
  ASSERT_NE(damaged, stored.images.end());
  const ImageLayout& layout = stored.layouts()[damaged - stored.images.begin()];
  auto mender = ImageMender::open(*damaged->image).value();
  const std::string one(1, text_of(nodes_[0], damaged->id)[layout.bytes - 1] ^ 1);
  ASSERT_TRUE(mender.write(layout.bytes - 1, std::as_bytes(std::span(one))).has_value());
  const auto parts = make_all(nodes_[0], wanted);
  ASSERT_TRUE(parts.has_value()) << parts.error().message();
  const Result<> compared = nodes_[0].maker.compare(wanted.record, stored, *wanted.change,
                                                    parts.value(), /*known=*/true, {});
  ASSERT_TRUE(compared.has_error());
  EXPECT_EQ(compared.error().code(), Code::kCorrupt);
  nodes_[0].maker.give_up(wanted.record, parts.value(), 1);
  expect_nothing_left();
}

TEST_F(PartMakerTest, WhatADecisionNamesStaysAndTheRestGoes) {
  commit();
  const Wanted wanted = want(nodes_[0], kOnThree);
  const auto parts = make_all(nodes_[0], wanted);
  ASSERT_TRUE(parts.has_value()) << parts.error().message();
  ASSERT_EQ(parts.value().size(), 3u);
  const Checkpoint& checkpoint = *wanted.record.checkpoint;
  auto images =
      nodes_[0].maker.compose(checkpoint, *wanted.record.where, *wanted.change, parts.value());
  ASSERT_TRUE(images.has_value()) << images.error().message();
  // A decision that came names them, and nobody has told the nodes of it.
  std::shared_ptr<const StoredState> moved =
      checkpoint.make_stored(wanted.state.spec, std::move(images).value()).value();
  const PlanTexts plan =
      PlanReport("job", "w0", checkpoint, *wanted.record.where, wanted.state.spec, *wanted.change)
          .texts("done", 0);
  CheckpointRecord record = wanted.record;
  auto next = nodes_[0].decisions.write_stored(record, moved, plan);
  ASSERT_TRUE(next.has_value()) << next.error().message();
  {
    MutexLock change(nodes_[0].decisions.mutex());
    const auto decide = [&](JobUpdate& update) -> Result<bool> {
      EXPECT_NE(update.checkpoint(checkpoint.name()), nullptr);
      Decisions::put_stored(record, std::move(next).value(), update);
      return true;
    };
    ASSERT_TRUE(nodes_[0].decisions.update(decide).has_value());
  }
  EXPECT_FALSE(nodes_[1].shelf.empty());
  ASSERT_TRUE(nodes_[0].follow().has_value());
  nodes_[0].maker.give_up(wanted.record, parts.value(), 1);  // as of one who was in doubt
  for (unsigned i = 0; i < nodes_.size(); ++i) {
    SCOPED_TRACE(JobNodes::name(i));
    EXPECT_TRUE(nodes_[i].shelf.empty());
    EXPECT_EQ(nodes_[i].images(), nodes_[i].named_images());
    EXPECT_FALSE(nodes_[i].images().empty());
  }
  expect_layout(*nodes_[2].record().checkpoint, sample_, wanted.state.spec);
  // Another change, of which nothing is decided: only that goes.
  const Wanted other = want(nodes_[0], kOnOthers);
  const auto more = make_all(nodes_[0], other, 2);
  ASSERT_TRUE(more.has_value()) << more.error().message();
  EXPECT_NE(nodes_[1].images(), nodes_[1].named_images());
  nodes_[0].maker.give_up(other.record, more.value(), 2);
  for (unsigned i = 0; i < nodes_.size(); ++i)
    EXPECT_EQ(nodes_[i].images(), nodes_[i].named_images()) << JobNodes::name(i);
}

TEST_F(PartMakerTest, APartIsMadeOnceHoweverOftenItIsAsked) {
  commit();
  const Wanted wanted = want(nodes_[0], kOnOthers);
  std::vector<std::string> answers(4);
  {
    std::vector<std::jthread> ask;
    for (std::string& answer : answers)
      ask.emplace_back([&] {
        const auto part = nodes_[1].maker.make_for(request(wanted, 7));
        answer = part.has_value() ? part.value().to_text() : part.error().message();
      });
  }
  for (const std::string& answer : answers) EXPECT_EQ(answer, answers.front());
  const auto part = PlanPart::from_text(answers.front());
  ASSERT_TRUE(part.has_value()) << answers.front();
  EXPECT_FALSE(part.value().images.empty());
  EXPECT_EQ(nodes_[1].images(), images_of(part.value()));
  // By whoever leads next, and with what it made of its own.
  const auto parts = make_all(nodes_[0], wanted, 9);
  ASSERT_TRUE(parts.has_value()) << parts.error().message();
  EXPECT_EQ(nodes_[1].images(), images_of(part.value()));
  nodes_[0].maker.give_up(wanted.record, parts.value(), 8);  // of one before
  EXPECT_EQ(nodes_[1].images(), images_of(part.value()));
  nodes_[0].maker.give_up(wanted.record, parts.value(), 9);
  expect_nothing_left();
}

TEST_F(PartMakerTest, ALeaderBeforeThePresentOneGetsNothing) {
  commit();
  const Wanted wanted = want(nodes_[0], kOnOthers), other = want(nodes_[0], kOnThree);
  ASSERT_TRUE(nodes_[1].maker.make_for(request(wanted, 9)).has_value());
  const std::set<std::string> made = nodes_[1].images();
  for (const Wanted& one : {wanted, other}) {
    const auto late = nodes_[1].maker.make_for(request(one, 8));
    ASSERT_TRUE(late.has_error());
    EXPECT_EQ(late.error().code(), Code::kCancelled);
    const auto parts = make_all(nodes_[0], one, 8);  // asks all, and takes back what it made itself
    ASSERT_TRUE(parts.has_error());
    EXPECT_EQ(parts.error().code(), Code::kCancelled) << parts.error().message();
    EXPECT_EQ(nodes_[1].images(), made);
    EXPECT_EQ(nodes_[1].shelf.epochs().at(wanted.record.id), 9);
    EXPECT_EQ(nodes_[0].images(), before_[0]);
    EXPECT_EQ(nodes_[2].images(), before_[2]);
  }
}

TEST_F(PartMakerTest, AnotherPlanTakesThePlaceOfTheFormer) {
  commit();
  const Wanted wanted = want(nodes_[0], kOnOthers), other = want(nodes_[0], kOnThree);
  ASSERT_TRUE(nodes_[1].maker.make_for(request(wanted, 1)).has_value());
  const std::set<std::string> former = nodes_[1].images();
  const int asked = nodes_[1].syncs;
  const auto part = nodes_[1].maker.make_for(request(other, 2));
  ASSERT_TRUE(part.has_value()) << part.error().message();
  EXPECT_GT(nodes_[1].syncs, asked);  // the former may have been decided on
  EXPECT_EQ(nodes_[1].images(), images_of(part.value()));
  EXPECT_EQ(nodes_[1].shelf.epochs().at(wanted.record.id), 2);
  for (const std::string& id : former) EXPECT_FALSE(nodes_[1].images().contains(id));
}

/// A node that has not heard of the edit, or of where the bytes lie, hears of it first.
TEST_F(PartMakerTest, WhoIsBehindCatchesUpFirst) {
  nodes_[0].commit(sample_, LayoutSpec());
  ASSERT_TRUE(nodes_[0].edit(kOnOthers).has_value());
  const Wanted wanted = want(nodes_[0], kOnOthers);
  EXPECT_EQ(nodes_[1].knowledge.now()->find_id(wanted.record.id), nullptr);
  const auto parts = make_all(nodes_[0], wanted);
  ASSERT_TRUE(parts.has_value()) << parts.error().message();
  expect_made(nodes_, wanted, parts.value(), sample_);
  EXPECT_EQ(nodes_[1].knowledge.now()->saved.revision, 2);
  EXPECT_GT(nodes_[1].syncs, 0);
  nodes_[0].maker.give_up(wanted.record, parts.value(), 1);
  EXPECT_THAT(nodes_[1].images(), IsEmpty());
}

/// Of a commit that was given up while its copies were made nothing stays, though nobody says so
/// any more.
TEST_F(PartMakerTest, APartOfACommitThatWasGivenUpGoes) {
  commit();
  const Wanted wanted = want(nodes_[0], kOnOthers);
  const auto fence = nodes_[0].cluster.fence();
  const std::string text = [&] {
    PartRequest of = PartRequest::from_text(request(wanted, 0)).value();
    of.commit = {"w0", fence->revision};
    return of.to_text();
  }();
  {
    const auto meanwhile = nodes_.fetches.during([&](const std::string&) -> std::optional<Error> {
      nodes_[1].taken.untake(wanted.record.id);
      return std::nullopt;
    });
    const auto part = nodes_[1].maker.make_for(text);
    ASSERT_TRUE(part.has_error());
    EXPECT_EQ(part.error().code(), Code::kConflict);
  }
  EXPECT_THAT(nodes_[1].images(), IsEmpty());
  EXPECT_TRUE(nodes_[1].shelf.empty());
  ASSERT_TRUE(nodes_[1].maker.make_for(text).has_value());
  EXPECT_TRUE(nodes_[1].taken.holds(wanted.record.id));
  EXPECT_FALSE(nodes_[1].shelf.done().has_value());  // it is no reshard
  nodes_[1].taken.untake(wanted.record.id);
  EXPECT_THAT(nodes_[1].images(), IsEmpty());
}

}  // namespace
}  // namespace ptc::testing
