// incoming/ against a local directory: one random sequence of operations on both, every result and
// errno compared.
#include <dirent.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/xattr.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "tests/fs/mount_fixture.h"

namespace ptc {
namespace {

std::string outcome(long result) {
  return result < 0 ? std::string("-") + ::strerrorname_np(errno) : std::to_string(result);
}

/// One side: does what it is told and says what came of it.
class Side {
 public:
  explicit Side(std::string root) : root_(std::move(root)) {}
  ~Side() {
    for (int fd : open_) {
      if (fd >= 0) ::close(fd);
    }
  }

  std::string open(size_t slot, const std::string& name, int flags, mode_t mode) {
    if (open_[slot] >= 0) ::close(open_[slot]);
    open_[slot] = ::open(at(name).c_str(), flags | O_NONBLOCK, mode);
    return open_[slot] < 0 ? outcome(-1) : "ok";
  }
  std::string close(size_t slot) {
    int result = ::close(open_[slot]);
    std::string text = outcome(result);
    open_[slot] = -1;
    return text;
  }
  std::string write(size_t slot, const std::string& data, off_t offset) {
    return outcome(::pwrite(open_[slot], data.data(), data.size(), offset));
  }
  std::string append(size_t slot, const std::string& data) {
    return outcome(::write(open_[slot], data.data(), data.size()));
  }
  std::string read(size_t slot, size_t size, off_t offset) {
    std::string data(size, '\0');
    ssize_t got = ::pread(open_[slot], data.data(), size, offset);
    if (got < 0) return outcome(got);
    data.resize(static_cast<size_t>(got));
    return data;
  }
  std::string map_and_write(size_t slot, size_t offset, char value) {
    struct stat stat;
    if (::fstat(open_[slot], &stat) != 0) return outcome(-1);
    if (!S_ISREG(stat.st_mode) || static_cast<size_t>(stat.st_size) <= offset) return "too short";
    void* map = ::mmap(nullptr, offset + 1, PROT_READ | PROT_WRITE, MAP_SHARED, open_[slot], 0);
    if (map == MAP_FAILED) return outcome(-1);
    static_cast<char*>(map)[offset] = value;
    ::msync(map, offset + 1, MS_SYNC);
    ::munmap(map, offset + 1);
    return "mapped";
  }
  std::string stat_open(size_t slot) {
    struct stat stat;
    return ::fstat(open_[slot], &stat) == 0 ? describe(stat) : outcome(-1);
  }
  std::string truncate_open(size_t slot, off_t size) {
    return outcome(::ftruncate(open_[slot], size));
  }
  std::string allocate(size_t slot, int mode, off_t offset, off_t size) {
    return outcome(::fallocate(open_[slot], mode, offset, size));
  }
  std::string seek(size_t slot, off_t offset, int whence) {
    struct stat stat;  // where a directory ends is each file system's own business
    if (::fstat(open_[slot], &stat) == 0 && !S_ISREG(stat.st_mode)) return "no file";
    return outcome(::lseek(open_[slot], offset, whence));
  }
  std::string sync(size_t slot) { return outcome(::fsync(open_[slot])); }
  std::string truncate(const std::string& name, off_t size) {
    return outcome(::truncate(at(name).c_str(), size));
  }
  std::string stat(const std::string& name) {
    struct stat stat;
    return ::lstat(at(name).c_str(), &stat) == 0 ? describe(stat) : outcome(-1);
  }
  std::string mkdir(const std::string& name, mode_t mode) {
    return outcome(::mkdir(at(name).c_str(), mode));
  }
  std::string rmdir(const std::string& name) { return outcome(::rmdir(at(name).c_str())); }
  std::string unlink(const std::string& name) { return outcome(::unlink(at(name).c_str())); }
  std::string rename(const std::string& from, const std::string& to, unsigned flags) {
    return outcome(::renameat2(AT_FDCWD, at(from).c_str(), AT_FDCWD, at(to).c_str(), flags));
  }
  std::string link(const std::string& from, const std::string& to) {
    return outcome(::link(at(from).c_str(), at(to).c_str()));
  }
  std::string symlink(const std::string& target, const std::string& name) {
    return outcome(::symlink(target.c_str(), at(name).c_str()));
  }
  std::string readlink(const std::string& name) {
    char target[256];
    ssize_t size = ::readlink(at(name).c_str(), target, sizeof(target));
    return size < 0 ? outcome(-1) : std::string(target, static_cast<size_t>(size));
  }
  std::string mknod(const std::string& name, mode_t mode) {
    return outcome(::mknod(at(name).c_str(), mode, 0));
  }
  std::string chmod(const std::string& name, mode_t mode) {
    return outcome(::chmod(at(name).c_str(), mode));
  }
  std::string chown(const std::string& name, uid_t uid, gid_t gid) {
    return outcome(::lchown(at(name).c_str(), uid, gid));
  }
  std::string utimens(const std::string& name, time_t seconds) {
    timespec times[2] = {{seconds, 5}, {seconds + 1, 7}};
    if (::utimensat(AT_FDCWD, at(name).c_str(), times, AT_SYMLINK_NOFOLLOW) != 0)
      return outcome(-1);
    struct stat stat;
    if (::lstat(at(name).c_str(), &stat) != 0) return outcome(-1);
    return std::to_string(stat.st_mtim.tv_sec) + "." + std::to_string(stat.st_mtim.tv_nsec);
  }
  std::string set_xattr(const std::string& name, const std::string& key, const std::string& value,
                        int flags) {
    return outcome(::lsetxattr(at(name).c_str(), key.c_str(), value.data(), value.size(), flags));
  }
  std::string get_xattr(const std::string& name, const std::string& key) {
    char value[64];
    ssize_t size = ::lgetxattr(at(name).c_str(), key.c_str(), value, sizeof(value));
    return size < 0 ? outcome(-1) : std::string(value, static_cast<size_t>(size));
  }
  std::string remove_xattr(const std::string& name, const std::string& key) {
    return outcome(::lremovexattr(at(name).c_str(), key.c_str()));
  }
  std::string list(const std::string& name) {
    DIR* dir = ::opendir(at(name).c_str());
    if (dir == nullptr) return outcome(-1);
    std::set<std::string> names;
    while (dirent* entry = ::readdir(dir)) {
      names.insert(std::string(entry->d_name) + "/" + std::to_string(entry->d_type));
    }
    ::closedir(dir);
    std::string all;
    for (const std::string& one : names) all += one + " ";
    return all;
  }
  bool is_open(size_t slot) const { return open_[slot] >= 0; }

 private:
  std::string at(const std::string& name) const {
    return name.empty() ? root_ : root_ + "/" + name;
  }
  static std::string describe(const struct stat& stat) {
    char text[128];
    bool sized = S_ISREG(stat.st_mode) || S_ISLNK(stat.st_mode);
    std::snprintf(text, sizeof(text), "mode %o nlink %lu uid %u gid %u size %ld", stat.st_mode,
                  static_cast<unsigned long>(stat.st_nlink), stat.st_uid, stat.st_gid,
                  sized ? static_cast<long>(stat.st_size) : 0L);
    return text;
  }
  const std::string root_;
  std::vector<int> open_ = std::vector<int>(4, -1);
};

class PosixTest : public MountTest {};

TEST_F(PosixTest, IncomingBehavesLikeALocalDirectory) {
  const char* given = std::getenv("PTC_TEST_SEED");
  unsigned seed = given != nullptr ? std::strtoul(given, nullptr, 10) : std::random_device()();
  SCOPED_TRACE("PTC_TEST_SEED=" + std::to_string(seed));
  RecordProperty("seed", static_cast<int>(seed));
  ::signal(SIGPIPE, SIG_IGN);  // of fifos nobody reads
  std::mt19937 random(seed);
  auto upto = [&](unsigned n) { return static_cast<unsigned>(random() % n); };

  // The same file system below both, so that what differs is ours.
  std::string local = mount_.store() + "/local", ours = job("incoming/x");
  ASSERT_EQ(::mkdir(local.c_str(), 0755), 0);
  ASSERT_EQ(::mkdir(ours.c_str(), 0755), 0);
  // Through the page cache of the mount, whole pages are written, and holes may be filled.
  bool same_holes =
      read_file(mount_.path() + "/.ptc/stats").find("\"passthrough\": true") != std::string::npos;
  Side sides[2] = {Side(local), Side(ours)};

  const std::vector<std::string> names = {"a", "b", "c", "d", "a/x", "a/y", "b/x", "b/y", "a/x/z"};
  auto name = [&] { return names[upto(names.size())]; };
  auto both = [&](const std::string& what, auto call) {
    std::string expected = call(sides[0]), got = call(sides[1]);
    EXPECT_EQ(got, expected) << what;
    return got == expected;
  };
  for (int step = 0; step < 4000 && !HasFailure(); ++step) {
    std::string n = name(), m = name();
    size_t slot = upto(4);
    unsigned number = upto(20000);
    std::string data(1 + upto(6000), static_cast<char>('a' + upto(26)));
    std::string where =
        " of step " + std::to_string(step) + ": " + n + " " + m + " " + std::to_string(number);
    switch (upto(30)) {
      case 0:
      case 1:
      case 2: {
        const int choices[] = {O_RDONLY,
                               O_RDWR,
                               O_WRONLY,
                               O_RDWR | O_CREAT,
                               O_RDWR | O_CREAT | O_EXCL,
                               O_WRONLY | O_CREAT | O_TRUNC,
                               O_RDWR | O_TRUNC,
                               O_WRONLY | O_CREAT | O_APPEND,
                               O_RDONLY | O_DIRECTORY,
                               O_RDWR | O_NOFOLLOW};
        int flags = choices[upto(10)];
        mode_t mode = upto(2) != 0 ? 0644 : 04711;
        both("open" + where + " flags " + std::to_string(flags),
             [&](Side& s) { return s.open(slot, n, flags, mode); });
        break;
      }
      case 3:
      case 4:
        if (!sides[0].is_open(slot)) break;
        both("write" + where, [&](Side& s) { return s.write(slot, data, number); });
        break;
      case 5:
        if (!sides[0].is_open(slot)) break;
        both("append" + where, [&](Side& s) { return s.append(slot, data); });
        break;
      case 6:
      case 7:
        if (!sides[0].is_open(slot)) break;
        both("read" + where, [&](Side& s) { return s.read(slot, data.size(), number); });
        break;
      case 8:
        if (!sides[0].is_open(slot)) break;
        both("fstat" + where, [&](Side& s) { return s.stat_open(slot); });
        if (same_holes) {
          both("SEEK_HOLE" + where, [&](Side& s) { return s.seek(slot, number, SEEK_HOLE); });
        }
        both("SEEK_END" + where, [&](Side& s) { return s.seek(slot, 0, SEEK_END); });
        break;
      case 9:
        if (!sides[0].is_open(slot)) break;
        both("ftruncate" + where, [&](Side& s) { return s.truncate_open(slot, number); });
        break;
      case 10:
        if (!sides[0].is_open(slot)) break;
        both("mmap" + where, [&](Side& s) { return s.map_and_write(slot, number, 'M'); });
        break;
      case 11:
        if (!sides[0].is_open(slot)) break;
        both("fsync" + where, [&](Side& s) { return s.sync(slot); });
        break;
      case 12:
        if (!sides[0].is_open(slot)) break;
        both("close" + where, [&](Side& s) { return s.close(slot); });
        break;
      case 13: {
        if (!sides[0].is_open(slot)) break;
        int mode = upto(2) != 0 ? 0 : FALLOC_FL_KEEP_SIZE;
        both("fallocate" + where, [&](Side& s) { return s.allocate(slot, mode, number, 5000); });
        break;
      }
      case 14:
        both("truncate" + where, [&](Side& s) { return s.truncate(n, number); });
        break;
      case 15:
      case 16:
        both("mkdir" + where, [&](Side& s) { return s.mkdir(n, 0750); });
        break;
      case 17:
        both("rmdir" + where, [&](Side& s) { return s.rmdir(n); });
        break;
      case 18:
        both("unlink" + where, [&](Side& s) { return s.unlink(n); });
        break;
      case 19:
      case 20: {
        const unsigned choices[] = {0, RENAME_NOREPLACE, RENAME_EXCHANGE};
        unsigned flags = choices[upto(3)];
        both("rename" + where + " flags " + std::to_string(flags),
             [&](Side& s) { return s.rename(n, m, flags); });
        break;
      }
      case 21:
        both("link" + where, [&](Side& s) { return s.link(n, m); });
        break;
      case 22:
        both("symlink" + where, [&](Side& s) { return s.symlink(m, n); });
        break;
      case 23:
        both("readlink" + where, [&](Side& s) { return s.readlink(n); });
        break;
      case 24: {
        mode_t type = upto(2) != 0 ? S_IFIFO : S_IFREG;
        both("mknod" + where, [&](Side& s) { return s.mknod(n, type | 0600); });
        break;
      }
      case 25: {
        mode_t mode = upto(4096);
        both("chmod" + where, [&](Side& s) { return s.chmod(n, mode); });
        both("stat after chmod" + where, [&](Side& s) { return s.stat(n); });
        break;
      }
      case 26:
        both("chown" + where, [&](Side& s) { return s.chown(n, number, number + 1); });
        both("stat after chown" + where, [&](Side& s) { return s.stat(n); });
        break;
      case 27:
        both("utimens" + where, [&](Side& s) { return s.utimens(n, number); });
        break;
      case 28: {
        std::string key = upto(2) != 0 ? "user.one" : "user.two";
        int flags = static_cast<int>(upto(3));
        both("setxattr" + where,
             [&](Side& s) { return s.set_xattr(n, key, data.substr(0, 20), flags); });
        both("getxattr" + where, [&](Side& s) { return s.get_xattr(n, key); });
        if (upto(3) == 0) {
          both("removexattr" + where, [&](Side& s) { return s.remove_xattr(n, key); });
        }
        break;
      }
      default: {
        std::string directory = upto(2) != 0 ? "a" : "";
        both("stat" + where, [&](Side& s) { return s.stat(n); });
        both("list" + where, [&](Side& s) { return s.list(directory); });
      }
    }
  }
}

TEST_F(PosixTest, NamesThatAreTooLong) {
  EXPECT_EQ(errno_of(::mkdir(job("incoming/" + std::string(256, 'n')).c_str(), 0755)),
            ENAMETOOLONG);
  EXPECT_EQ(errno_of(::mkdir(job("incoming/" + std::string(255, 'n')).c_str(), 0755)), 0);
  EXPECT_EQ(errno_of(::mkdir((mount_.path() + "/" + std::string(256, 'j')).c_str(), 0755)),
            ENAMETOOLONG);
}

}  // namespace
}  // namespace ptc
