// Copies that are damaged or gone: found, mended or made anew, and never passed on.
#include <fcntl.h>
#include <linux/fs.h>
#include <sys/ioctl.h>
#include <sys/stat.h>

#include <atomic>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <thread>

#include "reshard/job/job_record.h"
#include "store/base/file.h"
#include "tests/reshard/damage_fixture.h"
#include "tests/support/becomes.h"

namespace ptc::testing {
namespace {

using ::testing::HasSubstr;

TEST_F(DamageTest, ADamagedCopyIsNamedAndMadeAnew) {
  commit_with_copies(1);
  const unsigned node = holder_of(1);
  const std::string file = image_file(node, 1);
  flip_last_byte(file);
  const unsigned asked = (node + 1) % 3;
  Result<std::string> verified = cluster_.job(asked, "job")->verify("base");
  ASSERT_TRUE(verified.has_error());
  EXPECT_EQ(verified.error().code(), Code::kCorrupt);
  EXPECT_THAT(verified.error().message(), HasSubstr("on " + LocalCluster::name(node)));
  EXPECT_THAT(verified.error().message(), HasSubstr("--repair"));
  EXPECT_GE(cluster_.job(asked, "job")->numbers().counts.damaged_found, 1u);

  EXPECT_TRUE(becomes([&] {
    return cluster_.job(asked, "job")->numbers().counts.damaged_mended == 1u;
  })) << "nobody need ask for that";
  EXPECT_TRUE(cluster_.job(asked, "job")->repair("base").has_value());
  EXPECT_EQ(image_file(node, 1), file) << "it is mended where it lies, for those who have it open";
  EXPECT_EQ(cluster_.job(asked, "job")->numbers().counts.damaged_mended, 1u);
  cluster_.wait_settled();
  for (unsigned each : {0u, 1u, 2u})
    EXPECT_EQ(cluster_.job(each, "job")->numbers().mendings, 1u) << "all nodes say so";
  EXPECT_TRUE(cluster_.job(asked, "job")->verify("base").has_value());
  EXPECT_EQ(holders(0, spec_of(spec_text_), 1).size(), 2u);
  expect_everywhere({0, 1, 2}, spec_of(spec_text_));
}

/// No tensor's checksum covers it, but whoever reads the file gets it.
TEST_F(DamageTest, PaddingThatIsNotZeroAnyMoreIsFound) {
  commit_with_copies(1);
  spec_text_ = R"({"tp": 2, "pp": 1, "dp": 1, "replicas": 1})";  // of an odd vocabulary
  edit(0, spec_text_);
  cluster_.wait_settled();
  const auto stored = cluster_.job(0, "job")->find_checkpoint("base")->stored();
  const StoredImage* flipped = nullptr;
  for (size_t i = 0; i < stored->images.size() && flipped == nullptr; ++i) {
    for (const ArraySlot& slot : stored->layouts()[i].arrays) {
      const uint64_t elements = num_elements(slot.part->local_shape).value();
      uint64_t held = 0;
      for (const Piece& piece : slot.part->pieces) held += piece.global.volume();
      if (held == elements) continue;
      flipped = &stored->images[i];
      flip_byte(cluster_.store(flipped->node[1] - '0').images().directory() + "/" + flipped->id,
                slot.byte_offset + elements * sizeof(uint16_t) - 1);
      break;
    }
  }
  ASSERT_NE(flipped, nullptr);
  Result<std::string> verified = cluster_.job(0, "job")->verify("base");
  ASSERT_TRUE(verified.has_error());
  EXPECT_THAT(verified.error().message(), HasSubstr("its padding is not zero any more"));
  EXPECT_THAT(verified.error().message(), HasSubstr("on " + flipped->node));
  ASSERT_TRUE(cluster_.job(0, "job")->repair("base").has_value());
  cluster_.wait_settled();
  EXPECT_TRUE(cluster_.job(0, "job")->verify("base").has_value());
  expect_everywhere({0, 1, 2}, spec_of(spec_text_));
}

TEST_F(DamageTest, ACopyThatIsCutIsMadeAnew) {
  commit_with_copies(1);
  const unsigned node = holder_of(2);
  const std::string file = image_file(node, 2);
  ASSERT_EQ(chmod(file.c_str(), 0600), 0);
  std::filesystem::resize_file(file, 1000);
  Result<std::string> repaired = cluster_.job(node, "job")->repair("base");
  ASSERT_TRUE(repaired.has_value()) << repaired.error().message();
  EXPECT_THAT(repaired.value(), HasSubstr("1000 bytes instead of"));
  cluster_.wait_settled();
  EXPECT_TRUE(cluster_.job(0, "job")->verify("base").has_value());
  expect_everywhere({0, 1, 2}, spec_of(spec_text_));
}

/// As after a reboot of a node whose store was memory.
TEST_F(DamageTest, ANodeThatComesBackWithoutItsFilesGetsThemAnew) {
  commit_with_copies(1);
  const unsigned node = holder_of(1);
  const std::string images = cluster_.store(node).images().directory();
  cluster_.stop(node);
  std::filesystem::remove_all(images);
  cluster_.start(node);
  cluster_.wait_settled();
  for (uint64_t rank = 0; rank < 3; ++rank)
    EXPECT_GE(holders(node, spec_of(spec_text_), rank).size(), 2u) << rank;
  for (unsigned other = 0; other < 3; ++other)
    EXPECT_TRUE(cluster_.job(other, "job")->verify("base").has_value()) << other;
  expect_everywhere({0, 1, 2}, spec_of(spec_text_));
}

/// The others take them for there, and say that nothing is left to do: that holds for no node whose
/// files are missing.
TEST_F(DamageTest, ANodeThatCannotSayThatItsFilesAreMissingMakesThemAnewAllTheSame) {
  commit_with_copies(2);  // on each node all
  const unsigned node = 2;
  const std::string images = cluster_.store(node).images().directory();
  const auto looked = [&] {
    const auto entry = cluster_.meta().get("looked/job").value();
    return entry ? entry->revision : 0;
  };
  cluster_.stop(node);
  cluster_.wait_settled();
  std::filesystem::remove_all(images);
  const int64_t before = looked();
  std::atomic<int> refused = 0;
  const auto refusing = cluster_.refuses.during(
      [&](const std::string& who, const MetaTransaction& transaction) -> std::optional<Error> {
        if (who != LocalCluster::name(node)) return std::nullopt;
        const bool others_have_looked = looked() != before;
        for (const auto& [key, value] : transaction.leased_puts)
          if (key == "leaders/job" && !others_have_looked)
            return make_error(Code::kUnavailable, "the others first");
        for (const auto& [key, value] : transaction.puts)
          if (key == "jobs/job/checkpoints/base" && (!others_have_looked || refused++ == 0))
            return make_error(Code::kUnavailable, "etcd does not answer just now");
        return std::nullopt;
      });
  cluster_.start(node);
  EXPECT_TRUE(becomes([&] {
    for (uint64_t rank = 0; rank < 3; ++rank)
      if (holders(node, spec_of(spec_text_), rank).size() < 3) return false;
    return true;
  })) << cluster_.job(node, "job")->status_json();
  EXPECT_GT(refused, 0);
  cluster_.refuses = nullptr;
  cluster_.wait_settled();
  for (unsigned other = 0; other < 3; ++other)
    EXPECT_TRUE(cluster_.job(other, "job")->verify("base").has_value()) << other;
}

/// As after a start whose store was not mounted yet: what is nowhere else is lost as long as that
/// lasts.
TEST_F(DamageTest, FilesThatWereAwayAreTakenForGoodAgain) {
  commit_with_copies(0);
  const unsigned node = holder_of(1), other = (node + 1) % 3;
  const std::string images = cluster_.store(node).images().directory(), away = images + "-away";
  auto start_with = [&](const std::string& from, const std::string& to) {
    cluster_.stop(node);
    std::filesystem::rename(from, to);
    cluster_.start(node);
    cluster_.wait_settled();
  };
  start_with(images, away);
  EXPECT_FALSE(cluster_.job(other, "job")->find_checkpoint("base")->lost_tensors().empty());
  std::filesystem::remove_all(images);
  start_with(away, images);
  EXPECT_TRUE(cluster_.job(other, "job")->find_checkpoint("base")->lost_tensors().empty());
  expect_everywhere({0, 1, 2}, spec_of(spec_text_));
}

TEST_F(DamageTest, CopiesThatWereAwayAreLookedAtOnceTheyAreBack) {
  commit_with_copies(2);  // on each node all
  const auto due = [&] {
    for (const unsigned node : {0u, 1u, 2u})
      if (const auto next = cluster_.job(node, "job")->next_to_look_over(INT64_MAX);
          next && next->last_ns == 0)
        return true;
    return false;
  };
  cluster_.stop(2);
  cluster_.wait_settled();
  Result<> looked = cluster_.job(0, "job")->look_over("base");
  ASSERT_TRUE(looked.has_value()) << looked.error().message();
  EXPECT_THAT(cluster_.job(0, "job")->status_json(), HasSubstr(R"("away": ["w2"])"));
  EXPECT_GT(cluster_.job(0, "job")->next_to_look_over(INT64_MAX)->last_ns, 0);
  cluster_.start(2);
  EXPECT_TRUE(becomes(due));
  cluster_.wait_settled();
  looked = cluster_.job(0, "job")->look_over("base");
  ASSERT_TRUE(looked.has_value()) << looked.error().message();
  EXPECT_TRUE(becomes([&] { return !due(); }));
}

TEST_F(DamageTest, WhatCannotBeReadHereGoesWhenItIsRemoved) {
  commit_with_copies(1);
  const std::string directory = cluster_.store(2).directory() + "/jobs/job/checkpoints";
  const std::string images = cluster_.store(2).images().directory();
  ASSERT_FALSE(std::filesystem::is_empty(images));
  cluster_.stop(2);
  edit(0, R"({"tp": 1, "pp": 2, "dp": 1, "replicas": 1})");
  cluster_.wait_settled();
  cluster_.loses = [](const std::string&, std::string_view method) { return method == "job/file"; };
  cluster_.start(2);  // it does not know where the bytes lie by now
  ASSERT_EQ(cluster_.job(2, "job")->find_checkpoint("base"), nullptr);
  ASSERT_TRUE(cluster_.job(0, "job")->remove_checkpoint("base").has_value());
  cluster_.loses = nullptr;
  cluster_.wait_settled();
  EXPECT_TRUE(std::filesystem::is_empty(directory));
  EXPECT_TRUE(std::filesystem::is_empty(images));
}

TEST_F(DamageTest, AReshardDoesNotCarryDamageOn) {
  commit_with_copies(1);
  flip_last_byte(image_file(holder_of(0), 0));
  const std::string text = R"({"tp": 2, "pp": 1, "dp": 1, "replicas": 1})";
  edit(1, text);
  cluster_.wait_settled();
  EXPECT_TRUE(cluster_.job(2, "job")->verify("base").has_value());
  expect_everywhere({0, 1, 2}, spec_of(text));
}

/// Nothing is cut anew, and still what is copied is compared before anybody counts on it.
TEST_F(DamageTest, NoCopyIsMadeOfWhatIsDamaged) {
  commit_with_copies(0);
  const std::vector<std::string> before = holders(0, spec_of(spec_text_), 1);
  ASSERT_LT(before.size(), 3u);
  for (const std::string& node : before) flip_last_byte(image_file(node[1] - '0', 1));
  edit(0, R"({"tp": 1, "pp": 3, "dp": 1, "replicas": 2})");
  cluster_.wait_settled();
  EXPECT_EQ(holders(0, spec_of(spec_text_), 1), before);
  EXPECT_THAT(cluster_.job(0, "job")->status_json() + cluster_.job(1, "job")->status_json() +
                  cluster_.job(2, "job")->status_json(),
              HasSubstr("do not have the checksum they had"));
}

/// The same where a node dies, and what it had is made anew of the copy that is left.
TEST_F(DamageTest, NoCopyIsMadeAnewOfWhatIsDamaged) {
  commit_with_copies(1);
  const std::vector<std::string> before = holders(0, spec_of(spec_text_), 1);
  ASSERT_EQ(before.size(), 2u);
  const unsigned dies = before.front()[1] - '0', left = before.back()[1] - '0',
                 other = 3 - dies - left;
  flip_last_byte(image_file(left, 1));
  cluster_.stop(dies);
  EXPECT_TRUE(becomes([&] {
    return (cluster_.job(left, "job")->status_json() + cluster_.job(other, "job")->status_json())
               .find("do not have the checksum they had") != std::string::npos;
  }));
  EXPECT_EQ(image_file(other, 1), "");
  cluster_.start(dies);  // with the good one
  EXPECT_TRUE(becomes([&] { return cluster_.job(dies, "job")->repair("base").has_value(); }));
  cluster_.wait_settled();
  EXPECT_TRUE(becomes([&] { return cluster_.job(left, "job")->verify("base").has_value(); }));
  expect_everywhere({0, 1, 2}, spec_of(spec_text_));
}

TEST_F(DamageTest, WhatNoOtherCopyHasIsSaidAndKept) {
  commit_with_copies(0);
  std::string file;
  for (const std::string& node : holders(0, spec_of(spec_text_), 1)) {
    file = image_file(node[1] - '0', 1);
    flip_last_byte(file);
  }
  for (bool repair : {false, true}) {
    JobRef job = cluster_.job(0, "job");
    Result<std::string> answer = repair ? job->repair("base") : job->verify("base");
    ASSERT_TRUE(answer.has_error());
    EXPECT_THAT(answer.error().message(), HasSubstr("do not have the checksum they had"));
  }
  EXPECT_TRUE(std::filesystem::exists(file));
}

/// Most of a damaged copy may be right, and the last of it by the time that the other is gone: it
/// stays until it is mended, whoever does not answer meanwhile.
TEST_F(DamageTest, WhatCannotBeMendedNowStaysAndIsMendedLater) {
  for (const std::string_view lost : {"fetch", "job/mend"}) {
    SCOPED_TRACE(lost);
    cluster_.loses = nullptr;
    if (cluster_.job(0, "job") == nullptr) commit_with_copies(1);
    const unsigned node = holder_of(1), asked = lost == "fetch" ? node : (node + 1) % 3;
    const std::string file = image_file(node, 1);
    flip_byte(file, 20);  // of its header
    if (lost == "job/mend") flip_last_byte(file);
    std::atomic<int> in_vain = 0;
    const auto losing = cluster_.loses.during([&](const std::string&, std::string_view method) {
      if (method == lost) ++in_vain;
      return method == lost;
    });
    EXPECT_TRUE(cluster_.job(asked, "job")->repair("base").has_error());
    EXPECT_GT(in_vain, 0);
    ASSERT_TRUE(cluster_.job(asked, "job")->verify("base").has_error());
    const int before = in_vain;
    EXPECT_TRUE(becomes([&] { return in_vain > before; })) << "it is tried again";
    cluster_.wait_settled();
    EXPECT_EQ(image_file(node, 1), file);
    EXPECT_TRUE(std::filesystem::exists(file));
    EXPECT_TRUE(cluster_.job(asked, "job")->find_checkpoint("base")->lost_tensors().empty());
    EXPECT_EQ(cluster_.job(asked, "job")->numbers().counts.damaged_replaced, 0u);
    if (lost ==
        "job/mend") {  // others can be read meanwhile, and are: also where the wrong one lies
      for (const unsigned reads : {0u, 1u, 2u}) {
        const JobRef job = cluster_.job(reads, "job");
        EXPECT_TRUE(becomes([&] {
          const auto damage = job->find_checkpoint("base")->damage();
          return damage != nullptr && damage->copies.size() == 1;
        })) << reads;
        expect_layout(*job->find_checkpoint("base"), sample_, spec_of(spec_text_));
      }
    }
    cluster_.loses = nullptr;
    EXPECT_TRUE(becomes([&] { return cluster_.job(asked, "job")->verify("base").has_value(); }));
    EXPECT_EQ(image_file(node, 1), file);
    for (const unsigned reads : {0u, 1u, 2u})
      EXPECT_TRUE(becomes([&] {
        return cluster_.job(reads, "job")->find_checkpoint("base")->damage() == nullptr;
      })) << reads;
    // Who is known to have it can be gone: then this one is what is left.
    expect_everywhere({0, 1, 2}, spec_of(spec_text_));
  }
}

/// What was mended while nothing could be decided is told as soon as it can be, without anybody
/// asking for it; of a checkpoint that is gone by then there is nothing to tell.
TEST_F(DamageTest, WhatCouldNotBeToldIsToldLaterOrForgotten) {
  commit_with_copies(1);
  std::atomic<bool> away = false;
  const auto refusing = cluster_.refuses.during(
      [&](const std::string& node, const MetaTransaction&) -> std::optional<Error> {
        if (!away || node != "w0") return std::nullopt;
        return make_error(Code::kUnavailable, "etcd does not answer");
      });
  const auto mend_in_vain = [&] {
    flip_last_byte(image_file(holder_of(1), 1));
    away = true;
    EXPECT_TRUE(cluster_.job(0, "job")->repair("base").has_error());
  };
  mend_in_vain();
  away = false;
  for (unsigned each : {0u, 1u, 2u})
    EXPECT_TRUE(becomes([&] { return cluster_.job(each, "job")->numbers().mendings == 1u; }));

  mend_in_vain();
  ASSERT_TRUE(cluster_.job(1, "job")->remove_checkpoint("base").has_value());
  EXPECT_TRUE(becomes([&] { return cluster_.job(0, "job")->find_checkpoint("base") == nullptr; }));
  away = false;
  EXPECT_TRUE(becomes([&] { return cluster_.job(0, "job")->see_to_damage(); }))
      << "nothing is tried again for ever";
}

/// One that is taken out, for there is nothing left to mend, goes only while those live who have
/// the rest, and as they were when that was read.
TEST_F(DamageTest, NoneIsTakenOutButForOthersThatLive) {
  commit_with_copies(1);
  const unsigned node = holder_of(2);
  const std::string file = image_file(node, 2);
  ASSERT_EQ(chmod(file.c_str(), 0600), 0);
  std::filesystem::resize_file(file, 1000);
  if (!set_immutable(file, true))
    GTEST_SKIP() << "this file system, or user, makes no file immutable";
  std::string other;
  for (const std::string& holder : holders(0, spec_of(spec_text_), 2))
    if (holder != LocalCluster::name(node)) other = holder;
  const unsigned asked =
      (node + 1) % 3 == static_cast<unsigned>(other[1] - '0') ? (node + 2) % 3 : (node + 1) % 3;
  std::atomic<bool> once = false, named = false;
  const auto refusing = cluster_.refuses.during(
      [&](const std::string& who, const MetaTransaction& transaction) -> std::optional<Error> {
        if (who != LocalCluster::name(asked)) return std::nullopt;
        for (const auto& [key, value] : transaction.puts) {
          if (key != "jobs/job/checkpoints/base" || once.exchange(true)) continue;
          for (const auto& compare : transaction.compares)
            if (compare.key == "nodes/" + other || compare.key == kMembership) named = true;
        }
        return std::nullopt;
      });
  Result<std::string> repaired = cluster_.job(asked, "job")->repair("base");
  EXPECT_TRUE(set_immutable(file, false));
  ASSERT_TRUE(repaired.has_value()) << repaired.error().message();
  cluster_.refuses = nullptr;
  EXPECT_TRUE(once);
  EXPECT_EQ(cluster_.job(asked, "job")->numbers().counts.damaged_replaced, 1u);
  EXPECT_TRUE(named) << "the decision does not rest on that node " << other << " lives";
  cluster_.wait_settled();
  expect_everywhere({0, 1, 2}, spec_of(spec_text_));
}

/// By them a node would find good bytes of others wrong, and mend them.
TEST_F(DamageTest, WhatDescribesACheckpointIsTakenAnewWhereItHasChanged) {
  commit_with_copies(1);
  const unsigned node = 0;
  const std::string checkpoints = cluster_.directory(node) + "/jobs/job/checkpoints";
  const std::string directory = std::filesystem::directory_iterator(checkpoints)->path();
  for (const char* name : {"headers.bin", "manifest.json"}) {
    SCOPED_TRACE(name);
    const std::string file = directory + "/" + name, before = read_file(file);
    for (const size_t at : {before.size() / 2, before.size() - 3}) {
      cluster_.stop(node);
      flip_byte(file, at);
      cluster_.start(node);
      cluster_.wait_settled();
      EXPECT_EQ(read_file(file), before);
      for (unsigned each : {0u, 1u, 2u})
        EXPECT_TRUE(cluster_.job(each, "job")->verify("base").has_value()) << each;
    }
  }
  EXPECT_EQ(cluster_.job(1, "job")->numbers().mendings, 0u);
  expect_everywhere({0, 1, 2}, spec_of(spec_text_));
}

/// A look takes long: what another one finds wrong, of what this one has read already, stays so.
TEST_F(DamageTest, WhatAnotherLookFoundMeanwhileIsNotRightAgain) {
  commit_with_copies(0);
  const unsigned holder = holder_of(1), looks = (holder + 1) % 3, other = (holder + 2) % 3;
  const std::string file = image_file(holder, 1);
  const auto damaged = [&](unsigned node) {
    const auto damage = cluster_.job(node, "job")->find_checkpoint("base")->damage();
    return damage != nullptr && !damage->none();
  };
  std::atomic<bool> once = false;
  const auto breaking =
      cluster_.breaks.during([&](const std::string& asking, const std::string& node,
                                 std::string_view method, const std::string&) {
        if (asking != LocalCluster::name(looks) || node != LocalCluster::name(holder) ||
            method != "job/examine" || once.exchange(true))
          return false;
        flip_last_byte(file);
        EXPECT_TRUE(cluster_.job(other, "job")->verify("base").has_error());
        EXPECT_TRUE(becomes([&] { return damaged(looks); }));
        return false;
      });
  const Result<> looked = cluster_.job(looks, "job")->look_over("base");
  EXPECT_TRUE(once);
  ASSERT_TRUE(looked.has_error());
  EXPECT_EQ(looked.error().code(), Code::kBusy);
  for (const unsigned node : {0u, 1u, 2u}) EXPECT_TRUE(damaged(node)) << node;
  EXPECT_TRUE(cluster_.job(looks, "job")->look_over("base").has_value()) << "the next finds it";
  for (const unsigned node : {0u, 1u, 2u}) EXPECT_TRUE(damaged(node)) << node;
}

/// What another node says while one takes over what is agreed is not forgotten with what that had
/// read before.
TEST_F(DamageTest, WhatIsSaidToBeWrongWhileANodeFollowsStaysKnown) {
  commit_with_copies(0);
  const JobRef job = cluster_.job(1, "job");
  const CheckpointRef checkpoint = job->find_checkpoint("base");
  LookedOver looked{.time_ns = 1};
  looked.not_right.tensors = {0};
  std::atomic<int> at = 0;
  const std::thread::id here = std::this_thread::get_id();
  const auto listing = cluster_.lists.during([&](const std::string& node, std::string_view prefix) {
    if (node != "w1" || std::this_thread::get_id() != here) return;
    if (prefix == "jobs/job/" && at == 0) at = 1;
    if (prefix != kDrainedKeys || at != 1) return;
    at = 2;  // it has read what is agreed on of the job
    MetaTransaction transaction;
    transaction.puts.emplace_back("jobs/job/looked_over/" + checkpoint->manifest().id,
                                  looked.to_text());
    ASSERT_TRUE(cluster_.meta().commit(transaction).has_value());
    EXPECT_TRUE(becomes([&] { return checkpoint->damage() != nullptr; }));
  });
  ASSERT_TRUE(job->sync().has_value());
  cluster_.lists = nullptr;
  EXPECT_EQ(at, 2);
  ASSERT_NE(checkpoint->damage(), nullptr);
  EXPECT_EQ(*checkpoint->damage(), looked.not_right);
  ASSERT_TRUE(job->sync().has_value());
  ASSERT_NE(checkpoint->damage(), nullptr);
}

/// Of very much less is written down: the node that does so knows no more than what it told.
TEST_F(DamageTest, WhatIsWrongInVeryManyPlacesIsTheSameForAll) {
  constexpr size_t kTensors = 4100;
  std::vector<TensorEntry> entries;
  for (size_t i = 0; i < kTensors; ++i)
    entries.push_back({fmt::format("t{:05}", i), DType::kF32, {1}});
  const std::vector<std::string> bytes(kTensors, "abcd");
  ASSERT_TRUE(cluster_.store(0).create_job("job").has_value());
  write_file(incoming(0) + "/rank/0/model.safetensors", safetensors_file(entries, bytes));
  commit(0);
  cluster_.wait_settled();
  const std::string file = image_file(0, 0);
  ASSERT_EQ(chmod(file.c_str(), 0600), 0) << file;
  const std::string before = read_file(file);
  std::string after = before;
  const size_t data = before.size() - 4 * kTensors;
  for (size_t i = 0; i < kTensors; i += 2) after[data + 4 * i] = 'x';
  write_file(file, after);
  ASSERT_TRUE(cluster_.job(0, "job")->verify("base").has_error());
  const auto damage = [&](unsigned node) {
    const auto known = cluster_.job(node, "job")->find_checkpoint("base")->damage();
    return known != nullptr ? *known : KnownDamage();
  };
  for (const unsigned node : {0u, 1u}) EXPECT_TRUE(becomes([&] { return !damage(node).none(); }));
  EXPECT_TRUE(becomes([&] { return damage(0) == damage(1); }))
      << damage(0).tensors.size() << " " << damage(1).tensors.size();
}

/// Two nodes look for the first time, and neither has heard of the other yet.
TEST_F(DamageTest, TheFirstLookTakesNothingForRightThatAnotherFirstLookFound) {
  commit_with_copies(0);
  const std::string key =
      "jobs/job/looked_over/" + cluster_.job(0, "job")->find_checkpoint("base")->manifest().id;
  LookedOver other{.time_ns = 1};
  other.not_right.tensors = {0};
  std::atomic<bool> once = true;
  const auto refusing = cluster_.refuses.during(
      [&](const std::string& node, const MetaTransaction& transaction) -> std::optional<Error> {
        for (const auto& [put, value] : transaction.puts) {
          if (node != "w0" || put != key || !once.exchange(false)) continue;
          MetaTransaction theirs;
          theirs.puts.emplace_back(key, other.to_text());
          EXPECT_TRUE(cluster_.meta().commit(theirs).has_value());
        }
        return std::nullopt;
      });
  const Result<> looked = cluster_.job(0, "job")->look_over("base");
  EXPECT_FALSE(once);
  ASSERT_TRUE(looked.has_error());
  EXPECT_EQ(looked.error().code(), Code::kBusy);
  EXPECT_EQ(cluster_.meta().get(key).value()->value, other.to_text());
  cluster_.refuses = nullptr;
}

/// What looks found is forgotten with its checkpoint, and not because a node cannot show that one.
TEST_F(DamageTest, WhatIsWrongIsNotForgottenByANodeThatCannotReadItsCheckpoint) {
  commit_with_copies(0);
  write_ranks(sample_, spec_of(spec_text_), cluster_.job(0, "job")->files_dir() + "/incoming/more");
  ASSERT_TRUE(cluster_.job(0, "job")->commit("more", "more").has_value());
  cluster_.wait_settled();
  for (const std::string& node : holders(0, spec_of(spec_text_), 1))
    flip_last_byte(image_file(node[1] - '0', 1));
  ASSERT_TRUE(cluster_.job(0, "job")->verify("base").has_error());
  const auto damaged = [&](unsigned node) {
    const CheckpointRef base = cluster_.job(node, "job")->find_checkpoint("base");
    return base != nullptr && base->damage() != nullptr && !base->damage()->none();
  };
  for (const unsigned node : {0u, 1u, 2u}) EXPECT_TRUE(becomes([&] { return damaged(node); }));
  const std::string id = cluster_.job(0, "job")->find_checkpoint("base")->manifest().id;
  cluster_.stop(2);
  ASSERT_TRUE(std::filesystem::remove(cluster_.directory(2) + "/jobs/job/checkpoints/" + id +
                                      "/manifest.json"));
  cluster_.loses = [](const std::string&, std::string_view method) { return method == "job/file"; };
  cluster_.start(2);
  ASSERT_EQ(cluster_.job(2, "job")->find_checkpoint("base"), nullptr);
  const Result<> looked = cluster_.job(2, "job")->look_over("more");
  ASSERT_TRUE(looked.has_value()) << looked.error().message();
  cluster_.loses = nullptr;
  EXPECT_TRUE(cluster_.meta().get("jobs/job/looked_over/" + id).value().has_value());
  for (const unsigned node : {0u, 1u, 2u}) EXPECT_TRUE(becomes([&] { return damaged(node); }));
}

/// Of a mending that could not be written down not all was done: what is right again by it is read
/// again without anybody asking.
TEST_F(DamageTest, AMendingThatIsInDoubtIsTriedAgain) {
  commit_with_copies(1);
  const std::vector<std::string> nodes = holders(0, spec_of(spec_text_), 1);
  ASSERT_EQ(nodes.size(), 2u);
  const unsigned damaged = nodes[0][1] - '0', asked = 3 - damaged - (nodes[1][1] - '0');
  const auto knows = [&] {
    const auto damage = cluster_.job(asked, "job")->find_checkpoint("base")->damage();
    return damage != nullptr && !damage->none();
  };
  for (const Code code : {Code::kInDoubt, Code::kNoSpace}) {
    SCOPED_TRACE(code_name(code));
    flip_last_byte(image_file(damaged, 1));
    LookedOver looked{.time_ns = 1};  // as of one while the right copy was away
    looked.not_right.tensors = {0};
    MetaTransaction transaction;
    transaction.puts.emplace_back(
        "jobs/job/looked_over/" +
            cluster_.job(asked, "job")->find_checkpoint("base")->manifest().id,
        looked.to_text());
    ASSERT_TRUE(cluster_.meta().commit(transaction).has_value());
    ASSERT_TRUE(becomes(knows));
    std::atomic<int> in_vain = 0;
    const auto refusing = cluster_.refuses.during(
        [&](const std::string& node, const MetaTransaction& decision) -> std::optional<Error> {
          for (const auto& [key, value] : decision.puts)
            if (node == LocalCluster::name(asked) && key == "jobs/job/checkpoints/base" &&
                in_vain++ == 0)
              return make_error(code, "the answer was lost");
          return std::nullopt;
        });
    ASSERT_TRUE(cluster_.job(asked, "job")->verify("base").has_error());
    EXPECT_TRUE(becomes([&] { return in_vain > 0; }));
    EXPECT_TRUE(becomes([&] { return !knows(); })) << "all of it is right";
    cluster_.refuses = nullptr;
  }
  cluster_.wait_settled();
  expect_everywhere({0, 1, 2}, spec_of(spec_text_));
}

/// What is right nowhere is read by nobody once it is known, on no node and in no form, until it is
/// found right again; what lies beside it is.
TEST_F(DamageTest, WhatIsRightNowhereIsNotReadOnceItIsKnown) {
  commit_with_copies(0);
  std::vector<std::string> files;
  for (const std::string& node : holders(0, spec_of(spec_text_), 1))
    files.push_back(image_file(node[1] - '0', 1));
  for (const std::string& file : files) flip_last_byte(file);
  const LayoutSpec other = spec_of(R"({"tp": 2, "pp": 3, "dp": 1})");
  const auto refused = [&](unsigned node) {
    size_t count = 0;
    CheckpointRef checkpoint = cluster_.job(node, "job")->find_checkpoint("base");
    const auto see = [&](const FileSetRef& set) {
      for (size_t i = 0; i < set->entries().size(); ++i) {
        Result<FileContentRef> file = set->open(i);
        if (file.has_value()) continue;
        EXPECT_EQ(file.error().code(), Code::kCorrupt);
        EXPECT_THAT(file.error().message(), HasSubstr("is not what was committed"));
        ++count;
      }
    };
    for (uint64_t rank = 0; rank < 3; ++rank)
      see(checkpoint->rank_files(spec_of(spec_text_), rank).value());
    for (uint64_t rank = 0; rank < 6; ++rank) {
      see(checkpoint->rank_files(other, rank).value());
      see(checkpoint->rank_tensors(other, rank).value());
    }
    see(checkpoint->model_files().value());
    see(checkpoint->hf_files().value());
    see(checkpoint->dcp_files().value());
    return count;
  };
  EXPECT_EQ(refused(0), 0u) << "nobody has looked yet";
  ASSERT_TRUE(cluster_.job(0, "job")->verify("base").has_error());
  // Under the layout in force one file; under the other two, and as many arrays; each of the three
  // forms has it once.
  for (unsigned node : {0u, 1u, 2u})
    EXPECT_TRUE(becomes([&] { return refused(node) == 1 + 2 + 2 + 3; })) << refused(node);
  EXPECT_FALSE(cluster_.job(1, "job")->find_checkpoint("base")->damage()->none());
  cluster_.stop(1);
  cluster_.start(1);
  cluster_.wait_settled();
  EXPECT_EQ(refused(1), 1u + 2 + 2 + 3) << "who starts anew knows it too";
  for (const std::string& file : files) flip_last_byte(file);
  EXPECT_TRUE(cluster_.job(2, "job")->verify("base").has_value());
  for (unsigned node : {0u, 1u, 2u})
    EXPECT_TRUE(becomes([&] { return refused(node) == 0; })) << node;
  expect_everywhere({0, 1, 2}, spec_of(spec_text_));
}

}  // namespace
}  // namespace ptc::testing
