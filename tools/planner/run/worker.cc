#include "tools/planner/run/worker.h"

#include <fcntl.h>
#include <fmt/core.h>
#include <signal.h>
#include <spawn.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>

#include "store/base/file.h"

extern char** environ;

namespace ptc::planner {
namespace {

constexpr size_t kMostOfProc = 1 << 16;

/// Of /proc/PID/stat: field 22, behind the name, which may hold anything. "": there is none, or it
/// is a zombie.
std::string start_ticks(pid_t pid) {
  const auto stat = read_text_file(AT_FDCWD, fmt::format("/proc/{}/stat", pid), kMostOfProc);
  if (stat.has_error()) return "";
  size_t at = stat.value().rfind(')');
  if (at == std::string::npos || at + 2 >= stat.value().size()) return "";
  if (const char state = stat.value()[at + 2]; state == 'Z' || state == 'X') return "";
  constexpr int kFieldsBetween = 20;
  for (int field = 0; field < kFieldsBetween && at != std::string::npos; ++field)
    at = stat.value().find(' ', at + 1);
  if (at == std::string::npos) return "";
  return stat.value().substr(at + 1, stat.value().find(' ', at + 1) - at - 1);
}

std::string boot_id() {
  const auto boot = read_text_file(AT_FDCWD, "/proc/sys/kernel/random/boot_id", kMostOfProc);
  std::string id = boot.has_value() ? boot.value() : "";
  while (!id.empty() && id.back() == '\n') id.pop_back();
  return id;
}

std::string time_of_start(pid_t pid) {
  const std::string ticks = start_ticks(pid);
  if (ticks.empty()) return "";
  return boot_id() + " " + ticks;
}

/// One that is more than a zombie, which nobody has reaped yet.
bool has_living_member(pid_t group) {
  if (::kill(-group, 0) != 0) return false;
  std::error_code error;
  const std::filesystem::directory_iterator end;
  for (std::filesystem::directory_iterator at("/proc", error); !error && at != end;
       at.increment(error)) {
    const std::string name = at->path().filename();
    if (name.find_first_not_of("0123456789") != std::string::npos) continue;
    const auto stat = read_text_file(AT_FDCWD, "/proc/" + name + "/stat", kMostOfProc);
    const size_t behind = stat.has_value() ? stat.value().rfind(')') : std::string::npos;
    char state = 'Z';
    int parent = 0, of = 0;
    if (behind != std::string::npos &&
        std::sscanf(stat.value().c_str() + behind + 1, " %c %d %d", &state, &parent, &of) == 3 &&
        of == group && state != 'Z' && state != 'X')
      return true;
  }
  return false;
}

/// As execvp(3) would find it.
Result<> check_program(const WorkerCommand& command) {
  const std::string& name = command.command.front();
  const auto is_there = [&](const std::string& path) {
    const std::string from_there = path.starts_with('/') ? path : command.directory + "/" + path;
    struct stat facts = {};
    return ::stat(from_there.c_str(), &facts) == 0 && S_ISREG(facts.st_mode) &&
           ::access(from_there.c_str(), X_OK) == 0;
  };
  const std::string what = fmt::format("starting {} in {}", name, command.directory);
  if (::access(command.directory.c_str(), X_OK) != 0)
    return invalid_argument("{}: {}", what, std::strerror(errno));
  if (name.find('/') != std::string::npos) {
    if (is_there(name)) return ok();
    return invalid_argument("{}: there is no such program", what);
  }
  const char* all = std::getenv("PATH");
  std::string_view path = all != nullptr ? all : "/usr/bin:/bin";
  while (!path.empty()) {
    const std::string_view one = path.substr(0, path.find(':'));
    path.remove_prefix(std::min(path.size(), one.size() + 1));
    if (is_there(fmt::format("{}/{}", one.empty() ? "." : one, name))) return ok();
  }
  return invalid_argument("{}: there is no such program in $PATH", what);
}

class SpawnSettings {
 public:
  SpawnSettings() {
    ::posix_spawn_file_actions_init(&actions);
    ::posix_spawnattr_init(&attributes);
  }
  SpawnSettings(const SpawnSettings&) = delete;
  ~SpawnSettings() {
    ::posix_spawn_file_actions_destroy(&actions);
    ::posix_spawnattr_destroy(&attributes);
  }
  posix_spawn_file_actions_t actions;
  posix_spawnattr_t attributes;
};

/// Those of this process, with `variables` in the place of theirs.
std::vector<std::string> environment_with(
    const std::vector<std::pair<std::string, std::string>>& variables) {
  std::vector<std::string> all;
  for (char** one = environ; *one != nullptr; ++one) {
    const std::string_view entry(*one);
    const std::string_view name = entry.substr(0, entry.find('='));
    bool is_replaced = false;
    for (const auto& [key, value] : variables) is_replaced |= key == name;
    if (!is_replaced) all.emplace_back(entry);
  }
  for (const auto& [key, value] : variables) all.push_back(key + "=" + value);
  return all;
}

std::vector<char*> pointers(std::vector<std::string>& texts) {
  std::vector<char*> all;
  for (std::string& text : texts) all.push_back(text.data());
  all.push_back(nullptr);
  return all;
}

}  // namespace

Result<Worker> Worker::start(const WorkerCommand& command) {
  const std::string input = command.input.empty() ? "/dev/null" : command.input;
  PTC_TRY(auto file, open_file(AT_FDCWD, input, O_RDONLY));
  return spawn(command, std::move(file));
}

Result<Worker> Worker::prepare(const WorkerCommand& command) {
  PTC_TRY(check_program(command));
  int ends[2] = {-1, -1};
  if (::pipe2(ends, O_CLOEXEC) != 0) return errno_error(errno, "a pipe");
  UniqueFd input(ends[0]), gate(ends[1]);
  WorkerCommand waiting = command;
  waiting.command = {"/bin/sh", "-c", "read -r go && exec \"$@\" </dev/null", "sh"};
  waiting.command.insert(waiting.command.end(), command.command.begin(), command.command.end());
  PTC_TRY(auto worker, spawn(waiting, std::move(input)));
  worker.gate_ = std::move(gate);
  return worker;
}

void Worker::go() {
  constexpr std::string_view kGo = "go\n";
  // It may have been killed meanwhile: nobody is there to read it.
  struct sigaction ignore {
  }, before{};
  ignore.sa_handler = SIG_IGN;
  ::sigaction(SIGPIPE, &ignore, &before);
  (void)!::write(gate_.get(), kGo.data(), kGo.size());
  ::sigaction(SIGPIPE, &before, nullptr);
  gate_.reset();
}

Result<Worker> Worker::spawn(const WorkerCommand& command, UniqueFd input) {
  const std::string what = fmt::format("starting {}", command.command.front());
  const auto log = open_file(AT_FDCWD, command.log, O_WRONLY | O_CREAT | O_APPEND, 0644);
  if (log.has_error()) return invalid_argument("{}: {}", what, log.error().message());
  UniqueFd output;
  if (!command.output.empty()) {
    PTC_TRY(output, open_file(AT_FDCWD, command.output, O_WRONLY | O_CREAT | O_TRUNC, 0600));
  }
  // What it leaves behind is this process's to reap: nobody knows whether else anybody does.
  ::prctl(PR_SET_CHILD_SUBREAPER, 1);
  SpawnSettings settings;
  ::posix_spawn_file_actions_adddup2(&settings.actions, input.get(), 0);
  ::posix_spawn_file_actions_adddup2(&settings.actions,
                                     output.valid() ? output.get() : log.value().get(), 1);
  ::posix_spawn_file_actions_adddup2(&settings.actions, log.value().get(), 2);
  ::posix_spawn_file_actions_addchdir_np(&settings.actions, command.directory.c_str());
  sigset_t none, all;
  ::sigemptyset(&none);
  ::sigfillset(&all);
  ::posix_spawnattr_setsigmask(&settings.attributes, &none);
  ::posix_spawnattr_setsigdefault(&settings.attributes, &all);
  ::posix_spawnattr_setflags(
      &settings.attributes,
      static_cast<short>(POSIX_SPAWN_SETSID | POSIX_SPAWN_SETSIGMASK | POSIX_SPAWN_SETSIGDEF));
  std::vector<std::string> words = command.command, variables = environment_with(command.variables);
  pid_t pid = 0;
  const int error =
      ::posix_spawnp(&pid, words.front().c_str(), &settings.actions, &settings.attributes,
                     pointers(words).data(), pointers(variables).data());
  if (error == EAGAIN || error == ENOMEM)
    return make_error(Code::kUnavailable, "{}: {}", what, std::strerror(error));
  if (error != 0)
    return invalid_argument("{} in {}: {}", what, command.directory, std::strerror(error));
  return Worker(pid, time_of_start(pid), true);
}

std::optional<Worker> Worker::find(pid_t pid, const std::string& started_at,
                                   bool was_asked_to_end) {
  if (pid <= 1 || started_at.empty()) return std::nullopt;
  const std::string there = time_of_start(pid);
  const bool is_it = there == started_at && ::getsid(pid) == pid;
  // No other group has its number as long as one of it is left.
  const bool left_some = there.empty() && started_at.substr(0, started_at.find(' ')) == boot_id() &&
                         has_living_member(pid);
  if (!is_it && !left_some) return std::nullopt;
  Worker worker(pid, started_at, false);
  worker.was_asked_ = was_asked_to_end;
  if (left_some) {
    worker.is_over_ = true;
    worker.over_at_ = std::chrono::steady_clock::now();
    if (was_asked_to_end) ::kill(-pid, SIGTERM);  // they may not have been
  }
  return worker;
}

bool Worker::is_there() const { return is_child_ || time_of_start(pid_) == started_at_; }

/// No process gets the number of a group that has members. Who was found and is gone by now may
/// have left some: they are of the same boot, for that was looked at when it was found.
bool Worker::has_group() const {
  while (::waitpid(-pid_, nullptr, WNOHANG) > 0) {
  }
  return ::kill(-pid_, 0) == 0 || errno == EPERM;
}

void Worker::ask_to_end() {
  was_asked_ = true;
  if (!is_over_ && is_there()) ::kill(pid_, SIGTERM);
}

void Worker::kill() {
  if (!std::exchange(was_killed_, true)) over_at_ = std::chrono::steady_clock::now();
  if (is_over_ || is_there()) ::kill(-pid_, SIGKILL);
}

/// The status of the command itself, once it has ended.
bool Worker::look_at_leader() {
  if (!is_child_) return !is_there();
  siginfo_t info = {};
  if (::waitid(P_PID, static_cast<id_t>(pid_), &info, WEXITED | WNOHANG) != 0)
    return errno == ECHILD;
  if (info.si_pid == 0) return false;
  status_ = info.si_code == CLD_EXITED ? info.si_status : 128 + info.si_status;
  return true;
}

std::optional<Worker::Ended> Worker::ended() {
  constexpr auto kUntilReaped = std::chrono::seconds(3);  // by whoever has them now
  if (!is_over_) {
    if (!look_at_leader()) return std::nullopt;
    is_over_ = true;
    over_at_ = std::chrono::steady_clock::now();
    // A shell does not hand SIGTERM on. Whoever it leaves behind may save yet, as long as it is
    // let.
    if (has_group()) ::kill(-pid_, was_asked_ ? SIGTERM : SIGKILL);
  }
  if (!has_group()) return Ended{status_};
  const bool may_save = was_asked_ && !was_killed_;
  if (!may_save) {
    ::kill(-pid_, SIGKILL);
    if (std::chrono::steady_clock::now() - over_at_ > kUntilReaped) return Ended{status_};
  }
  return std::nullopt;
}

}  // namespace ptc::planner
