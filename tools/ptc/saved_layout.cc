#include "tools/ptc/saved_layout.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <span>
#include <thread>

#include "store/base/shell_word.h"
#include "tools/ptc/job_status.h"
#include "tools/ptc/layout_edit.h"

namespace ptc::cli {
namespace {

constexpr size_t kMaxLayoutBytes = 1 << 20;

std::string layout_path(const Target& target) { return target.job_dir() + "/layout.json"; }

}  // namespace

std::string SavedLayout::removed_text(const std::string& job) const {
  return fmt::format(
      "layout.json of {} was removed; {} {}. 'ptc layout {} set' with any option writes it again; "
      "what rm has hidden is also back by itself a minute later",
      job, wanted, in_force ? "stays in force" : "is wanted still", shell_word(job));
}

Result<json::object> SavedLayout::layout() const {
  if (removed) {
    auto layout = layout_of_name(wanted);
    if (layout) return layout;
    return invalid_argument(
        "layout.json was removed, and the name of its layout, {}, does not say all of that: write "
        "a "
        "whole layout.json, or wait a minute, after which what rm has hidden is back",
        wanted);
  }
  auto value = parse_json(text);
  if (!value) return std::move(value).error().with_context("layout.json");
  if (!value.value().is_object()) return invalid_argument("layout.json: not a JSON object");
  return std::move(value.value().get_object());
}

Result<SavedLayout> read_saved_layout(const Target& target) {
  constexpr int kMostTries = 20;
  for (int tries = 0; tries < kMostTries; ++tries) {
    PTC_TRY(const auto before, read_status(target));
    auto text = read_text_file(AT_FDCWD, layout_path(target), kMaxLayoutBytes);
    const bool removed = !text && text.error().code() == Code::kNotFound;
    if (!text && !removed) return std::move(text).error();
    PTC_TRY(const auto after, read_status(target));
    if (before.revision != after.revision) continue;
    return SavedLayout{removed ? "" : std::move(text).value(), after.revision, after.wanted,
                       removed, after.layout == after.wanted};
  }
  return make_error(Code::kUnavailable, "{}: somebody saves it again and again",
                    layout_path(target));
}

Result<> save_layout(const Target& target, const std::string& text, bool make) {
  const std::string path = layout_path(target);
  const Reason why(target);
  PTC_TRY(auto fd, open_file(AT_FDCWD, path, O_WRONLY | O_TRUNC | (make ? O_CREAT : 0), 0644));
  auto written = write_exactly(fd.get(), std::as_bytes(std::span(text)), 0);
  // The close is what saves; its error is the answer.
  int closed = ::close(fd.release());
  int reason = errno;
  if (!written) return std::move(written).error().with_context(path);
  if (closed == 0) return ok();
  const bool refused = reason == EINVAL || reason == ENOSPC;
  return make_error(refused            ? Code::kInvalidArgument
                    : reason == EAGAIN ? Code::kConflict
                                       : Code::kUnavailable,
                    "{}", why.text(reason));
}

void wait_for_another(const Target& target, const SavedLayout& before) {
  constexpr int kMostLooks = 50;
  for (int looks = 0; looks < kMostLooks; ++looks) {
    const auto status = read_status(target);
    if (!status || status.value().revision != before.revision) return;
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
}

LayoutLock::LayoutLock(const Target& target) {
  auto directory = open_file(AT_FDCWD, target.job_dir(), O_RDONLY | O_DIRECTORY);
  if (!directory) return;
  directory_ = std::move(directory).value();
  (void)lock_file(directory_.get(), std::chrono::seconds(5));
}

bool undoes(const json::object& later, const json::object& before, const json::object& ours) {
  bool changed = false;
  auto was_and_is = [&](std::string_view key) {
    const json::value *was = before.if_contains(key), *set = ours.if_contains(key),
                      *is = later.if_contains(key);
    const auto same = [](const json::value* a, const json::value* b) {
      return a == nullptr || b == nullptr ? a == b : *a == *b;
    };
    if (same(was, set)) return true;
    changed = true;
    return same(was, is);
  };
  for (const auto& field : before)
    if (!was_and_is(field.key())) return false;
  for (const auto& field : ours)
    if (!was_and_is(field.key())) return false;
  return changed;
}

}  // namespace ptc::cli
