#include "tools/ptc/incoming_dir.h"

#include <fcntl.h>
#include <fmt/core.h>
#include <stdio.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <ctime>
#include <random>
#include <string_view>
#include <utility>

#include "reshard/job/names.h"
#include "tools/ptc/mount.h"

namespace ptc::cli {
namespace {

constexpr size_t kMostOfName = 200;        // there is room for the rest in a name of 255 bytes
constexpr int kTriesToTakeItsPlace = 100;  // others make and remove it, too

bool rename_with(unsigned flags, const std::string& source, const std::string& target) {
  return ::renameat2(AT_FDCWD, source.c_str(), AT_FDCWD, target.c_str(), flags) == 0;
}

std::string own_name(const std::string& path) {
  const size_t name = path.rfind('/') + 1;
  std::random_device random;
  return fmt::format("{}{}{:08x}{:08x}", path.substr(0, name + kMostOfName), kImportMark, random(),
                     random());
}

/// Who has made a directory has not locked it yet.
bool is_just_made(int directory) {
  constexpr time_t kNotLockedYet = 5;  // seconds
  struct stat info {};
  return ::fstat(directory, &info) != 0 || std::time(nullptr) < info.st_ctime + kNotLockedYet;
}

/// What imports that were killed left under names of their own.
void remove_what_was_left(const std::string& path) {
  const size_t name = path.rfind('/') + 1;
  const std::string own = path.substr(name, kMostOfName) + std::string(kImportMark);
  const auto names = list_directory(path.substr(0, name));
  if (!names) return;
  for (const std::string& one : names.value()) {
    if (one.size() != own.size() + kImportDigits || !one.starts_with(own) ||
        one.find_first_not_of("0123456789abcdef", own.size()) != std::string::npos)
      continue;
    const std::string left = path.substr(0, name) + one;
    const auto directory = open_file(AT_FDCWD, left, O_RDONLY | O_DIRECTORY | O_NOFOLLOW);
    if (!directory || is_just_made(directory.value().get()) ||
        ::flock(directory.value().get(), LOCK_EX | LOCK_NB) != 0)
      continue;
    (void)remove_tree(AT_FDCWD, left);
    ::unlink((left + ".error").c_str());
  }
}

}  // namespace

IncomingDir::Identity IncomingDir::of(const std::string& path) {
  struct stat info {};
  if (::lstat(path.c_str(), &info) != 0) return {};
  return {info.st_dev, info.st_ino};
}

Result<IncomingDir> IncomingDir::make(std::string path, bool force) {
  remove_what_was_left(path);
  IncomingDir staging;
  staging.own_ = own_name(path);
  const std::string& own = staging.own_;
  if (::mkdir(own.c_str(), 0777) != 0) return errno_error(errno, "making " + path);
  auto failed = [&](Error error) {
    ::rmdir(own.c_str());
    return error;
  };
  auto directory = open_file(AT_FDCWD, own, O_RDONLY | O_DIRECTORY | O_NOFOLLOW);
  if (!directory) return failed(std::move(directory).error());
  if (::flock(directory.value().get(), LOCK_SH | LOCK_NB) != 0)
    return failed(errno_error(errno, "locking " + own));
  staging.directory_ = std::move(directory).value();
  staging.identity_ = of(own);
  staging.wanted_ = staging.path_ = std::move(path);
  for (int tries = 0;; ++tries) {
    if (rename_with(RENAME_NOREPLACE, own, staging.path_)) return staging;
    int error = errno;
    if (error == EEXIST && force && rename_with(RENAME_EXCHANGE, own, staging.path_)) {
      auto removed = remove_tree(AT_FDCWD, own);
      if (removed) return staging;
      // Somebody commits it just now.
      if (staging.is_at_its_name()) (void)rename_with(RENAME_EXCHANGE, own, staging.path_);
      return failed(std::move(removed).error());
    }
    if (error == EEXIST && force && (errno == ENOENT || errno == EEXIST) &&
        tries < kTriesToTakeItsPlace)
      continue;
    if (error == EEXIST && !force)
      return failed(Error(Code::kAlreadyExists, staging.path_ + " is there"));
    return failed(errno_error(errno, "making " + staging.path_));
  }
}

std::string IncomingDir::inside() const {
  return fmt::format("/proc/self/fd/{}", directory_.get());
}

bool IncomingDir::is_at_its_name() const { return of(path_) == identity_; }

Error IncomingDir::named(Error error) const {
  std::string message = error.message();
  const std::string hidden = inside();
  for (size_t at; (at = message.find(hidden)) != std::string::npos;)
    message.replace(at, hidden.size(), path_);
  return Error(error.code(), std::move(message), error.errno_value());
}

Result<> IncomingDir::begin_commit() {
  if (::mkdir(own_.c_str(), 0777) != 0) return errno_error(errno, "making " + own_);
  placeholder_ = of(own_);
  const bool exchanged = rename_with(RENAME_EXCHANGE, own_, wanted_);
  if (exchanged && of(own_) == identity_) {
    path_ = own_;
    return ok();
  }
  // It is of somebody else by now.
  if (exchanged) (void)rename_with(RENAME_EXCHANGE, own_, wanted_);
  ::rmdir(own_.c_str());
  return make_error(Code::kConflict, "{} was removed or replaced", wanted_);
}

void IncomingDir::end_commit() {
  const bool kept = of(wanted_) == placeholder_;
  if (of(own_) != identity_) {
    if (kept) {
      ::rmdir(wanted_.c_str());
      ::unlink((wanted_ + ".error").c_str());  // of an earlier attempt
    }
    path_ = wanted_;
    return;
  }
  if (!(kept && rename_with(RENAME_EXCHANGE, own_, wanted_)) &&
      !rename_with(RENAME_NOREPLACE, own_, wanted_))
    return;
  if (kept) ::rmdir(own_.c_str());
  (void)::rename((own_ + ".error").c_str(), (wanted_ + ".error").c_str());
  path_ = wanted_;
}

void IncomingDir::remove() {
  if (is_at_its_name()) (void)remove_tree(AT_FDCWD, path_);
}

}  // namespace ptc::cli
