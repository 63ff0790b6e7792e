// ptc layout: print, set and edit layout.json, and hear why an edit was refused.
#include <fcntl.h>
#include <fmt/core.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <optional>

#include "store/base/file.h"
#include "store/base/shell_word.h"
#include "tools/ptc/command.h"
#include "tools/ptc/interruptions.h"
#include "tools/ptc/job_status.h"
#include "tools/ptc/layout_edit.h"
#include "tools/ptc/mount.h"
#include "tools/ptc/saved_layout.h"
#include "tools/ptc/text.h"

namespace ptc::cli {
namespace {

constexpr size_t kMaxLayoutBytes = 1 << 20;

std::string while_saving(const Target& target) {
  return fmt::format(
      "\nptc: interrupted while layout.json was being saved: ptc status {} says which layout is "
      "wanted now\n",
      shell_word(target.job));
}

std::string goes_on(const Target& target, const std::string& to) {
  return fmt::format(
      "\nptc: interrupted: the change of {}{} goes on; ptc wait {} shows when it is in force\n",
      target.job, to, shell_word(target.job));
}

int replaced(const std::string& what, const JobStatus& by) {
  fmt::print(stderr,
             "ptc: {}: {} was replaced by {} (revision {}) meanwhile: somebody else saved "
             "layout.json\n",
             by.job, what, by.wanted, by.revision);
  if (by.settled()) fmt::print(stderr, "{}\n", settled_text(by));
  return kFailed;
}

/// What a layout in the memory of devices means for what is stored.
void say_what_ends_with_a_daemon(const JobStatus& status) {
  for (const std::string& warning : text_list(array_field(status.raw, "warnings")))
    if (warning.find("in the memory of devices alone") != std::string::npos)
      fmt::print(stderr, "ptc: {}: {}\n", status.job, printable(warning));
}

/// `saved`: layout.json as it was right after. `status`: the job's since then. `is_in`: whether
/// what was saved is in a later one, too.
Result<int> report_saved(const Target& target, const SavedLayout& saved, JobStatus status,
                         bool wait, LastWords& last_words,
                         const std::function<Result<bool>(const SavedLayout& later)>& is_in) {
  if (wait) {
    last_words.say(goes_on(target, " to " + saved.wanted));
    PTC_TRY(status, wait_until_settled(target, 0));
  }
  if (status.wanted != saved.wanted) {
    PTC_TRY(const auto later, read_saved_layout(target));
    PTC_TRY(const bool is_kept, is_in(later));
    if (!is_kept)
      return replaced(fmt::format("{} (revision {})", saved.wanted, saved.revision), status);
  }
  if (wait) {
    fmt::print(status.state == "failed" ? stderr : stdout, "{}\n", settled_text(status));
    say_what_ends_with_a_daemon(status);
    return status.state == "failed" ? kFailed : kDone;
  }
  if (status.settled()) {
    fmt::print("{}\n", settled_text(status));
  } else {
    fmt::print("{}: {} wanted (revision {}); ptc wait {} shows when it is in force\n", target.job,
               status.wanted, status.revision, target.job);
  }
  return kDone;
}

/// What was saved between `before` was read and `ours` replaced it, nobody can read any more.
void say_unseen(const Target& target, const SavedLayout& before, const SavedLayout& now) {
  if (now.revision <= before.revision + 1) return;
  fmt::print(stderr,
             "ptc: somebody else saved layout.json of {} at the same time (revision {} came after "
             "{}): see whether ptc layout {} has what both want\n",
             target.job, now.revision, before.revision, shell_word(target.job));
}

int refused(const Error& error) {
  constexpr std::string_view kRefused = "layout.json refused";  // as status.json begins it
  std::string_view between = error.message().starts_with(kRefused) ? "" : ": ";
  fmt::print(stderr, "ptc: {}{}{}\n", between.empty() ? "" : kRefused, between, error.message());
  return kFailed;
}

Result<int> run_print(const Context& context, const std::string& job) {
  PTC_TRY(auto target, find_job(context.mount_option, job));
  PTC_TRY(const auto saved, read_saved_layout(target));
  if (saved.removed) return make_error(Code::kNotFound, "{}", saved.removed_text(target.job));
  fmt::print("{}{}", saved.text, saved.text.ends_with('\n') ? "" : "\n");
  return kDone;
}

void say_removed(const SavedLayout& before) {
  fmt::print(stderr,
             "ptc: layout.json was removed: it is written again for {}, without what a name does "
             "not say (replicas, keep, devices), unless given now\n",
             before.wanted);
}

Result<int> run_set(const Context& context, const std::string& job, const LayoutEdit& edit,
                    bool wait) {
  constexpr int kMostTries = 10;
  PTC_TRY(auto target, find_job(context.mount_option, job));
  std::optional<LayoutLock> lock(target);
  for (int tries = 1;; ++tries) {
    PTC_TRY(const auto before, read_saved_layout(target));
    PTC_TRY(const auto layout, before.layout());
    std::vector<std::string> notes;
    const json::object ours = edited_layout(layout, edit, notes);
    const std::string text = pretty_json(ours);
    LastWords last_words(while_saving(target));
    // Between here and the close nobody looks; what comes first by then is only said.
    PTC_TRY(const auto status, read_status(target));
    if (status.revision != before.revision && tries < kMostTries) continue;
    const auto saved = save_layout(target, text, before.removed);
    if (saved) last_words.say(goes_on(target, ""));
    const bool undecided = !saved && saved.error().code() == Code::kConflict;
    if (undecided) wait_for_another(target, before);
    PTC_TRY(const auto after, read_saved_layout(target));
    const bool may_try = tries < kMostTries;
    if (undecided && may_try && after.revision != before.revision)
      continue;  // another node's came first
    json::object theirs = ours;
    if (after.text != text && !after.removed) {
      PTC_TRY(theirs, after.layout());
    }
    // Who saved after us had read what we had: both edits belong into it.
    if (saved && may_try && undoes(theirs, layout, ours)) continue;
    PTC_TRY(const auto latest, read_status(target));
    if (saved && may_try && latest.revision != after.revision) {
      PTC_TRY(const auto later, read_saved_layout(target));
      PTC_TRY(const auto content, later.removed ? Result<json::object>(ours) : later.layout());
      if (undoes(content, layout, ours)) continue;
    }
    if (before.removed) say_removed(before);
    for (const std::string& note : notes) fmt::print(stderr, "ptc: {}\n", note);
    if (!saved && saved.error().code() == Code::kInvalidArgument) return refused(saved.error());
    if (!saved) return saved.error();
    if (after.text == text) say_unseen(target, before, after);
    lock.reset();
    const auto has_it = [&edit](const json::object& one) {
      std::vector<std::string> ignored;
      return edited_layout(one, edit, ignored) == one;
    };
    if (!has_it(theirs)) return replaced("what was saved", latest);
    return report_saved(target, after, latest, wait, last_words,
                        [&](const SavedLayout& later) -> Result<bool> {
                          if (later.removed) return false;
                          PTC_TRY(const auto theirs_now, later.layout());
                          return has_it(theirs_now);
                        });
  }
}

/// A file of its own in $TMPDIR that goes with this object.
class TemporaryFile {
 public:
  static Result<TemporaryFile> create(const std::string& job, const std::string& text) {
    const char* dir = std::getenv("TMPDIR");
    std::string path =
        fmt::format("{}/{}-layout-XXXXXX.json", dir != nullptr && *dir != '\0' ? dir : "/tmp", job);
    UniqueFd fd(::mkostemps(path.data(), 5, O_CLOEXEC));
    if (!fd.valid()) return errno_error(errno, path);
    TemporaryFile file(path);
    PTC_TRY(write_exactly(fd.get(), std::as_bytes(std::span(text)), 0));
    return file;
  }
  TemporaryFile(TemporaryFile&& other) noexcept : path_(std::exchange(other.path_, "")) {}
  ~TemporaryFile() {
    if (!path_.empty()) ::unlink(path_.c_str());
  }
  const std::string& path() const { return path_; }
  /// It stays.
  void keep() { path_.clear(); }

 private:
  explicit TemporaryFile(std::string path) : path_(std::move(path)) {}
  std::string path_;
};

Result<> run_editor(const std::string& path) {
  std::string editor;
  for (const char* variable : {"VISUAL", "EDITOR"}) {
    const char* value = std::getenv(variable);
    if (editor.empty() && value != nullptr) editor = value;
  }
  if (editor.empty()) editor = "vi";
  // Through the shell, since $EDITOR may hold arguments; the path is not part of the command's
  // text.
  std::string command = editor + " \"$1\"";
  pid_t child = ::fork();
  if (child < 0) return errno_error(errno, "starting the editor");
  if (child == 0) {
    ::execl("/bin/sh", "sh", "-c", command.c_str(), "sh", path.c_str(), nullptr);
    ::_exit(127);
  }
  int status = 0;
  while (::waitpid(child, &status, 0) < 0 && errno == EINTR) {
  }
  if (WIFEXITED(status) && WEXITSTATUS(status) == 0) return ok();
  return make_error(Code::kCancelled, "the editor ({}) failed; layout.json was not changed",
                    editor);
}

bool ask_to_edit_again() {
  fmt::print(stderr, "Edit again? [Y/n] ");
  std::fflush(stderr);
  int first = std::getchar();
  for (int c = first; c != '\n' && c != EOF;) c = std::getchar();
  return first == '\n' || first == 'y' || first == 'Y';
}

/// Nothing was saved: the text that was made of `before` stays in its file.
int changed_meanwhile(const Target& target, const SavedLayout& before, const SavedLayout& now,
                      const std::string& file) {
  fmt::print(
      stderr,
      "ptc: somebody else saved layout.json of {} while it was edited (revision {} came after "
      "{}): nothing was saved. 'ptc layout {}' prints theirs, {} has yours\n",
      target.job, now.revision, before.revision, shell_word(target.job), shell_word(file));
  return kFailed;
}

Result<int> run_edit(const Context& context, const std::string& job, bool wait) {
  PTC_TRY(auto target, find_job(context.mount_option, job));
  PTC_TRY(auto before, read_saved_layout(target));
  PTC_TRY(const auto layout, before.layout());
  const std::string text = before.removed ? pretty_json(layout) : before.text;
  PTC_TRY(auto file, TemporaryFile::create(target.job, text));
  if (before.removed) say_removed(before);
  for (;;) {
    PTC_TRY(run_editor(file.path()));
    PTC_TRY(auto edited, read_text_file(AT_FDCWD, file.path(), kMaxLayoutBytes));
    if (edited == text && !before.removed) {
      fmt::print("{}: layout.json unchanged\n", target.job);
      return kDone;
    }
    std::optional<LayoutLock> lock(target);
    PTC_TRY(auto now, read_saved_layout(target));
    if (now.revision != before.revision) {
      lock.reset();
      const int status = changed_meanwhile(target, before, now, file.path());
      if (is_live_terminal(0) && ask_to_edit_again()) {
        before = std::move(now);  // of which is known now
        continue;
      }
      file.keep();
      return status;
    }
    std::optional<LastWords> last_words(while_saving(target));
    auto saved = save_layout(target, edited, now.removed);
    if (saved) last_words->say(goes_on(target, ""));
    if (!saved && saved.error().code() == Code::kConflict) wait_for_another(target, now);
    PTC_TRY(const auto after, read_saved_layout(target));
    if (!saved && saved.error().code() == Code::kConflict && after.revision != now.revision) {
      const int status = changed_meanwhile(target, before, after, file.path());
      file.keep();
      return status;
    }
    lock.reset();
    if (saved) {
      if (after.text == edited || after.removed) {
        say_unseen(target, now, after);
        PTC_TRY(const auto status, read_status(target));
        return report_saved(target, after, status, wait, *last_words,
                            [&](const SavedLayout& later) { return later.text == edited; });
      }
      PTC_TRY(const auto status, read_status(target));
      return replaced("what was saved", status);
    }
    last_words.reset();
    if (saved.error().code() != Code::kInvalidArgument) return std::move(saved).error();
    refused(saved.error());
    if (!is_live_terminal(0) || !ask_to_edit_again()) return kFailed;
  }
}

}  // namespace

void add_layout(CLI::App& app, Context& context) {
  struct Options {
    std::string job;
    LayoutEdit edit;
    bool wait = false;
  };
  auto options = std::make_shared<Options>();
  CLI::App* command = app.add_subcommand("layout", "Print, set or edit a job's layout.json");
  command->add_option("JOB", options->job, "a job, or a path into it")->required();
  command->footer(
      "A layout that cannot be is refused with the reason, and nothing changes.\n"
      "'set' keeps what others set at the same time. Where somebody else's layout\n"
      "replaces the one that was saved, that is said, and is a failure. Where\n"
      "layout.json was removed, 'set' and 'edit' write it again.\n"
      "\nExamples:\n  ptc layout llama\n  ptc layout llama set --tp 2 --pp 4 --wait\n"
      "  ptc layout llama edit");
  CLI::App* set = command->add_subcommand("set", "Change these fields and keep the others");
  CLI::App* edit = command->add_subcommand("edit", "Open layout.json in $VISUAL or $EDITOR");
  for (CLI::App* sub : {set, edit}) {
    sub->add_flag("--wait", options->wait, "wait until it is in force");
    sub->fallthrough();
  }
  add_layout_options(*set, options->edit, true);
  command->require_subcommand(0, 1);
  command->callback([&context, options, set, edit] {
    if (set->parsed() && options->edit.empty())
      throw CLI::RequiredError("set: at least one of --tp, --pp, …");
    context.run = [&context, options, set, edit]() -> Result<int> {
      if (set->parsed()) return run_set(context, options->job, options->edit, options->wait);
      if (edit->parsed()) return run_edit(context, options->job, options->wait);
      return run_print(context, options->job);
    };
  });
}

}  // namespace ptc::cli
