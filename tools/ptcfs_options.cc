#include "tools/ptcfs_options.h"

#include <fmt/core.h>
#include <unistd.h>

#include <algorithm>
#include <boost/json/array.hpp>
#include <boost/json/object.hpp>
#include <charconv>
#include <cstdio>
#include <filesystem>
#include <map>
#include <vector>

#include "fs/report/version.h"
#include "reshard/node/join_jobs.h"
#include "store/base/json.h"
#include "store/base/size_text.h"
#include "store/device/devices.h"
#include "tools/cli/complete.h"
#include "tools/cli/manual_style.h"

namespace ptc {
namespace {

constexpr const char* kDescription =
    "Mounts the state of training jobs as a file system: checkpoints held in memory, readable "
    "under any layout of ranks. mkdir in it makes a job.";
constexpr const char* kFooter =
    R"(Options of -o, besides those above that take a value (memory=64G,
etcd=http://a:2379;http://b:2379):
  allow_other           other users may enter (needs user_allow_other in
                        /etc/fuse.conf unless root)
  keep                  as --keep
  noexec, noatime, …    as mount(8) has them; ro is refused, for a job must be
                        able to write

Examples:
  ptcfs /mnt/ptc                     in the background, in half of the memory
  ptcfs --memory 64G /mnt/ptc        in a tmpfs of 64 GiB, which outlives the
                                     daemon
  ptcfs --store /local/ptc /mnt/ptc  on a local disk
  ptcfs --node w1 --listen 10.0.0.1:7070 --secret /etc/ptcfs/secret
        --etcd http://10.0.0.9:2379 /mnt/ptc         one node of a cluster
  ptcfs -f /mnt/ptc                  in the foreground, log on stderr
  ptcfs --keep /mnt/ptc              what is open outlives a daemon that dies
  ptcfs --upgrade /mnt/ptc           this program serves it from now on
  umount /mnt/ptc                    ends it; what was committed is kept
  ptcfs --discard /mnt/ptc           frees what was kept
  none /mnt/ptc fuse.ptcfs memory=64G,allow_other,nofail 0 0     in /etc/fstab

Exit status: 0 mounted (with -f: ended well), 1 wrong usage, 2 system error,
32 mount failed.)";

const std::vector<std::string> kOwn = {
    "store",     "memory",   "cache",    "quota-job",  "quota-user",       "data-root",
    "node",      "http",     "etcd",     "listen",     "advertise",        "cluster",
    "secret",    "tls-ca",   "tls-cert", "tls-key",    "etcd-credentials", "etcd-ca",
    "etcd-cert", "etcd-key", "lease",    "scrub",      "root-mode",        "patience",
    "reserve",   "io-uring", "damaged",  "log-format", "access-log",       "gpu",
    "transport"};
// Concern mount(8) and systemd alone, or are what the mount is anyway.
const std::vector<std::string> kPassedOver = {"rw",
                                              "auto",
                                              "noauto",
                                              "user",
                                              "nouser",
                                              "users",
                                              "owner",
                                              "group",
                                              "nofail",
                                              "_netdev",
                                              "defaults",
                                              "dev",
                                              "nodev",
                                              "suid",
                                              "nosuid",
                                              "exec",
                                              "default_permissions",
                                              "comment",
                                              "uhelper",
                                              "fsname",
                                              "subtype",
                                              "async",
                                              "atime",
                                              "diratime",
                                              "relatime",
                                              "norelatime",
                                              "nostrictatime",
                                              "nolazytime",
                                              "loud"};
const std::vector<std::string> kKernels = {"noexec", "noatime", "nodiratime", "sync", "dirsync"};

bool is_in(const std::vector<std::string>& names, const std::string& name) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

/// As the caller means it: in the background the daemon's directory is another.
std::string absolute_path(const std::string& path) {
  std::error_code error;
  auto absolute = std::filesystem::absolute(path, error);
  return error ? path : absolute.string();
}

/// An option of ptcfs' own: --memory 64G, or -o memory=64G.
Result<> take_own(const std::string& key, const std::string& value, Options* options) {
  constexpr uint64_t kLeastMemory = 16 << 20, kMostMemory = uint64_t{1} << 60;
  if (value.empty()) return invalid_argument("a value is missing");
  ClusterOptions& cluster = options->cluster;
  const std::map<std::string_view, std::string*> texts = {{"node", &options->node},
                                                          {"listen", &cluster.listen},
                                                          {"advertise", &cluster.advertise},
                                                          {"cluster", &cluster.etcd.cluster}};
  const std::map<std::string_view, std::string*> files = {
      {"secret", &cluster.auth.secret_file},
      {"tls-ca", &cluster.auth.ca_file},
      {"tls-cert", &cluster.auth.cert_file},
      {"tls-key", &cluster.auth.key_file},
      {"etcd-credentials", &cluster.etcd.credentials_file},
      {"etcd-ca", &cluster.etcd.ca_file},
      {"etcd-cert", &cluster.etcd.certificate_file},
      {"etcd-key", &cluster.etcd.key_file}};
  if (const auto text = texts.find(key); text != texts.end()) {
    *text->second = value;
  } else if (const auto file = files.find(key); file != files.end()) {
    *file->second = absolute_path(value);
  } else if (key == "store") {
    options->place.directory = absolute_path(value);
  } else if (key == "quota-job") {
    PTC_TRY(options->quota_job, QuotaLimit::parse(value));
  } else if (key == "quota-user") {
    PTC_TRY(options->quota_user, QuotaLimit::parse(value));
  } else if (key == "data-root") {
    for (const std::string& root : CLI::detail::split(value, ':')) {
      if (root.empty())
        return invalid_argument("one of the directories in {} has no name", ptc::quoted(value));
      // Compared with paths letter by letter, without "." and "..".
      options->data_roots.push_back(
          root.starts_with('/')
              ? root
              : std::filesystem::path(absolute_path(root)).lexically_normal().string());
    }
  } else if (key == "log-format") {
    if (value != "text" && value != "json")
      return invalid_argument("{} is neither text nor json", ptc::quoted(value));
    options->log_format = value == "json" ? LogFormat::kJson : LogFormat::kText;
  } else if (key == "http") {
    PTC_TRY(options->http, HttpAddress::parse(value));
  } else if (key == "access-log") {
    options->access_log = value == "-" ? value : absolute_path(value);
  } else if (key == "etcd") {
    for (const std::string& list : CLI::detail::split(value, ','))
      for (const std::string& endpoint : CLI::detail::split(list, ';'))
        if (!endpoint.empty()) cluster.etcd.endpoints.push_back(endpoint);
  } else if (key == "reserve") {
    options->reserve = {};
    if (value == "auto") {
      options->reserve.follows = host_takes_free_memory();
    } else if (value != "off") {
      PTC_TRY(options->reserve.for_good, parse_size(value));
      if (options->reserve.for_good > memory_of_machine())
        return invalid_argument("{} is more than this machine has; give a size, auto or off",
                                format_size(options->reserve.for_good));
    }
  } else if (key == "gpu") {
    std::string list = value;
    std::ranges::replace(list, ';', ',');  // in -o commas separate options
    PTC_TRY(Devices::check(list));
    options->gpu = list;
  } else if (key == "scrub") {
    PTC_TRY(options->scrub, ScrubRate::parse(value));
  } else if (key == "damaged") {
    if (value != "refuse" && value != "read")
      return invalid_argument("'{}' is neither refuse nor read", value);
    options->reads_damaged = value == "read";
  } else if (key == "root-mode") {
    uint32_t mode = 0;
    const auto [end, bad] = std::from_chars(value.data(), value.data() + value.size(), mode, 8);
    if (bad != std::errc() || end != value.data() + value.size() || mode > 07777)
      return invalid_argument("'{}' is no mode in octal digits, as 1777 is", value);
    options->root_mode = mode;
  } else if (key == "patience") {
    uint32_t patience = 0;
    const auto [end, bad] = std::from_chars(value.data(), value.data() + value.size(), patience);
    if (bad != std::errc() || end != value.data() + value.size() || patience < 1 ||
        patience > 86400)
      return invalid_argument("a request waits 1 to 86400 seconds");
    options->mount.patience = std::chrono::seconds(patience);
  } else if (key == "io-uring") {
    const std::map<std::string_view, IoUring> words = {
        {"auto", IoUring::kAuto}, {"on", IoUring::kOn}, {"off", IoUring::kOff}};
    const auto word = words.find(value);
    if (word == words.end()) return invalid_argument("'{}' is none of auto, on, off", value);
    options->mount.io_uring = word->second;
  } else if (key == "transport") {
    PTC_TRY(cluster.transport, parse_node_transport(value));
  } else if (key == "lease") {
    uint32_t lease = 0;
    const auto [end, bad] = std::from_chars(value.data(), value.data() + value.size(), lease);
    if (bad != std::errc() || end != value.data() + value.size() || lease < 2 || lease > 3600)
      return invalid_argument("a lease lasts 2 to 3600 seconds");
    cluster.lease = std::chrono::seconds(lease);
  } else {
    PTC_TRY(uint64_t bytes, parse_size(value));
    if (bytes > kMostMemory) return invalid_argument("{} is more than 1 EiB", format_size(bytes));
    if (key == "cache") {
      options->cache_bytes = bytes;
    } else if (bytes < kLeastMemory) {
      return invalid_argument("{} is too small: {} at least", format_size(bytes),
                              format_size(kLeastMemory));
    } else {
      options->place.memory_bytes = bytes;
    }
  }
  return ok();
}

/// One option of -o.
Result<> take_mount_option(const std::string& option, Options* options) {
  const size_t equals = option.find('=');
  const std::string key = option.substr(0, equals);
  if (key.empty() || key.starts_with("x-") || key.starts_with("X-") || is_in(kPassedOver, key)) {
    return ok();
  }
  if (is_in(kKernels, key)) {
    options->mount.kernel_options.push_back(key);
  } else if (key == "allow_other") {
    options->mount.allow_other = true;
  } else if (key == "keep") {
    options->keep = true;
  } else if (is_in(kOwn, key)) {
    return take_own(key, equals == std::string::npos ? "" : option.substr(equals + 1), options);
  } else if (key == "ro") {
    return invalid_argument(
        "a read-only mount is not offered, since layout.json and incoming/ "
        "must be writable; take away write permission instead");
  } else if (key == "remount") {
    return invalid_argument("options cannot change while it is mounted; umount, then mount again");
  } else {
    std::vector<std::string> known = kOwn;
    known.insert(known.end(), {"allow_other", "keep", "noexec", "noatime", "nodiratime"});
    const auto near = nearest_name(key, known);
    return invalid_argument("unknown option{}; ptcfs --help lists them",
                            near ? fmt::format(", is it '{}'?", *near) : "");
  }
  return ok();
}

std::string host_name() {
  char host[256] = "localhost";
  ::gethostname(host, sizeof host - 1);
  return host;
}

cli::Values values_of(const std::string& type, const cli::Typed&) {
  using enum cli::Values::Else;
  if (type == "DIR" || type == "MOUNTPOINT") return {{}, kDirectories};
  if (type == "WAY") return {{"auto", "tcp", "nccl"}, kNothing};
  if (type != "OPT,…") return {};
  cli::Values values{{"allow_other", "keep"}, kNothing};
  for (const std::string& name : kOwn) values.words.push_back(name + "=");
  values.words.insert(values.words.end(), kKernels.begin(), kKernels.end());
  return values;
}

}  // namespace

json::object options_report(const Options& options) {
  const ClusterOptions& cluster = options.cluster;
  json::object report{{"mount-point", options.mount.mount_point},
                      {"allow-other", options.mount.allow_other},
                      {"patience", options.mount.patience.count() / 1000},
                      {"reserve", options.reserve.for_good},
                      {"gpu", options.gpu},
                      {"io-uring", options.mount.io_uring == IoUring::kOff  ? "off"
                                   : options.mount.io_uring == IoUring::kOn ? "on"
                                                                            : "auto"}};
  if (options.place.memory_bytes) report["memory"] = *options.place.memory_bytes;
  if (options.cache_bytes) report["cache"] = *options.cache_bytes;
  if (cluster.etcd.endpoints.empty()) return report;
  report["etcd"] = json::array(cluster.etcd.endpoints.begin(), cluster.etcd.endpoints.end());
  report["lease"] = cluster.lease.count();
  report["transport"] = to_string(cluster.transport);
  const std::pair<const char*, const std::string&> texts[] = {
      {"cluster", cluster.etcd.cluster},  {"listen", cluster.listen},
      {"advertise", cluster.advertise},   {"secret", cluster.auth.secret_file},
      {"tls-ca", cluster.auth.ca_file},   {"tls-cert", cluster.auth.cert_file},
      {"tls-key", cluster.auth.key_file}, {"etcd-credentials", cluster.etcd.credentials_file},
      {"etcd-ca", cluster.etcd.ca_file},  {"etcd-cert", cluster.etcd.certificate_file},
      {"etcd-key", cluster.etcd.key_file}};
  for (const auto& [name, text] : texts)
    if (!text.empty()) report[name] = text;
  return report;
}

int complain(const Error& error, int status) {
  fmt::print(stderr, "ptcfs: {}\n", error.message());
  return status;
}

std::optional<int> read_command_line(int argc, char** argv, Options* options) {
  CLI::App app(kDescription, "ptcfs");
  cli::set_manual_style(app);
  app.footer(kFooter);
  app.set_version_flag("--version", fmt::format("ptcfs {}", kVersion),
                       "print the version and exit");
  std::vector<std::string> places, mount_options;
  auto add_own = [&](const std::string& key, const char* type, const char* about) {
    auto take = [key, options](const std::string& value) {
      auto taken = take_own(key, value, options);
      if (!taken) throw CLI::ValidationError("--" + key, taken.error().message());
    };
    app.add_option_function<std::string>("--" + key, take, about)->type_name(type);
  };
  app.add_option("MOUNTPOINT", places,
                 "a directory; a store directory (or 'none') may stand before it, as "
                 "mount(8) calls helpers")
      ->expected(1, 2)
      ->required();
  app.add_flag("-f,--foreground", options->foreground, "stay in the foreground, log on stderr");
  app.add_option("-o,--options", mount_options, "mount options, separated by commas")
      ->type_name("OPT,…")
      ->allow_extra_args(false)
      ->take_all();
  add_own("store", "DIR",
          "directory of the bytes; with --memory, a tmpfs is mounted on it (default: a tmpfs on "
          "/run/ptcfs/<mount point>)");
  add_own("memory", "SIZE",
          "size of that tmpfs: 64G, 1.5T; at least 16M (default: half of memory)");
  add_own("cache", "SIZE",
          "memory for files that are computed on read; given back when they are not asked for any "
          "more (default: an eighth of memory)");
  add_own("reserve", "SIZE",
          "memory that is kept for the next layout or checkpoint, so that it is not waited for: so "
          "much for good; auto: what others have left, where the host of a virtual machine takes "
          "free memory back, for ten minutes, and the kernel may have it; off (default: auto)");
  add_own(
      "gpu", "WHICH",
      "devices in whose memory layouts may be (\"memory\": \"device\" in layout.json): auto, those "
      "that the driver has; off; 0,1, these; or host:64M,64M, devices in the host's memory, to "
      "try such layouts without a GPU (default: auto)");
  add_own("quota-job", "SIZE[,FILES]",
          "what each job may have on this node: bytes, with its checkpoints, and files outside of "
          "these: 64G, 64G,1M, "
          "none,1M (default: all there is; of one job: setfattr -n trusted.ptc.quota -v 64G JOB)");
  add_own("quota-user", "SIZE[,FILES]", "what each user but root may have in all jobs, likewise");
  add_own("data-root", "DIR:…",
          "data sets may lie only below these directories, and no symbolic link lead out of them "
          "(default: "
          "wherever the user who saves source.json may read)");
  add_own("scrub", "RATE",
          "look over what is stored, when nobody else needs the processors, and mend what is "
          "damaged from copies: off, "
          "daily (each checkpoint once a day), or round after round with so many bytes a second: "
          "50M (default: daily)");
  add_own("damaged", "WHAT",
          "what reads of bytes get that are known to be wrong, and right in no copy: refuse (an "
          "error) or read "
          "(them, to save what can be saved; default: refuse)");
  add_own("root-mode", "MODE",
          "mode of the mount's root, so that others may make jobs: 1777; it lasts (default: as "
          "chmod left it, at "
          "first 0755)");
  add_own("patience", "SECONDS",
          "how long a read waits for another node, or for a data set's shards, before it fails "
          "with ETIMEDOUT "
          "(default: 60)");
  add_own("io-uring", "WHEN",
          "take the kernel's requests by io_uring, with threads on each processor, which is faster "
          "where waking a thread on another is slow: off, on, or auto: where the kernel offers it "
          "(Linux 6.14 with `echo Y > /sys/module/fuse/parameters/enable_uring`) (default: off)");
  add_own("log-format", "FORMAT",
          "what lines of the log are: text, or json: an object each, with time, level and message "
          "(default: text)");
  add_own("node", "NAME", "name of this node, a DNS label (default: the host's name)");
  add_own(
      "http", "ADDR",
      "show jobs, layouts, traffic and metrics to browsers and Prometheus on this address: "
      "127.0.0.1:9090, [::1]:9090; :9090 is 127.0.0.1, port 0 any free one. Nobody is asked for "
      "a password. /healthz and /readyz say how the daemon is (default: off)");
  add_own("access-log", "FILE",
          "note there each request of --http: time, client, method, path, status, bytes and "
          "seconds, as words of a line, or as JSON with --log-format json; - is standard output "
          "(default: off)");
  add_own("etcd", "URL,…",
          "the etcd that the nodes of a cluster find each other and agree through: "
          "http://10.0.0.1:2379,http://10.0.0.2:2379 (default: a cluster of one)");
  add_own("listen", "HOST:PORT", "where other nodes reach this one (default: 127.0.0.1:7070)");
  add_own("advertise", "HOST:PORT",
          "the same as others see it, where that differs or --listen is 0.0.0.0 or [::]");
  add_own("cluster", "NAME", "which cluster of those that share the etcd (default: ptcfs)");
  add_own("transport", "WAY",
          "how bytes go between GPUs of two nodes: nccl, which must be there; tcp; or auto, over "
          "NCCL where both have it and there is no TLS (default: auto)");
  add_own("secret", "FILE",
          "the secret that all nodes of the cluster share: 32 bytes or more, mode 0600");
  app.add_flag("--insecure", options->cluster.auth.insecure,
               "listen beyond this machine without a secret: whoever reaches the port reads all");
  add_own("tls-ca", "FILE",
          "mutual TLS between nodes: the authority that signs the nodes' certificates, PEM");
  add_own("tls-cert", "FILE", "this node's certificate, with its name in the SAN, PEM");
  add_own("tls-key", "FILE", "its key, PEM, mode 0600");
  add_own("etcd-credentials", "FILE", "user:password for etcd, mode 0600");
  add_own("etcd-ca", "FILE", "authority of etcd's certificate, PEM (default: the system's)");
  add_own("etcd-cert", "FILE", "certificate that is shown to etcd, PEM, with --etcd-key");
  add_own("etcd-key", "FILE", "its key, PEM, mode 0600");
  app.add_flag("--join", options->cluster.join,
               "bring the jobs that the store has of its own into a cluster that has jobs, too");
  auto join_as = [options](const std::string& text) {
    if (auto taken = take_job_name(text, options->cluster.join_as); !taken)
      throw CLI::ValidationError("--join-as", taken.error().message());
  };
  app.add_option_function<std::vector<std::string>>(
         "--join-as",
         [join_as](const std::vector<std::string>& texts) {
           for (const std::string& text : texts) join_as(text);
         },
         "the same, and job OLD of the store is NEW in the cluster, which has an OLD of its own; "
         "may be given several times")
      ->type_name("OLD=NEW")
      ->allow_extra_args(false)
      ->take_all();
  add_own("lease", "SECONDS",
          "how long a node may be silent before it counts as gone (default: 5)");
  app.add_flag("--discard", options->discard,
               "do not mount: free what an earlier mount on MOUNTPOINT has kept");
  app.add_flag("--keep", options->keep,
               "the mount, and what is open in it, outlives the daemon: a small process keeps it, "
               "and starts the daemon again when it dies. Needs root; goes without io_uring");
  app.add_flag("--upgrade", options->upgrade,
               "do not mount: let this program serve MOUNTPOINT, which is mounted with --keep, "
               "with the options given here, or else as before");
  app.add_flag("-d,--debug", options->mount.debug, "log every request; implies -f");
  if (cli::answer_completion(app, argc, argv, values_of)) return 0;
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    if (error.get_exit_code() == 0) return app.exit(error);
    const std::string what = cli::usage_complaint(app, error);
    return complain(invalid_argument("{}; run ptcfs --help", what), kUsage);
  }
  for (const std::string& list : mount_options) {
    for (const std::string& option : CLI::detail::split(list, ',')) {
      if (auto taken = take_mount_option(option, options); !taken) {
        return complain(std::move(taken).error().with_context("-o " + option), kUsage);
      }
    }
  }
  if (places.size() == 2) {
    options->mount.source = places[0];
    if (places[0] != "none" && places[0] != "ptcfs") {
      (void)take_own("store", places[0], options);
    }
    places.erase(places.begin());
  }
  options->place.mount_point = places[0];
  options->foreground = options->foreground || options->mount.debug;
  if (!options->access_log.empty() && !options->http)
    return complain(invalid_argument("--access-log is of --http, which is not given"), kUsage);
  if (options->access_log == "-" && !options->foreground)
    return complain(invalid_argument("--access-log - wants -f: a daemon in the background has no "
                                     "standard output; give a file"),
                    kUsage);
  ClusterOptions& cluster = options->cluster;
  if (cluster.etcd.endpoints.empty() && !cluster.listen.empty())
    return complain(invalid_argument("--listen is for a cluster, which also needs --etcd"), kUsage);
  if (cluster.etcd.endpoints.empty() && cluster.transport == NodeTransport::kNccl)
    return complain(invalid_argument("--transport nccl is for a cluster, which also needs --etcd"),
                    kUsage);
  if (cluster.listen.empty()) cluster.listen = "127.0.0.1:7070";
  cluster.node = options->node.empty() ? host_name() : options->node;
  if (!cluster.etcd.endpoints.empty() || !options->node.empty()) {
    if (auto checked = check(cluster); !checked) return complain(checked.error(), kUsage);
  }
  // Beside the mount point and the flag itself.
  options->upgrade_has_options = argc > 3;
  if (options->keep && options->mount.io_uring == IoUring::kOn)
    return complain(invalid_argument("--keep goes without io_uring: of what the kernel has given "
                                     "out that way nothing comes again when a daemon has died"),
                    kUsage);
  if (options->keep) options->mount.io_uring = IoUring::kOff;
  if (options->keep && ::geteuid() != 0 && !options->upgrade)
    return complain(make_error(Code::kPermissionDenied,
                               "--keep needs root: users mount by fusermount3, which gives the "
                               "mount to one process alone"),
                    kUsage);
  return std::nullopt;
}

}  // namespace ptc
