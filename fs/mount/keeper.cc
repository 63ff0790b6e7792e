#include "fs/mount/keeper.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <syslog.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <sstream>
#include <thread>

#include "fs/mount/mount_point.h"

namespace ptc {
namespace {

constexpr const char* kVariable = "PTCFS_KEPT";
constexpr int kMostFailures = 5;    // of starts, one after another
constexpr int kMostQuickEnds = 30;  // of those that had begun to serve
constexpr std::chrono::seconds kUpgradeWithin{60}, kSoon{1};
constexpr size_t kMostRequest = 64 << 10;

int64_t now_ns() {
  timespec now = {};
  ::clock_gettime(CLOCK_MONOTONIC, &now);
  return int64_t{now.tv_sec} * 1'000'000'000 + now.tv_nsec;
}

std::string how_it_ended(int status) {
  if (WIFSIGNALED(status))
    return fmt::format("signal {} ({})", WTERMSIG(status), ::strsignal(WTERMSIG(status)));
  return fmt::format("exit status {}", WEXITSTATUS(status));
}

/// One message with at most one descriptor.
bool send_message(int socket, std::string_view text, int fd) {
  iovec part{const_cast<char*>(text.data()), text.size()};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr message = {};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  if (fd >= 0) {
    message.msg_control = control;
    message.msg_controllen = sizeof control;
    cmsghdr* header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof(int));
    std::memcpy(CMSG_DATA(header), &fd, sizeof fd);
  }
  return ::sendmsg(socket, &message, MSG_NOSIGNAL) == static_cast<ssize_t>(text.size());
}

/// Empty: the other end is closed.
std::string receive_message(int socket, UniqueFd* fd) {
  std::string text(kMostRequest, '\0');
  iovec part{text.data(), text.size()};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr message = {};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof control;
  const ssize_t got = ::recvmsg(socket, &message, MSG_CMSG_CLOEXEC);
  if (got <= 0) return {};
  text.resize(static_cast<size_t>(got));
  const cmsghdr* header = CMSG_FIRSTHDR(&message);
  if (header != nullptr && header->cmsg_type == SCM_RIGHTS) {
    int received = -1;
    std::memcpy(&received, CMSG_DATA(header), sizeof received);
    UniqueFd owned(received);
    if (fd != nullptr) *fd = std::move(owned);
  }
  return text;
}

Result<sockaddr_un> address_of(const std::string& mount_point) {
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  // No mount point is escaped to a name that begins with a dot.
  const std::string path = "/run/ptcfs/.keeper." + escape_path(mount_point);
  if (path.size() >= sizeof address.sun_path)
    return invalid_argument("{} is too long a path for its keeper to be asked", mount_point);
  std::memcpy(address.sun_path, path.data(), path.size());
  return address;
}

class Keeper {
 public:
  explicit Keeper(const KeeperOptions& options) : options_(options) {}

  int run() {
    if (auto ready = prepare(); !ready) {
      say(ready.error().message());
      options_.started(32);
      return 32;
    }
    start();
    for (;;) {
      pollfd sources[] = {{signals_.get(), POLLIN, 0},
                          {daemon_socket_.get(), POLLIN, 0},
                          {listener_.get(), POLLIN, 0}};
      const int got = ::poll(sources, 3, until_next());
      if (got < 0 && errno != EINTR) return give_up("poll failed");
      if (got == 0) on_time();
      // What it has said comes before its end.
      if (got > 0 && (sources[1].revents & (POLLIN | POLLHUP)) != 0) on_message();
      if (got > 0 && (sources[0].revents & POLLIN) != 0)
        if (const auto status = on_signal()) return *status;
      if (got > 0 && (sources[2].revents & POLLIN) != 0) on_request();
    }
  }

 private:
  struct Program {
    UniqueFd file;  // O_PATH
    std::vector<std::string> arguments;
    std::string directory;  // that these are meant in
  };

  /// Where whoever looks after the mount will find it.
  void say(const std::string& text) const {
    std::fprintf(stderr, "ptcfs: %s\n", text.c_str());
    if (options_.foreground) return;
    ::openlog("ptcfs", LOG_PID, LOG_DAEMON);
    ::syslog(LOG_WARNING, "%s", text.c_str());
  }

  Result<> prepare() {
    sigset_t signals;
    ::sigemptyset(&signals);
    for (int signal : {SIGCHLD, SIGTERM, SIGINT, SIGHUP}) ::sigaddset(&signals, signal);
    ::sigprocmask(SIG_BLOCK, &signals, &former_signals_);
    signals_ = UniqueFd(::signalfd(-1, &signals, SFD_CLOEXEC));
    if (!signals_.valid()) return errno_error(errno, "signalfd");
    device_ = UniqueFd(::open("/dev/fuse", O_RDWR | O_CLOEXEC));
    if (!device_.valid()) return errno_error(errno, "/dev/fuse");
    state_ = UniqueFd(::memfd_create("ptcfs-state", MFD_CLOEXEC));
    if (!state_.valid()) return errno_error(errno, "memory for the state of the mount");
    program_.file = UniqueFd(::open("/proc/self/exe", O_PATH | O_CLOEXEC));
    if (!program_.file.valid()) return errno_error(errno, "/proc/self/exe");
    program_.arguments = options_.arguments;
    program_.directory = options_.directory;
    be_spared();
    former_connection_ = connection_there();
    listen();
    return ok();
  }

  /// Of all processes this one frees the least memory, and costs the most.
  void be_spared() {
    if (auto text = read_text_file(AT_FDCWD, "/proc/self/oom_score_adj", 64))
      former_score_ = text.value();
    for (const char* score : {"-1000", "-900"})
      if (write_text("/proc/self/oom_score_adj", score)) return;
  }

  static bool write_text(const char* path, std::string_view text) {
    const UniqueFd file(::open(path, O_WRONLY | O_CLOEXEC));
    return file.valid() &&
           ::write(file.get(), text.data(), text.size()) == static_cast<ssize_t>(text.size());
  }

  /// Without it there are no upgrades, and nothing else is missing.
  void listen() {
    auto address = address_of(options_.mount_point);
    if (!address) return say("there will be no upgrade under way: " + address.error().message());
    ::mkdir("/run/ptcfs", 0755);
    UniqueFd socket(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
    // One of a keeper that lives stays its own.
    if (socket.valid() &&
        ::connect(socket.get(), reinterpret_cast<const sockaddr*>(&address.value()),
                  sizeof(sockaddr_un)) == 0)
      return;
    socket = UniqueFd(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
    ::unlink(address.value().sun_path);
    const mode_t mask = ::umask(077);
    const bool bound = socket.valid() &&
                       ::bind(socket.get(), reinterpret_cast<const sockaddr*>(&address.value()),
                              sizeof(sockaddr_un)) == 0 &&
                       ::listen(socket.get(), 4) == 0;
    ::umask(mask);
    if (bound) listener_ = std::move(socket);
    else say(fmt::format("there will be no upgrade under way: {}", std::strerror(errno)));
  }

  void start() {
    int ends[2];
    next_start_ns_ = 0;
    serves_ = false;
    started_ns_ = now_ns();
    if (::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) != 0) return put_off();
    daemon_socket_ = UniqueFd(ends[0]);
    const UniqueFd theirs(ends[1]);
    const pid_t child = ::fork();
    if (child == 0) become_daemon(theirs.get());
    if (child < 0) return put_off();
    daemon_ = child;
  }
  void put_off() {
    daemon_ = 0;
    next_start_ns_ = now_ns() + 100'000'000;
  }

  [[noreturn]] void become_daemon(int socket) {
    const Program& program = next_.file.valid() ? next_ : program_;
    write_text("/proc/self/oom_score_adj", former_score_);
    ::sigprocmask(SIG_SETMASK, &former_signals_, nullptr);
    for (int fd : {device_.get(), state_.get(), beneath_.get(), socket})
      if (fd >= 0) ::fcntl(fd, F_SETFD, 0);
    ::setenv(kVariable,
             fmt::format("{},{},{},{},{},{},{}\n{}\n{}", device_.get(), state_.get(),
                         beneath_.get(), socket, options_.foreground ? 1 : 0,
                         made_room_ ? 2
                         : killed_  ? 1
                                    : 0,
                         ended_ns_, cause_, options_.mount_point)
                 .c_str(),
             1);
    // What a service manager has started is the keeper; the daemon stands for it.
    const char* executed = ::getenv("SYSTEMD_EXEC_PID");
    if (executed != nullptr && executed == std::to_string(first_pid_))
      ::setenv("SYSTEMD_EXEC_PID", std::to_string(::getpid()).c_str(), 1);
    if (::chdir(program.directory.c_str()) != 0 && ::chdir("/") != 0) ::_exit(126);
    std::vector<char*> arguments;
    for (const std::string& one : program.arguments)
      arguments.push_back(const_cast<char*>(one.c_str()));
    arguments.push_back(nullptr);
    ::execveat(program.file.get(), "", arguments.data(), environ, AT_EMPTY_PATH);
    std::fprintf(stderr, "ptcfs: the daemon cannot be started: %s\n", std::strerror(errno));
    ::_exit(126);
  }

  int until_next() const {
    int64_t next = next_start_ns_;
    if (asker_.valid() && (next == 0 || upgrade_until_ns_ < next)) next = upgrade_until_ns_;
    if (next == 0) return -1;
    return static_cast<int>(std::clamp<int64_t>((next - now_ns()) / 1'000'000 + 1, 0, 60'000));
  }
  void on_time() {
    if (next_start_ns_ != 0 && now_ns() >= next_start_ns_) start();
    if (!asker_.valid() || now_ns() < upgrade_until_ns_) return;
    // It neither begins to serve nor ends.
    if (daemon_ > 0 && next_.file.valid()) ::kill(daemon_, SIGKILL);
  }

  void on_message() {
    UniqueFd beneath;
    const std::string text = receive_message(daemon_socket_.get(), &beneath);
    if (text.empty()) {
      daemon_socket_.reset();
      return;
    }
    if (beneath.valid()) beneath_ = std::move(beneath);
    serves_ = true;
    failures_ = 0;
    serves_since_ns_ = now_ns();
    if (!was_started_) {
      was_started_ = true;
      connection_ = connection_there();
      options_.started(0);
    }
    if (next_.file.valid()) {
      program_ = std::move(next_);
      next_ = {};
      answer(fmt::format("ok {}", (now_ns() - ended_ns_) / 1000));
    }
  }

  void answer(const std::string& text) {
    if (asker_.valid()) send_message(asker_.get(), text, -1);
    asker_.reset();
  }

  /// Of the mount that is there now, on top of others; empty: there is none. For the end, when
  /// nobody serves it, and so nobody may look at it by its path.
  std::string connection_there() const {
    std::string found;
    auto text = read_text_file(AT_FDCWD, "/proc/self/mountinfo", 64 << 20);
    if (!text) return found;
    std::istringstream lines(text.value());
    for (std::string line; std::getline(lines, line);) {
      std::istringstream fields(line);
      std::string id, parent, device, root, at;
      if (!(fields >> id >> parent >> device >> root >> at)) continue;
      if (line.find(" fuse.ptcfs ") == std::string::npos) continue;
      if (unescaped_path(at) == options_.mount_point) found = device.substr(device.find(':') + 1);
    }
    return found;
  }

  std::optional<int> on_signal() {
    signalfd_siginfo signal = {};
    if (::read(signals_.get(), &signal, sizeof signal) != sizeof signal) return std::nullopt;
    if (signal.ssi_signo != SIGCHLD) {
      is_ending_ = true;
      if (daemon_ > 0) {
        ::kill(daemon_, static_cast<int>(signal.ssi_signo));
        return std::nullopt;
      }
      return give_up("it was told to end while no daemon served");
    }
    int status = 0;
    if (daemon_ <= 0 || ::waitpid(daemon_, &status, WNOHANG) != daemon_) return std::nullopt;
    while (daemon_socket_.valid() && !serves_) on_message();  // until it is closed
    daemon_ = 0;
    daemon_socket_.reset();
    ended_ns_ = now_ns();
    return on_end(status);
  }

  std::optional<int> on_end(int status) {
    const bool exited = WIFEXITED(status);
    const int code = exited ? WEXITSTATUS(status) : -1;
    if (!was_started_) {
      options_.started(exited ? code : 2);
      if (!exited) say(fmt::format("the daemon did not start: {}", how_it_ended(status)));
      // What was there before is somebody else's.
      if (const std::string now = connection_there(); now != former_connection_) connection_ = now;
      if (!connection_.empty()) return give_up("the daemon did not start");
      return end(exited && code != 0 ? code : 2);
    }
    if (exited && code == 0 && serves_) return end(0);
    if (is_ending_) return give_up(fmt::format("the daemon ended by {}", how_it_ended(status)));
    killed_ = WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL;
    made_room_ = exited && code == kMadeRoom;
    cause_ = how_it_ended(status);
    if (made_room_) {
      cause_ = "upgrade";
      start();
      return std::nullopt;
    }
    if (next_.file.valid()) {  // the former one goes on
      next_ = {};
      made_room_ = true;  // what is left is of the one before, which nothing was wrong with
      say(fmt::format("the upgrade of {} failed: {}; the former daemon goes on",
                      options_.mount_point, how_it_ended(status)));
      answer(fmt::format("failed by {}; its log says why. The former one goes on",
                         how_it_ended(status)));
      start();
      return std::nullopt;
    }
    const bool soon = !killed_ && ended_ns_ - started_ns_ < std::chrono::nanoseconds(kSoon).count();
    quick_ends_ = soon ? quick_ends_ + 1 : 0;
    if (quick_ends_ >= kMostQuickEnds)
      return give_up(fmt::format(
          "the daemon ended {} times in a row soon after it had begun to serve, at last by {}",
          quick_ends_, how_it_ended(status)));
    if (!serves_ && ++failures_ >= kMostFailures)
      return give_up(fmt::format("the daemon failed to start {} times in a row, at last by {}",
                                 failures_, how_it_ended(status)));
    say(fmt::format("the daemon of {} ended by {}; it is started again", options_.mount_point,
                    how_it_ended(status)));
    // Which hopes that what ails it goes away: a port that is taken, an etcd that is away.
    if (!serves_) next_start_ns_ = now_ns() + (250'000'000LL << failures_);
    else if (quick_ends_ > kMostFailures) next_start_ns_ = now_ns() + 1'000'000'000;
    else start();
    return std::nullopt;
  }

  /// Nobody serves it, and whoever waits for it would do so for ever.
  int give_up(const std::string& why) {
    say(fmt::format("{}; {} is unmounted", why, options_.mount_point));
    answer(why);
    if (!connection_.empty())
      write_text(fmt::format("/sys/fs/fuse/connections/{}/abort", connection_).c_str(), "1");
    if (auto mounted = mounted_on(options_.mount_point);
        mounted && mounted->type == "fuse.ptcfs" && connection_there() == connection_ &&
        ::umount2(options_.mount_point.c_str(), MNT_DETACH | UMOUNT_NOFOLLOW) != 0)
      say(fmt::format("unmounting {}: {}", options_.mount_point, std::strerror(errno)));
    return end(is_ending_ ? 0 : 2);
  }
  int end(int status) {
    if (auto address = address_of(options_.mount_point); address && listener_.valid())
      ::unlink(address.value().sun_path);
    return status;
  }

  /// "program\0directory\0argument\0…": they replace what serves.
  void on_request() {
    UniqueFd asker(::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC));
    if (!asker.valid()) return;
    const timeval patience{1, 0};
    ::setsockopt(asker.get(), SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience);
    ucred who = {};
    socklen_t size = sizeof who;
    ::getsockopt(asker.get(), SOL_SOCKET, SO_PEERCRED, &who, &size);
    const std::string text = receive_message(asker.get(), nullptr);
    if (text.empty() || who.uid != ::geteuid()) return;
    std::vector<std::string> words;
    for (size_t at = 0; at < text.size();) {
      words.emplace_back(text.c_str() + at);
      at += words.back().size() + 1;
    }
    if (asker_.valid() || daemon_ <= 0 || !serves_ || is_ending_) {
      send_message(asker.get(), "it is being replaced already, or is not serving; try again", -1);
      return;
    }
    Program next;
    next.file = UniqueFd(::open(words[0].c_str(), O_PATH | O_CLOEXEC));
    if (!next.file.valid()) {
      send_message(asker.get(), fmt::format("{}: {}", words[0], std::strerror(errno)), -1);
      return;
    }
    next.arguments = program_.arguments;
    next.directory = program_.directory;
    if (words.size() > 2) {
      next.directory = words[1];
      next.arguments.assign(words.begin() + 2, words.end());
    }
    next_ = std::move(next);
    asker_ = std::move(asker);
    upgrade_until_ns_ = now_ns() + std::chrono::nanoseconds(kUpgradeWithin).count();
    ::kill(daemon_, make_room_signal());
  }

  const KeeperOptions& options_;
  const pid_t first_pid_ = ::getpid();
  sigset_t former_signals_ = {};
  std::string former_score_ = "0", connection_, former_connection_;
  UniqueFd signals_, device_, state_, beneath_, listener_, daemon_socket_, asker_;
  Program program_, next_;
  pid_t daemon_ = 0;
  bool serves_ = false, was_started_ = false, is_ending_ = false, killed_ = false,
       made_room_ = false;
  int failures_ = 0, quick_ends_ = 0;
  int64_t started_ns_ = 0, serves_since_ns_ = 0, ended_ns_ = 0, next_start_ns_ = 0,
          upgrade_until_ns_ = 0;
  std::string cause_;
};

}  // namespace

int keep_mount(const KeeperOptions& options) {
  ::prctl(PR_SET_NAME, "ptcfs-keeper");
  ::signal(SIGPIPE, SIG_IGN);
  return Keeper(options).run();
}

int make_room_signal() { return SIGRTMIN + 1; }

void KeptBy::serves(int beneath_fd) const { send_message(keeper.get(), "serves", beneath_fd); }

std::optional<KeptBy> kept_by() {
  const char* given = ::getenv(kVariable);
  if (given == nullptr) return std::nullopt;
  std::istringstream text(given);
  KeptBy kept;
  int device = -1, state = -1, beneath = -1, socket = -1, foreground = 0, killed = 0;
  char comma;
  text >> device >> comma >> state >> comma >> beneath >> comma >> socket >> comma >> foreground >>
      comma >> killed >> comma >> kept.ended_ns;
  text.ignore();
  std::getline(text, kept.cause);
  std::getline(text, kept.mount_point, '\0');
  ::unsetenv(kVariable);
  for (int fd : {device, state, beneath, socket})
    if (fd >= 0) ::fcntl(fd, F_SETFD, FD_CLOEXEC);
  kept.device = UniqueFd(device);
  kept.state = UniqueFd(state);
  kept.beneath = UniqueFd(beneath);
  kept.keeper = UniqueFd(socket);
  kept.foreground = foreground != 0;
  kept.killed = killed == 1;
  kept.made_room = killed == 2;
  ::prctl(PR_SET_NAME, "ptcfs");
  return kept;
}

Result<std::chrono::microseconds> ask_for_upgrade(const std::string& mount_point,
                                                  const std::string& program,
                                                  const std::vector<std::string>& arguments) {
  PTC_TRY(auto address, address_of(mount_point));
  std::error_code error;
  const UniqueFd socket(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  if (!socket.valid() ||
      ::connect(socket.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0)
    return make_error(Code::kUnavailable,
                      "no ptcfs --keep serves {} ({}); a mount without --keep is unmounted, and "
                      "mounted again",
                      mount_point, std::strerror(errno));
  std::string text = program;
  if (!arguments.empty())
    text.append(1, '\0').append(std::filesystem::current_path(error).string());
  for (const std::string& one : arguments) text.append(1, '\0').append(one);
  if (text.size() >= kMostRequest) return invalid_argument("the command line is too long");
  if (!send_message(socket.get(), text, -1)) return errno_error(errno, "asking the keeper");
  const std::string said = receive_message(socket.get(), nullptr);
  if (said.starts_with("ok "))
    return std::chrono::microseconds(std::strtoll(said.c_str() + 3, nullptr, 10));
  return make_error(Code::kUnavailable, "the daemon of {} was not replaced: {}", mount_point,
                    said.empty() ? "its keeper has ended" : said);
}

}  // namespace ptc
