#include "reshard/intake/commit_share.h"

#include <fcntl.h>
#include <spdlog/spdlog.h>
#include <stdio.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>

#include "reshard/intake/found_files.h"
#include "store/base/mutex.h"

namespace ptc {

Result<std::shared_ptr<ShownName>> ShownName::make(const std::string& path,
                                                   const struct stat& like) {
  if (mkdir(path.c_str(), 0700) != 0) return errno_error(errno, path);
  PTC_TRY(auto directory, open_file(AT_FDCWD, path, O_RDONLY | O_DIRECTORY | O_NOFOLLOW));
  if ((geteuid() == 0 && fchown(directory.get(), like.st_uid, like.st_gid) != 0) ||
      fchmod(directory.get(), like.st_mode & 07777) != 0)
    return errno_error(errno, path);
  return std::shared_ptr<ShownName>(new ShownName(std::move(directory)));
}

bool ShownName::is_at(const std::string& path) const {
  struct stat own {
  }, there{};
  return fstat(directory_.get(), &own) == 0 && lstat(path.c_str(), &there) == 0 &&
         own.st_dev == there.st_dev && own.st_ino == there.st_ino;
}

bool ShownName::is_empty() const {
  std::error_code error;
  return std::filesystem::is_empty(fmt::format("/proc/self/fd/{}", directory_.get()), error);
}

void ShownName::remove_from(const std::string& path) {
  MutexLock lock(mutex_);
  if (is_at(path)) rmdir(path.c_str());
  gone_ = true;
  remove_trace();
}

void ShownName::traced_by(std::string trace) {
  MutexLock lock(mutex_);
  trace_ = std::move(trace);
  if (gone_) remove_trace();
}

void ShownName::remove_trace() {
  if (trace_.empty()) return;
  rmdir(trace_.c_str());
  rmdir(trace_.substr(0, trace_.rfind('/')).c_str());
  trace_.clear();
}

Result<std::shared_ptr<CommitShare>> CommitShare::take(Place place, std::string id,
                                                       std::string incoming, const MakeSeal& seal,
                                                       GivesWay may_give_way) {
  const std::string source = place.incoming_dir() + "/" + incoming;
  struct stat st {};
  if (lstat(source.c_str(), &st) != 0) {
    if (errno == ENOENT) return std::shared_ptr<CommitShare>();
    return errno_error(errno, "incoming/" + incoming);
  }
  if (!S_ISDIR(st.st_mode))
    return invalid_argument(
        "incoming/{} is no directory: a checkpoint is incoming/<name>/rank/<r>/…", incoming);
  std::shared_ptr<CommitShare> share(
      new CommitShare(std::move(place), std::move(id), std::move(incoming)));
  if (seal) {
    auto give_way = [weak = std::weak_ptr(share), may = std::move(may_give_way)] {
      if (may && !may()) return false;
      const auto known = weak.lock();
      return known == nullptr || known->withdraw_unless_hidden();
    };
    auto sealed = seal(std::move(give_way));
    if (sealed.has_error()) return std::move(sealed).error();
    MutexLock lock(share->mutex_);
    if (!share->withdrawn_) share->seal_ = std::move(sealed).value();
  }
  PTC_TRY(share->directory_, open_file(AT_FDCWD, source, O_RDONLY | O_DIRECTORY | O_NOFOLLOW));
  MutexLock lock(share->mutex_);
  const auto found = find_files(share->directory(), true);
  share->has_files_ = found.has_error() || !found.value().empty();
  if (found.has_value())  // else it is told when it is drafted
    for (const Found& file : found.value()) share->versions_.emplace(file.source(), file.version);
  return share;
}

bool CommitShare::has_files() const {
  MutexLock lock(mutex_);
  return has_files_;
}

CommitShare::~CommitShare() {
  if (settled_) return;
  remove_images();
  if (hidden_) put_back();
}

void CommitShare::remove_images() {
  for (const Adopted& one : adopted_) {
    (void)place_.images->remove(one.image->id());
    renew(one.path);
  }
  adopted_.clear();
}

/// Links come and go: that is no write, and what was hashed stays known.
void CommitShare::renew(const std::string& path) {
  struct stat now {};
  const auto known = versions_.find(path);
  if (known == versions_.end() ||
      fstatat(directory(), path.c_str(), &now, AT_SYMLINK_NOFOLLOW) != 0)
    return;
  FileVersion renewed = version_of(now);
  const FileVersion& before = known->second;
  if (renewed.inode != before.inode || renewed.bytes != before.bytes ||
      renewed.mtime_ns != before.mtime_ns)
    return;
  place_.hashes->renew(before, renewed);
  known->second = renewed;
}

Result<> CommitShare::check_there() const {
  if (!withdrawn_) return ok();
  return make_error(Code::kConflict,
                    "incoming/{} was written again, and its commit is given up: move it once more",
                    incoming_);
}

Result<> CommitShare::check_unchanged(const std::string& path) const {
  const auto known = versions_.find(path);
  struct stat st {};
  if (fstatat(directory(), path.c_str(), &st, AT_SYMLINK_NOFOLLOW) != 0)
    return errno_error(errno, path);
  PTC_TRY(bool busy, open_for_writing(directory(), path));
  const FileVersion now = version_of(st);
  if (!busy && known != versions_.end() && now.inode == known->second.inode &&
      now.bytes == known->second.bytes && now.mtime_ns == known->second.mtime_ns)
    return ok();
  return make_error(Code::kBusy, "{} was written while it was being committed", path);
}

Result<std::vector<ImageRef>> CommitShare::adopt(const std::vector<std::string>& paths) {
  std::vector<ImageRef> images;
  for (const std::string& path : paths) {
    PTC_TRY(auto image, place_.images->adopt(directory(), path));
    MutexLock lock(mutex_);
    if (Result<> there = check_there(); there.has_error()) {
      (void)place_.images->remove(image->id());
      return std::move(there).error();
    }
    adopted_.push_back({path, image});
    PTC_TRY(check_unchanged(path));
    renew(path);
    images.push_back(std::move(image));
  }
  PTC_TRY(place_.images->sync());
  return images;
}

Result<> CommitShare::hide(Name name) {
  MutexLock lock(mutex_);
  PTC_TRY(check_there());
  if (hidden_) return ok();
  PTC_TRY(make_directory(AT_FDCWD, place_.job_dir + "/committing"));
  PTC_TRY(make_directory(AT_FDCWD, hidden_dir()));
  const std::string source = source_dir(), hidden = hidden_dir() + "/" + incoming_;
  struct stat opened {
  }, moved{};
  if (fstat(directory(), &opened) != 0) return errno_error(errno, "incoming/" + incoming_);
  if (name == Name::kShown) {
    if (auto made = ShownName::make(hidden, opened); made.has_value())
      shown_ = std::move(made).value();
    if (shown_ == nullptr ||
        renameat2(AT_FDCWD, source.c_str(), AT_FDCWD, hidden.c_str(), RENAME_EXCHANGE) != 0) {
      rmdir(hidden.c_str());
      shown_.reset();
    }
  }
  if (shown_ == nullptr && rename(source.c_str(), hidden.c_str()) != 0) {
    Error error = errno_error(errno, "incoming/" + incoming_);
    rmdir(hidden_dir().c_str());
    return error;
  }
  hidden_ = true;
  if (stat(hidden.c_str(), &moved) != 0 || opened.st_ino != moved.st_ino)
    return make_error(Code::kBusy, "incoming/{} was replaced while it was being committed",
                      incoming_);
  for (const Adopted& one : adopted_) {
    PTC_TRY(check_unchanged(one.path));
  }
  PTC_TRY(sync_directory(AT_FDCWD, place_.job_dir + "/committing"));
  return sync_directory(AT_FDCWD, place_.job_dir);
}

std::shared_ptr<ShownName> CommitShare::shown() const {
  MutexLock lock(mutex_);
  return shown_;
}

void CommitShare::withdraw() {
  std::unique_ptr<Seal> broken;
  MutexLock lock(mutex_);
  broken = withdraw_now();
  if (!hidden_ || settled_) return;
  put_back();
  hidden_ = false;
}

bool CommitShare::withdraw_unless_hidden() {
  std::unique_ptr<Seal> broken;
  MutexLock lock(mutex_);
  if (hidden_) return false;
  broken = withdraw_now();
  return true;
}

std::unique_ptr<Seal> CommitShare::withdraw_now() {
  withdrawn_ = true;
  remove_images();
  return std::move(seal_);
}

void CommitShare::committed() {
  std::unique_ptr<Seal> seal;
  MutexLock lock(mutex_);
  settled_ = true;
  // The user's until now. They stay drafts until this node has the checkpoint's own files: if it
  // never gets them, a start finds what no checkpoint here names.
  for (const Adopted& one : adopted_)
    if (Result<> done = place_.images->make_read_only(one.image->id()); done.has_error())
      spdlog::warn("a file of incoming/{}: {}", incoming_, done.error().message());
  if (seal_ != nullptr) seal_->committed();
  seal = std::move(seal_);
  if (shown_ == nullptr) {
    (void)remove_tree(AT_FDCWD, hidden_dir());
    return;
  }
  const std::string hidden = hidden_dir() + "/" + incoming_;
  std::error_code error;
  std::vector<std::string> inside;
  for (const auto& entry : std::filesystem::directory_iterator(hidden, error))
    inside.push_back(entry.path().string());
  for (const std::string& path : inside) (void)remove_tree(AT_FDCWD, path);
  shown_->traced_by(hidden);
}

void CommitShare::leave() {
  MutexLock lock(mutex_);
  settled_ = true;
}

void CommitShare::put_back() {
  const std::string from = hidden_dir() + "/" + incoming_, to = source_dir();
  const std::string other = place_.incoming_dir() + "/recovered-" + id_;
  // It takes the place of the empty one. Somebody may have made the name anew; then it comes back
  // under another.
  const unsigned how = shown_ != nullptr && shown_->is_at(to) ? 0 : RENAME_NOREPLACE;
  if (renameat2(AT_FDCWD, from.c_str(), AT_FDCWD, to.c_str(), how) != 0 &&
      rename(from.c_str(), other.c_str()) != 0)
    spdlog::error("incoming/{} could not be put back ({}); it is in {}", incoming_,
                  errno_error(errno, "rename").message(), from);
  else rmdir(hidden_dir().c_str());
}

}  // namespace ptc
