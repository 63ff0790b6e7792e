// ptcfs: the daemon. Finds the store, mounts, and waits for the end.
#include <fcntl.h>
#include <fmt/ranges.h>
#include <limits.h>
#include <malloc.h>
#include <signal.h>
#include <spdlog/sinks/rotating_file_sink.h>
#include <spdlog/sinks/stdout_sinks.h>
#include <spdlog/sinks/syslog_sink.h>
#include <spdlog/spdlog.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <future>
#include <memory>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "fs/http/health.h"
#include "fs/http/http_pages.h"
#include "fs/kernel/kept_mount.h"
#include "fs/mount/beneath.h"
#include "fs/mount/keeper.h"
#include "fs/mount/mount_point.h"
#include "fs/nodes/ask_file.h"
#include "fs/report/version.h"
#include "fs/tree/host_file.h"
#include "fs/tree/tree.h"
#include "store/base/file.h"
#include "store/base/json.h"
#include "store/base/shell_word.h"
#include "store/base/size_text.h"
#include "store/device/devices.h"
#include "tools/capabilities.h"
#include "tools/log_format.h"
#include "tools/log_limit.h"
#include "tools/ptcfs_options.h"

namespace ptc {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

constexpr seconds kStopWithin{10};
constexpr milliseconds kRoomWithin{500};  // for another daemon

constexpr size_t kLogBytes =
    16 << 20;  // then the file becomes ptcfs.1.log, and that before it goes

void log_to_stderr(bool debug, LogFormat format) {
  auto logger = std::make_shared<spdlog::logger>(
      "ptcfs", std::make_shared<LimitedSink>(std::make_shared<spdlog::sinks::stderr_sink_st>()));
  set_format(*logger, format);
  logger->set_level(debug ? spdlog::level::debug : spdlog::level::info);
  spdlog::set_default_logger(logger);
}

/// What is said of users' jobs is for whoever runs it, whatever the umask. So is what an earlier
/// one wrote.
spdlog::file_event_handlers for_its_owner_alone() {
  spdlog::file_event_handlers handlers;
  handlers.before_open = [](const spdlog::filename_t& path) {
    const UniqueFd file(::open(path.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600));
    if (file.get() >= 0) ::fchmod(file.get(), 0600);
  };
  return handlers;
}

/// Once in the background: the system's log, or a file in the store where there is none.
void log_in_background(const std::string& store, LogFormat format) {
  std::shared_ptr<spdlog::logger> logger;
  auto limited = [](spdlog::sink_ptr sink) {
    return std::make_shared<spdlog::logger>("ptcfs-background",
                                            std::make_shared<LimitedSink>(std::move(sink)));
  };
  if (::access("/dev/log", W_OK) == 0) {
    logger = limited(
        std::make_shared<spdlog::sinks::syslog_sink_st>("ptcfs", LOG_PID, LOG_DAEMON, true));
    set_format(*logger, format, /*timed=*/true);
  } else {
    ::chmod((store + "/ptcfs.1.log").c_str(), 0600);
    logger = limited(std::make_shared<spdlog::sinks::rotating_file_sink_st>(
        store + "/ptcfs.log", kLogBytes, 1, false, for_its_owner_alone()));
    set_format(*logger, format);
    logger->flush_on(spdlog::level::info);
  }
  spdlog::set_default_logger(logger);
}

void raise_file_limit() {
  rlimit limit;
  if (::getrlimit(RLIMIT_NOFILE, &limit) != 0) return;
  limit.rlim_cur = limit.rlim_max;
  ::setrlimit(RLIMIT_NOFILE, &limit);
}

constexpr int kStirred = SIGUSR1;  // to the main thread: there is something to see to

/// Every thread begins with these blocked; the main thread waits for them.
sigset_t block_signals() {
  sigset_t signals;
  ::sigemptyset(&signals);
  for (int signal : {SIGTERM, SIGINT, SIGHUP, kStirred, make_room_signal()})
    ::sigaddset(&signals, signal);
  ::pthread_sigmask(SIG_BLOCK, &signals, nullptr);
  ::signal(SIGPIPE, SIG_IGN);
  ::signal(SIGIO, SIG_IGN);  // of a lease that is broken while it is probed
  return signals;
}

/// Whatever hangs at the end: the state is durable at every moment, so leaving is safe.
void end_at_the_latest() {
  std::thread([] {
    std::this_thread::sleep_for(kStopWithin - seconds(1));
    spdlog::warn("something does not end; leaving it behind");
    spdlog::shutdown();
    ::_exit(0);
  }).detach();
}

void say_what_is_kept(const JobStore& store, const StorePlace& place, const Options& options) {
  size_t checkpoints = 0;
  auto jobs = store.jobs();
  for (const JobRef& job : jobs) checkpoints += job->checkpoints().size();
  struct statvfs space = {};
  std::string used;
  if (place.is_tmpfs && ::statvfs(place.directory.c_str(), &space) == 0) {
    used = ", " + format_size((space.f_blocks - space.f_bfree) * space.f_frsize);
  }
  std::string store_option =
      options.place.directory.empty() ? "" : " --store " + shell_word(place.directory);
  bool discards = place.is_tmpfs || options.place.directory.empty();
  spdlog::info(
      "unmounted {}; kept in {}{}: jobs {}, checkpoints {}{}. To free it: {}",
      options.mount.mount_point, place.directory,
      place.in_memory ? " (memory, until the next boot)" : "", jobs.size(), checkpoints, used,
      discards
          ? fmt::format("ptcfs{} --discard {}", store_option, shell_word(options.mount.mount_point))
          : "rm -r " + shell_word(place.directory));
}

/// Once in a while: threads end that are not needed any more, and what is free goes back to the
/// system, of which the allocator keeps it otherwise. The longer nobody has used the mount, the
/// less often.
class Housekeeping {
 public:
  explicit Housekeeping(FuseSession& session) : session_(session) {}

  /// Somebody uses the mount.
  void stir() {
    used_ = true;
    next_ = std::min<Clock::time_point>(next_, Clock::now() + kEvery);
  }
  /// Until when to sleep.
  std::chrono::steady_clock::time_point tick() {
    // Where files are not found by handles, each that the kernel knows takes a descriptor.
    const bool may_lack = !session_.tree().handles().enabled();
    if (may_lack && were_descriptors_short()) session_.prune_names(FuseSession::Prune::kAll);
    const auto now = Clock::now();
    if (now >= next_) {
      // Of names once a minute; until they were looked at after the last use nothing is put off.
      const bool is_idle = !std::exchange(used_, false);
      every_ = is_idle && pruned_ ? std::min(2 * every_, kSeldom) : kEvery;
      if (!is_idle) pruned_ = false;
      next_ = now + every_;
      session_.tell_next_use();
      keep_house(is_idle);
    }
    return may_lack && every_ == kEvery ? std::min(next_, now + kOften) : next_;
  }

 private:
  using Clock = std::chrono::steady_clock;
  void keep_house(bool is_idle) {
    session_.end_spare_threads();
    session_.tree().forget_old();
    if (Clock::now() >= prune_) {
      if (is_idle) session_.prune_names(FuseSession::Prune::kWhereIdle);
      session_.prune_names(FuseSession::Prune::kWhereMany);
      prune_ = Clock::now() + kNames;
      pruned_ = is_idle;
    }
    // What the allocator says is free it may have given back before.
    const size_t unused = unused_bytes();
    left_ = std::min(left_, unused);
    if (unused < left_ + kWorthBytes) return;
    ::malloc_trim(0);
    left_ = unused_bytes();
  }

  /// Memory of this process that nothing has asked the allocator for.
  static size_t unused_bytes() {
    size_t pages = 0, resident = 0, shared = 0;
    std::ifstream("/proc/self/statm") >> pages >> resident >> shared;
    const size_t have = (resident - shared) * static_cast<size_t>(::getpagesize());
    const struct mallinfo2 of_all = ::mallinfo2();
    return have - std::min(have, of_all.uordblks + of_all.hblkhd);
  }

  static constexpr seconds kEvery{10}, kNames{55}, kSeldom{600};
  static constexpr milliseconds kOften{200};
  static constexpr size_t kWorthBytes = 16 << 20;
  FuseSession& session_;
  bool pruned_ = false;  // names, as of a mount that is idle, since it was used
  Clock::time_point prune_ = Clock::now();
  bool used_ = true;  // since the last time
  seconds every_ = kEvery;
  Clock::time_point next_ = Clock::now() + kEvery;
  size_t left_ = 0;  // between what is in use, stacks, and the like
};

/// The signal that comes until then; 0: none.
int signal_until(const sigset_t& signals, std::chrono::steady_clock::time_point until) {
  using std::chrono::nanoseconds;
  const auto left = std::max(until - std::chrono::steady_clock::now(), nanoseconds(0));
  const auto whole = std::chrono::duration_cast<seconds>(left);
  const timespec pause{whole.count(), nanoseconds(left - whole).count()};
  return std::max(::sigtimedwait(&signals, nullptr, &pause), 0);
}

/// Nobody has unmounted it: what is written to its path from now on would be missing later.
void close_beneath(Beneath& beneath, const std::string& path) {
  const Beneath::Closed closed = beneath.close();
  if (closed == Beneath::Closed::kNot) return;
  spdlog::info("{} until ptcfs is mounted there again, {}",
               closed == Beneath::Closed::kForAll
                   ? fmt::format("nothing can be written to {} itself", path)
                   : fmt::format("nobody but root can write to {} itself", path),
               closed == Beneath::Closed::kForAll ? "or `chattr -i`, or `ptcfs --discard`"
                                                  : "or `chmod u+w`, or `ptcfs --discard`");
}

void wait_for_the_end(FuseSession& session, Beneath& beneath, Health& health,
                      const sigset_t& signals, const std::string& path) {
  constexpr milliseconds kEnding{200};
  Housekeeping housekeeping(session);
  for (;;) {
    auto until = housekeeping.tick();
    if (session.is_gone())  // and some requests may be under way
      until = std::min(until, std::chrono::steady_clock::now() + kEnding);
    const int signal = signal_until(signals, until);
    if (session.wait(milliseconds(0))) {  // umount
      health.leaves();
      end_at_the_latest();
      return;
    }
    if (signal == kStirred) housekeeping.stir();
    if (signal == 0 || signal == kStirred) continue;
    if (signal == make_room_signal()) {
      if (session.live_state() == nullptr) continue;
      // What is not answered by then, or waits for others, the kernel gives to the next one.
      session.stop_receiving(kRoomWithin);
      spdlog::info("another daemon serves {} from now on", path);
      spdlog::shutdown();
      ::_exit(kMadeRoom);
    }
    health.leaves();
    spdlog::info("{}: unmounting {}", ::strsignal(signal), path);
    end_at_the_latest();
    close_beneath(beneath, path);
    if (!session.unmount()) {
      spdlog::warn(
          "{} is in use; it was unmounted lazily: files that are open stay readable only "
          "where the kernel reads them by itself",
          path);
    }
    session.wait(seconds(2));
    session.stop();
    return;
  }
}

/// It says how the start goes on; pages follow when there is something to show.
Result<std::unique_ptr<HttpServer>> serve_health(const Options& options, const Health& health) {
  if (!options.http) return std::unique_ptr<HttpServer>();
  PTC_TRY(auto server, HttpServer::listen(*options.http));
  if (!options.access_log.empty()) {
    const bool as_json = options.log_format == LogFormat::kJson;
    PTC_TRY(auto log, AccessLog::open(options.access_log,
                                      as_json ? AccessFormat::kJson : AccessFormat::kText));
    server->log_to(std::move(log));
  }
  server->serve([&health](std::string_view path) { return health.answer(path); });
  return server;
}

Health::Checks checks_of(FuseSession& session, const std::string& path) {
  return {.mount =
              [path] {
                const auto all = mounted_file_systems();
                if (!all) return std::string();  // no descriptor is left to look with
                std::string type;                // of the topmost
                for (const MountEntry& entry : all.value())
                  if (entry.mount_point == path) type = entry.type;
                if (type.empty()) return fmt::format("nothing is mounted on {} any more", path);
                if (type == "fuse.ptcfs") return std::string();
                return fmt::format("{} is mounted over {}", type, path);
              },
          .requests = [&session] { return session.trouble(); },
          .service = [&session] { return session.tree().store().service(); }};
}

void show_pages(HttpServer& server, Tree& tree) {
  server.show([pages = HttpPages(tree)](std::string_view path) { return pages.answer(path); });
  spdlog::info("http: {}", server.url());
  if (!server.loopback()) {
    spdlog::warn(
        "http: {} is open to the network, and nobody is asked for a password: whoever "
        "reaches it sees the names and layouts of all jobs",
        server.url());
  }
}

/// A start that fails leaves no tmpfs or directory behind that was made for it. Outlives whatever
/// has files there open.
class NewPlace {
 public:
  NewPlace(const StorePlace& place, const StorePlaceOptions& options)
      : options_(options), place_(place) {}
  ~NewPlace() {
    if (!keep_) take_back_store_place(options_, place_);
  }
  void keep() { keep_ = true; }

 private:
  const StorePlaceOptions& options_;
  const StorePlace& place_;
  bool keep_ = false;
};

/// What holds the owner, mode and names of the mount's root. Its mode may let all write: it is in a
/// directory of its own, which nobody else may enter, whatever the store's own mode is.
Result<std::string> root_in(const std::string& store) {
  const std::string closed = store + "/mount", root = closed + "/root", former = store + "/root";
  PTC_TRY(make_directory(AT_FDCWD, closed, 0700));
  struct stat facts = {};
  if (::lstat(root.c_str(), &facts) != 0 && ::rename(former.c_str(), root.c_str()) != 0 &&
      errno != ENOENT)
    return errno_error(errno, former);
  return root;
}

bool is_below(const std::string& path, const std::string& directory) {
  return path == directory || (path.starts_with(directory) &&
                               (directory.ends_with('/') || path[directory.size()] == '/'));
}

/// The directory to mount on, just before that; whatever lies in it.
Result<Beneath> mountable(const std::string& path, bool was_dead) {
  if (was_dead) {
    PTC_TRY(take_away_dead_mount(path));
    spdlog::warn("a dead ptcfs mount was left on {}; it was unmounted first", path);
  }
  PTC_TRY(auto beneath, Beneath::open(path));
  constexpr size_t kNamed = 5;
  std::vector<std::string> names = beneath.names(kNamed + 1);
  if (names.empty()) return beneath;
  const bool more = names.size() > kNamed;
  if (more) names.pop_back();
  for (std::string& name : names) name = ptc::quoted(name);
  spdlog::warn(
      "{} is not empty: {}{} lie beneath the mount now, and are seen again when it is unmounted. "
      "If they were meant "
      "for ptcfs, they were written while it was not mounted",
      path, fmt::join(names, ", "), more ? " and others" : "");
  return beneath;
}

/// A node's membership, which ends with this at the latest.
class Leaving {
 public:
  explicit Leaving(ClusterNode* node) : node_(node) {}
  ~Leaving() { now(); }
  void now() {
    if (node_ != nullptr) std::exchange(node_, nullptr)->leave();
  }

 private:
  ClusterNode* node_;
};

/// What a keeper gave to this process.
struct Kept {
  KeptBy by;
  std::unique_ptr<LiveState> state;
  std::unique_ptr<KeptMount> mount;

  static Result<std::unique_ptr<Kept>> take(KeptBy by) {
    PTC_TRY(auto state, LiveState::open(by.state.get()));
    if (state->goes_on())
      state->note_end(by.made_room ? LiveState::End::kMadeRoom
                      : by.killed  ? LiveState::End::kKilled
                                   : LiveState::End::kCrashed);
    auto mount = std::make_unique<KeptMount>(by.device.get(), *state);
    return std::make_unique<Kept>(Kept{std::move(by), std::move(state), std::move(mount)});
  }
  bool goes_on() const { return state->goes_on(); }
  /// What is open is in that store.
  Result<> check_store(const std::string& directory) {
    LiveState::Header& header = state->header();
    char* const named = header.store;
    const size_t most = sizeof header.store - 1;
    struct stat stat = {};
    if (::stat(directory.c_str(), &stat) != 0) return errno_error(errno, "store " + directory);
    if (!goes_on()) {
      std::strncpy(named, directory.c_str(), most);
      header.store_device = stat.st_dev;
      header.store_inode = stat.st_ino;
    } else if (directory.substr(0, most) != named) {
      return invalid_argument(
          "the mount's store is {}, and cannot become {} while it is mounted; unmount it, and "
          "mount again",
          named, directory);
    } else if (header.store_device != stat.st_dev || header.store_inode != stat.st_ino) {
      return invalid_argument("the store {} is another directory than when it was mounted",
                              directory);
    }
    return ok();
  }
  /// Once the mount can be used.
  void say_so() const {
    if (!mount->can_resend())
      spdlog::warn(
          "this kernel does not give out again what a daemon has taken and not answered (Linux "
          "6.9 does): --keep survives planned upgrades only");
    if (!goes_on()) return;
    timespec now = {};
    ::clock_gettime(CLOCK_MONOTONIC, &now);
    const int64_t ns = int64_t{now.tv_sec} * 1'000'000'000 + now.tv_nsec;
    spdlog::info("the mount goes on; the daemon before ended by {}, {:.3f} s ago", by.cause,
                 static_cast<double>(ns - by.ended_ns) / 1e9);
  }
};

/// Mounts and serves until the end. `ready` is called once the mount can be used. `kept`: null
/// where there is no keeper.
template <class Ready>
int run(Options& options, Kept* kept, Ready ready) {
  const bool goes_on = kept != nullptr && kept->goes_on();
  keep_needed_capabilities();
  ::umask(077);  // the store is nobody else's
  raise_file_limit();
  sigset_t signals = block_signals();

  if (options.mount.allow_other) {
    auto allowed = check_allow_other();
    if (!allowed) return complain(allowed.error(), kMountFailure);
  }
  // Whoever looks at what is mounted there while nobody serves it waits for this process.
  auto was_dead = goes_on ? Result<bool>(false) : check_mount_point(options.mount.mount_point);
  if (!was_dead) return complain(was_dead.error(), kMountFailure);
  Health health;
  auto http = serve_health(options, health);
  if (!http) return complain(http.error(), kSystemError);
  auto place = prepare_store_place(options.place);
  if (!place) return complain(place.error(), kSystemError);
  NewPlace new_place(place.value(), options.place);
  if (kept != nullptr) {
    if (auto same = kept->check_store(place.value().directory); !same)
      return complain(same.error(), kUsage);
    if (goes_on && !kept->by.foreground)
      log_in_background(place.value().directory, options.log_format);
    options.mount.kept = kept->mount.get();
  }
  if (!place.value().note.empty()) spdlog::warn("{}", place.value().note);
  if (is_below(place.value().directory, options.mount.mount_point)) {
    return complain(
        invalid_argument(
            "the store {} would lie below the mount point {}, and be hidden by it; give another "
            "--store",
            place.value().directory, options.mount.mount_point),
        kUsage);
  }

  Tree tree(options.cache_bytes.value_or(memory_of_machine() / 8));
  if (kept != nullptr) tree.set_live_state(kept->state.get());
  tree.page_files().set_place(pages_socket(options.mount.mount_point), place.value().directory);
  tree.set_data_roots(options.data_roots);
  tree.set_options(options_report(options));
  tree.quotas().set_limits(options.quota_user, options.quota_job);
  JobStoreOptions store_options;
  store_options.directory = place.value().directory;
  store_options.node = options.node;
  store_options.version = kVersion;
  store_options.scrub = options.scrub;
  store_options.reads_damaged = options.reads_damaged;
  store_options.reserve = options.reserve;
  auto devices = Devices::open(options.gpu);
  if (!devices) return complain(std::move(devices).error().with_context("--gpu"), kSystemError);
  store_options.devices = std::move(devices).value();
  options.cluster.devices = store_options.devices;
  std::unique_ptr<ClusterNode> cluster;
  if (!options.cluster.etcd.endpoints.empty()) {
    auto started = ClusterNode::start(options.cluster);
    if (!started) return complain(started.error(), kSystemError);
    cluster = std::move(started).value();
    store_options.node = options.cluster.node;
    store_options.cluster = cluster->services();
  }
  auto store = JobStore::open(store_options, &tree);
  Leaving leaving(cluster.get());  // whatever ends this: others must not ask a store that is gone
  if (!store) {
    Error error = std::move(store).error().with_context("store " + place.value().directory);
    if (error.code() == Code::kNoSpace)
      error = make_error(Code::kNoSpace, "{}; start with a larger --memory, or make room there",
                         error.message());
    return complain(error, kSystemError);
  }
  ::umask(0);  // from here on modes come from the kernel, which has applied the caller's
  const auto root = root_in(place.value().directory);
  if (!root) return complain(root.error(), kSystemError);
  auto attached = tree.attach(store.value().get(), root.value());
  if (!attached) return complain(attached.error(), kSystemError);
  if (options.root_mode && ::chmod(root.value().c_str(), *options.root_mode) != 0)
    return complain(errno_error(errno, "the mode of the mount's root"), kSystemError);
  if (cluster != nullptr) {
    auto joined = cluster->join(*store.value());
    if (!joined) return complain(joined.error(), kSystemError);
    if (!place.value().is_tmpfs) new_place.keep();  // the cluster knows it now
    spdlog::info("node {} of cluster {}: listening on {}, etcd {}", options.cluster.node,
                 options.cluster.etcd.cluster, cluster->address(),
                 fmt::join(options.cluster.etcd.endpoints, ", "));
  }
  auto beneath = goes_on ? Result<Beneath>(Beneath::taken_over(std::move(kept->by.beneath)))
                         : mountable(options.mount.mount_point, was_dead.value());
  if (!beneath) return complain(beneath.error(), kMountFailure);
  if (kept != nullptr)
    kept->mount->set_begins(
        [kept, fd = goes_on ? -1 : beneath.value().fd()] { kept->by.serves(fd); });
  options.mount.stirred = [self = ::pthread_self()] { ::pthread_kill(self, kStirred); };
  auto session = FuseSession::mount(tree, options.mount);
  if (!session) return complain(session.error(), kMountFailure);
  if (goes_on) {
    // It is as the first one left it.
  } else if (is_lasting_mount_point(options.mount.mount_point)) {
    beneath.value().close();
  } else if (auto given_back = beneath.value().give_back(); !given_back) {
    spdlog::warn("{}", given_back.error().message());
  }

  new_place.keep();
  ready(place.value());
  if (kept != nullptr) kept->say_so();
  spdlog::info("mounted {} (ptcfs {}, node {}, store {}, jobs {}, passthrough {}{})",
               options.mount.mount_point, kVersion, store.value()->node(), place.value().directory,
               store.value()->job_count(), tree.passthrough().enabled() ? "on" : "off",
               session.value()->uses_io_uring() ? ", io_uring" : "");
  health.mounted(checks_of(*session.value(), options.mount.mount_point));
  if (http.value() != nullptr) show_pages(*http.value(), tree);
  wait_for_the_end(*session.value(), beneath.value(), health, signals, options.mount.mount_point);
  health.ended();
  http.value().reset();
  session.value().reset();
  if (!wait_for_answers(seconds(5))) {
    spdlog::warn("a question asked through .ptc/ask is not finished; leaving it behind");
    spdlog::shutdown();
    ::_exit(0);
  }
  say_what_is_kept(*store.value(), place.value(), options);
  tree.detach();
  store.value()->note_last();
  leaving.now();
  store.value().reset();
  spdlog::shutdown();
  return 0;
}

void let_go_of_terminal() {
  const int null = ::open("/dev/null", O_RDWR | O_CLOEXEC);
  for (int fd : {0, 1, 2}) ::dup2(null, fd);
}

/// Going into the background: the exit status of the parent says whether the mount works.
/// `serve` is called in the child, with what tells the parent.
int run_in_background(const std::function<int(const std::function<void(int)>& tell)>& serve) {
  int pipe_fds[2];
  if (::pipe2(pipe_fds, O_CLOEXEC) != 0) return complain(errno_error(errno, "pipe"), kSystemError);
  pid_t child = ::fork();
  if (child < 0) return complain(errno_error(errno, "fork"), kSystemError);
  if (child > 0) {
    ::close(pipe_fds[1]);
    unsigned char status = 0;
    ssize_t got;
    while ((got = ::read(pipe_fds[0], &status, 1)) < 0 && errno == EINTR) {
    }
    if (got == 1) return status;
    int how = 0;
    while (::waitpid(child, &how, 0) < 0 && errno == EINTR) {
    }
    return WIFEXITED(how) ? WEXITSTATUS(how) : kSystemError;
  }
  ::close(pipe_fds[0]);
  ::setsid();
  if (::chdir("/") != 0) return kSystemError;
  return serve([&](int status) {
    if (status == 0) let_go_of_terminal();
    const auto told = static_cast<unsigned char>(status);
    (void)!::write(pipe_fds[1], &told, 1);
    ::close(pipe_fds[1]);
  });
}

int start_keeper(const Options& options, int argc, char** argv) {
  std::error_code error;
  KeeperOptions keeper{.mount_point = options.mount.mount_point,
                       .arguments = {argv, argv + argc},
                       .directory = std::filesystem::current_path(error).string(),
                       .foreground = options.foreground};
  if (options.foreground) return keep_mount(keeper);
  return run_in_background([&](const std::function<void(int)>& tell) {
    keeper.started = tell;
    return keep_mount(keeper);
  });
}

/// A daemon that a keeper has started, for the first time or again.
int run_kept(Options& options, KeptBy by) {
  options.place.mount_point = options.mount.mount_point = by.mount_point;
  options.mount.io_uring = IoUring::kOff;
  const bool foreground = by.foreground;
  if (!foreground && ::chdir("/") != 0) return kSystemError;
  auto kept = Kept::take(std::move(by));
  if (!kept) return complain(kept.error(), kSystemError);
  return run(options, kept.value().get(), [&](const StorePlace& place) {
    if (foreground || kept.value()->goes_on()) return;
    log_in_background(place.directory, options.log_format);
    let_go_of_terminal();
  });
}

/// Of what the jobs of a mount have in the memory of devices alone, which ends with the daemon that
/// serves it; empty: there is nothing.
std::string ends_with_daemon(const std::string& mount_point) {
  std::string first;
  size_t more = 0;
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator(mount_point, error)) {
    const std::string job = entry.path().filename().string();
    const auto text = read_text_file(AT_FDCWD, entry.path().string() + "/status.json", 64 << 20);
    if (!text) continue;  // it is no job's
    const auto status = parse_json(text.value());
    if (!status || !status.value().is_object()) continue;
    const json::value* checkpoints = status.value().get_object().if_contains("checkpoints");
    if (checkpoints == nullptr || !checkpoints->is_array()) continue;
    for (const json::value& checkpoint : checkpoints->get_array()) {
      if (!checkpoint.is_object()) continue;
      const auto bytes = json_uint(checkpoint.get_object(), "ends_with_daemon_bytes");
      if (!bytes || !bytes.value()) continue;
      if (!first.empty()) {
        ++more;
        continue;
      }
      first = fmt::format(
          "job {} has {} in the memory of devices alone, which would be lost: bring it into the "
          "host's (ptc layout {} set --memory host --wait), or remove that checkpoint",
          shell_word(job), format_size(*bytes.value()), shell_word(job));
    }
  }
  if (more > 0) first += fmt::format("; and so for {} further checkpoints", more);
  return first;
}

/// The same. A daemon that does not answer for so long is not asked: it is replaced for that.
std::string ends_with_daemon_if_it_says(const std::string& mount_point) {
  constexpr auto kPatience = std::chrono::seconds(5);
  std::promise<std::string> promise;
  std::future<std::string> said = promise.get_future();
  std::thread([mount_point, promise = std::move(promise)]() mutable {
    promise.set_value(ends_with_daemon(mount_point));
  }).detach();
  return said.wait_for(kPatience) == std::future_status::ready ? said.get() : std::string();
}

/// What is given beside the flag replaces all that was given before.
int upgrade(const Options& options, int argc, char** argv) {
  char self[PATH_MAX] = {};
  if (::readlink("/proc/self/exe", self, sizeof self - 1) <= 0)
    return complain(errno_error(errno, "/proc/self/exe"), kSystemError);
  std::vector<std::string> arguments;
  if (options.upgrade_has_options) {
    for (int i = 0; i < argc; ++i)
      if (std::string_view(argv[i]) != "--upgrade") arguments.emplace_back(argv[i]);
  }
  if (const std::string lost = ends_with_daemon_if_it_says(options.mount.mount_point);
      !lost.empty())
    return complain(
        make_error(Code::kBusy, "{} is not upgraded: {}", options.mount.mount_point, lost),
        kSystemError);
  auto outage = ask_for_upgrade(options.mount.mount_point, self, arguments);
  if (!outage) return complain(outage.error(), kSystemError);
  fmt::print("ptcfs: upgraded {}; nobody served it for {:.3f} s\n", options.mount.mount_point,
             static_cast<double>(outage.value().count()) / 1e6);
  return 0;
}

int discard(const Options& options) {
  auto mounted = mounted_on(options.place.mount_point);
  if (mounted && mounted->type == "fuse.ptcfs") {
    return complain(make_error(Code::kBusy, "{} is mounted; unmount it first: umount {}",
                               options.place.mount_point, shell_word(options.place.mount_point)),
                    kSystemError);
  }
  if (auto beneath = Beneath::open(options.place.mount_point)) {
    if (auto given_back = beneath.value().give_back(); !given_back)
      return complain(given_back.error(), kSystemError);
  }
  auto gone = discard_store_place(options.place);
  if (!gone) return complain(gone.error(), kSystemError);
  fmt::print("ptcfs: discarded {}\n", gone.value());
  return 0;
}

int main_of(int argc, char** argv) {
  Options options;
  if (auto status = read_command_line(argc, argv, &options)) return *status;
  log_to_stderr(options.mount.debug, options.log_format);
  if (auto by = kept_by()) return run_kept(options, *std::move(by));
  auto mount_point = resolve_mount_point(options.place.mount_point);
  if (!mount_point) return complain(mount_point.error(), kMountFailure);
  options.place.mount_point = options.mount.mount_point = mount_point.value();
  if (options.discard) return discard(options);
  if (options.upgrade) return upgrade(options, argc, argv);
  if (options.keep) return start_keeper(options, argc, argv);
  if (options.foreground) return run(options, nullptr, [](const StorePlace&) {});
  return run_in_background([&](const std::function<void(int)>& tell) {
    return run(options, nullptr, [&](const StorePlace& place) {
      log_in_background(place.directory, options.log_format);
      tell(0);
    });
  });
}

}  // namespace
}  // namespace ptc

int main(int argc, char** argv) {
  try {
    return ptc::main_of(argc, argv);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "ptcfs: %s\n", error.what());
    return ptc::kSystemError;
  }
}
