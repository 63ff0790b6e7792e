#include "tools/ptc/copy_tree.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <filesystem>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <stop_token>
#include <thread>
#include <utility>

#include "store/base/fan_out.h"
#include "store/base/file.h"
#include "store/base/mutex.h"

namespace ptc::cli {
namespace {

constexpr size_t kCopyBytes = 4 << 20;
/// Small files cost waking the daemon more than copying, and large ones more than one core copies.
constexpr size_t kCopiedAtOnce = 4;

class Lister {
 public:
  Lister(CopyList& list, std::string prefix, const std::function<bool(const std::string&)>& skip)
      : list_(list), prefix_(std::move(prefix)), skip_(skip) {}

  Result<> walk(const std::string& directory, const std::string& relative, mode_t within) {
    struct stat info {};
    if (::stat(directory.c_str(), &info) != 0) return errno_error(errno, directory);
    const mode_t reach = within & readers_of((info.st_mode & 0011) << 2, info.st_gid);
    auto identity = std::pair(info.st_dev, info.st_ino);
    if (!open_.insert(identity).second)
      return invalid_argument("{}: a symbolic link leads back to a directory above it", directory);
    PTC_TRY(auto names, names_in(directory));
    for (const std::string& name : names) {
      std::string path = directory + "/" + name;
      std::string below = relative.empty() ? name : relative + "/" + name;
      if (skip_(below)) continue;
      if (::stat(path.c_str(), &info) != 0) return errno_error(errno, path);
      if (S_ISDIR(info.st_mode)) {
        PTC_TRY(walk(path, below, reach));
      } else if (S_ISREG(info.st_mode)) {
        auto bytes = static_cast<uint64_t>(info.st_size);
        list_.items.push_back({path, prefix_.empty() ? below : prefix_ + "/" + below, bytes,
                               reach & readers_of(info.st_mode, info.st_gid)});
        list_.bytes += bytes;
      } else {
        list_.skipped.push_back(path);
      }
    }
    open_.erase(identity);
    return ok();
  }

 private:
  static Result<std::vector<std::string>> names_in(const std::string& directory) {
    std::unique_ptr<DIR, int (*)(DIR*)> dir(::opendir(directory.c_str()), &::closedir);
    if (!dir) return errno_error(errno, directory);
    std::vector<std::string> names;
    errno = 0;
    while (dirent* entry = ::readdir(dir.get())) {
      std::string name = entry->d_name;
      if (name != "." && name != "..") names.push_back(std::move(name));
      errno = 0;
    }
    if (errno != 0) return errno_error(errno, "reading directory " + directory);
    std::sort(names.begin(), names.end());
    return names;
  }

  CopyList& list_;
  std::string prefix_;
  const std::function<bool(const std::string&)>& skip_;
  std::set<std::pair<dev_t, ino_t>> open_;
};

/// Calls `give_up` where what is to stop has not ended a moment later: a read of a file on a node
/// that does not answer ends with the process alone. Nor does it let a signal's handler run; so
/// while this lives, signals go to a thread of its own.
class Impatience {
 public:
  explicit Impatience(const CopyStop& stop) {
    if (stop.wanted == nullptr || !stop.give_up) return;
    sigset_t signals;
    ::sigemptyset(&signals);
    for (const int signal : {SIGINT, SIGTERM, SIGHUP}) ::sigaddset(&signals, signal);
    ::pthread_sigmask(SIG_BLOCK, &signals, &before_);
    blocks_ = true;
    watcher_ = std::jthread([this, stop, signals](const std::stop_token& ended) {
      ::pthread_sigmask(SIG_UNBLOCK, &signals, nullptr);
      constexpr auto kLook = std::chrono::milliseconds(100);
      constexpr int kLooks = 10;
      MutexLock lock(mutex_);
      for (int looks = 0; looks < kLooks; looks += *stop.wanted ? 1 : 0)
        if (ended_.wait_for(mutex_, ended, kLook, [] { return false; }); ended.stop_requested())
          return;
      stop.give_up();
    });
  }

  Impatience(const Impatience&) = delete;
  ~Impatience() {
    if (blocks_) ::pthread_sigmask(SIG_SETMASK, &before_, nullptr);
  }

 private:
  sigset_t before_{};
  bool blocks_ = false;
  Mutex mutex_;
  StoppableConditionVariable ended_;
  std::jthread watcher_;  // last: it uses the rest
};

struct How {
  Progress& progress;
  bool durable;
  const std::atomic<bool>* stop;
};

Result<> copy_bytes(int source, int target, const CopyItem& item, std::span<std::byte> buffer,
                    const How& how) {
  uint64_t offset = 0;
  for (;;) {
    if (how.stop != nullptr && *how.stop) return make_error(Code::kCancelled, "interrupted");
    ssize_t got = ::read(source, buffer.data(), buffer.size());
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return errno_error(errno, "reading " + item.source);
    if (got == 0) break;
    auto data = std::span<const std::byte>(buffer.data(), static_cast<size_t>(got));
    auto written = write_exactly(target, data, offset);
    if (!written) return std::move(written).error().with_context(item.target);
    offset += data.size();
    how.progress.add(data.size());
  }
  if (offset != item.bytes)
    return make_error(Code::kCorrupt, "{} changed its size while it was copied", item.source);
  return ok();
}

Result<> copy_file(const CopyItem& item, const std::string& target_dir, std::span<std::byte> buffer,
                   const How& how) {
  const std::string path = target_dir + "/" + item.target;
  PTC_TRY(auto source, open_file(AT_FDCWD, item.source, O_RDONLY));
  ::posix_fadvise(source.get(), 0, 0, POSIX_FADV_SEQUENTIAL);
  PTC_TRY(auto target, open_file(AT_FDCWD, path, O_WRONLY | O_CREAT | O_TRUNC, item.mode));
  PTC_TRY(copy_bytes(source.get(), target.get(), item, buffer, how));
  if (how.durable && ::fsync(target.get()) != 0) return errno_error(errno, path);
  // A file system may say only here that the bytes did not arrive.
  if (::close(target.release()) != 0) return errno_error(errno, path);
  return ok();
}

/// The directories that the files are to lie in, each once.
Result<> make_directories(const CopyList& list, const std::string& target_dir) {
  std::set<std::string> directories{target_dir};
  for (const CopyItem& item : list.items)
    directories.insert(std::filesystem::path(target_dir + "/" + item.target).parent_path());
  for (const std::string& directory : directories) {
    std::error_code error;
    std::filesystem::create_directories(directory, error);
    if (error) return errno_error(error.value(), "making " + directory);
  }
  return ok();
}

}  // namespace

mode_t readers_of(mode_t mode, gid_t group) {
  return 0600 | ((mode & 0040) != 0 && group == ::getegid() ? 0060 : 0) |
         ((mode & 0004) != 0 ? 0006 : 0);
}

Result<CopyList> list_files(const std::string& directory, const std::string& prefix,
                            const std::function<bool(const std::string&)>& skip) {
  CopyList list;
  PTC_TRY(Lister(list, prefix, skip).walk(directory, "", 0666));
  return list;
}

Result<> copy_files(const CopyList& list, const std::string& target_dir, Progress& progress,
                    bool durable, const CopyStop& stop) {
  PTC_TRY(make_directories(list, target_dir));
  const Impatience watches(stop);
  struct Shared {
    Mutex mutex;
    std::optional<std::pair<size_t, Error>> first PTC_GUARDED_BY(mutex);  // of what failed
  } shared;
  std::atomic<bool> failed = false;
  const auto copy = [&](size_t i) {
    if (failed) return;
    thread_local const auto buffer = std::make_unique<std::byte[]>(kCopyBytes);
    Result<> copied = copy_file(list.items[i], target_dir, {buffer.get(), kCopyBytes},
                                {progress, durable, stop.wanted});
    if (copied.has_value()) return;
    failed = true;
    MutexLock lock(shared.mutex);
    if (!shared.first || i < shared.first->first)
      shared.first.emplace(i, std::move(copied).error());
  };
  FanOut(list.items.size(), copy, kCopiedAtOnce).finish();
  MutexLock lock(shared.mutex);
  if (shared.first) return std::move(shared.first->second);
  return ok();
}

}  // namespace ptc::cli
