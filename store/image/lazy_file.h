// Files of one directory that are known for long, and open only while they are used and for a while
// after.
#pragma once

#include <sys/stat.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "store/base/error.h"
#include "store/base/file.h"
#include "store/base/mutex.h"

namespace ptc {

class LazyFile;

/// Of a name under which a file is kept that was removed while it was in use.
inline constexpr std::string_view kRemovedSuffix = ".removed";

/// The directory, and those of its files that are open: besides those in use `most_open`, which are
/// closed in the order of a clock with a second chance. Threads: any. What is open already is used
/// without its mutex.
class LazyFiles {
 public:
  /// Hears, from any thread, of so many bytes of a file that has neither a name nor a user any
  /// more.
  using Gone = std::function<void(uint64_t bytes)>;
  /// `path` is the directory's, for messages.
  LazyFiles(UniqueFd directory, std::string path, size_t most_open, Gone gone = nullptr)
      : directory_(std::move(directory)),
        path_(std::move(path)),
        most_open_(most_open),
        gone_(std::move(gone)) {}
  int directory() const { return directory_.get(); }
  const std::string& path() const { return path_; }
  /// How many are open now, with those that stay so because they have no name (LazyFile::remove).
  size_t open_files() const;

 private:
  friend class LazyFile;
  void add(LazyFile& file, UniqueFd fd);  // one user has it then
  /// Some are open beyond `most_open_`: this one is to be closed, unless it is in use.
  void close_unused(LazyFile& file);
  /// Frees a descriptor. false: all are in use.
  bool close_any();
  /// Whether it may be open for good; as many as half of `most_open_` may.
  bool keep_open(LazyFile& file);
  void forget(LazyFile& file);
  UniqueFd try_close(LazyFile& file) PTC_REQUIRES(mutex_);     // invalid: it is in use
  UniqueFd close_next(size_t looked_at) PTC_REQUIRES(mutex_);  // of so many at most
  void take_out(LazyFile& file) PTC_REQUIRES(mutex_);

  const UniqueFd directory_;
  const std::string path_;
  const size_t most_open_;
  const Gone gone_;  // may be null
  mutable Mutex mutex_;
  std::vector<LazyFile*> open_ PTC_GUARDED_BY(mutex_);  // the clock's face, in any order
  size_t hand_ PTC_GUARDED_BY(mutex_) = 0;              // position in open_
  size_t kept_ PTC_GUARDED_BY(mutex_) = 0;              // those of keep_open()
  std::atomic<bool> over_{false};  // open_ has more than most_open_; written with the mutex held
};
using LazyFilesRef = std::shared_ptr<LazyFiles>;

/// A descriptor, lent. The file outlives it.
class FileInUse {
 public:
  FileInUse(FileInUse&& other) noexcept
      : file_(std::exchange(other.file_, nullptr)), fd_(other.fd_) {}
  FileInUse& operator=(FileInUse&&) = delete;
  ~FileInUse();
  int fd() const { return fd_; }

 private:
  friend class LazyFile;
  FileInUse(LazyFile* file, int fd) : file_(file), fd_(fd) {}
  LazyFile* file_;
  int fd_;
};

/// One file. It is the one that was found, whatever the directory holds under its name later
/// (by inode and birth; where the file system knows none, whatever has the name).
/// Threads: any.
class LazyFile {
 public:
  enum class Access { kRead, kWrite };  // kWrite: reads, too
  /// A regular file, and its size; takes no descriptor. kNotFound; kCorrupt: it is something else.
  static Result<std::unique_ptr<LazyFile>> find(LazyFilesRef files, std::string name,
                                                Access access = Access::kRead);
  ~LazyFile();
  LazyFile(const LazyFile&) = delete;
  LazyFile& operator=(const LazyFile&) = delete;

  uint64_t bytes() const { return bytes_; }  // when it was found
  /// Open until the result goes. kCorrupt: its name is gone, or another file has it. Where no
  /// descriptor is to be had, one of a file that is not in use is closed; if there is none, the
  /// error has EMFILE or ENFILE.
  Result<FileInUse> use();
  /// `fd` is of this very file, and may do what this may; the file was not used before. Spares the
  /// first use an open.
  void open_as(UniqueFd fd);
  /// It has another name from now on. kNotFound: it was removed, and gets none any more.
  Result<> rename(const std::string& to);
  /// It has no name any more, and can be used as before: it stays open, or where enough do, or no
  /// descriptor is left, has the name <name>.removed as long as this object lives. Not there: ok.
  Result<> remove();

 private:
  friend class LazyFiles;
  friend class FileInUse;
  static constexpr uint32_t kOpen = 1u << 31;
  static constexpr size_t kNowhere = SIZE_MAX;

  LazyFile(LazyFilesRef files, std::string name, Access access, const struct statx& found);
  Result<FileInUse> open_and_use() PTC_REQUIRES(mutex_);
  Result<UniqueFd> open() const PTC_REQUIRES(mutex_);
  void release();

  const LazyFilesRef files_;
  const Access access_;
  const uint64_t bytes_;
  const std::tuple<uint64_t, int64_t, uint32_t>
      identity_;  // inode, second and nanosecond of its birth; zeros: not known
  /// Users, and kOpen while fd_ is a descriptor. Only from kOpen and no user it goes to 0, with
  /// files_->mutex_ held.
  std::atomic<uint32_t> users_{0};
  std::atomic<bool> used_again_{false};      // since the clock's hand came by
  int fd_ = -1;                              // guarded by files_->mutex_; read by its users, too
  size_t position_ = kNowhere;               // guarded by files_->mutex_: in its open_
  bool kept_ = false;                        // guarded by files_->mutex_
  Mutex mutex_;                              // one thread opens it
  std::string name_ PTC_GUARDED_BY(mutex_);  // empty: none any more
  bool removed_ PTC_GUARDED_BY(mutex_) = false;  // the name goes with this
};

}  // namespace ptc
