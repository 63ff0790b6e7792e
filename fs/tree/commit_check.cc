#include "fs/tree/commit_check.h"

#include <dirent.h>
#include <fcntl.h>
#include <stdio.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <unistd.h>

#include <chrono>
#include <memory>
#include <thread>
#include <unordered_map>
#include <utility>

#include "fs/tree/real_node.h"
#include "store/base/mutex.h"

namespace ptc {
namespace {

constexpr unsigned kMaxDepth = 64;
/// The kernel tells of a last close after close() or munmap() has returned: on a machine that is
/// busy, long after. A rename may take 2 s.
constexpr auto kPatience = std::chrono::milliseconds(1200),
               kLongestPause = std::chrono::milliseconds(30);

}  // namespace

CommitCheck::~CommitCheck() { job_.gate().unseal(keys_, owner_); }

Result<> CommitCheck::seal(const std::vector<std::string>& keys) {
  if (job_.gate().seal(keys, owner_)) return ok();
  return make_error(Code::kBusy, "incoming/{} is being committed already", name_);
}

Result<> CommitCheck::find_files(int dir_fd, const std::string& path, unsigned depth) {
  if (depth > kMaxDepth) {
    return invalid_argument("incoming/{}: directories are nested deeper than {}", path, kMaxDepth);
  }
  auto opened =
      open_file(dir_fd, path.substr(path.rfind('/') + 1), O_RDONLY | O_DIRECTORY | O_NOFOLLOW);
  if (!opened) return std::move(opened).error().with_context("incoming/" + path);
  std::unique_ptr<DIR, int (*)(DIR*)> stream(::fdopendir(opened.value().get()), &::closedir);
  if (!stream) return errno_error(errno, "reading incoming/" + path);
  int fd = opened.value().release();  // now the stream's
  // Sealed before it is read: what would be made in it later would be lost.
  struct stat directory = {};
  if (::fstat(fd, &directory) != 0) return errno_error(errno, "incoming/" + path);
  keys_.push_back(RealNode::key_of(directory));
  PTC_TRY(seal({keys_.back()}));
  while (dirent* entry = ::readdir(stream.get())) {
    std::string name = entry->d_name;
    if (name == "." || name == "..") continue;
    struct stat stat = {};
    if (::fstatat(fd, name.c_str(), &stat, AT_SYMLINK_NOFOLLOW) != 0) continue;  // just removed
    std::string child = path + "/" + name;
    if (S_ISDIR(stat.st_mode)) {
      PTC_TRY(find_files(fd, child, depth + 1));
    }
    if (!S_ISREG(stat.st_mode)) continue;
    files_.push_back({child, RealNode::key_of(stat), stat.st_nlink > 1});
  }
  return ok();
}

Result<> CommitCheck::check_closed(const File& file) const {
  auto fd = open_file(job_.incoming_fd().get(), file.path, O_RDONLY | O_NOFOLLOW | O_NONBLOCK);
  if (!fd) return std::move(fd).error();
  // A read lease is granted exactly when no one has the file open or mapped for writing, whether
  // through us or through passthrough, where an mmap outlives the close that we are told of.
  if (::fcntl(fd.value().get(), F_SETLEASE, F_RDLCK) == 0) {
    ::fcntl(fd.value().get(), F_SETLEASE, F_UNLCK);
    return ok();
  }
  if (errno != EAGAIN) return ok();  // the file system below knows no leases
  return make_error(
      Code::kBusy,
      "incoming/{} is still open for writing; close it, then move the checkpoint again", file.path);
}

Result<> CommitCheck::replace_by_copy(File& file) {
  const std::string what = "incoming/" + file.path;
  const size_t slash = file.path.rfind('/');
  const std::string leaf = file.path.substr(slash + 1);
  PTC_TRY(auto parent, open_file(job_.incoming_fd().get(), file.path.substr(0, slash),
                                 O_RDONLY | O_DIRECTORY | O_NOFOLLOW));
  PTC_TRY(auto source, open_file(parent.get(), leaf, O_RDONLY | O_NOFOLLOW | O_NONBLOCK));
  struct stat stat = {};
  if (::fstat(source.get(), &stat) != 0) return errno_error(errno, what);
  const HeldFd files = job_.files_fd();
  const int job_dir = files.get();
  Quotas& quotas = job_.tree().quotas();
  const QuotaAmount space = job_.limited() ? QuotaAmount{stat.st_blocks * 512, 1} : QuotaAmount{};
  auto take_space = [&]() -> Result<> {
    if (quotas.reserve(job_.account(), stat.st_uid, space)) return ok();
    return Error(
        Code::kNoSpace,
        fmt::format(
            "{} has another name outside, and the copy that is committed instead takes more than "
            "its owner or the job may have",
            what),
        EDQUOT);
  };
  auto give_space = [&] { quotas.add(job_.account(), stat.st_uid, {-space.bytes, -space.files}); };
  PTC_TRY(take_space());  // or it is not even made
  give_space();
  PTC_TRY(auto copy, job_.scratch_path());
  PTC_TRY(auto target, open_file(job_dir, copy, O_WRONLY | O_CREAT | O_EXCL));
  auto exchange = [&] {
    return ::renameat2(job_dir, copy.c_str(), parent.get(), leaf.c_str(), RENAME_EXCHANGE) == 0;
  };
  auto copied = [&]() -> Result<> {
    for (off_t left = stat.st_size; left > 0;) {
      ssize_t sent = ::sendfile(target.get(), source.get(), nullptr, static_cast<size_t>(left));
      if (sent < 0 && errno == EINTR) continue;
      if (sent <= 0) return errno_error(sent < 0 ? errno : EIO, "copying " + what);
      left -= sent;
    }
    if ((::geteuid() == 0 && ::fchown(target.get(), stat.st_uid, stat.st_gid) != 0) ||
        ::fchmod(target.get(), stat.st_mode & 07777) != 0) {
      return errno_error(errno, "replacing the hard link " + what);
    }
    // From the exchange on it has a name, by which it is counted.
    const SharedLock gate(job_.space_gate());
    PTC_TRY(take_space());
    if (!exchange()) {
      const int error = errno;
      give_space();
      return errno_error(error, "replacing the hard link " + what);
    }
    struct stat replaced = {};
    if (::fstatat(job_dir, copy.c_str(), &replaced, AT_SYMLINK_NOFOLLOW) == 0 &&
        RealNode::key_of(replaced) == file.key) {
      return ok();
    }
    exchange();
    give_space();
    return make_error(Code::kBusy, "{} was replaced while it was being committed", what);
  }();
  ::unlinkat(job_dir, copy.c_str(), 0);
  if (!copied) return copied;
  // The copy is committed; the file under its other name stays what it is.
  if (::fstat(target.get(), &stat) != 0) return errno_error(errno, what);
  job_.gate().unseal({file.key}, owner_);
  std::erase(keys_, file.key);
  file.key = RealNode::key_of(stat);
  keys_.push_back(file.key);
  return seal({file.key});
}

Result<> CommitCheck::prepare() {
  struct stat stat = {};
  if (::fstatat(job_.incoming_fd().get(), name_.c_str(), &stat, AT_SYMLINK_NOFOLLOW) != 0) {
    return errno_error(errno, "incoming/" + name_);
  }
  if (!S_ISDIR(stat.st_mode)) return ok();  // the job says what is wrong with it
  PTC_TRY(find_files(job_.incoming_fd().get(), name_, 0));
  for (const File& file : files_) keys_.push_back(file.key);
  PTC_TRY(seal(keys_));

  auto deadline = std::chrono::steady_clock::now() + kPatience;
  for (const File& file : files_) {
    for (auto pause = std::chrono::milliseconds(1);; pause = std::min(pause * 2, kLongestPause)) {
      auto closed = check_closed(file);
      if (closed) break;
      if (std::chrono::steady_clock::now() >= deadline) return closed;
      std::this_thread::sleep_for(pause);
    }
  }
  for (File& file : files_) {
    if (file.linked_elsewhere) {
      PTC_TRY(replace_by_copy(file));
    }
  }
  return ok();
}

void CommitCheck::committed() {
  for (const std::string& key : keys_) {
    NodeRef node = job_.tree().table().find(key);
    if (auto real = std::dynamic_pointer_cast<RealNode>(node)) {
      real->make_read_only();
      job_.note_committed(real);
    }
  }
}

}  // namespace ptc
