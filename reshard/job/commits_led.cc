#include "reshard/job/commits_led.h"

#include <fcntl.h>
#include <spdlog/spdlog.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include "reshard/intake/tree_rights.h"
#include "reshard/job/commit_attempt.h"
#include "reshard/job/names.h"
#include "store/base/file.h"
#include "store/base/json.h"
#include "store/base/mutex.h"
#include "store/base/random_id.h"
#include "store/base/utf8.h"
#include "store/base/walk_tree.h"
#include "store/base/wall_time.h"

namespace ptc {
namespace {

constexpr auto kFailureKept = std::chrono::seconds(60);

/// Of a name that leaves room for it.
std::string with_ending(const std::string& incoming, std::string_view ending) {
  constexpr size_t kMaxName = 255;
  return incoming.substr(0, kMaxName - ending.size()) + std::string(ending);
}

/// Where the reason of a refusal is told.
std::string error_file_of(const std::string& incoming) { return with_ending(incoming, ".error"); }

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
  auto is_newer = [&](const struct stat& facts) {
    return facts.st_ctim.tv_sec * 1'000'000'000 + facts.st_ctim.tv_nsec > time_ns + kTick;
  };
  const Result<UniqueFd> top = open_file(AT_FDCWD, directory, O_RDONLY | O_DIRECTORY | O_NOFOLLOW);
  struct stat facts = {};
  if (top.has_error() || ::fstat(top.value().get(), &facts) != 0 || is_newer(facts)) return true;
  bool any = false;
  const Result<> walked =
      walk_tree(top.value().get(), [&](int, const char*, const struct stat& entry) {
        any = is_newer(entry);
        return !any;
      });
  return any || walked.has_error();
}

}  // namespace

std::string without_file_of(const std::string& incoming) {
  return with_ending(incoming, ".without");
}

void CommitsLed::write_error_file(const std::string& incoming, const std::string& text,
                                  const std::optional<ReadRights>& rights) {
  // The directory is the user's: nothing here may follow what they put there.
  const std::string directory = uses_.place.dir + "/files/incoming";
  const std::string name = error_file_of(incoming),
                    temporary = "." + incoming.substr(0, 200) + ".error-new";
  auto write = [&]() -> Result<> {
    PTC_TRY(auto dir_fd, open_file(AT_FDCWD, directory, O_RDONLY | O_DIRECTORY | O_NOFOLLOW));
    unlinkat(dir_fd.get(), temporary.c_str(), 0);
    PTC_TRY(auto fd, open_file(dir_fd.get(), temporary, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW));
    const std::string line = text + "\n";
    PTC_TRY(write_exactly(fd.get(), std::as_bytes(std::span(line)), 0));
    struct stat owner {};
    const bool known = fstatat(dir_fd.get(), incoming.c_str(), &owner, AT_SYMLINK_NOFOLLOW) == 0;
    if (rights) {
      owner.st_uid = rights->uid;
      owner.st_gid = rights->gid;
    }
    if ((known || rights) && geteuid() == 0 && fchown(fd.get(), owner.st_uid, owner.st_gid) != 0)
      return errno_error(errno, "chown of " + name);
    // Without root's rights its group is the daemon's.
    const uint32_t mode = !rights ? 0444 : geteuid() == 0 ? rights->mode : rights->mode & ~0040u;
    if (fchmod(fd.get(), 0200 | mode) != 0) return errno_error(errno, "chmod of " + name);
    if (renameat(dir_fd.get(), temporary.c_str(), dir_fd.get(), name.c_str()) != 0)
      return errno_error(errno, name);
    return ok();
  };
  Result<> written = write();
  if (written.has_error())
    spdlog::warn("job {}: the reason of a refusal could not be written: {}", uses_.place.name,
                 written.error().message());
  if (uses_.place.listener != nullptr) uses_.place.listener->space_changed(uses_.place.name);
}

void CommitsLed::note_refused(const std::string& incoming, const Error& error,
                              const std::optional<ReadRights>& elsewhere) {
  // Where nobody can be asked it is root's.
  std::optional<ReadRights> rights = elsewhere, rights_above = ReadRights{0, 0, 0400};
  const auto directory =
      open_file(AT_FDCWD, uses_.place.incoming_dir(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW);
  if (struct stat facts = {};
      directory.has_value() && ::fstat(directory.value().get(), &facts) == 0) {
    rights_above = rights_of(facts);
    rights = narrowed(rights, rights_of_tree(directory.value().get(), incoming));
  } else {
    rights = rights_above;
  }
  write_error_file(incoming, error.message(), rights);
  // Everybody who may read the job's status reads this.
  const std::string told =
      rights || rights_above
          ? fmt::format("incoming/{} says why to those who may read all that was to be committed",
                        error_file_of(std::string(staged_name(incoming))))
          : error.message();
  uses_.knowledge.update([&](KnownJob& known) {
    known.set_error(fmt::format("commit of incoming/{} refused: {}", staged_name(incoming), told));
  });
  spdlog::info("job {}: commit of incoming/{} refused: {}", uses_.place.name, incoming,
               error.message());
}

void CommitsLed::remove_files_about(const std::string& incoming) {
  for (const std::string& name : {error_file_of(incoming), without_file_of(incoming)})
    unlink(fmt::format("{}/{}", uses_.place.incoming_dir(), name).c_str());
}

Result<> CommitsLed::commit(const std::string& incoming, const std::string& name,
                            Clock::time_point deadline) {
  const auto checkpoint_of = [this](const std::string& id) {
    const JobKnowledge::Snapshot known = uses_.knowledge.now();
    const CheckpointRecord* record = known->find_id(id);
    return record != nullptr ? record->checkpoint->name() : std::string();
  };
  const auto heard = uses_.taken.hear(incoming, name, deadline, checkpoint_of);
  if (heard) {
    if (heard->has_value()) remove_files_about(incoming);
    return *heard;
  }
  Result<std::shared_ptr<CommitAttempt>> attempt = find(incoming, name, deadline);
  if (attempt.has_error()) {
    if (attempt.error().errno_value() == EAGAIN) return std::move(attempt).error();
    note_refused(incoming, attempt.error());
    uses_.knowledge.update([](KnownJob& known) { ++known.counts.commits_refused; });
    return std::move(attempt).error();
  }
  std::optional<Result<>> outcome = attempt.value()->wait(deadline);
  if (!outcome) return going_on(incoming);
  if (outcome->has_value()) {
    attempt.value()->answered();
    remove_files_about(incoming);
    MutexLock lock(mutex_);
    space_changed_ = true;
    uses_.wake();
    return ok();
  }
  Error error = std::move(*outcome).error();
  if (!may_pass(error.code())) return error;
  return Error(error.code(), error.message(), EAGAIN);  // the same mv again may do
}

Result<std::shared_ptr<CommitAttempt>> CommitsLed::find(const std::string& incoming,
                                                        const std::string& name,
                                                        Clock::time_point deadline) {
  PTC_TRY(check_name(name, "checkpoint", "meta.json"));
  for (;;) {
    std::shared_ptr<CommitAttempt> other;  // of the same directory
    {
      MutexLock lock(mutex_);
      // Not before: an attempt that has ended by now was decided before that.
      const JobKnowledge::Snapshot known_now = uses_.knowledge.now();
      if (closed_ || stopping_)
        return make_error(Code::kNotFound, "job {} is being removed", uses_.place.name);
      if (const auto known = attempts_.find(incoming); known != attempts_.end()) {
        other = known->second;
        const CheckpointRecord* made = known_now->find_id(other->id());
        if (other->unheard_success() && made != nullptr) {
          if (other->name() == name) return other;
          return make_error(Code::kNotFound, "incoming/{} is checkpoint {} by now", incoming,
                            other->name());
        }
        if (other->ended()) {
          ended_.push_back(other);
          attempts_.erase(known);
        } else if (other->name() == name && !other->stopped() && !other->written_anew()) {
          return other;
        }
      }
    }
    if (other == nullptr) break;
    if (other->ended()) {
      other->answered();  // it was committed, and removed since
      const auto failure = other->unheard_failure();
      if (failure && !may_pass(failure->code) && other->name() == name &&
          now_ns() - failure->time_ns < std::chrono::nanoseconds(kFailureKept).count() &&
          !changed_since(uses_.place.dir + "/files/incoming/" + incoming, failure->time_ns))
        return other;  // wait() tells it; it is noted already
      continue;
    }
    if (other->name() == name && other->written_anew()) {
      // How that ends is no answer for what is there now; if it fails, this is the next to be
      // tried.
      if (!other->wait(deadline) || !other->ended()) return going_on(incoming);
      continue;
    }
    if (!other->withdraw())
      return make_error(Code::kBusy, "incoming/{} is being committed as {}", incoming,
                        other->name());
    if (!other->wait(deadline)) return going_on(incoming);  // until it has let go of the files
  }
  PTC_TRY(check_member(*uses_.place.services.cluster));
  PTC_TRY(auto id, random_id());
  auto attempt = std::make_shared<CommitAttempt>(*this, std::move(id), incoming, name);
  MutexLock lock(mutex_);
  if (closed_ || stopping_)
    return make_error(Code::kNotFound, "job {} is being removed", uses_.place.name);
  if (uses_.knowledge.now()->record_of(name) != nullptr)
    return make_error(Code::kAlreadyExists, "checkpoint {} exists already", name);
  const auto [known, is_new] = attempts_.emplace(incoming, attempt);
  if (!is_new) return make_error(Code::kBusy, "incoming/{} is being committed", incoming);
  try {
    attempt->start();
  } catch (const std::system_error& error) {
    attempts_.erase(known);
    return Error(
        Code::kUnavailable,
        fmt::format("there is no thread for the commit of incoming/{}: {}", incoming, error.what()),
        EAGAIN);
  }
  uses_.wake();
  return attempt;
}

bool CommitsLed::close() {
  std::vector<std::shared_ptr<CommitAttempt>> all;
  {
    MutexLock lock(mutex_);
    closed_ = true;
    for (const auto& [incoming, attempt] : attempts_) all.push_back(attempt);
  }
  if (std::all_of(all.begin(), all.end(), [](const auto& attempt) { return attempt->withdraw(); }))
    return true;
  reopen();
  return false;
}

void CommitsLed::reopen() {
  MutexLock lock(mutex_);
  closed_ = false;
}

std::vector<std::shared_ptr<CommitAttempt>> CommitsLed::stop() {
  stop_.request_stop();
  MutexLock lock(mutex_);
  stopping_ = true;
  std::vector<std::shared_ptr<CommitAttempt>> all;
  all.swap(ended_);
  for (auto& [incoming, attempt] : attempts_) all.push_back(std::move(attempt));
  attempts_.clear();
  return all;
}

bool CommitsLed::look_after() {
  std::vector<std::shared_ptr<CommitAttempt>> all, ended;
  bool count_anew = false;
  {
    MutexLock lock(mutex_);
    for (const auto& [incoming, attempt] : attempts_) all.push_back(attempt);
    ended.swap(ended_);  // destroyed without the lock
    count_anew = std::exchange(space_changed_, false);
  }
  if (count_anew && uses_.place.listener != nullptr)
    uses_.place.listener->space_changed(uses_.place.name);
  for (const auto& attempt : all)
    if (attempt->forgotten() && !attempt->ended() && attempt->withdraw())
      spdlog::info("job {}: the commit of incoming/{} is given up: nobody asks for it any more",
                   uses_.place.name, attempt->incoming());
  MutexLock lock(mutex_);
  std::erase_if(attempts_, [&](const auto& one) PTC_REQUIRES(mutex_) {
    const bool over = one.second->ended() && one.second->forgotten();
    if (over) ended_.push_back(one.second);
    return over;
  });
  return !attempts_.empty() || !ended_.empty() || space_changed_;
}

void CommitsLed::note_committed(const std::string& id) {
  constexpr size_t kKnown = 256;
  MutexLock lock(mutex_);
  committed_ids_.push_back(id);
  if (committed_ids_.size() > kKnown) committed_ids_.pop_front();
}

std::string CommitsLed::outcome_of(const std::string& id) const {
  MutexLock lock(mutex_);
  for (const auto& [incoming, attempt] : attempts_)
    if (attempt->id() == id) return std::string(attempt->outcome());
  const bool committed =
      std::find(committed_ids_.begin(), committed_ids_.end(), id) != committed_ids_.end();
  return committed ? "committed" : "given up";
}

}  // namespace ptc
