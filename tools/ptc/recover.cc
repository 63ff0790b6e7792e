// ptc recover: what the nodes of a cluster had agreed on, made anew of what their stores have seen.
#include "reshard/node/recover.h"

#include <fcntl.h>
#include <fmt/core.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <set>
#include <thread>

#include "fs/mount/mount_point.h"
#include "store/base/file.h"
#include "store/base/size_text.h"
#include "store/meta/etcd_meta.h"
#include "tools/ptc/command.h"
#include "tools/ptc/text.h"

namespace ptc::cli {
namespace {

struct RecoverOptions {
  std::vector<std::string> stores;
  std::string from;
  EtcdOptions etcd;
  bool dry_run = false, yes = false;
};

/// The directory of a store, or that of the tmpfs behind a mount point.
std::string store_directory(const std::string& place) {
  std::error_code error;
  if (std::filesystem::exists(place + "/identity.json", error)) return place;
  const std::string behind =
      "/run/ptcfs/" + escape_path(std::filesystem::absolute(place, error).string());
  return std::filesystem::exists(behind + "/identity.json", error) ? behind : place;
}

/// No daemon has it, and none gets it meanwhile.
Result<UniqueFd> lock_store(const std::string& directory) {
  auto fd = open_file(AT_FDCWD, directory + "/lock", O_RDWR);
  if (fd.has_error() && fd.error().code() == Code::kNotFound) return UniqueFd();
  PTC_TRY(UniqueFd lock, std::move(fd));
  PTC_TRY(const bool locked, lock_file(lock.get(), std::chrono::seconds(5)));
  if (!locked)
    return make_error(Code::kBusy, "a ptcfs daemon has the store {}: stop all nodes first (umount)",
                      directory);
  return lock;
}

void print_checkpoint(const RecoverReport::Checkpoint& one) {
  fmt::print("  {}/{}: ", printable(one.job), printable(one.name));
  if (!one.known) {
    fmt::print("where its files lie is not known here: look at more stores\n");
    return;
  }
  fmt::print("{} files here ({})", one.files, format_size(one.bytes));
  if (one.missing > 0) fmt::print(", {} MISSING", one.missing);
  for (const auto& [node, count] : one.elsewhere)
    fmt::print(", {} on {} (not looked at)", count, node);
  fmt::print("\n");
}

void print_left_out(const std::vector<RecoverReport::LeftOut>& left_out) {
  for (const RecoverReport::LeftOut& one : left_out)
    say_line("    {} (known to {})", one.what, fmt::join(one.nodes, ", "));
}

/// Each choice, and what it leaves out; those together that leave out the same.
void print_choices(const std::vector<SeenStore>& stores, const RecoverReport& report) {
  fmt::print(
      "from revision {} on these stores have seen different things agreed, and none knows "
      "all:\n",
      report.parted);
  std::vector<bool> said(stores.size());
  for (size_t i = 0; i < stores.size(); ++i) {
    if (said[i] || !report.can_be_chosen[i]) continue;
    std::vector<std::string> nodes;
    for (size_t j = i; j < stores.size(); ++j)
      if (report.can_be_chosen[j] && report.left_out[j] == report.left_out[i]) {
        nodes.push_back(stores[j].identity.node);
        said[j] = true;
      }
    fmt::print("  --from {} leaves out{}\n", fmt::join(nodes, " or "),
               report.left_out[i].empty() ? " nothing" : ":");
    print_left_out(report.left_out[i]);
  }
}

void print_stores(const std::vector<SeenStore>& stores, const RecoverReport& report, bool decided) {
  for (size_t i = 0; i < stores.size(); ++i)
    fmt::print("{} of node {}, cluster {} ({}), history {}: has seen revision {}{}{}\n",
               stores[i].directory, stores[i].identity.node, stores[i].identity.cluster_name,
               stores[i].identity.cluster, stores[i].identity.history, stores[i].facts.seen(),
               stores.size() > 1 && i == report.newest ? " (the latest)" : "",
               decided && report.chosen != report.newest && i == report.chosen ? " (chosen)" : "");
  for (const RegisteredStore& other : report.others)
    fmt::print(
        "store {} of node {}: not looked at; if it has seen more, or knows jobs that these do not "
        "(ptc recover --dry-run there), recover from it\n",
        other.store, other.node);
}

/// `decided`: it is clear of which store everything is to be made.
void print_report(const std::vector<SeenStore>& stores, const RecoverReport& report, bool decided) {
  print_stores(stores, report, decided);
  if (report.parted > 0) print_choices(stores, report);
  if (!decided) return;
  say_line("jobs: {}",
           report.jobs.empty() ? "none" : fmt::format("{}", fmt::join(report.jobs, ", ")));
  for (const RecoverReport::Checkpoint& one : report.checkpoints) print_checkpoint(one);
  if (const auto& left_out = report.left_out[report.chosen];
      report.parted == 0 && !left_out.empty()) {
    fmt::print("left out:\n");
    print_left_out(left_out);
  }
  if (!report.gone.empty())
    say_line("in etcd now, and not of this: {}", fmt::join(report.gone, ", "));
  fmt::print("{} of the agreed keys are missing in etcd, or are others there\n",
             report.changes.size());
}

/// What somebody can do who misses it.
void print_where_it_is(const std::vector<SeenStore>& stores, const RecoverReport& report) {
  std::vector<std::string> directories;
  for (const RecoverReport::LeftOut& one : report.left_out[report.chosen])
    for (const SeenStore& store : stores)
      if (std::find(one.nodes.begin(), one.nodes.end(), store.identity.node) != one.nodes.end() &&
          std::find(directories.begin(), directories.end(), store.directory) == directories.end())
        directories.push_back(store.directory);
  if (directories.empty()) return;
  fmt::print(
      "what is left out stays in {}, where nothing names it any more (kept in .ptc/nodes.json). "
      "To read it, copy that before its node starts; ptc(1) says how\n",
      fmt::join(directories, ", "));
}

/// Nodes that are started as ever would find none of what is made now.
void print_other_name(const std::vector<SeenStore>& stores, const std::string& cluster) {
  std::set<std::string> names;
  for (const SeenStore& store : stores) names.insert(store.identity.cluster_name);
  if (names.size() == 1 && names.contains(cluster)) return;
  fmt::print(stderr,
             "ptc: warning: --cluster says {}, and the stores are of the cluster {}. Is it another "
             "on purpose? All of its nodes are to be started with --cluster {} then\n",
             cluster, fmt::join(names, " and "), cluster);
}

constexpr auto kWaitForLeases = std::chrono::seconds(20);

bool confirmed() {
  fmt::print(stderr, "Make what was agreed anew of this? [y/N] ");
  std::fflush(stderr);
  const int first = std::getchar();
  for (int c = first; c != '\n' && c != EOF;) c = std::getchar();
  return first == 'y' || first == 'Y';
}

Result<int> run_recover(const Context&, const RecoverOptions& options) {
  std::vector<SeenStore> stores;
  std::vector<UniqueFd> locks;  // before they are looked at: a node that stops writes last
  for (const std::string& place : options.stores) {
    if (!options.dry_run) {
      PTC_TRY(locks.emplace_back(), lock_store(store_directory(place)));
    }
    auto store = look_at_store(store_directory(place));
    if (std::error_code error; store.has_error() && store.error().code() == Code::kNotFound &&
                               std::filesystem::exists(place + "/.ptc/version", error))
      return make_error(Code::kNotFound,
                        "ptcfs is mounted at {}, and its store is elsewhere (ptcfs --store): name "
                        "that, once all nodes are stopped (umount)",
                        place);
    PTC_TRY(auto seen, std::move(store));
    stores.push_back(std::move(seen));
  }
  EtcdOptions etcd = options.etcd;
  if (etcd.cluster.empty()) etcd.cluster = stores.front().identity.cluster_name;
  PTC_TRY(auto meta, open_etcd_meta(etcd));
  PTC_TRY(auto report, look_at_all(stores, *meta, options.from));
  const bool decided = report.parted == 0 || !options.from.empty();
  print_report(stores, report, decided);
  std::fflush(stdout);
  print_other_name(stores, etcd.cluster);
  if (options.dry_run) return kDone;
  if (!decided)
    return make_error(
        Code::kInvalidArgument,
        "the stores have seen different things agreed from revision {} on, so that each leaves "
        "out something: nothing was changed. Choose one with --from NODE, after a look at it with "
        "--dry-run --from NODE",
        report.parted);
  if (!report.alive.empty())
    fmt::print(stderr,
               "nodes are there still, or were when etcd was saved: {}; waiting until their leases "
               "have ended\n",
               fmt::join(report.alive, ", "));
  for (const auto deadline = std::chrono::steady_clock::now() + kWaitForLeases;
       !report.alive.empty();) {
    if (std::chrono::steady_clock::now() > deadline)
      return make_error(
          Code::kBusy,
          "nodes are there: {}. Stop them all first, and wait until their leases have ended",
          fmt::join(report.alive, ", "));
    std::this_thread::sleep_for(std::chrono::milliseconds(500));
    PTC_TRY(report, look_at_all(stores, *meta, options.from));
  }
  if (!options.yes && !(is_live_terminal(0) && confirmed())) {
    fmt::print(stderr, "ptc: nothing was changed (--yes: without being asked)\n");
    return kFailed;
  }
  PTC_TRY(recover(stores, report.chosen, *meta));
  print_where_it_is(stores, report);
  const bool other = etcd.cluster != stores.front().identity.cluster_name;
  fmt::print("done: start the nodes again{}\n",
             other ? fmt::format(", with --cluster {}", etcd.cluster) : "");
  return kDone;
}

}  // namespace

void add_recover(CLI::App& app, Context& context) {
  auto [command, options] = add_command<RecoverOptions>(
      app, context, "recover", "Make what a cluster agreed on anew, when etcd has lost it",
      run_recover);
  options->etcd.cluster.clear();
  command->add_option("STORE", options->stores, "stores of nodes, or their mount points")
      ->required();
  command
      ->add_option("--from", options->from,
                   "of what the store of this node has seen (default: of the latest)")
      ->type_name("NODE");
  command->add_option("--etcd", options->etcd.endpoints, "as ptcfs has it")
      ->type_name("URL,…")
      ->delimiter(',')
      ->allow_extra_args(false)
      ->required();
  command
      ->add_option("--cluster", options->etcd.cluster,
                   "the cluster's name (default: as the store has it)")
      ->type_name("NAME");
  command->add_option("--etcd-credentials", options->etcd.credentials_file, "as ptcfs has it")
      ->type_name("FILE");
  command->add_option("--etcd-ca", options->etcd.ca_file, "as ptcfs has it")->type_name("FILE");
  command->add_option("--etcd-cert", options->etcd.certificate_file, "as ptcfs has it")
      ->type_name("FILE");
  command->add_option("--etcd-key", options->etcd.key_file, "as ptcfs has it")->type_name("FILE");
  command->add_flag("--dry-run", options->dry_run, "only say what is there, and what is missing");
  command->add_flag("-y,--yes", options->yes, "do not ask");
  command->footer(
      "Each store has a copy of what it has seen agreed. When etcd's data were lost, or\n"
      "are of a backup, the nodes refuse to start. With all nodes stopped, look at the\n"
      "store of each (--dry-run), and recover from the one that has seen the latest\n"
      "revision; then start them. No file of a store is changed. Where the stores have\n"
      "seen different things, since nodes went on with an etcd that was set back, it\n"
      "says what each leaves out, and one of them must be chosen (--from).\n"
      "\nExample:\n"
      "  ptc recover --etcd http://10.0.0.9:2379 /local/ptc");
}

}  // namespace ptc::cli
