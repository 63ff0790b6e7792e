#include "tools/planner/run/processes.h"

#include <fcntl.h>
#include <fmt/core.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <filesystem>

#include "store/base/file.h"

namespace ptc::planner {
namespace {

constexpr size_t kMostOfProc = 1 << 16, kMostOfEnvironment = 4 << 20;

/// The numbers that directories there have as names.
Result<std::vector<pid_t>> numbers_in(const std::string& directory) {
  std::vector<pid_t> numbers;
  std::error_code error;
  std::filesystem::directory_iterator at(directory, error);
  const std::filesystem::directory_iterator end;
  for (; !error && at != end; at.increment(error)) {
    const std::string name = at->path().filename();
    constexpr size_t kMostDigits = 9;
    if (name.find_first_not_of("0123456789") == std::string::npos && name.size() <= kMostDigits)
      numbers.push_back(std::stoi(name));
  }
  if (error) return make_error(Code::kUnavailable, "{}: {}", directory, error.message());
  return numbers;
}

/// kNotFound: there is none any more.
Result<ProcessFacts> read_facts(pid_t pid) {
  auto stat = read_text_file(AT_FDCWD, fmt::format("/proc/{}/stat", pid), kMostOfProc);
  if (stat.has_error()) {
    if (::access(fmt::format("/proc/{}", pid).c_str(), F_OK) != 0 && errno == ENOENT)
      return make_error(Code::kNotFound, "process {}", pid);
    // Gone between its open and its read: ESRCH.
    if (stat.error().code() == Code::kNotFound) return std::move(stat).error();
    return make_error(Code::kUnavailable, "{}", stat.error().message());
  }
  const size_t behind = stat.value().rfind(')');  // the name before it may hold anything
  char state = 0;
  ProcessFacts facts{.pid = pid};
  unsigned long long threads = 0, ticks = 0;
  constexpr int kRead = 6;
  if (behind == std::string::npos ||
      std::sscanf(stat.value().c_str() + behind + 1,
                  " %c %d %d %d %*d %*d %*u %*u %*u %*u %*u %*u %*u %*d %*d %*d %*d %llu %*d %llu",
                  &state, &facts.parent, &facts.group, &facts.session, &threads, &ticks) != kRead)
    return make_error(Code::kUnavailable, "/proc/{}/stat is none", pid);
  // Its first thread may have ended, and others not.
  facts.has_ended = (state == 'Z' || state == 'X') && threads <= 1;
  facts.ticks = ticks;
  return facts;
}

}  // namespace

std::string boot_id() {
  static const std::string id = [] {
    const auto boot = read_text_file(AT_FDCWD, "/proc/sys/kernel/random/boot_id", kMostOfProc);
    std::string text = boot.has_value() ? boot.value() : "";
    while (!text.empty() && text.back() == '\n') text.pop_back();
    return text;
  }();
  return id;
}

std::string ProcessFacts::started_at() const { return fmt::format("{} {}", boot_id(), ticks); }

std::optional<ProcessFacts> facts_of(pid_t pid) {
  auto facts = read_facts(pid);
  if (facts.has_error()) return std::nullopt;
  return std::move(facts).value();
}

Result<std::vector<ProcessFacts>> all_processes() {
  PTC_TRY(const auto numbers, numbers_in("/proc"));
  std::vector<ProcessFacts> all;
  all.reserve(numbers.size());
  for (const pid_t pid : numbers) {
    auto facts = read_facts(pid);
    if (facts.has_value()) all.push_back(std::move(facts).value());
    else if (::kill(pid, 0) == 0) return std::move(facts).error();
  }
  return all;
}

std::optional<std::string> variable_of(pid_t pid, const std::string& name) {
  std::string text;
  // A first thread that has ended has no memory any more; the others have.
  const auto threads = numbers_in(fmt::format("/proc/{}/task", pid));
  if (threads.has_error()) return std::nullopt;
  for (const pid_t thread : threads.value()) {
    auto read = read_text_file(AT_FDCWD, fmt::format("/proc/{}/task/{}/environ", pid, thread),
                               kMostOfEnvironment);
    if (read.has_error() && read.error().code() == Code::kPermissionDenied) return "";
    if (read.has_error() || read.value().empty()) continue;
    text = std::move(read).value();
    break;
  }
  if (text.empty()) return std::nullopt;
  const std::string begins = name + "=";
  size_t at = 0;
  while (at < text.size()) {
    const size_t end = std::min(text.find('\0', at), text.size());
    if (text.compare(at, begins.size(), begins) == 0)
      return text.substr(at + begins.size(), end - at - begins.size());
    at = end + 1;
  }
  return "";
}

void signal_if(pid_t pid, int signal, const std::function<bool(pid_t)>& is_it) {
  // By number: glibc 2.36 declares its functions for C alone.
  const UniqueFd process(static_cast<int>(::syscall(SYS_pidfd_open, pid, 0)));
  const bool is_unknown = !process.valid() && (errno == ENOSYS || errno == EPERM);
  if ((!process.valid() && !is_unknown) || !is_it(pid)) return;
  if (is_unknown) ::kill(pid, signal);
  else ::syscall(SYS_pidfd_send_signal, process.get(), signal, nullptr, 0);
}

}  // namespace ptc::planner
