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
#include <charconv>
#include <cstdlib>
#include <cstring>
#include <set>

#include "store/base/file.h"
#include "store/base/random_id.h"
#include "tools/planner/run/processes.h"

extern char** environ;

namespace ptc::planner {
namespace {

constexpr const char* kMark = "PTC_WORKER";

/// Of this process; another may have its number once it is reaped.
std::set<pid_t>& unreaped_leaders() {
  static std::set<pid_t> leaders;
  return leaders;
}

/// What commands have left behind in other sessions, once that has ended, too.
void reap(const ProcessFacts& orphan) {
  if (orphan.parent == ::getpid() && orphan.session != ::getsid(0) &&
      !unreaped_leaders().contains(orphan.pid))
    ::waitpid(orphan.pid, nullptr, WNOHANG);
}

std::string time_of_start(pid_t pid) {
  const auto facts = facts_of(pid);
  return facts && !facts->has_ended ? facts->started_at() : "";
}

/// Itself, and who has started it.
std::set<pid_t> own_line(const std::vector<ProcessFacts>& all) {
  std::map<pid_t, pid_t> parents;
  for (const ProcessFacts& one : all) parents[one.pid] = one.parent;
  std::set<pid_t> line;
  for (pid_t pid = ::getpid(); pid > 0 && line.insert(pid).second;) {
    const auto parent = parents.find(pid);
    pid = parent != parents.end() ? parent->second : 0;
  }
  return line;
}

/// Of "outer:inner", as one has that was started by one that was started so.
bool has_part(const std::string& marks, const std::string& mark) {
  return (":" + marks + ":").find(":" + mark + ":") != std::string::npos;
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

Worker::Worker(WorkerId id, bool is_child) : id_(std::move(id)), is_child_(is_child) {
  const size_t space = id_.started_at.find(' ');
  if (space != std::string::npos)
    std::from_chars(id_.started_at.data() + space + 1,
                    id_.started_at.data() + id_.started_at.size(), ticks_);
}

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

void Worker::take_back() {
  ::kill(id_.pid, SIGKILL);
  unreaped_leaders().erase(id_.pid);  // it is reaped when it is seen to have ended
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
  WorkerId id;
  PTC_TRY(id.mark, random_id());
  auto all_variables = command.variables;
  const char* outer = std::getenv(kMark);
  all_variables.emplace_back(kMark, outer != nullptr ? outer + (":" + id.mark) : id.mark);
  std::vector<std::string> words = command.command, variables = environment_with(all_variables);
  const int error =
      ::posix_spawnp(&id.pid, words.front().c_str(), &settings.actions, &settings.attributes,
                     pointers(words).data(), pointers(variables).data());
  if (error == EAGAIN || error == ENOMEM)
    return make_error(Code::kUnavailable, "{}: {}", what, std::strerror(error));
  if (error != 0)
    return invalid_argument("{} in {}: {}", what, command.directory, std::strerror(error));
  if (const auto facts = facts_of(id.pid)) id.started_at = facts->started_at();
  unreaped_leaders().insert(id.pid);
  return Worker(std::move(id), true);
}

std::optional<Worker> Worker::find(const WorkerId& id, bool was_asked_to_end) {
  if (id.pid <= 1 || id.started_at.empty()) return std::nullopt;
  Worker worker(id, false);
  worker.was_asked_ = was_asked_to_end;
  if (time_of_start(id.pid) == id.started_at && ::getsid(id.pid) == id.pid) return worker;
  // It has ended. Of another boot nobody is left.
  if (id.started_at.substr(0, id.started_at.find(' ')) != boot_id()) return std::nullopt;
  if (const auto left = worker.members(); left && left->empty()) return std::nullopt;
  worker.is_over_ = true;
  worker.over_at_ = Clock::now();
  return worker;
}

bool Worker::is_there() const { return is_child_ || time_of_start(id_.pid) == id_.started_at; }

void Worker::ask_to_end() {
  was_asked_ = true;
  (void)members();  // who is known now is known when nobody can tell any more whose he was
  if (!is_over_ && is_there()) ::kill(id_.pid, SIGTERM);
}

void Worker::kill() {
  was_killed_ = true;
  if (const auto all = members()) signal_all(*all, SIGKILL);
  else if (!is_over_ && is_there()) ::kill(id_.pid, SIGKILL);
}

std::optional<std::vector<pid_t>> Worker::members() {
  const auto found = all_processes();
  if (found.has_error()) return std::nullopt;
  const std::vector<ProcessFacts>& all = found.value();
  const std::set<pid_t> own = own_line(all);
  // No process gets the number of a session that has members; so who has it and is another one says
  // that there are none.
  const bool has_session = std::none_of(all.begin(), all.end(), [&](const ProcessFacts& one) {
    return one.pid == id_.pid && one.ticks != ticks_;
  });
  std::map<pid_t, uint64_t> seen, others;
  is_unclear_ = false;
  const auto knew = [](const std::map<pid_t, uint64_t>& who, const ProcessFacts& one) {
    const auto known = who.find(one.pid);
    return known != who.end() && known->second == one.ticks;
  };
  for (const ProcessFacts& one : all) {
    if (one.has_ended) {
      reap(one);
      continue;
    }
    if (one.ticks < ticks_ || own.contains(one.pid)) continue;
    if (knew(seen_, one) || (has_session && one.session == id_.pid)) {
      seen[one.pid] = one.ticks;
    } else if (knew(others_, one)) {
      others[one.pid] = one.ticks;
    } else if (!id_.mark.empty()) {
      const auto marks = variable_of(one.pid, kMark);
      if (marks && has_part(*marks, id_.mark)) seen[one.pid] = one.ticks;
      else if (marks) others[one.pid] = one.ticks;
      else is_unclear_ |= one.session != 0;  // 0: a thread of the kernel
    }
  }
  // Whoever these have started, with whatever environment.
  for (bool more = true; std::exchange(more, false);)
    for (const ProcessFacts& one : all)
      if (!one.has_ended && one.ticks >= ticks_ && !own.contains(one.pid) &&
          !seen.contains(one.pid) &&
          (seen.contains(one.parent) || (one.session != 0 && seen.contains(one.session)))) {
        seen[one.pid] = one.ticks;
        more = true;
      }
  seen_ = std::move(seen);
  others_ = std::move(others);
  std::vector<pid_t> members;
  for (const auto& [pid, ticks] : seen_) members.push_back(pid);
  return members;
}

void Worker::signal_all(const std::vector<pid_t>& pids, int signal) {
  for (const pid_t member : pids)
    signal_if(member, signal, [&](pid_t pid) {
      const auto facts = facts_of(pid);
      return facts && facts->ticks == seen_[pid];
    });
}

bool Worker::lingers() const {
  constexpr auto kLong = std::chrono::seconds(10);
  return is_over_ && (!was_asked_ || was_killed_) && Clock::now() - over_at_ > kLong;
}

/// The status of the command itself, once it has ended.
bool Worker::look_at_leader() {
  if (!is_child_) return !is_there();
  siginfo_t info = {};
  if (::waitid(P_PID, static_cast<id_t>(id_.pid), &info, WEXITED | WNOHANG) != 0)
    return errno == ECHILD;
  if (info.si_pid == 0) return false;
  status_ = info.si_code == CLD_EXITED ? info.si_status : 128 + info.si_status;
  unreaped_leaders().erase(id_.pid);
  return true;
}

std::optional<Worker::Ended> Worker::ended() {
  constexpr auto kLeastRest = std::chrono::milliseconds(50);
  constexpr int kRests = 20;  // as long as a look takes
  constexpr auto kClears = std::chrono::seconds(2);
  if (!is_over_) {
    is_over_ = look_at_leader();
    over_at_ = Clock::now();
  }
  const Clock::time_point now = Clock::now();
  if (!is_over_ || now < next_look_) return std::nullopt;
  const auto left = members();
  const bool is_clear = !is_unclear_ || now - over_at_ > kClears;
  const bool is_empty = left && left->empty() && is_clear;
  // One look may miss who was just being started by another.
  if (std::exchange(is_empty_, is_empty) && is_empty) return Ended{status_};
  // A shell does not hand SIGTERM on. Whoever it leaves behind may save yet, as long as it is let.
  if (left && !left->empty()) {
    if (!was_asked_ || was_killed_) signal_all(*left, SIGKILL);
    else if (!std::exchange(were_asked_, true)) signal_all(*left, SIGTERM);
  }
  const Clock::duration took = Clock::now() - now;
  next_look_ = Clock::now() + (is_empty ? std::chrono::milliseconds(5)
                                        : std::max<Clock::duration>(kLeastRest, took * kRests));
  return std::nullopt;
}

}  // namespace ptc::planner
