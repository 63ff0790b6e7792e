#include "fs/mount/store_place.h"

#include <fcntl.h>
#include <linux/magic.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <sys/sysinfo.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <thread>

#include "fs/mount/mount_point.h"
#include "store/base/file.h"
#include "store/base/size_text.h"

namespace ptc {
namespace {

// A daemon that was just unmounted still has the store for a moment.
constexpr std::chrono::seconds kDaemonEndsWithin{5};

Error store_in_use(const std::string& directory) {
  return make_error(Code::kBusy, "{} is in use; stop the daemon first (umount the mount point)",
                    directory);
}

/// Makes it where it is not there.
Result<std::string> absolute_directory(const std::string& path, std::vector<std::string>* made) {
  if (const auto around = mounted_around(path); around && around->type == "fuse.ptcfs")
    return invalid_argument(
        "the store {} would lie in the ptcfs that is mounted on {}, which keeps its own files "
        "elsewhere; give another --store",
        path, around->mount_point);
  std::error_code error;
  std::filesystem::path missing = std::filesystem::absolute(path, error).lexically_normal();
  if (!missing.has_filename()) missing = missing.parent_path();  // "store/"
  for (; !std::filesystem::exists(missing, error) && !error; missing = missing.parent_path())
    made->push_back(missing.string());
  std::filesystem::create_directories(path, error);
  if (error) return errno_error(error.value(), "store directory " + path);
  auto result = std::filesystem::canonical(path, error);
  if (error) return errno_error(error.value(), "store directory " + path);
  return result.string();
}

constexpr const char* kTmpfsSource = "ptcfs-store";  // how one of ours is told from others

bool tmpfs_on(const std::string& directory) {
  auto mounted = mounted_on(directory);
  return mounted && mounted->type == "tmpfs" && mounted->source == kTmpfsSource;
}

uint64_t size_of(const std::string& directory) {
  struct statfs space = {};
  return ::statfs(directory.c_str(), &space) == 0
             ? static_cast<uint64_t>(space.f_blocks) * static_cast<uint64_t>(space.f_bsize)
             : 0;
}

Result<> mount_tmpfs(const std::string& directory, uint64_t bytes, StorePlace* place) {
  std::string options = fmt::format("mode=0700,size={}", bytes);
  std::string huge = options + ",huge=within_size";  // 1.5 times the speed of reading
  unsigned long flags = MS_NOSUID | MS_NODEV | MS_NOEXEC;
  if (::mount(kTmpfsSource, directory.c_str(), "tmpfs", flags, huge.c_str()) == 0) return ok();
  if (errno == EINVAL &&
      ::mount(kTmpfsSource, directory.c_str(), "tmpfs", flags, options.c_str()) == 0) {
    place->note = "the kernel gives no huge pages to tmpfs; reading will be slower";
    return ok();
  }
  return errno_error(errno, "mounting a tmpfs on " + directory);
}

Result<> resize_tmpfs(const std::string& directory, uint64_t bytes) {
  std::string options = fmt::format("size={}", bytes);
  unsigned long flags = MS_REMOUNT | MS_NOSUID | MS_NODEV | MS_NOEXEC;
  if (::mount(kTmpfsSource, directory.c_str(), "tmpfs", flags, options.c_str()) == 0) return ok();
  if (errno == EINVAL) {
    return invalid_argument(
        "the store on {} holds more than {}; give a larger --memory, or remove "
        "checkpoints first",
        directory, format_size(bytes));
  }
  return errno_error(errno, "resizing the tmpfs on " + directory);
}

/// A directory that only this user can have made or can read.
Result<> own_directory(const std::string& path, std::vector<std::string>* made) {
  if (::mkdir(path.c_str(), 0700) == 0) {
    made->insert(made->begin(), path);
  } else if (errno != EEXIST) {
    return errno_error(errno, path);
  }
  struct stat stat = {};
  if (::lstat(path.c_str(), &stat) != 0) return errno_error(errno, path);
  if (!S_ISDIR(stat.st_mode) || stat.st_uid != ::geteuid() || (stat.st_mode & 077) != 0) {
    return make_error(
        Code::kPermissionDenied,
        "{} is not a directory of this user with mode 0700; give another with --store", path);
  }
  return ok();
}

/// Where a user who may not mount a tmpfs keeps things: in memory all the same.
Result<std::string> users_base(std::vector<std::string>* made) {
  std::string base = fmt::format("/dev/shm/ptcfs-{}", ::geteuid());
  if (::access("/dev/shm", W_OK) != 0) {
    const char* runtime = std::getenv("XDG_RUNTIME_DIR");
    if (runtime == nullptr || *runtime == '\0') {
      return make_error(Code::kPermissionDenied,
                        "neither /dev/shm nor XDG_RUNTIME_DIR can be written; give --store DIR");
    }
    base = std::string(runtime) + "/ptcfs";
  }
  PTC_TRY(own_directory(base, made));
  return base;
}

Result<std::string> users_directory(const std::string& escaped, std::vector<std::string>* made) {
  PTC_TRY(const std::string base, users_base(made));
  std::string directory = base + "/" + escaped;
  PTC_TRY(own_directory(directory, made));
  return directory;
}

std::string default_tmpfs(const std::string& mount_point) {
  return "/run/ptcfs/" + escape_path(mount_point);
}

std::string note_of_size(uint64_t bytes) {
  if (bytes <= memory_of_machine()) return "";
  return fmt::format(
      "--memory {} is more than the {} of this machine: what is beyond goes to swap, and where "
      "there is none the kernel ends processes",
      format_size(bytes), format_size(memory_of_machine()));
}

Result<> prepare(const StorePlaceOptions& options, StorePlace& place) {
  bool root = ::geteuid() == 0;
  if (!options.directory.empty() && !options.memory_bytes) {
    PTC_TRY(place.directory, absolute_directory(options.directory, &place.made));
    place.is_tmpfs = tmpfs_on(place.directory);
    struct statfs space = {};
    place.in_memory = ::statfs(place.directory.c_str(), &space) == 0 && space.f_type == TMPFS_MAGIC;
    return ok();
  }
  if (!root && options.directory.empty()) {
    PTC_TRY(place.directory, users_directory(escape_path(options.mount_point), &place.made));
    place.in_memory = true;
    place.note =
        fmt::format("not root, so no tmpfs of its own: keeping everything in {}{}", place.directory,
                    options.memory_bytes ? "; --memory does not limit it" : "");
    return ok();
  }
  PTC_TRY(place.directory,
          absolute_directory(
              options.directory.empty() ? default_tmpfs(options.mount_point) : options.directory,
              &place.made));
  place.in_memory = place.is_tmpfs = true;
  if (tmpfs_on(place.directory)) {
    // Block counts are of whole pages.
    if (options.memory_bytes && (size_of(place.directory) >> 12) != (*options.memory_bytes >> 12)) {
      PTC_TRY(resize_tmpfs(place.directory, *options.memory_bytes));
      place.note = note_of_size(*options.memory_bytes);
    }
    return ok();
  }
  std::error_code error;
  if (!std::filesystem::is_empty(place.directory, error)) {
    return make_error(Code::kAlreadyExists,
                      "{} is not empty, and a tmpfs on it would hide what is there; leave out "
                      "--memory to use it as it is, or give another --store",
                      place.directory);
  }
  const uint64_t bytes = options.memory_bytes.value_or(memory_of_machine() / 2);
  PTC_TRY(mount_tmpfs(place.directory, bytes, &place));
  place.is_new = true;
  place.note = note_of_size(bytes);
  return ok();
}

}  // namespace

Result<StorePlace> prepare_store_place(const StorePlaceOptions& options) {
  StorePlace place;
  auto prepared = prepare(options, place);
  if (prepared) return place;
  take_back_store_place(options, place);
  return std::move(prepared).error();
}

void take_back_store_place(const StorePlaceOptions& options, const StorePlace& place) {
  if (place.is_new) (void)discard_store_place(options);
  std::error_code error;
  const bool is_ours = !place.made.empty() && !place.directory.empty() &&
                       std::filesystem::canonical(place.made.front(), error) == place.directory;
  if (is_ours && !tmpfs_on(place.directory)) {
    // Another daemon may have begun there meanwhile.
    auto lock_fd = open_file(AT_FDCWD, place.directory + "/lock", O_RDWR);
    auto locked =
        lock_fd ? lock_file(lock_fd.value().get(), std::chrono::seconds(0)) : Result<bool>(false);
    if (locked && locked.value()) (void)remove_tree(AT_FDCWD, place.directory);
  }
  for (const std::string& made : place.made) ::rmdir(made.c_str());
}

std::string pages_socket(const std::string& mount_point) {
  // A socket's path is short. No mount point is escaped to a name that begins with a dot.
  const std::string name = fmt::format("/.pages.{:016x}", std::hash<std::string>()(mount_point));
  if (::geteuid() == 0) {
    ::mkdir("/run/ptcfs", 0755);
    return "/run/ptcfs" + name;
  }
  std::vector<std::string> made;
  const auto base = users_base(&made);
  return base ? base.value() + name : std::string();
}

uint64_t memory_of_machine() {
  struct sysinfo info = {};
  ::sysinfo(&info);
  return uint64_t{info.totalram} * info.mem_unit;
}

Result<std::string> discard_store_place(const StorePlaceOptions& options) {
  std::string directory = options.directory;
  if (directory.empty()) {
    directory = default_tmpfs(options.mount_point);
    if (::geteuid() != 0) {
      std::vector<std::string> made;
      PTC_TRY(directory, users_directory(escape_path(options.mount_point), &made));
      if (auto lock_fd = open_file(AT_FDCWD, directory + "/lock", O_RDWR)) {
        PTC_TRY(bool locked, lock_file(lock_fd.value().get(), kDaemonEndsWithin));
        if (!locked) return store_in_use(directory);
      }
      PTC_TRY(remove_tree(AT_FDCWD, directory));
      return directory;
    }
  }
  char* resolved = ::realpath(directory.c_str(), nullptr);
  if (resolved == nullptr) {
    return make_error(Code::kNotFound, "{} has no store: {} does not exist", options.mount_point,
                      directory);
  }
  directory = resolved;
  std::free(resolved);
  if (!tmpfs_on(directory)) {
    if (options.directory.empty()) {
      ::rmdir(directory.c_str());
      return make_error(Code::kNotFound, "{} has no store: nothing is mounted on {}",
                        options.mount_point, directory);
    }
    return invalid_argument(
        "{} is a directory of yours, not a tmpfs of ptcfs; remove it with rm -r", directory);
  }
  const auto deadline = std::chrono::steady_clock::now() + kDaemonEndsWithin;
  while (::umount2(directory.c_str(), UMOUNT_NOFOLLOW) != 0) {
    if (errno != EBUSY) return errno_error(errno, "unmounting " + directory);
    if (std::chrono::steady_clock::now() >= deadline) return store_in_use(directory);
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
  if (options.directory.empty()) ::rmdir(directory.c_str());
  return directory;
}

}  // namespace ptc
