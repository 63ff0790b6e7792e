#include "tools/planner/run/processes.h"

#include <fcntl.h>
#include <fmt/core.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdio>
#include <filesystem>

#include "store/base/file.h"

namespace ptc::planner {
namespace {

constexpr size_t kMostOfProc = 1 << 16, kMostOfEnvironment = 4 << 20;

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

std::optional<ProcessFacts> facts_of(pid_t pid) {
  const auto stat = read_text_file(AT_FDCWD, fmt::format("/proc/{}/stat", pid), kMostOfProc);
  if (stat.has_error()) return std::nullopt;
  const size_t behind = stat.value().rfind(')');  // the name before it may hold anything
  if (behind == std::string::npos) return std::nullopt;
  char state = 0;
  ProcessFacts facts{.pid = pid};
  unsigned long long ticks = 0;
  const int read = std::sscanf(stat.value().c_str() + behind + 1,
                               " %c %d %d %d %*d %*d %*u %*u %*u %*u %*u %*u %*u %*d %*d %*d %*d "
                               "%*d %*d %llu",
                               &state, &facts.parent, &facts.group, &facts.session, &ticks);
  if (read != 5) return std::nullopt;
  facts.is_zombie = state == 'Z' || state == 'X';
  facts.started_at = fmt::format("{} {}", boot_id(), ticks);
  return facts;
}

std::vector<ProcessFacts> all_processes() {
  std::vector<ProcessFacts> all;
  std::error_code error;
  const std::filesystem::directory_iterator end;
  for (std::filesystem::directory_iterator at("/proc", error); !error && at != end;
       at.increment(error)) {
    const std::string name = at->path().filename();
    constexpr size_t kMostDigits = 9;
    if (name.find_first_not_of("0123456789") != std::string::npos || name.size() > kMostDigits)
      continue;
    if (auto facts = facts_of(std::stoi(name))) all.push_back(std::move(*facts));
  }
  return all;
}

bool was_started_with(pid_t pid, const std::string& name, const std::string& value) {
  auto all = read_text_file(AT_FDCWD, fmt::format("/proc/{}/environ", pid), kMostOfEnvironment);
  if (all.has_error()) return false;
  const std::string wanted = name + "=" + value + '\0';
  const std::string& text = all.value();
  const size_t at = text.find(wanted);
  return text.starts_with(wanted) ||
         (at != std::string::npos && text.find('\0' + wanted) != std::string::npos);
}

void signal_if(pid_t pid, int signal, const std::function<bool(pid_t)>& is_it) {
  // By number: glibc 2.36 declares its functions for C alone.
  const UniqueFd process(static_cast<int>(::syscall(SYS_pidfd_open, pid, 0)));
  if (process.valid() && is_it(pid))
    ::syscall(SYS_pidfd_send_signal, process.get(), signal, nullptr, 0);
}

}  // namespace ptc::planner
