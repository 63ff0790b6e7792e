#include "fs/http/access_log.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <pthread.h>
#include <spdlog/spdlog.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include <boost/json/object.hpp>
#include <boost/json/serialize.hpp>
#include <cmath>
#include <deque>
#include <thread>
#include <utility>

#include "store/base/file.h"
#include "store/base/json.h"
#include "store/base/mutex.h"
#include "store/base/utf8.h"

namespace ptc {
namespace {

constexpr size_t kMostWaiting = 4096;                 // lines
constexpr size_t kMostPathBytes = 2048;               // of a line
constexpr auto kLastLines = std::chrono::seconds(1);  // may take so long at the end

/// "2026-01-31T12:00:00.123+01:00"
std::string time_with_zone(std::chrono::system_clock::time_point when) {
  const auto since = std::chrono::floor<std::chrono::milliseconds>(when.time_since_epoch());
  const time_t seconds = std::chrono::floor<std::chrono::seconds>(since).count();
  tm parts = {};
  ::localtime_r(&seconds, &parts);
  const long minutes = parts.tm_gmtoff / 60, distance = minutes < 0 ? -minutes : minutes;
  return fmt::format("{:04}-{:02}-{:02}T{:02}:{:02}:{:02}.{:03}{}{:02}:{:02}", parts.tm_year + 1900,
                     parts.tm_mon + 1, parts.tm_mday, parts.tm_hour, parts.tm_min, parts.tm_sec,
                     since.count() % 1000, minutes < 0 ? '-' : '+', distance / 60, distance % 60);
}

/// One word of a line.
std::string word_of(std::string_view text) {
  if (text.empty()) return "-";
  std::string word;
  for (const char c : printable(text, kMostPathBytes)) {
    if (c == ' ') word += "\\x20";
    else word += c;
  }
  return word;
}

}  // namespace

std::string access_line(const HttpAccess& access, AccessFormat format) {
  const std::string time = time_with_zone(access.when);
  if (format == AccessFormat::kText)
    return fmt::format("{} {} {} {} {} {} {:.3f}", time, word_of(access.client),
                       word_of(access.method), word_of(access.path), access.status, access.bytes,
                       access.seconds);
  return json::serialize(json::object{{"time", time},
                                      {"client", access.client},
                                      {"method", printable(access.method, kMostPathBytes)},
                                      {"path", printable(access.path, kMostPathBytes)},
                                      {"status", access.status},
                                      {"bytes", access.bytes},
                                      {"seconds", std::round(access.seconds * 1e6) / 1e6}});
}

struct AccessLog::Impl {
  std::string path;
  AccessFormat format = AccessFormat::kText;
  UniqueFd file;  // of the writer; none: standard output

  Mutex mutex;
  ConditionVariable changed;
  std::deque<HttpAccess> waiting PTC_GUARDED_BY(mutex);
  uint64_t left_out PTC_GUARDED_BY(mutex) = 0;
  bool ends PTC_GUARDED_BY(mutex) = false, ended PTC_GUARDED_BY(mutex) = false;
  bool failing = false;  // of the writer: said in the log

  bool to_standard_output() const { return path == "-"; }
  Result<UniqueFd> open_file() const;
  void write_all();
  Result<> write(std::string_view lines);
};

Result<UniqueFd> AccessLog::Impl::open_file() const {
  // A pipe that nobody reads is an error, and not waited for.
  constexpr int kFlags = O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC | O_NOCTTY | O_NONBLOCK;
  UniqueFd opened(::open(path.c_str(), kFlags, 0600));
  if (opened.get() < 0 || ::fcntl(opened.get(), F_SETFL, O_APPEND) != 0)
    return errno_error(errno, "the access log " + path);
  return opened;
}

Result<> AccessLog::Impl::write(std::string_view lines) {
  if (!to_standard_output()) {
    struct stat named = {}, held = {};
    const bool same = file.get() >= 0 && ::stat(path.c_str(), &named) == 0 &&
                      ::fstat(file.get(), &held) == 0 && named.st_ino == held.st_ino &&
                      named.st_dev == held.st_dev;
    if (!same) {
      PTC_TRY(file, open_file());
    }
  }
  const int to = to_standard_output() ? STDOUT_FILENO : file.get();
  while (!lines.empty()) {
    const ssize_t written = ::write(to, lines.data(), lines.size());
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) return errno_error(errno, "the access log " + path);
    lines.remove_prefix(static_cast<size_t>(written));
  }
  return ok();
}

void AccessLog::Impl::write_all() {
  ::pthread_setname_np(::pthread_self(), "ptcfs-access");
  for (;;) {
    std::deque<HttpAccess> taken;
    uint64_t lacking = 0;
    {
      MutexLock lock(mutex);
      changed.wait(mutex, [&]() PTC_REQUIRES(mutex) { return ends || !waiting.empty(); });
      taken.swap(waiting);
      lacking = std::exchange(left_out, 0);
    }
    if (taken.empty()) break;  // it ends
    std::string lines;
    for (const HttpAccess& access : taken) lines.append(access_line(access, format)).append("\n");
    Result<> done = write(lines);
    if (done.has_error() && !std::exchange(failing, true))
      spdlog::error("requests of --http are not noted: {}", done.error().message());
    if (done.has_value()) failing = false;
    if (lacking > 0)
      spdlog::warn("{} requests of --http are not noted: they came faster than {} could be written",
                   lacking, path);
  }
  MutexLock lock(mutex);
  ended = true;
  changed.notify_all();
}

AccessLog::AccessLog(std::shared_ptr<Impl> impl) : impl_(std::move(impl)) {}

/// A writer that hangs is left behind: it has what it needs.
AccessLog::~AccessLog() {
  MutexLock lock(impl_->mutex);
  impl_->ends = true;
  impl_->changed.notify_all();
  impl_->changed.wait_for(impl_->mutex, kLastLines,
                          [&]() PTC_REQUIRES(impl_->mutex) { return impl_->ended; });
}

Result<std::unique_ptr<AccessLog>> AccessLog::open(const std::string& path, AccessFormat format) {
  auto impl = std::make_shared<Impl>();
  impl->path = path;
  impl->format = format;
  if (!impl->to_standard_output()) {
    PTC_TRY(impl->file, impl->open_file());
  }
  std::thread([impl] { impl->write_all(); }).detach();
  return std::unique_ptr<AccessLog>(new AccessLog(std::move(impl)));
}

void AccessLog::note(HttpAccess access) {
  MutexLock lock(impl_->mutex);
  if (impl_->waiting.size() < kMostWaiting) impl_->waiting.push_back(std::move(access));
  else ++impl_->left_out;
  impl_->changed.notify_all();
}

}  // namespace ptc
