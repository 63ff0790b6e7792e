// Texts of a job and their modes, which are decided one after the other; and nobody sees one
// between.
#include <gmock/gmock.h>

#include <atomic>
#include <chrono>
#include <string>
#include <thread>
#include <vector>

#include "reshard/job/job_attributes.h"
#include "reshard/job/known_job.h"
#include "reshard/node/job_store.h"
#include "tests/reshard/cluster_fixture.h"
#include "tests/support/becomes.h"
#include "tests/support/job_fixture.h"

namespace ptc::testing {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

class JobTextsTest : public ClusterTest {
 protected:
  JobTextsTest() {
    EXPECT_TRUE(cluster_.store(0).create_job("job").has_value());
    for (unsigned node = 0; node < 3; ++node)
      EXPECT_TRUE(becomes([&] { return cluster_.store(node).find("job") != nullptr; }));
  }
  JobRef job(unsigned node) { return cluster_.job(node, "job"); }
  static std::string rules(std::string_view path, int round) {
    return fmt::format(
        R"({{"format": "ptc-rules/1", "extends": "llama", "rules": [{{"names": ["{}.weight"], "stage": "all"}}]}}{})",
        path, std::string(round, ' '));
  }
  /// As a mount does (EditableFile::save_as).
  void save_rules(unsigned node, const std::string& text, uint32_t mode) {
    const JobRef to = job(node);
    bool lets_more = false;
    Result<> saved = ok();
    do {
      EXPECT_TRUE(to->narrow_mode("rules.json", mode));
      lets_more = false;
      saved = to->save_rules(text, Job::AtMost{"rules.json", mode, &lets_more});
    } while (lets_more);
    EXPECT_TRUE(saved) << saved.error().message();
    const Result<> opened = to->open_text("rules.json", mode, text);
    EXPECT_TRUE(opened || opened.error().code() == Code::kConflict) << opened.error().message();
  }
  static uint32_t mode_of_rules(const JobRef& job) {
    return job->attributes()->of("rules.json").mode.value_or(kTextMode);
  }
  static bool is_closed(const std::optional<std::string>& text) {
    return text && text->find("mine") != std::string::npos;
  }
};

/// From the moment on at which others may read the text, and not a moment later.
TEST(JobTexts, WhatWasRefusedIsNotToldOnceATextIsOpened) {
  const auto with_mode = [](uint32_t mode) {
    FileAttributes changed;
    changed.mode = mode;
    auto all = std::make_shared<JobAttributes>();
    all->decide("layout.json", changed);
    return Agreed<AttributesInForce>{{std::move(all)}, 1};
  };
  KnownJob known;
  known.set_attributes(with_mode(0600));
  known.note_refused_save("layout.json", "unknown key 'mine'");
  known.set_attributes(with_mode(0400));
  EXPECT_THAT(known.last_error->what, HasSubstr("mine"));
  known.set_attributes(with_mode(0640));
  EXPECT_THAT(known.last_error->what, Not(HasSubstr("mine")));
  known.note_refused_save("rules.json", "unknown key 'ours'");
  known.set_attributes(with_mode(0644));
  EXPECT_THAT(known.last_error->what, HasSubstr("ours"));
}

/// One for himself and one for all: whichever stays has its own mode.
TEST_F(JobTextsTest, TwoAtTheSameMomentDoNotGetEachOthersMode) {
  for (int round = 0; round < 20 && !HasFailure(); ++round) {
    {
      const std::jthread other([&] { save_rules(0, rules("mine", round), 0600); });
      save_rules(1, rules("ours", round), 0644);
    }
    for (unsigned node = 0; node < 3; ++node) {
      const JobRef here = job(node);
      EXPECT_TRUE(becomes([&] {
        const std::optional<std::string> text = here->rules_text();
        return (text == rules("mine", round) && mode_of_rules(here) == 0600) ||
               (text == rules("ours", round) && mode_of_rules(here) == 0644);
      })) << node
          << ", round " << round;
    }
  }
}

/// While others decide about names beside it, too, whose owners and modes are in the same value.
TEST_F(JobTextsTest, NoNodeEverShowsATextThatIsClosedUnderAModeThatIsNot) {
  std::atomic<int> seen = 0, looks = 0;
  std::vector<std::jthread> others;
  for (unsigned node = 0; node < 3; ++node) {
    others.emplace_back([&, here = job(node)](const std::stop_token& stop) {
      while (!stop.stop_requested()) {
        const auto text = here->rules_text();
        const uint32_t mode = mode_of_rules(here);
        // No text comes twice: it was there all the time.
        if (is_closed(text) && (mode & 0044) != 0 && here->rules_text() == text) ++seen;
        ++looks;
      }
    });
    others.emplace_back([here = job(node)](const std::stop_token& stop) {
      FileAttributes change;
      for (uint32_t i = 0; !stop.stop_requested(); ++i) {
        change.mode = i % 2 == 0 ? 0700 : 0755;
        (void)here->change_attributes("incoming", change);
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      }
    });
  }
  for (int round = 0; round < 40; ++round)
    save_rules(round % 3, rules(round % 2 == 0 ? "mine" : "ours", round),
               round % 2 == 0 ? 0600 : 0644);
  others.clear();
  EXPECT_EQ(seen, 0) << looks;
}

/// A node alone hears of no decision but its own; those of one moment are taken over in their
/// order.
TEST(JobAttributesAlone, AreAsDecidedHoweverManyDecideAtOnce) {
  const TempDir dir;
  const auto store =
      JobStore::open({.directory = dir.path(), .node = "n0", .copy_threads = 2}, nullptr).value();
  const JobRef job = store->create_job("job").value();
  for (int round = 0; round < 50; ++round) {
    std::vector<std::jthread> others;
    for (const char* name : {"", "incoming", "dataset", "layout.json"})
      others.emplace_back([&, name] {
        FileAttributes change;
        change.mode = 0700 | (round & 0077);
        EXPECT_TRUE(job->change_attributes(name, change));
      });
    others.clear();
    const auto agreed = job->meta().get("jobs/job/attributes").value();
    ASSERT_TRUE(agreed.has_value());
    ASSERT_EQ(job->attributes()->to_text(), agreed->value) << round;
  }
}

/// A save narrows the mode of the old text until the new one is in force; it is refused, and the
/// owner has closed the file meanwhile: to just what it was narrowed to.
TEST(JobAttributesAlone, WhatItsOwnerClosesMeanwhileIsNotOpenedAgain) {
  const TempDir dir;
  const auto store =
      JobStore::open({.directory = dir.path(), .node = "n0", .copy_threads = 2}, nullptr).value();
  const JobRef job = store->create_job("job").value();
  const std::string name = "layout.json", text = job->layout_text();
  const auto mode = [&] { return job->attributes()->of(name).mode.value_or(0644); };
  const auto decide = [&](const std::string& of, uint32_t wanted) {
    FileAttributes change;
    change.mode = wanted;
    EXPECT_TRUE(job->change_attributes(of, change));
  };
  const auto narrow = [&](uint32_t to) { return job->narrow_mode(name, to).value(); };
  const auto unchanged = narrow(0600);
  ASSERT_TRUE(unchanged.has_value());
  EXPECT_EQ(unchanged->before, 0644u);
  EXPECT_EQ(mode(), 0600u);
  decide("incoming", 0711);  // which is of another name
  EXPECT_TRUE(job->open_text(name, unchanged->before, text, unchanged));
  EXPECT_EQ(mode(), 0644u);

  const auto narrowed = narrow(0600);
  EXPECT_FALSE(narrow(0640).has_value()) << "it lets no more already";
  decide(name, 0600);
  const Result<> opened = job->open_text(name, 0644, text, narrowed);
  ASSERT_TRUE(opened.has_error());
  EXPECT_EQ(opened.error().code(), Code::kConflict);
  EXPECT_EQ(mode(), 0600u);
}

}  // namespace
}  // namespace ptc::testing
