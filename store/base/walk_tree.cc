#include "store/base/walk_tree.h"

#include <dirent.h>
#include <fcntl.h>
#include <fmt/format.h>

#include <cerrno>
#include <memory>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "store/base/file.h"

namespace ptc {
namespace {

constexpr int kHow = O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK;

/// Down by names and up by "..", after which it looks whether that is where it came from: a
/// directory that was moved has another. Then the way down is gone again from the top, as far as
/// it is the same.
class TreeWalk {
 public:
  explicit TreeWalk(const TreeVisitor& visit) : visit_(visit) {}

  Result<> run(int dir_fd) {
    UniqueFd top(::openat(dir_fd, ".", kHow));
    const int top_reason = errno;
    top_ = dir_fd;
    if (!enter(std::move(top), top_reason, ".")) return std::move(first_error_);
    while (!enough_ && !way_.empty()) {
      Level& level = way_.back();
      if (level.below.empty()) {
        go_up();
        continue;
      }
      const std::string name = std::move(level.below.back());
      level.below.pop_back();
      UniqueFd below(::openat(here_.get(), name.c_str(), kHow));
      const int reason = errno;
      enter(std::move(below), reason, name);
    }
    return std::move(first_error_);
  }

 private:
  using Identity = std::pair<dev_t, ino_t>;
  struct Level {
    std::string name;
    Identity identity;
    std::vector<std::string> below;  // directories in it, still to be entered
  };

  static Identity identity_of(int fd) {
    struct stat facts = {};
    return ::fstat(fd, &facts) == 0 ? Identity{facts.st_dev, facts.st_ino} : Identity{0, 0};
  }

  void note(int reason, const char* what) {
    const bool gone = reason == ENOENT || reason == ENOTDIR || reason == ELOOP;
    if (!gone && first_error_.has_value()) first_error_ = errno_error(reason, what);
  }

  /// false: it is left out.
  bool enter(UniqueFd dir, int reason, const std::string& name) {
    if (!dir.valid()) {
      note(reason, "opening a directory");
      return false;
    }
    Level level{name, identity_of(dir.get()), {}};
    if (!entered_.insert(level.identity).second) return false;  // moved to where it comes up again
    read(dir.get(), level);
    here_ = std::move(dir);
    way_.push_back(std::move(level));
    return true;
  }

  void read(int dir, Level& level) {
    UniqueFd copy(::fcntl(dir, F_DUPFD_CLOEXEC, 0));
    std::unique_ptr<DIR, int (*)(DIR*)> stream(copy.valid() ? ::fdopendir(copy.get()) : nullptr,
                                               &::closedir);
    if (!stream) return note(errno, "reading a directory");
    (void)copy.release();  // now the stream's
    while (!enough_) {
      errno = 0;
      const dirent* entry = ::readdir(stream.get());
      if (entry == nullptr) {
        if (errno != 0) note(errno, "reading a directory");
        return;
      }
      const std::string_view name = entry->d_name;
      if (name == "." || name == "..") continue;
      struct stat facts = {};
      if (::fstatat(dir, entry->d_name, &facts, AT_SYMLINK_NOFOLLOW) != 0) {
        note(errno, "stat");
        continue;
      }
      enough_ = !visit_(dir, entry->d_name, facts);
      if (S_ISDIR(facts.st_mode)) level.below.emplace_back(name);
    }
  }

  void go_up() {
    way_.pop_back();
    if (way_.empty()) return;
    UniqueFd above(::openat(here_.get(), "..", kHow));
    if (above.valid() && identity_of(above.get()) == way_.back().identity) here_ = std::move(above);
    else go_down_again();
  }

  /// To the end of the way, or as far as that is where it was.
  void go_down_again() {
    here_ = UniqueFd(::openat(top_, ".", kHow));
    for (size_t i = 1; i < way_.size(); ++i) {
      UniqueFd below(::openat(here_.get(), way_[i].name.c_str(), kHow));
      if (!below.valid() || identity_of(below.get()) != way_[i].identity) {
        if (!below.valid()) note(errno, "opening a directory");
        way_.resize(i);
        return;
      }
      here_ = std::move(below);
    }
  }

  const TreeVisitor& visit_;
  int top_ = -1;
  UniqueFd here_;           // the last of way_
  std::vector<Level> way_;  // from the top
  std::set<Identity> entered_;
  bool enough_ = false;
  Result<> first_error_ = ok();
};

}  // namespace

Result<> walk_tree(int dir_fd, const TreeVisitor& visit) { return TreeWalk(visit).run(dir_fd); }

}  // namespace ptc
