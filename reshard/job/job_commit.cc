// The commits that this node leads (commit_attempt.h): who asks for one finds what is under way.
#include <fcntl.h>
#include <spdlog/spdlog.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>

#include "reshard/job/commit_attempt.h"
#include "reshard/job/job_impl.h"
#include "store/base/file.h"
#include "store/base/json.h"
#include "store/base/random_id.h"
#include "store/base/utf8.h"
#include "store/base/wall_time.h"

namespace ptc {
namespace {

constexpr auto kFailureKept = std::chrono::seconds(60);

Result<> check_name(std::string_view name) {
  if (name.empty() || name[0] == '.' || name.size() > 255 ||
      name.find('/') != std::string_view::npos)
    return invalid_argument("'{}' is no name for a checkpoint", name);
  if (!is_utf8(name))
    return invalid_argument(
        "the name of the checkpoint, {}, is not UTF-8, and could not be written in "
        "meta.json: rename it",
        quoted(name));
  return ok();
}

/// Where the reason of a refusal is told: incoming/<name>.error, of a name that leaves room for it.
std::string error_file_of(const std::string& incoming) {
  constexpr size_t kMaxName = 255;
  constexpr std::string_view kEnding = ".error";
  return incoming.substr(0, kMaxName - kEnding.size()) + std::string(kEnding);
}

Error going_on(const std::string& incoming) {
  return Error(Code::kUnavailable,
               fmt::format("incoming/{} takes longer, and goes on: the same mv again completes it",
                           incoming),
               EAGAIN);
}

/// Whether the same may succeed without anything being mended.
bool may_pass(Code code) {
  return code == Code::kConflict || code == Code::kUnavailable || code == Code::kInDoubt;
}

/// Whether anything below the directory was changed after that time.
bool changed_since(const std::string& directory, int64_t time_ns) {
  constexpr int64_t kTick = 20'000'000;  // of the clock that stamps files
  namespace fs = std::filesystem;
  auto is_newer = [&](const std::string& path) {
    struct stat st {};
    return lstat(path.c_str(), &st) == 0 &&
           st.st_ctim.tv_sec * 1'000'000'000 + st.st_ctim.tv_nsec > time_ns + kTick;
  };
  if (is_newer(directory)) return true;
  std::error_code error;
  for (fs::recursive_directory_iterator it(directory, error), end; !error && it != end;
       it.increment(error))
    if (is_newer(it->path())) return true;
  return static_cast<bool>(error);
}

}  // namespace

void Job::Impl::write_error_file(const std::string& incoming, const std::string& text) {
  // The directory is the user's: nothing here may follow what they put there.
  const std::string directory = job->files_dir() + "/incoming";
  const std::string name = error_file_of(incoming),
                    temporary = "." + incoming.substr(0, 200) + ".error-new";
  auto write = [&]() -> Result<> {
    PTC_TRY(auto dir_fd, open_file(AT_FDCWD, directory, O_RDONLY | O_DIRECTORY | O_NOFOLLOW));
    unlinkat(dir_fd.get(), temporary.c_str(), 0);
    PTC_TRY(auto fd, open_file(dir_fd.get(), temporary, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW));
    const std::string line = text + "\n";
    PTC_TRY(write_exactly(fd.get(), std::as_bytes(std::span(line)), 0));
    struct stat owner {};
    if (fstatat(dir_fd.get(), incoming.c_str(), &owner, AT_SYMLINK_NOFOLLOW) == 0 &&
        geteuid() == 0 && fchown(fd.get(), owner.st_uid, owner.st_gid) != 0)
      return errno_error(errno, "chown of " + name);
    if (fchmod(fd.get(), 0644) != 0) return errno_error(errno, "chmod of " + name);
    if (renameat(dir_fd.get(), temporary.c_str(), dir_fd.get(), name.c_str()) != 0)
      return errno_error(errno, name);
    return ok();
  };
  Result<> written = write();
  if (written.has_error())
    spdlog::warn("job {}: the reason of a refusal could not be written: {}", job->name(),
                 written.error().message());
  if (listener != nullptr) listener->space_changed(job->name());
}

void Job::Impl::note_refused(const std::string& incoming, const Error& error) {
  write_error_file(incoming, error.message());
  knowledge.update([&](KnownJob& known) {
    known.set_error(fmt::format("commit of incoming/{} refused: {}", incoming, error.message()));
  });
  spdlog::info("job {}: commit of incoming/{} refused: {}", job->name(), incoming, error.message());
}

void Job::Impl::remove_error_file(const std::string& incoming) {
  unlink(fmt::format("{}/incoming/{}", job->files_dir(), error_file_of(incoming)).c_str());
}

Result<> Job::Impl::commit(const std::string& incoming, const std::string& name,
                           Clock::time_point deadline) {
  Result<std::shared_ptr<CommitAttempt>> attempt = find_attempt(incoming, name, deadline);
  if (attempt.has_error()) {
    if (attempt.error().errno_value() == EAGAIN) return std::move(attempt).error();
    note_refused(incoming, attempt.error());
    knowledge.update([](KnownJob& known) { ++known.counts.commits_refused; });
    return std::move(attempt).error();
  }
  std::optional<Result<>> outcome = attempt.value()->wait(deadline);
  if (!outcome) return going_on(incoming);
  if (outcome->has_value()) {
    attempt.value()->answered();
    remove_error_file(incoming);
    std::lock_guard lock(commits_mutex);
    space_changed = true;
    housekeeping.wake();
    return ok();
  }
  Error error = std::move(*outcome).error();
  if (!may_pass(error.code())) return error;
  return Error(error.code(), error.message(), EAGAIN);  // the same mv again may do
}

Result<std::shared_ptr<Job::Impl::CommitAttempt>> Job::Impl::find_attempt(
    const std::string& incoming, const std::string& name, Clock::time_point deadline) {
  PTC_TRY(check_name(name));
  for (;;) {
    std::shared_ptr<CommitAttempt> other;  // of the same directory
    {
      const JobKnowledge::Snapshot known_now = knowledge.now();
      std::lock_guard lock(commits_mutex);
      if (closed || stopping)
        return make_error(Code::kNotFound, "job {} is being removed", job->name());
      if (const auto known = attempts.find(incoming); known != attempts.end()) {
        other = known->second;
        const CheckpointRecord* made = known_now->find_id(other->id());
        if (other->unheard_success() && made != nullptr) {
          if (other->name() == name) return other;
          return make_error(Code::kNotFound, "incoming/{} is checkpoint {} by now", incoming,
                            other->name());
        }
        if (other->ended()) {
          ended_attempts.push_back(other);
          attempts.erase(known);
        } else if (other->name() == name && !other->stopped()) {
          return other;
        }
      }
    }
    if (other == nullptr) break;
    if (other->ended()) {
      other->answered();  // it was committed, and removed since
      const auto failure = other->unheard_failure();
      if (failure && !may_pass(failure->error.code()) && other->name() == name &&
          now_ns() - failure->time_ns < std::chrono::nanoseconds(kFailureKept).count() &&
          !changed_since(job->files_dir() + "/incoming/" + incoming, failure->time_ns))
        return failure->error;
      continue;
    }
    if (!other->withdraw())
      return make_error(Code::kBusy, "incoming/{} is being committed as {}", incoming,
                        other->name());
    if (!other->wait(deadline)) return going_on(incoming);  // until it has let go of the files
  }
  PTC_TRY(check_member(services.cluster));
  PTC_TRY(auto id, random_id());
  auto attempt = std::make_shared<CommitAttempt>(*this, std::move(id), incoming, name);
  std::lock_guard lock(commits_mutex);
  if (closed || stopping)
    return make_error(Code::kNotFound, "job {} is being removed", job->name());
  if (knowledge.now()->record_of(name) != nullptr)
    return make_error(Code::kAlreadyExists, "checkpoint {} exists already", name);
  const auto [known, is_new] = attempts.emplace(incoming, attempt);
  if (!is_new) return make_error(Code::kBusy, "incoming/{} is being committed", incoming);
  try {
    attempt->start();
  } catch (const std::system_error& error) {
    attempts.erase(known);
    return Error(
        Code::kUnavailable,
        fmt::format("there is no thread for the commit of incoming/{}: {}", incoming, error.what()),
        EAGAIN);
  }
  housekeeping.wake();
  return attempt;
}

bool Job::Impl::withdraw_attempts() {
  std::vector<std::shared_ptr<CommitAttempt>> all;
  {
    std::lock_guard lock(commits_mutex);
    for (const auto& [incoming, attempt] : attempts) all.push_back(attempt);
  }
  return std::all_of(all.begin(), all.end(),
                     [](const auto& attempt) { return attempt->withdraw(); });
}

void Job::Impl::look_after_attempts() {
  std::vector<std::shared_ptr<CommitAttempt>> all, ended;
  {
    std::lock_guard lock(commits_mutex);
    for (const auto& [incoming, attempt] : attempts) all.push_back(attempt);
    ended.swap(ended_attempts);  // destroyed without the lock
  }
  for (const auto& attempt : all)
    if (attempt->forgotten() && !attempt->ended() && attempt->withdraw())
      spdlog::info("job {}: the commit of incoming/{} is given up: nobody asks for it any more",
                   job->name(), attempt->incoming());
  std::lock_guard lock(commits_mutex);
  std::erase_if(attempts, [&](const auto& one) {
    const bool over = one.second->ended() && one.second->forgotten();
    if (over) ended_attempts.push_back(one.second);
    return over;
  });
}

void Job::Impl::note_committed(const std::string& id) {
  constexpr size_t kKnown = 256;
  std::lock_guard lock(commits_mutex);
  committed_ids.push_back(id);
  if (committed_ids.size() > kKnown) committed_ids.pop_front();
}

std::string Job::Impl::commit_outcome(const std::string& id) const {
  std::lock_guard lock(commits_mutex);
  for (const auto& [incoming, attempt] : attempts)
    if (attempt->id() == id) return std::string(attempt->outcome());
  const bool committed =
      std::find(committed_ids.begin(), committed_ids.end(), id) != committed_ids.end();
  return committed ? "committed" : "given up";
}

}  // namespace ptc
