#include "tools/ptc/staged_dir.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <utility>
#include <vector>

#include "store/base/file.h"

namespace ptc::cli {
namespace {

namespace fs = std::filesystem;

/// Of the directory and all below.
Result<> sync_tree(const fs::path& directory) {
  std::error_code error;
  for (fs::recursive_directory_iterator entry(directory, error), end; !error && entry != end;
       entry.increment(error)) {
    if (!entry->is_directory(error)) continue;
    PTC_TRY(sync_directory(AT_FDCWD, entry->path()));
  }
  if (error) return errno_error(error.value(), directory.string());
  return sync_directory(AT_FDCWD, directory);
}

bool is_same(const struct stat& one, const struct stat& other) {
  return one.st_dev == other.st_dev && one.st_ino == other.st_ino;
}

/// Whether an empty directory may take the place of this one: it is no link and no mount point, it
/// is not where the caller stands, and it can be given to whom it belongs.
bool is_replaceable(const fs::path& directory, const struct stat& info) {
  struct stat above {
  }, here{};
  std::error_code error;
  return S_ISDIR(info.st_mode) && fs::is_empty(directory, error) && !error &&
         ::stat(directory.parent_path().c_str(), &above) == 0 && above.st_dev == info.st_dev &&
         !is_same(above, info) && ::access(directory.parent_path().c_str(), W_OK) == 0 &&
         (::stat(".", &here) != 0 || !is_same(here, info)) && info.st_uid == ::geteuid() &&
         info.st_gid == ::getegid() && (above.st_mode & S_ISGID) == 0;
}

mode_t usual_mode() {
  const mode_t mask = ::umask(0);
  ::umask(mask);
  return 0777 & ~mask;
}

}  // namespace

Result<StagedDirectory> StagedDirectory::make(const std::string& destination) {
  StagedDirectory staged;
  std::error_code error;
  staged.destination_ = fs::absolute(destination, error).lexically_normal();
  if (!staged.destination_.has_filename())
    staged.destination_ = staged.destination_.parent_path();  // "out/"
  const fs::path parent = staged.destination_.parent_path();
  struct stat info {};
  mode_t mode = usual_mode();
  if (::lstat(staged.destination_.c_str(), &info) == 0) {
    staged.inside_ = !is_replaceable(staged.destination_, info);
    if (!staged.inside_) mode = info.st_mode & 07777;
  }
  staged.above_ = parent;
  while (!fs::exists(staged.above_, error) && staged.above_ != staged.above_.parent_path())
    staged.above_ = staged.above_.parent_path();
  fs::create_directories(parent, error);
  if (error) return errno_error(error.value(), "making " + parent.string());
  std::string path = staged.inside_
                         ? (staged.destination_ / ".ptc-export-XXXXXX").string()
                         : (parent / ("." + staged.destination_.filename().string().substr(0, 200) +
                                      ".ptc-export-XXXXXX"))
                               .string();
  if (::mkdtemp(path.data()) == nullptr)
    return errno_error(errno, "making a directory in " + fs::path(path).parent_path().string());
  staged.path_ = std::move(path);
  if (::chmod(staged.path_.c_str(), mode) != 0) return errno_error(errno, staged.path_);
  return staged;
}

StagedDirectory::StagedDirectory(StagedDirectory&& other) noexcept
    : destination_(std::move(other.destination_)),
      above_(std::move(other.above_)),
      path_(std::exchange(other.path_, std::string())),
      inside_(other.inside_) {}

StagedDirectory::~StagedDirectory() { discard(); }

void StagedDirectory::discard() {
  if (path_.empty()) return;
  std::error_code error;
  fs::remove_all(path_, error);
  for (fs::path made = destination_.parent_path(); made != above_ && made != made.parent_path();
       made = made.parent_path())
    if (::rmdir(made.c_str()) != 0) break;  // somebody else uses it by now
}

Result<> StagedDirectory::move_each() const {
  std::vector<fs::path> directories, files;
  std::error_code error;
  for (fs::recursive_directory_iterator entry(path_, error), end; !error && entry != end;
       entry.increment(error))
    (entry->is_directory(error) ? directories : files)
        .push_back(entry->path().lexically_relative(path_));
  if (error) return errno_error(error.value(), path_);
  for (const fs::path& directory : directories) {
    fs::create_directories(destination_ / directory, error);
    if (error) return errno_error(error.value(), "making " + (destination_ / directory).string());
  }
  for (const fs::path& file : files) {
    const fs::path target = destination_ / file;
    if (::rename((fs::path(path_) / file).c_str(), target.c_str()) != 0)
      return errno_error(errno, target.string());
  }
  for (const fs::path& directory : directories) {
    PTC_TRY(sync_directory(AT_FDCWD, destination_ / directory));
  }
  return ok();
}

Result<> StagedDirectory::publish() {
  PTC_TRY(sync_tree(path_));
  if (inside_) {
    PTC_TRY(move_each());
    std::error_code error;
    fs::remove_all(path_, error);
    path_.clear();
    return sync_directory(AT_FDCWD, destination_);
  }
  if (::rename(path_.c_str(), destination_.c_str()) != 0)
    return errno_error(errno, destination_.string());
  path_.clear();
  return sync_directory(AT_FDCWD, destination_.parent_path());
}

}  // namespace ptc::cli
