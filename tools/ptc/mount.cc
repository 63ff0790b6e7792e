#include "tools/ptc/mount.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <boost/json/array.hpp>
#include <boost/json/object.hpp>
#include <boost/json/serialize.hpp>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <optional>
#include <set>
#include <thread>

#include "fs/mount/mount_point.h"
#include "store/base/file.h"
#include "store/base/shell_word.h"
#include "tools/ptc/fields.h"

namespace ptc::cli {
namespace {

constexpr size_t kMaxJsonBytes = size_t{1} << 30;
constexpr size_t kMaxAnswerBytes = size_t{256} << 20;

bool is_mount_top(const std::string& dir) {
  struct stat info {};
  return ::stat((dir + "/.ptc/version").c_str(), &info) == 0 && S_ISREG(info.st_mode);
}

/// The mount that `path` (absolute, lexically normal) is in or would be in.
std::optional<std::string> enclosing_mount(std::filesystem::path path) {
  for (;; path = path.parent_path()) {
    if (is_mount_top(path.string())) return path.string();
    if (path == path.parent_path()) return std::nullopt;
  }
}

/// False: it is another user's, without allow_other, or in a directory that is closed. Of what the
/// kernel knows by itself: a daemon that does not answer is not waited for.
bool may_enter(const std::string& mount_point) {
  struct statx facts {};
  return ::statx(AT_FDCWD, mount_point.c_str(), AT_STATX_DONT_SYNC, STATX_TYPE, &facts) == 0 ||
         errno == ENOTCONN;
}

/// Mount points of type fuse.ptcfs, each once.
struct Mounted {
  std::vector<std::string> points;  // that this user may enter
  size_t of_others = 0;
};
Mounted mounted() {
  std::set<std::string> seen;
  Mounted found;
  auto entries = mounted_file_systems();
  if (!entries) return found;
  for (const MountEntry& entry : entries.value()) {
    if (entry.type != "fuse.ptcfs" || !seen.insert(entry.mount_point).second) continue;
    if (may_enter(entry.mount_point)) found.points.push_back(entry.mount_point);
    else ++found.of_others;
  }
  return found;
}

Error no_mount_at(const std::string& dir, std::string_view named_by) {
  struct stat info {};
  if (int failed = stat_alive(dir, info); failed != 0) {
    if (failed == ENOTCONN) {
      return make_error(Code::kUnavailable,
                        "the daemon behind {} is gone; unmount it (umount {}) and start it again "
                        "(ptcfs … {})",
                        dir, shell_word(dir), shell_word(dir));
    }
    return errno_error(failed, fmt::format("{} ({})", dir, named_by));
  }
  return make_error(Code::kNotFound, "{} ({}) is not in a ptcfs mount: it has no .ptc/version", dir,
                    named_by);
}

Result<std::string> mount_around(const std::string& dir, std::string_view named_by) {
  std::error_code error;
  auto path = std::filesystem::absolute(dir, error).lexically_normal();
  if (!path.has_filename() && path.has_relative_path()) path = path.parent_path();
  if (auto found = enclosing_mount(path)) return *found;
  return no_mount_at(dir, named_by);
}

bool is_path(std::string_view text) {
  return text.starts_with('/') || text == "." || text == ".." || text.starts_with("./") ||
         text.starts_with("../");
}

std::vector<std::string> components_of(const std::filesystem::path& path) {
  std::vector<std::string> parts;
  for (const auto& part : path) {
    if (!part.empty() && part != "/" && part != ".") parts.push_back(part.string());
  }
  return parts;
}

Result<> check_job_exists(const Target& target) {
  struct stat info {};
  if (::stat((target.job_dir() + "/status.json").c_str(), &info) == 0) return ok();
  if (errno != ENOENT && errno != ENOTDIR) return errno_error(errno, target.job_dir());
  if (::stat(target.job_dir().c_str(), &info) == 0)
    return make_error(
        Code::kUnavailable,
        "job {} is half removed: rm -r {} completes that, or, where other nodes have files in "
        "it, ptc rm --force {} once its files are back, a minute after the last of them was "
        "removed",
        target.job, shell_word(target.job_dir()), target.job);
  auto jobs = list_jobs(target.mount);
  std::string hint;
  if (jobs && jobs.value().empty()) hint = "; there is none yet (mkdir makes one)";
  if (jobs) {
    if (auto near = nearest_name(target.job, jobs.value()))
      hint = fmt::format("; is it '{}'?", *near);
  }
  return make_error(Code::kNotFound, "no job '{}' in {}{}", target.job, target.mount, hint);
}

/// What `inside` means in the mount; `text`: as the user called it.
Result<Target> target_in(std::string mount, const std::filesystem::path& inside,
                         const std::string& text) {
  Target target;
  target.mount = std::move(mount);
  const std::vector<std::string> parts = components_of(inside);
  if (parts.empty() || parts[0] == ".." || parts[0] == ".ptc")
    return invalid_argument("'{}' names no job", text);
  target.job = parts[0];
  if (parts.size() >= 3 && parts[1] == "checkpoints") {
    target.checkpoint = parts[2];
  } else if (parts.size() == 2 && parts[1] != "checkpoints" && parts[1] != "current") {
    target.checkpoint = parts[1];
  } else if (parts.size() > 2) {
    return invalid_argument("'{}' is neither a job nor a checkpoint", text);
  }
  return target;
}

Result<Target> target_of_path(const std::string& text) {
  PTC_TRY(auto mount, mount_around(text, "the job's path"));
  auto path = std::filesystem::absolute(text).lexically_normal();
  auto inside = path.lexically_relative(mount);
  return target_in(std::move(mount), inside, text);
}

Result<Target> target_of_name(const std::string& mount_option, const std::string& text) {
  PTC_TRY(auto mount, find_mount(mount_option));
  return target_in(std::move(mount), std::filesystem::path(text).lexically_normal(), text);
}

std::string dirname_of_current(const std::string& link) {  // checkpoints/<name>/layouts/<layout>
  auto parts = components_of(std::filesystem::path(link));
  return parts.size() >= 2 && parts[0] == "checkpoints" ? parts[1] : "";
}

Result<std::string> newest_checkpoint(const Target& target) {
  PTC_TRY(auto status, read_json_file(target.job_dir() + "/status.json"));
  const json::array& checkpoints = array_field(status, "checkpoints");  // by time of commit
  if (checkpoints.empty() || !checkpoints.back().is_object()) return std::string();
  return text_field(checkpoints.back().get_object(), "name");
}

}  // namespace

Result<std::string> find_mount(const std::string& option) {
  if (!option.empty()) return mount_around(option, "given with -C");
  const char* variable = std::getenv("PTC_MOUNT");
  if (variable != nullptr && *variable != '\0') return mount_around(variable, "from PTC_MOUNT");

  std::error_code error;
  auto here = std::filesystem::current_path(error);
  if (!error) {
    if (auto found = enclosing_mount(here)) return *found;
  }
  const auto [points, of_others] = mounted();
  if (points.size() == 1) {
    if (is_mount_top(points[0])) return points[0];
    return no_mount_at(points[0], "the only ptcfs mount");
  }
  if (is_mount_top("/mnt/ptc")) return std::string("/mnt/ptc");
  if (points.size() > 1) {
    return make_error(Code::kNotFound,
                      "there are {} ptcfs mounts: {}. Say which: -C DIR, or PTC_MOUNT=DIR",
                      points.size(), fmt::join(points, ", "));
  }
  if (of_others > 0)
    return make_error(Code::kNotFound,
                      "no ptcfs is mounted that this user may enter: {} of other users {} (their "
                      "-o allow_other lets others in)",
                      of_others, of_others == 1 ? "is" : "are");
  return make_error(Code::kNotFound,
                    "no ptcfs is mounted. Mount one (ptcfs MOUNTPOINT, see ptcfs --help); where it "
                    "cannot be found by itself, name it: -C DIR, or PTC_MOUNT=DIR");
}

Result<Target> find_target(const std::string& mount_option, const std::string& text,
                           bool may_be_new) {
  auto target = is_path(text) ? target_of_path(text) : target_of_name(mount_option, text);
  if (may_be_new || (!target && is_path(text))) return target;
  Result<> there = target ? check_job_exists(target.value()) : Result<>(target.error());
  if (there) return target;
  // In a job's directory, what is there may be called as ls calls it.
  struct stat info {};
  if (!is_path(text) && ::stat(text.c_str(), &info) == 0) {
    auto meant = target_of_path(text);
    const bool may_be_there =
        mount_option.empty() || (target && meant && meant.value().mount == target.value().mount);
    if (meant && may_be_there && check_job_exists(meant.value())) return meant;
  }
  return std::move(there).error();
}

Result<Target> find_job(const std::string& mount_option, const std::string& text, bool may_be_new) {
  PTC_TRY(auto target, find_target(mount_option, text, may_be_new));
  if (!target.checkpoint.empty())
    return invalid_argument("'{}' names a checkpoint; a job is meant here, such as {}", text,
                            target.job);
  return target;
}

Result<Target> with_checkpoint(Target target) {
  if (target.checkpoint.empty()) {
    std::error_code error;
    auto link = std::filesystem::read_symlink(target.job_dir() + "/current", error);
    if (!error) target.checkpoint = dirname_of_current(link.string());
    // One that was written in another layout is not current before its first reshard is done.
    if (target.checkpoint.empty()) {
      PTC_TRY(target.checkpoint, newest_checkpoint(target));
    }
    if (target.checkpoint.empty())
      return make_error(Code::kNotFound, "job '{}' has no checkpoint yet", target.job);
    return target;
  }
  struct stat info {};
  if (::stat(target.checkpoint_dir().c_str(), &info) == 0) return target;
  if (errno != ENOENT) return errno_error(errno, target.checkpoint_dir());
  PTC_TRY(auto names, list_directory(target.job_dir() + "/checkpoints"));
  return make_error(Code::kNotFound, "job '{}' has no checkpoint '{}'; it has {}", target.job,
                    target.checkpoint,
                    names.empty() ? "none" : fmt::format("{}", fmt::join(names, ", ")));
}

Result<std::vector<std::string>> list_directory(const std::string& path) {
  std::unique_ptr<DIR, int (*)(DIR*)> dir(::opendir(path.c_str()), &::closedir);
  if (!dir) return errno_error(errno, path);
  std::vector<std::string> names;
  for (;;) {
    errno = 0;
    dirent* entry = ::readdir(dir.get());
    if (entry == nullptr) break;
    if (entry->d_name[0] != '.') names.emplace_back(entry->d_name);
  }
  if (errno != 0) return errno_error(errno, "reading directory " + path);
  std::sort(names.begin(), names.end());
  return names;
}

Result<std::vector<std::string>> list_jobs(const std::string& mount) {
  return list_directory(mount);
}

Result<json::object> read_json_file(const std::string& path) {
  PTC_TRY(auto text, read_text_file(AT_FDCWD, path, kMaxJsonBytes));
  auto value = parse_json(text, {.max_bytes = kMaxJsonBytes, .max_depth = 32});
  if (!value) return std::move(value).error().with_context(path);
  if (!value.value().is_object()) return make_error(Code::kCorrupt, "{}: not a JSON object", path);
  return std::move(value.value().get_object());
}

Result<json::object> ask(const std::string& mount, const json::object& request,
                         std::chrono::milliseconds patience) {
  std::string path = mount + "/.ptc/ask";
  PTC_TRY(auto fd, open_file(AT_FDCWD, path, O_RDWR));
  std::string text = json::serialize(request);
  ssize_t put = ::write(fd.get(), text.data(), text.size());
  // The daemon works on a few questions at once; others wait for their turn.
  const auto until = std::chrono::steady_clock::now() + patience;
  while (put < 0 && errno == EAGAIN && std::chrono::steady_clock::now() < until) {
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    put = ::write(fd.get(), text.data(), text.size());
  }
  if (put != static_cast<ssize_t>(text.size()))
    return errno_error(put < 0 ? errno : EIO, "asking the daemon through " + path);
  std::string answer;
  for (;;) {
    size_t old_size = answer.size();
    answer.resize(old_size + (64 << 10));
    ssize_t got =
        ::pread(fd.get(), answer.data() + old_size, 64 << 10, static_cast<off_t>(old_size));
    if (got < 0 && errno == ESPIPE) got = ::read(fd.get(), answer.data() + old_size, 64 << 10);
    if (got < 0 && errno != EINTR) return errno_error(errno, "reading the answer from " + path);
    answer.resize(old_size + (got > 0 ? static_cast<size_t>(got) : 0));
    if (got == 0) break;
    if (answer.size() > kMaxAnswerBytes)
      return make_error(Code::kCorrupt, "the daemon's answer is too long");
  }
  auto value = parse_json(answer, {.max_bytes = kMaxAnswerBytes, .max_depth = 32});
  if (!value) return std::move(value).error().with_context("the daemon's answer");
  if (!value.value().is_object())
    return make_error(Code::kCorrupt, "the daemon's answer is not a JSON object");
  const json::object& object = value.value().get_object();
  if (bool_field(object, "ok")) return object_field(object, "result");
  std::string message = text_field(object, "error");
  std::string code = text_field(object, "code");
  if (message.empty()) message = "the daemon refused without a reason";
  for (int i = 0; i <= static_cast<int>(Code::kInternal); ++i) {
    if (code == code_name(static_cast<Code>(i))) return Error(static_cast<Code>(i), message);
  }
  return Error(Code::kInternal, message);
}

}  // namespace ptc::cli
