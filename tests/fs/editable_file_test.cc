#include "fs/tree/editable_file.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <future>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "fs/nodes/job/layout_file.h"
#include "tests/fs/lone_tree.h"

namespace ptc {
namespace {
constexpr std::chrono::milliseconds kWaits{1700};

class EditableFileTest : public ::testing::Test {
 protected:
  EditableFileTest()
      : file_("layout.json", {.text = [this] { return std::optional(accepted_); },
                              .save = [this](const std::string& text, const TextSave&) -> Result<> {
                                ++offers_;
                                if (text != "good" && text != "better") {
                                  return invalid_argument("no");
                                }
                                accepted_ = text;
                                return ok();
                              },
                              .remove = []() -> Result<> { return ok(); }}) {}

  std::unique_ptr<Handle> open(int flags) { return file_.open(Caller{}, flags, nullptr).value(); }
  static FsResult<size_t> write(Handle& handle, std::string_view text, uint64_t offset = 0) {
    return handle.write(std::as_bytes(std::span(text)), offset);
  }
  static std::string read(Handle& handle) {
    std::string text(100, '\0');
    auto got = handle.read(std::as_writable_bytes(std::span(text)), 0, [] { return false; });
    text.resize(got ? got.value() : 0);
    return text;
  }
  static int flush(Handle& handle) {
    auto flushed = handle.flush();
    return flushed ? 0 : flushed.error().value;
  }

  std::string accepted_ = "old";
  int offers_ = 0;
  EditableFile file_;
};

TEST_F(EditableFileTest, ReadersSeeTheAcceptedText) {
  auto writer = open(O_RDWR | O_TRUNC);
  ASSERT_TRUE(write(*writer, "bad"));
  EXPECT_EQ(read(*open(O_RDONLY)), "old");
  EXPECT_EQ(read(*writer), "bad");
  EXPECT_EQ(flush(*writer), EINVAL);
  EXPECT_EQ(read(*open(O_RDONLY)), "old");
  ASSERT_TRUE(writer->truncate(0));
  ASSERT_TRUE(write(*writer, "good"));
  EXPECT_EQ(flush(*writer), 0);
  EXPECT_EQ(read(*open(O_RDONLY)), "good");
}

TEST_F(EditableFileTest, AnEarlyCloseIsNoSave) {
  auto writer = open(O_WRONLY | O_TRUNC);
  EXPECT_EQ(flush(*writer), 0);  // of the shell's first descriptor
  EXPECT_EQ(offers_, 0);
  ASSERT_TRUE(write(*writer, "good"));
  EXPECT_EQ(flush(*writer), 0);
  writer.reset();
  EXPECT_EQ(offers_, 1);
}

TEST_F(EditableFileTest, EmptiedForGoodIsASave) {
  open(O_WRONLY | O_TRUNC).reset();
  EXPECT_EQ(offers_, 1);
  EXPECT_EQ(accepted_, "old");
  open(O_WRONLY).reset();
  EXPECT_EQ(offers_, 1) << "opened and closed: nothing";
}

TEST_F(EditableFileTest, ARefusedDraftIsNotOfferedTwiceAtTheEnd) {
  auto writer = open(O_WRONLY | O_TRUNC);
  ASSERT_TRUE(write(*writer, "bad"));
  EXPECT_EQ(flush(*writer), EINVAL);
  writer.reset();
  EXPECT_EQ(offers_, 1);
}

TEST_F(EditableFileTest, TruncatedByPathThenWritten) {
  AttributeChange empty;
  empty.size = 0;
  ASSERT_TRUE(file_.set_attributes(empty, nullptr));
  EXPECT_EQ(read(*open(O_RDONLY)), "old");
  auto writer = open(O_WRONLY);
  ASSERT_TRUE(write(*writer, "better"));
  EXPECT_EQ(flush(*writer), 0);
  EXPECT_EQ(accepted_, "better");
}

TEST_F(EditableFileTest, AppendGoesBehindTheDraft) {
  accepted_ = "bet";
  auto writer = open(O_WRONLY | O_APPEND);
  ASSERT_TRUE(write(*writer, "ter", 0));
  EXPECT_EQ(flush(*writer), 0);
  EXPECT_EQ(accepted_, "better");
}

TEST(EditableFileSpace, DraftsAndTextsAreCountedAndBounded) {
  int64_t taken = 0, most = 64 << 20;
  std::string accepted;
  EditableFile file("layout.json",
                    {.text = [&] { return std::optional(accepted); },
                     .save = [&](const std::string& text, const TextSave&) -> Result<> {
                       if (text.empty()) return invalid_argument("no");
                       accepted = text;
                       return ok();
                     },
                     .remove = []() -> Result<> { return ok(); },
                     .take = [&](int64_t more, bool must) -> FsResult<> {
                       if (more > 0 && !must && taken + more > most) return Errno{EDQUOT};
                       taken += more;
                       return ok();
                     }});
  std::vector<std::unique_ptr<Handle>> handles;
  const std::string text(1 << 20, 'x');
  int error = 0;
  while (error == 0 && handles.size() < 1000) {
    handles.push_back(file.open(Caller{}, O_WRONLY | O_TRUNC, nullptr).value());
    const auto put = handles.back()->write(std::as_bytes(std::span(text)), 0);
    if (!put) error = put.error().value;
  }
  EXPECT_EQ(error, EDQUOT);
  EXPECT_EQ(handles.size(), 17u);
  EXPECT_LE(taken, EditableFile::kMostDraftBytes);
  ASSERT_TRUE(handles.front()->flush());
  EXPECT_EQ(accepted, text);
  handles.clear();
  EXPECT_EQ(taken, (1 << 20) - 4096);  // the text that was accepted
  most = taken;
  EXPECT_TRUE(file.save(std::string(4096, 'y'), User{}));
  EXPECT_EQ(taken, 0);
  most = 0;
  EXPECT_EQ(file.save(text, User{}).error().value, EDQUOT);
  EXPECT_EQ(taken, 0);
  EXPECT_TRUE(file.save("short", User{}));
}

/// The kernel holds locks of the whole mount meanwhile.
TEST(EditableFileRename, WaitsForABoundedTimeAndTheSameOneAgainGoesOn) {
  std::mutex mutex;
  std::string accepted = "old";
  std::atomic<int> offers = 0;
  std::promise<void> answer;
  std::shared_future<void> answered = answer.get_future().share();
  Errands errands;
  const auto file = std::make_shared<EditableFile>(
      "order.json",
      EditableFile::Source{.text =
                               [&] {
                                 std::lock_guard lock(mutex);
                                 return std::optional(accepted);
                               },
                           .save = [&](const std::string& text, const TextSave&) -> Result<> {
                             ++offers;
                             answered.wait();
                             if (text == "bad") return invalid_argument("no");
                             std::lock_guard lock(mutex);
                             accepted = text;
                             return ok();
                           },
                           .remove = []() -> Result<> { return ok(); }});
  const User ann{1000, 1000, {}};
  const auto rename = [&](const std::string& text) {
    auto done = file->rename_over(text, 0644, ann, errands, file, kWaits);
    return done ? 0 : done.error().value;
  };
  for (const char* text : {"new", "other", "new"}) {
    auto asked = std::async(std::launch::async, [&] { return rename(text); });
    const bool in_time = asked.wait_for(std::chrono::seconds(10)) == std::future_status::ready;
    EXPECT_TRUE(in_time);
    if (!in_time) answer.set_value();
    EXPECT_EQ(asked.get(), EAGAIN);
    if (!in_time) return;
  }
  EXPECT_EQ(offers, 1);
  answer.set_value();
  EXPECT_EQ(rename("new"), 0);
  EXPECT_EQ(offers, 1);
  EXPECT_EQ(file->text(), "new");
  EXPECT_EQ(rename("bad"), EINVAL);
  EXPECT_EQ(rename("other"), 0);
  EXPECT_EQ(rename("new"), 0);
  EXPECT_EQ(offers, 4);
  EXPECT_EQ(file->text(), "new");
}

/// As of a job that is removed while one of its texts is saved.
TEST(EditableFileRename, AwayWaitsForABoundedTimeToo) {
  std::atomic<bool> there = true;
  std::atomic<int> removals = 0;
  std::promise<void> answer;
  std::shared_future<void> answered = answer.get_future().share();
  Errands errands;
  const auto file = std::make_shared<EditableFile>(
      "rules.json",
      EditableFile::Source{
          .text = [&] { return there ? std::optional<std::string>("{}") : std::nullopt; },
          .save = [](const std::string&, const TextSave&) -> Result<> { return ok(); },
          .remove = []() -> Result<> { return make_error(Code::kInternal, "of any text"); },
          .remove_if = [&](const std::string& text) -> Result<> {
            ++removals;
            answered.wait();
            if (text != "{}") return make_error(Code::kConflict, "it has changed");
            there = false;
            return ok();
          }});
  const auto away = [&](const std::string& was) {
    auto done = file->rename_away(was, {1000, 1000, {}}, errands, file, kWaits);
    return done ? 0 : done.error().value;
  };
  for (int i = 0; i < 2; ++i) {
    auto asked = std::async(std::launch::async, away, "{}");
    const bool in_time = asked.wait_for(std::chrono::seconds(10)) == std::future_status::ready;
    EXPECT_TRUE(in_time);
    if (!in_time) answer.set_value();
    EXPECT_EQ(asked.get(), EAGAIN);
    if (!in_time) return;
  }
  answer.set_value();
  EXPECT_EQ(away("{}"), 0);
  EXPECT_EQ(removals, 1);
  EXPECT_FALSE(file->exists());
  there = true;
  EXPECT_EQ(away("as it was before"), EAGAIN);
  EXPECT_TRUE(file->exists());
}

/// What the moved file may be read by is so when its text shows, and as before where it is refused.
TEST(EditableFileRename, TheTextIsNeverReadByWhomItWasClosedTo) {
  FileAttributes agreed;
  std::string accepted = "old";
  std::vector<std::string> steps;
  const auto note = [&](std::string_view what, mode_t mode) {
    steps.push_back(fmt::format("{} {:o}", what, mode));
  };
  std::shared_ptr<EditableFile> file;
  EditableFile::Source source;
  source.text = [&] { return std::optional(accepted); };
  source.save = [&](const std::string& text, const TextSave&) -> Result<> {
    note(text, file->mode_for_group(0));
    if (text == "opened and bad") agreed.mode = 0644;
    if (text == "closed by its owner and bad") agreed.changes = 9;
    if (text.ends_with("bad")) return invalid_argument("no");
    accepted = text;
    return ok();
  };
  source.remove = []() -> Result<> { return ok(); };
  source.attributes = [&] { return agreed; };
  source.narrow = [&](mode_t mode) -> FsResult<std::optional<NarrowedMode>> {
    note("narrow", mode);
    NarrowedMode narrowed{.before = agreed.mode.value_or(0644)};
    agreed.mode = narrowed.before & mode;
    narrowed.left = agreed;
    return std::optional(narrowed);
  };
  source.open_to = [&](mode_t mode, const std::string& text, const auto& narrowed) -> FsResult<> {
    note("open " + text, mode);
    if (text == accepted && (!narrowed || narrowed->left == agreed)) agreed.mode = mode;
    return ok();
  };
  source.conceal_refusal = [&] { note("conceal", file->mode_for_group(0)); };
  file = std::make_shared<EditableFile>("source.json", std::move(source));
  Errands errands;
  const auto move = [&](const std::string& text, mode_t mode) {
    steps.clear();
    return file->rename_over(text, mode, {1000, 1000, {}}, errands, file, std::chrono::seconds(9))
        .has_value();
  };
  using Steps = std::vector<std::string>;
  EXPECT_FALSE(move("bad", S_IFREG | 0600));
  EXPECT_EQ(steps, (Steps{"narrow 600", "bad 600", "conceal 600", "open old 644"}));
  EXPECT_EQ(file->mode_for_group(0), 0644u);
  // Its owner wants it so, meanwhile.
  EXPECT_FALSE(move("closed by its owner and bad", S_IFREG | 0600));
  EXPECT_EQ(file->mode_for_group(0), 0600u);
  agreed.mode = 0644;
  EXPECT_TRUE(move("new", S_IFREG | 0600));
  EXPECT_EQ(steps, (Steps{"narrow 600", "new 600"}));
  EXPECT_EQ(file->mode_for_group(0), 0600u);
  // Somebody else has narrowed it, who might open it again.
  EXPECT_TRUE(move("private too", S_IFREG | 0600));
  EXPECT_EQ(steps, (Steps{"private too 600", "open private too 600"}));
  EXPECT_TRUE(move("for the group", S_IFREG | 0640));
  EXPECT_EQ(steps, (Steps{"for the group 600", "open for the group 640"}));
  EXPECT_TRUE(move("for others", S_IFREG | 0604));
  EXPECT_EQ(steps, (Steps{"narrow 604", "for others 600", "open for others 604"}));
  EXPECT_EQ(file->mode_for_group(0), 0604u);
  // Somebody lets others read the old one meanwhile.
  EXPECT_TRUE(move("own", S_IFREG | 0600));
  EXPECT_FALSE(move("opened and bad", S_IFREG | 0600));
  EXPECT_EQ(steps, (Steps{"opened and bad 600", "conceal 600"}));
  EXPECT_EQ(file->mode_for_group(0), 0644u);
}

TEST(EditableFileRename, ItsThreadMayBeTheLastThatHasTheFile) {
  std::promise<void> answer;
  std::shared_ptr<EditableFile> file;
  const auto save = [&](const std::string&, const TextSave&) -> Result<> {
    answer.get_future().wait();
    file.reset();
    return ok();
  };
  file = std::make_shared<EditableFile>(
      "order.json", EditableFile::Source{.text = [] { return std::optional<std::string>("old"); },
                                         .save = save,
                                         .remove = []() -> Result<> { return ok(); }});
  const std::weak_ptr<EditableFile> seen = file;
  Errands errands;
  const auto asked = file->rename_over("new", 0644, {1000, 1000, {}}, errands, file, kWaits);
  EXPECT_EQ(asked ? 0 : asked.error().value, EAGAIN);
  answer.set_value();
  errands.wait();
  EXPECT_TRUE(seen.expired());
}

/// The kernel has asked for the mode, which is narrowed then; and it asks for the text when that is
/// another one.
TEST(EditableFileNode, WhoWasLetInByTheModeBeforeDoesNotReadTheNextText) {
  constexpr uid_t kAnyone = 54321;
  LoneTree lone;
  const JobRef job = lone.store->create_job("job").value();
  const JobViewRef view = lone.tree.job("job").value();
  LayoutFile node(view, view->layout());
  const auto opens = [&](uid_t uid, int flags) {
    const auto opened = node.open({.uid = uid, .gid = uid, .pid = getpid()}, flags);
    return opened ? 0 : opened.error().value;
  };
  EXPECT_EQ(opens(kAnyone, O_RDONLY), 0);
  ASSERT_TRUE(job->narrow_mode("layout.json", 0622));
  EXPECT_EQ(opens(kAnyone, O_RDONLY), EACCES);
  EXPECT_EQ(opens(kAnyone, O_RDWR), EACCES);
  EXPECT_EQ(opens(kAnyone, O_WRONLY), 0);
  EXPECT_EQ(opens(::geteuid(), O_RDWR), 0);
}

}  // namespace
}  // namespace ptc
