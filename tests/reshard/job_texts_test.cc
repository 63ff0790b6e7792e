// Texts of a job and their modes, which are decided one after the other; and nobody sees one
// between.
#include <gmock/gmock.h>

#include <atomic>
#include <chrono>
#include <map>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "reshard/job/job_attributes.h"
#include "reshard/job/known_job.h"
#include "reshard/node/job_store.h"
#include "tests/reshard/cluster_fixture.h"
#include "tests/support/becomes.h"
#include "tests/support/job_fixture.h"

namespace ptc::testing {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
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

constexpr uint32_t kAnn = 1001, kBob = 1002, kTeam = 2001, kOthers = 2002;

/// Of a job of Ann's and her team: with what attributes, by name.
JobAttributes attributes_with(const std::map<std::string, FileAttributes>& others) {
  JobAttributes all;
  for (const char* directory : {"", "incoming", "dataset"})
    all.update(directory, {kAnn, kTeam, 0755, {}, {}});
  for (const auto& [name, changed] : others) all.update(name, changed);
  return all;
}

FileAttributes let_by_mode(uint32_t mode) { return {{}, {}, mode, {}, {}}; }
FileAttributes given_to_group(uint32_t gid) { return {{}, gid, {}, {}, {}}; }
FileAttributes given_to(uint32_t uid) { return {uid, {}, {}, {}, {}}; }

TEST(JobTexts, AreOpenedByModesOwnersAndGroupsAndByDirectoriesThatLeadToThem) {
  using Changes = std::map<std::string, FileAttributes>;
  const auto opened = [](const Changes& before, const Changes& change) {
    JobAttributes after = attributes_with(before);
    for (const auto& [name, changed] : change) after.update(name, changed);
    return after.opened_since(attributes_with(before));
  };
  const auto all = ElementsAre("dataset/consumed", "dataset/order.json", "dataset/source.json",
                               "layout.json", "rules.json");
  const auto of_data_set =
      ElementsAre("dataset/consumed", "dataset/order.json", "dataset/source.json");
  const auto layout = ElementsAre("layout.json");
  // The text's own.
  EXPECT_THAT(opened({{"layout.json", let_by_mode(0600)}}, {{"layout.json", let_by_mode(0640)}}),
              layout);
  EXPECT_THAT(opened({{"layout.json", let_by_mode(0640)}}, {{"layout.json", let_by_mode(0600)}}),
              IsEmpty());
  EXPECT_THAT(
      opened({{"layout.json", let_by_mode(0640)}}, {{"layout.json", given_to_group(kOthers)}}),
      layout);
  EXPECT_THAT(
      opened({{"layout.json", let_by_mode(0604)}}, {{"layout.json", given_to_group(kOthers)}}),
      layout);
  EXPECT_THAT(
      opened({{"layout.json", let_by_mode(0600)}}, {{"layout.json", given_to_group(kOthers)}}),
      IsEmpty());
  EXPECT_THAT(opened({{"layout.json", let_by_mode(0640)}},
                     {{"layout.json", {kBob, kOthers, 0640, {}, {}}}}),
              layout);
  EXPECT_THAT(opened({{"layout.json", let_by_mode(0600)}}, {{"layout.json", given_to(kBob)}}),
              layout);
  EXPECT_THAT(
      opened({{"layout.json", let_by_mode(0600)}}, {{"layout.json", {kAnn, kTeam, 0600, {}, {}}}}),
      IsEmpty())
      << "they were before";
  // What all could read before is opened to nobody.
  EXPECT_THAT(
      opened({}, {{"layout.json", given_to_group(kOthers)}, {"rules.json", given_to(kBob)}}),
      IsEmpty());
  EXPECT_THAT(opened({}, {{"", {kBob, kOthers, 0755, {}, {}}}}), IsEmpty());
  // The job's.
  EXPECT_THAT(opened({{"layout.json", let_by_mode(0600)}}, {{"", given_to(kBob)}}), layout);
  EXPECT_THAT(opened({{"layout.json", let_by_mode(0640)}}, {{"", given_to_group(kOthers)}}),
              layout);
  EXPECT_THAT(opened({{"layout.json", let_by_mode(0600)}}, {{"", given_to_group(kOthers)}}),
              IsEmpty());
  EXPECT_THAT(opened({{"", let_by_mode(0750)}}, {{"", given_to_group(kOthers)}}), all);
  EXPECT_THAT(opened({{"", let_by_mode(0700)}}, {{"", given_to(kBob)}}), all);
  EXPECT_THAT(opened({{"", let_by_mode(0700)}}, {{"", let_by_mode(0750)}}), all);
  EXPECT_THAT(opened({{"", let_by_mode(0750)}}, {{"", let_by_mode(0700)}}), IsEmpty());
  EXPECT_THAT(opened({}, {{"incoming", {kBob, kOthers, 0777, {}, {}}}}), IsEmpty());
  // The data set's.
  EXPECT_THAT(opened({{"dataset", let_by_mode(0700)}}, {{"dataset", let_by_mode(0711)}}),
              of_data_set);
  EXPECT_THAT(opened({{"dataset", let_by_mode(0750)}}, {{"dataset", given_to_group(kOthers)}}),
              of_data_set);
  EXPECT_THAT(opened({{"dataset", let_by_mode(0700)}}, {{"dataset", given_to(kBob)}}), of_data_set);
  // Of a job that was made without a word about them nobody knows who could pass.
  JobAttributes given;
  given.update("", {kBob, kOthers, 0755, {}, {}});
  EXPECT_THAT(given.opened_since({}), all);
  FileAttributes limited;
  limited.quota = "1 GB";
  EXPECT_THAT(opened({{"", let_by_mode(0700)}}, {{"", limited}}), IsEmpty());
}

TEST(JobTexts, WhatWasRefusedIsNotToldToAnotherOwnerOrGroup) {
  for (const char* text : {"layout.json", "rules.json", "dataset/source.json"}) {
    const auto before = attributes_with({{text, let_by_mode(0640)}});
    for (const auto& [name, change] :
         {std::pair<std::string, FileAttributes>(text, given_to_group(kOthers)),
          {"", given_to_group(kOthers)},
          {"", given_to(kBob)}}) {
      KnownJob known;
      known.set_attributes({{std::make_shared<JobAttributes>(before)}, 1});
      known.note_refused_save(text, "unknown key 'mine'");
      JobAttributes after = before;
      after.decide("incoming", given_to(kBob));
      known.set_attributes({{std::make_shared<JobAttributes>(after)}, 2});
      EXPECT_THAT(known.last_error->what, HasSubstr("mine"));
      after.decide(name, change);
      known.set_attributes({{std::make_shared<JobAttributes>(after)}, 3});
      EXPECT_THAT(known.last_error->what, Not(HasSubstr("mine")))
          << text << " and '" << name << "'";
      EXPECT_THAT(known.last_error->what, HasSubstr("is not told"));
      if (known.layout_error) {
        EXPECT_THAT(known.layout_error->what, Not(HasSubstr("mine")));
      }
    }
  }
}

/// Also on those nodes which only hear of it, and where it was refused.
TEST_F(JobTextsTest, NoNodeTellsAnotherOwnerWhatWasRefused) {
  for (const char* name : {"", "incoming", "dataset"})
    ASSERT_TRUE(job(0)->change_attributes(name, {kAnn, kTeam, 0755, {}, {}}));
  ASSERT_TRUE(job(0)->change_attributes("layout.json", let_by_mode(0640)));
  const auto become = [&](unsigned node, const std::string& name, const FileAttributes& wanted) {
    const JobRef here = job(node);
    EXPECT_TRUE(becomes([&] {
      FileAttributes all = here->attributes()->of(name);
      FileAttributes changed = all;
      changed.update(wanted);
      return changed == all;
    })) << node
        << " '" << name << "'";
  };
  for (const auto& [name, change] :
       {std::pair<std::string, FileAttributes>("layout.json", given_to_group(kOthers)),
        {"", given_to_group(kOthers)},
        {"", given_to(kBob)}}) {
    for (unsigned node = 0; node < 3; ++node) {
      become(node, "layout.json", let_by_mode(0640));
      job(node)->note_refused_save("layout.json", "unknown key 'mine'");
      EXPECT_THAT(job(node)->status_json(), HasSubstr("mine"));
    }
    ASSERT_TRUE(job(0)->change_attributes(name, change));
    for (unsigned node = 0; node < 3; ++node) {
      become(node, name, change);
      EXPECT_THAT(job(node)->status_json(), Not(HasSubstr("mine"))) << node << " '" << name << "'";
    }
  }
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
