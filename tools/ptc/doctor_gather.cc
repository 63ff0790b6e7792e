// Finds what `ptc doctor` knows of this machine and of a mount.
#include "tools/ptc/doctor_gather.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/timex.h>
#include <sys/utsname.h>
#include <unistd.h>

#include <cerrno>
#include <charconv>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <set>
#include <sstream>

#include "fs/mount/mount_point.h"
#include "store/base/file.h"
#include "tools/ptc/fields.h"
#include "tools/ptc/mount.h"

namespace ptc::cli {
namespace {

using namespace std::chrono_literals;

constexpr auto kMountPatience = 3s;

std::string first_line(const std::string& path) {
  std::string line;
  std::getline(std::ifstream(path), line);
  return line;
}

uint64_t number_of(const std::string& text, int base = 10) {
  uint64_t number = 0;
  std::from_chars(text.data(), text.data() + text.size(), number, base);
  return number;
}

/// "MemTotal" → bytes.
std::map<std::string, uint64_t> meminfo() {
  std::map<std::string, uint64_t> found;
  std::ifstream file("/proc/meminfo");
  for (std::string line; std::getline(file, line);) {
    std::string key;
    uint64_t kib = 0;
    std::istringstream words(line);
    if (words >> key >> kib) found[key.substr(0, key.find(':'))] = kib << 10;
  }
  return found;
}

/// The word in brackets: "always [never] deny".
std::string chosen_word(const std::string& line) {
  const size_t begin = line.find('['), end = line.find(']');
  return begin == std::string::npos || end == std::string::npos || end < begin
             ? ""
             : line.substr(begin + 1, end - begin - 1);
}

uint64_t own_capabilities() {
  std::ifstream file("/proc/self/status");
  for (std::string word; file >> word;)
    if (word == "CapPrm:" && file >> word) return number_of(word, 16);
  return 0;
}

bool has_program(const std::string& program) {
  const char* path = std::getenv("PATH");
  std::istringstream directories(std::string("/usr/bin:") + (path != nullptr ? path : "/bin"));
  for (std::string directory; std::getline(directories, directory, ':');)
    if (::access((directory + "/" + program).c_str(), X_OK) == 0) return true;
  return false;
}

bool users_may_let_others_in() {
  std::ifstream file("/etc/fuse.conf");
  for (std::string line, word; std::getline(file, line);)
    if (std::istringstream(line) >> word && word == "user_allow_other") return true;
  return false;
}

std::optional<bool> clock_synchronised() {
  timex clock = {};
  const int state = ::adjtimex(&clock);
  if (state < 0) return std::nullopt;
  return state != TIME_ERROR && (clock.status & STA_UNSYNC) == 0;
}

std::optional<GroupLimit> group_limit(const json::object& limits, std::string_view key) {
  if (!has_object(limits, key)) return std::nullopt;
  const json::object& group = object_field(limits, key);
  return GroupLimit{number_field(group, "limit"), number_field(group, "used"),
                    text_field(group, "group")};
}

void take_limits(const json::object& report, DaemonFacts* daemon) {
  const json::object& limits = object_field(report, "limits");
  daemon->open_files = number_field(limits, "open_files");
  daemon->open_files_limit = number_field(limits, "open_files_limit");
  daemon->mappings = number_field(limits, "mappings");
  daemon->groups = {group_limit(limits, "group_memory"), group_limit(limits, "group_threads")};
}

void take_daemon(const json::object& report, MountReport* mounted) {
  DaemonFacts& daemon = mounted->daemon;
  daemon.version = text_field(report, "version");
  daemon.node = text_field(report, "node");
  daemon.store = text_field(report, "store");
  daemon.pid = number_field(report, "pid");
  daemon.user = number_field(report, "user");
  daemon.in_memory = bool_field(report, "store_in_memory");
  daemon.store_total = number_field(report, "store_total_bytes");
  daemon.store_used = number_field(report, "store_used_bytes");
  const json::object& kernel = object_field(report, "kernel");
  daemon.passthrough = bool_field(kernel, "passthrough");
  daemon.expires_names = bool_field(kernel, "expires_names");
  daemon.capabilities = number_of(text_field(report, "capabilities"), 16);
  take_limits(report, &daemon);
  const json::object& options = object_field(report, "options");
  const std::string uring = text_field(options, "io-uring");
  daemon.wants_uring = uring == "on" || uring == "auto";
  daemon.allow_other = bool_field(options, "allow-other");
  EtcdOptions& etcd = mounted->options.etcd;
  etcd.endpoints = text_list(array_field(options, "etcd"));
  etcd.cluster = text_field(options, "cluster");
  etcd.credentials_file = text_field(options, "etcd-credentials");
  etcd.ca_file = text_field(options, "etcd-ca");
  etcd.certificate_file = text_field(options, "etcd-cert");
  etcd.key_file = text_field(options, "etcd-key");
  mounted->options.tls_ca = text_field(options, "tls-ca");
  mounted->options.tls_certificate = text_field(options, "tls-cert");
}

std::optional<double> if_there(const json::object& object, std::string_view key) {
  if (!object.contains(key)) return std::nullopt;
  return real_field(object, key);
}

void take_nodes(const json::object& report, MountReport* mounted) {
  mounted->agreement = text_field(object_field(report, "agreement"), "why");
  for (const json::value& value : array_field(report, "nodes")) {
    if (!value.is_object()) continue;
    const json::object& node = value.get_object();
    const json::object& clock = object_field(node, "clock");
    NodeFacts facts{.name = text_field(node, "name"),
                    .state = text_field(node, "state"),
                    .version = text_field(node, "version"),
                    .heard_seconds_ago = if_there(node, "heard_seconds_ago"),
                    .clock_ahead = if_there(clock, "ahead_seconds"),
                    .clock_within = if_there(clock, "within_seconds")};
    facts.is_self = facts.name == mounted->daemon.node;
    mounted->nodes.push_back(std::move(facts));
  }
}

/// May hang with the daemon.
MountReport look_at_mount(const std::string& mount_point) {
  using enum DaemonFacts::State;
  MountReport mounted;
  DaemonFacts& daemon = mounted.daemon;
  daemon.mount_point = mount_point;
  struct stat facts = {};
  if (const int failed = stat_alive(mount_point, facts); failed != 0) {
    daemon.state = failed == ENOTCONN ? kGone : kUnreadable;
    daemon.trouble = errno_error(failed, mount_point).message();
    return mounted;
  }
  const std::string own = mount_point + "/.ptc/";
  auto report = read_json_file(own + "daemon.json");
  if (report.has_error() && report.error().code() == Code::kNotFound) {
    daemon.state = kOld;
    daemon.version = first_line(own + "version");
    return mounted;
  }
  if (report.has_error()) {
    daemon.state = kUnreadable;
    daemon.trouble = report.error().message();
    return mounted;
  }
  take_daemon(report.value(), &mounted);
  if (const auto nodes = read_json_file(own + "nodes.json")) take_nodes(nodes.value(), &mounted);
  return mounted;
}

/// "mnt-my\x2dptc" → "/mnt/my-ptc": what escape_path() has made.
std::string unescape_path(const std::string& escaped) {
  std::string path = "/";
  if (escaped == "-") return path;
  for (size_t i = 0; i < escaped.size(); ++i) {
    if (escaped[i] == '-') {
      path += '/';
    } else if (escaped.compare(i, 2, "\\x") == 0 && i + 3 < escaped.size()) {
      path += static_cast<char>(number_of(escaped.substr(i + 2, 2), 16));
      i += 3;
    } else {
      path += escaped[i];
    }
  }
  return path;
}

/// False also where that cannot be told.
bool is_unused(const std::string& store) {
  const auto lock = open_file(AT_FDCWD, store + "/lock", O_RDONLY);
  // Whoever begins just now tries again for as long as this holds it.
  return lock && ::flock(lock.value().get(), LOCK_SH | LOCK_NB) == 0;
}

uint64_t bytes_below(const std::string& directory) {
  namespace fs = std::filesystem;
  uint64_t bytes = 0;
  std::error_code error;
  for (fs::recursive_directory_iterator it(directory, error), end; !error && it != end;
       it.increment(error)) {
    struct stat facts = {};
    if (::lstat(it->path().c_str(), &facts) == 0)
      bytes += static_cast<uint64_t>(facts.st_blocks) * 512;
  }
  return bytes;
}

}  // namespace

MachineFacts gather_machine() {
  MachineFacts facts;
  utsname name = {};
  if (::uname(&name) == 0) facts.kernel = name.release;
  facts.enable_uring = first_line("/sys/module/fuse/parameters/enable_uring");
  const UniqueFd device(::open("/dev/fuse", O_RDWR | O_CLOEXEC));
  facts.fuse_error = device.get() < 0 ? errno : 0;
  facts.is_root = ::geteuid() == 0;
  facts.has_fusermount = has_program("fusermount3");
  facts.user_allow_other = users_may_let_others_in();
  facts.capabilities = own_capabilities();
  auto memory = meminfo();
  facts.memory_total = memory["MemTotal"];
  facts.memory_available = memory["MemAvailable"];
  facts.swap_total = memory["SwapTotal"];
  facts.swap_used = facts.swap_total - std::min(facts.swap_total, memory["SwapFree"]);
  facts.commit_limit = memory["CommitLimit"];
  facts.committed = memory["Committed_AS"];
  facts.overcommit = static_cast<int>(number_of(first_line("/proc/sys/vm/overcommit_memory")));
  facts.shmem_enabled =
      chosen_word(first_line("/sys/kernel/mm/transparent_hugepage/shmem_enabled"));
  facts.groups = group_limits();
  rlimit files = {};
  if (::getrlimit(RLIMIT_NOFILE, &files) == 0) facts.open_files_limit = files.rlim_max;
  facts.mappings_limit = number_of(first_line("/proc/sys/vm/max_map_count"));
  facts.clock_synchronised = clock_synchronised();
  return facts;
}

MountReport gather_mount(const std::string& mount_point) {
  const auto there = mounted_on(mount_point);
  if (!there || there->type != "fuse.ptcfs") {
    MountReport none;
    none.daemon.mount_point = mount_point;
    none.daemon.state = DaemonFacts::State::kNotMounted;
    return none;
  }
  if (auto mounted = within(kMountPatience, [=] { return look_at_mount(mount_point); }))
    return *std::move(mounted);
  MountReport silent;
  silent.daemon.mount_point = mount_point;
  silent.daemon.state = DaemonFacts::State::kSilent;
  return silent;
}

std::vector<std::string> mount_points() {
  std::set<std::string> points;
  const auto entries = mounted_file_systems();
  if (entries)
    for (const MountEntry& entry : entries.value())
      if (entry.type == "fuse.ptcfs") points.insert(entry.mount_point);
  return {points.begin(), points.end()};
}

std::vector<std::string> dead_mounts() {
  std::vector<std::string> dead;
  for (const std::string& point : mount_points()) {
    const auto failed = within(1s, [point] {
      struct stat facts = {};
      return stat_alive(point, facts);
    });
    if (failed && *failed == ENOTCONN) dead.push_back(point);
  }
  return dead;
}

std::vector<StoreFacts> unused_stores() {
  std::vector<StoreFacts> unused;
  for (const std::string& top :
       {std::string("/run/ptcfs"), "/dev/shm/ptcfs-" + std::to_string(::geteuid())}) {
    const auto names = list_directory(top);
    if (names.has_error()) continue;
    for (const std::string& name : names.value()) {
      const std::string store = top + "/" + name;
      if (!is_unused(store)) continue;
      unused.push_back({store, unescape_path(name), bytes_below(store)});
    }
  }
  return unused;
}

}  // namespace ptc::cli
