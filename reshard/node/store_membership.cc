#include "reshard/node/store_membership.h"

#include <fcntl.h>
#include <fmt/ranges.h>
#include <spdlog/spdlog.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <boost/json/array.hpp>
#include <boost/json/object.hpp>
#include <filesystem>
#include <functional>
#include <map>
#include <set>

#include "reshard/move/placement.h"
#include "store/base/file.h"
#include "store/base/json.h"
#include "store/base/random_id.h"

namespace ptc {
namespace {

constexpr size_t kMostTombstones = 4096;  // then stores that were away for long are told no more
constexpr size_t kTombstonesAtOnce = 64;  // keys of a transaction

bool is_filled(const std::string& directory) {
  std::error_code error;
  return std::filesystem::exists(directory, error) && !std::filesystem::is_empty(directory, error);
}

std::string own_meta_path(const std::string& directory) { return directory + "/meta.db"; }

bool was_alone(const std::string& directory) {
  std::error_code error;
  return std::filesystem::exists(own_meta_path(directory), error);
}

constexpr std::string_view kRecover =
    "If it is the right one, its data were lost or are of a backup: make what was "
    "agreed anew from the stores, with all nodes stopped (ptc recover; see ptc(1))";

constexpr std::string_view kJobKeys = "jobs/";

/// Whether a checkpoint may have bytes on the node: not all nodes are named where there are many.
bool lies_on(const MetaEntry& entry, const std::string& node) {
  const auto value = parse_json(entry.value);
  const json::object* object = value.has_value() ? value.value().if_object() : nullptr;
  const json::value* nodes = object != nullptr ? object->if_contains("nodes") : nullptr;
  if (object != nullptr && object->contains("more_nodes")) return true;
  return nodes != nullptr && nodes->is_array() &&
         std::find(nodes->get_array().begin(), nodes->get_array().end(), json::value(node)) !=
             nodes->get_array().end();
}

}  // namespace

Result<> open_alone(const std::string& directory, const std::string& node) {
  PTC_TRY(auto found, read_store_identity(directory));
  if (found && !found->cluster.empty())
    return make_error(
        Code::kUnavailable,
        "the store {} belongs to cluster {} ({}), as node {}: start it with --etcd, and "
        "--cluster where that is another than ptcfs",
        directory, found->cluster_name, found->cluster, found->node);
  // Without its metadata nobody knows what is in it.
  if (!was_alone(directory) && (is_filled(directory + "/jobs") || is_filled(directory + "/images")))
    return make_error(Code::kCorrupt,
                      "the store {} has jobs but no meta.db, which says what is in them: "
                      "put it back, or give ptcfs another store",
                      directory);
  if (found) return ok();
  StoreIdentity identity;
  identity.node = node;
  PTC_TRY(identity.store, random_id());
  return write_store_identity(directory, identity);
}

Result<std::unique_ptr<StoreMembership>> StoreMembership::open(MembershipOptions options,
                                                               MetaClient& meta, Cluster& cluster) {
  std::unique_ptr<StoreMembership> membership(
      new StoreMembership(std::move(options), meta, cluster));
  PTC_TRY(membership->find_cluster());
  if (membership->options_.begin) {
    PTC_TRY(membership->options_.begin(membership->identity_.store));
  }
  PTC_TRY(membership->register_store());
  return membership;
}

Error StoreMembership::refuse(std::string_view what, std::string_view to_do) const {
  return make_error(Code::kUnavailable, "the store {} belongs to cluster {} ({}), but {}. {}",
                    options_.directory, identity_.cluster_name, identity_.cluster, what, to_do);
}

Result<> StoreMembership::find_cluster() {
  const std::string& directory = options_.directory;
  PTC_TRY(auto found, read_store_identity(directory));
  PTC_TRY(facts_, AgreedFacts::open(agreed_facts_path(directory)));
  PTC_TRY(auto cluster, read_cluster_identity(meta_));
  const bool alone = was_alone(directory);
  const bool empty = !alone && facts_.entries().empty() && !is_filled(directory + "/jobs") &&
                     !is_filled(directory + "/images");
  if (found) identity_ = *found;
  else {
    PTC_TRY(identity_.store, random_id());
  }
  const std::string there = fmt::format("{} (cluster {})", options_.where, options_.cluster_name);
  if (!identity_.cluster.empty() && !empty) {
    if (!cluster)
      return refuse(fmt::format("{} knows no such cluster", there),
                    fmt::format("Look at --etcd and --cluster. {}", kRecover));
    if (cluster->id != identity_.cluster)
      return refuse(fmt::format("{} is another one ({})", there, cluster->id),
                    "Give --etcd and --cluster of its own, or this node another store");
    if (identity_.node != options_.node)
      return refuse(
          fmt::format("as node {} and not {}", identity_.node, options_.node),
          fmt::format("Start it with --node {}, or give this node another store", identity_.node));
    if (cluster->recovering)
      return refuse(fmt::format("what {} says is being made anew", there),
                    "Run ptc recover to its end, then start it");
    if (!alone) {
      PTC_TRY(check_seen(*cluster));
      return options_.check_let_in ? options_.check_let_in(false) : ok();
    }
  }
  // An older ptcfs left no identity: then the jobs say whether this is their cluster.
  if (!found && !alone && !empty) {
    PTC_TRY(auto jobs, meta_.list("jobs/"));
    const bool known = std::any_of(jobs.begin(), jobs.end(), [&](const MetaEntry& entry) {
      return std::filesystem::exists(fmt::format("{}/{}", directory, entry.key));
    });
    if (!known && is_filled(directory + "/jobs"))
      return make_error(Code::kUnavailable,
                        "the store {} has jobs, and {} knows none of them: look at --etcd and "
                        "--cluster, or give this node another store",
                        directory, there);
  }
  if (options_.check_let_in) {
    PTC_TRY(options_.check_let_in(!found || identity_.cluster.empty()));
  }
  if (!cluster) {
    if (options_.join || !options_.join_as.empty())
      return make_error(Code::kNotFound,
                        "there is no cluster {} to join at {}: look at --cluster and --etcd, or "
                        "leave out --join and --join-as, and one of this name begins",
                        options_.cluster_name, options_.where);
    ClusterIdentity made;
    PTC_TRY(made.id, random_id());
    MetaTransaction transaction;
    transaction.compares = {{kIdentityKey, 0}};
    transaction.puts = {{kIdentityKey, made.to_text()}};
    Result<int64_t> put = meta_.commit(transaction);
    if (put.has_error() && put.error().code() != Code::kConflict) return std::move(put).error();
    PTC_TRY(cluster, read_cluster_identity(meta_));
    if (!cluster)
      return make_error(Code::kUnavailable, "the identity of the cluster is gone at once");
    if (put.has_value())
      spdlog::info("cluster {} ({}) begins at {}", options_.cluster_name, cluster->id,
                   options_.where);
  }
  if (alone) return join_with_jobs(*cluster);
  facts_.clear();
  return take_identity(*cluster);
}

Result<> StoreMembership::take_identity(const ClusterIdentity& cluster) {
  identity_.node = options_.node;
  identity_.cluster = cluster.id;
  identity_.cluster_name = options_.cluster_name;
  identity_.history = cluster.history;
  PTC_TRY(write_store_identity(options_.directory, identity_));
  cluster_.belongs_to({kIdentityKey, cluster.meta_revision});
  return ok();
}

/// What was agreed goes on from what this store has seen, or was made anew of that at least.
Result<> StoreMembership::check_seen(const ClusterIdentity& cluster) {
  const std::string there = fmt::format("{} (cluster {})", options_.where, options_.cluster_name);
  if (cluster.history < identity_.history)
    return refuse(fmt::format("{} was set back: it is of history {}, and the store has seen {}",
                              there, cluster.history, identity_.history),
                  kRecover);
  if (cluster.history > identity_.history) {
    const auto next =
        std::find_if(cluster.recovered.begin(), cluster.recovered.end(),
                     [&](const auto& one) { return one.history == identity_.history + 1; });
    const int64_t known = next == cluster.recovered.end() ? 0 : next->revision;
    if (facts_.seen() > known && !options_.join)
      return refuse(
          fmt::format(
              "what was agreed was made anew as it was at revision {}, and the store has seen {}",
              known, facts_.seen()),
          "Start it with --join to go on with that: what nobody names is kept in the store");
    if (facts_.seen() > known)
      spdlog::warn(
          "the store has seen decisions that the cluster knows no more; what nobody names is kept");
    facts_.clear();
    return take_identity(cluster);
  }
  PTC_TRY(auto entry, meta_.get(store_key(identity_.store)));
  all_removals_ = entry.has_value();
  PTC_TRY(int64_t revision, meta_.commit({}));  // changes nothing
  if (revision < facts_.seen())
    return refuse(fmt::format("{} was set back: it is at revision {}, and the store has seen {}",
                              there, revision, facts_.seen()),
                  kRecover);
  cluster_.belongs_to({kIdentityKey, cluster.meta_revision});
  PTC_TRY(auto jobs, meta_.list("jobs/"));
  PTC_TRY(auto removed, meta_.list(kTombstones));
  Result<> fits = facts_.check(jobs, removed, all_removals_);
  if (fits.has_error())
    return refuse(fmt::format("{} is not what it was: {}", there, fits.error().message()),
                  kRecover);
  if (identity_.cluster_name == options_.cluster_name) return ok();
  return take_identity(cluster);
}

/// A new store takes the place of one that was lost, or empty; but with jobs of its own it was
/// never that, and would be taken for the one that has what the cluster has there.
Result<> StoreMembership::check_name_is_free(const ClusterIdentity& cluster) const {
  PTC_TRY(const auto stores, read_stores(meta_));
  const bool taken = std::any_of(stores.begin(), stores.end(), [&](const RegisteredStore& other) {
    return other.node == options_.node && other.store != identity_.store;
  });
  if (!taken) return ok();
  PTC_TRY(const auto jobs, meta_.list("jobs/"));
  for (const MetaEntry& entry : jobs)
    if (entry.key.find("/checkpoints/") != std::string::npos && lies_on(entry, options_.node))
      return make_error(
          Code::kAlreadyExists,
          "cluster {} ({}) has a node {} already, with another store, and checkpoints there; {} "
          "has "
          "jobs of its own: give this node another name (--node). Nothing was changed",
          options_.cluster_name, cluster.id, options_.node, options_.directory);
  return ok();
}

Result<> StoreMembership::join_with_jobs(const ClusterIdentity& cluster) {
  const std::string path = own_meta_path(options_.directory);
  PTC_TRY(auto own, open_sqlite_meta(path));
  PTC_TRY(check_job_names(*own, options_.directory, options_.join_as));
  PTC_TRY(auto found, compare_jobs(*own, meta_, options_.join_as));
  if (!found.in_both.empty()) {
    const std::string& first = found.in_both.front();
    if (const auto as = options_.join_as.find(first); as != options_.join_as.end())
      return make_error(
          Code::kAlreadyExists,
          "--join-as {}={}: cluster {} ({}) has a job {} already: choose another name", first,
          as->second, options_.cluster_name, cluster.id, as->second);
    return make_error(
        Code::kAlreadyExists,
        "the store {} has {} of its own, and so has cluster {} ({}): start it with --join-as "
        "{}=NAME, for each of them, to take it there under another name, or remove one of the two "
        "first (ptcfs without --etcd shows those of the store)",
        options_.directory, fmt::join(found.in_both, ", "), options_.cluster_name, cluster.id,
        first);
  }
  const bool begun = !identity_.cluster.empty(), asked = options_.join || !options_.join_as.empty();
  if (!begun && !found.there_already.empty())
    return make_error(
        Code::kAlreadyExists,
        "the store {} has {}, and cluster {} ({}) has the very same, or had: it came from a copy "
        "of "
        "this store. What is in this one would be lost: remove one of the two first (ptcfs without "
        "--etcd shows those of the store), or give this node another store",
        options_.directory, fmt::join(found.there_already, ", "), options_.cluster_name,
        cluster.id);
  if (!begun && !asked && !found.own.empty() && !found.others.empty())
    return make_error(
        Code::kUnavailable,
        "the store {} has jobs of its own ({}), and so has cluster {} ({}) at {}: {}. "
        "Start it with --join to take them there, or give this node another store",
        options_.directory, fmt::join(found.own, ", "), options_.cluster_name, cluster.id,
        options_.where, fmt::join(found.others, ", "));
  if (!begun && !found.own.empty()) {  // else what is there of the node may be this one's own
    PTC_TRY(check_name_is_free(cluster));
  }
  // From here on it can only go on joining.
  facts_.clear();
  PTC_TRY(take_identity(cluster));
  PTC_TRY(join_jobs(*own, meta_, options_.directory, options_.node, options_.join_as,
                    {kIdentityKey, cluster.meta_revision}));
  own.reset();
  if (::rename(path.c_str(), (path + ".joined").c_str()) != 0) return errno_error(errno, path);
  ::unlink((path + "-spare").c_str());
  PTC_TRY(sync_directory(AT_FDCWD, options_.directory));
  if (!found.own.empty())
    spdlog::info("{} joined cluster {} ({})", fmt::join(found.own, ", "), options_.cluster_name,
                 cluster.id);
  return ok();
}

void say_replaced(const RegisteredStore& other, const std::string& by) {
  spdlog::info("store {} of node {} is replaced by this one, {}", other.store, other.node, by);
}

/// This store takes the place of others of its node: they were lost. One whose lease has not ended
/// may be of another daemon, which is let in or this one: forget_replaced().
Result<> StoreMembership::register_store() {
  PTC_TRY(auto stores, read_stores(meta_));
  PTC_TRY(auto alive, meta_.get("nodes/" + options_.node));  // this one is not yet
  MetaTransaction transaction;
  for (const RegisteredStore& other : stores) {
    if (other.store == identity_.store) own_ = other;
    if (other.store == identity_.store || other.node != options_.node) continue;
    replaces_ = replaces_ || alive;
    if (alive) continue;
    say_replaced(other, identity_.store);
    transaction.deletes.push_back(store_key(other.store));
  }
  if (own_.starts > identity_.starts && !options_.join)
    return refuse(fmt::format("it is an older copy: it was started {} times, and a store of this "
                              "identity {} times, as node {}",
                              identity_.starts, own_.starts, own_.node),
                  "Give this node the one that was used last, or another store; if that one is "
                  "lost, start this with --join: "
                  "what it has is used, and what was stored since is missing");
  // The file first: never is it behind because of a crash.
  own_.starts = identity_.starts = std::max(own_.starts, identity_.starts) + 1;
  PTC_TRY(write_store_identity(options_.directory, identity_));
  own_.node = options_.node;
  transaction.puts = {{store_key(identity_.store), own_.to_text()},
                      {std::string(kMembership), options_.node}};
  transaction.compares = {{store_key(identity_.store), own_.meta_revision}, *cluster_.identity()};
  PTC_TRY(own_.meta_revision, meta_.commit(transaction));
  return ok();
}

/// Once this node is a member, as the decision compares, no other has its name, and none of the
/// stores that were registered for it is in use.
Result<> StoreMembership::forget_replaced() {
  if (!replaces_ || check_member(cluster_).has_error()) return ok();
  PTC_TRY(auto stores, read_stores(meta_));
  std::erase_if(stores, [&](const RegisteredStore& other) {
    return other.node != options_.node || other.store == identity_.store;
  });
  if (!stores.empty()) {
    MetaTransaction transaction;
    transaction.puts = {{std::string(kMembership), options_.node}};
    for (const RegisteredStore& other : stores) {
      transaction.compares.push_back({store_key(other.store), other.meta_revision});
      transaction.deletes.push_back(store_key(other.store));
    }
    PTC_TRY(commit_fenced(meta_, cluster_, std::move(transaction)));
  }
  for (const RegisteredStore& other : stores) say_replaced(other, identity_.store);
  replaces_ = false;
  return ok();
}

/// Stores that began together do not read all at the same time.
std::chrono::steady_clock::duration StoreMembership::whole_after() const {
  constexpr std::chrono::seconds kLeast{600}, kMore{300};
  return kLeast +
         std::hash<std::string>{}(identity_.store) % kMore.count() * std::chrono::seconds(1);
}

/// That something has gone of which nobody said so, the number of keys tells; that the agreement
/// store is what it was, the latest of those that are known, which must be there as it was. Else,
/// and once in a while, all is read; so it is when a job was removed.
Result<std::optional<StoreMembership::Agreed>> StoreMembership::look_at_changes() {
  const std::optional<Agreed> all_is_needed;
  lacks_gone_ = false;
  if (!all_removals_ || !believed_whole_ ||
      std::chrono::steady_clock::now() - *believed_whole_ >= whole_after())
    return all_is_needed;
  if (!latest_known_) {
    latest_known_ = 0;
    for (auto known = facts_.entries().lower_bound(kJobKeys);
         known != facts_.entries().end() && known->first.starts_with(kJobKeys); ++known)
      if (known->second.revision <= facts_.jobs_seen())
        latest_known_ = std::max(*latest_known_, known->second.revision);
  }
  if (*latest_known_ == 0) return all_is_needed;
  PTC_TRY(auto changes, meta_.changes(kJobKeys, *latest_known_ - 1));
  if (!changes) return all_is_needed;
  Agreed agreed;
  agreed.whole = false;
  bool same = false;
  size_t keys = facts_.jobs_keys();
  for (MetaEntry& entry : changes->entries) {
    const auto known = facts_.entries().find(entry.key);
    const bool is_known = known != facts_.entries().end();
    const bool is_as_it_was = is_known && known->second.revision == entry.revision;
    if (is_as_it_was && known->second.value != entry.value) return all_is_needed;
    same = same || (is_as_it_was && entry.revision == *latest_known_);
    if (!is_known) ++keys;
    gone_.erase(entry.key);
    if (!is_as_it_was) agreed.jobs.push_back(std::move(entry));
  }
  PTC_TRY(agreed.removed, read_tombstones(meta_));
  std::set<std::string_view> tombstones;
  for (const MetaEntry& entry : agreed.removed.entries) {
    if (entry.revision > own_.done && is_removed_job_key(entry.key)) return all_is_needed;
    tombstones.insert(entry.key);
  }
  for (const auto& [key, revision] : gone_) {
    const auto known = facts_.entries().find(key);
    if (known == facts_.entries().end() || known->second.revision >= revision) continue;
    const std::string removal = key_of_removal(known->second);
    if (!removal.empty() && !tombstones.contains(removal)) return all_is_needed;
    agreed.gone.push_back(key);
    --keys;
  }
  lacks_gone_ = same && keys > changes->keys;
  if (!same || keys != changes->keys) return all_is_needed;
  std::sort(agreed.jobs.begin(), agreed.jobs.end(),
            [](const MetaEntry& a, const MetaEntry& b) { return a.key < b.key; });
  return std::optional(std::move(agreed));
}

Result<StoreMembership::Agreed> StoreMembership::look(bool whole,
                                                      const std::function<bool()>& more_gone) {
  PTC_TRY(check_identity(meta_, cluster_));
  Result<> fits = ok();
  Agreed agreed;
  std::optional<Agreed> changed;
  if (!whole) {
    do {
      PTC_TRY(changed, look_at_changes());
    } while (!changed && lacks_gone_ && more_gone && more_gone());
  }
  if (changed) {
    agreed = *std::move(changed);
    fits = facts_.check_each(agreed.jobs);
  } else {
    believed_whole_.reset();
    const auto now = std::chrono::steady_clock::now();
    PTC_TRY(agreed.jobs, meta_.list(kJobKeys));
    PTC_TRY(agreed.removed, read_tombstones(meta_));
    fits = facts_.check(agreed.jobs, agreed.removed.entries, all_removals_);
    if (fits.has_value()) believed_whole_ = now;
  }
  if (fits.has_error()) {
    cluster_.distrust(fits.error().message());
    believed_whole_.reset();
    return check_trusted(cluster_).error();
  }
  cluster_.trust();
  return agreed;
}

std::map<std::string_view, int64_t> StoreMembership::keys_of(const std::string& job,
                                                             const Agreed& agreed) const {
  const std::string key = std::string(kJobKeys) + job, prefix = key + "/",
                    data_set = prefix + "dataset/";
  std::map<std::string_view, int64_t> keys;
  const auto add = [&](const MetaEntry& entry) {
    if (!entry.key.starts_with(data_set)) keys.insert_or_assign(entry.key, entry.revision);
  };
  const auto is_of_it = [&](const std::string& one) {
    return one == key || one.starts_with(prefix);
  };
  if (!agreed.whole) {
    if (const auto itself = facts_.entries().find(key); itself != facts_.entries().end())
      add(itself->second);
    for (auto known = facts_.entries().lower_bound(prefix);
         known != facts_.entries().end() && known->first.starts_with(prefix); ++known)
      add(known->second);
    for (const std::string& gone : agreed.gone) keys.erase(gone);
  }
  for (const MetaEntry& entry : agreed.jobs)
    if (is_of_it(entry.key)) add(entry);
  return keys;
}

void StoreMembership::note_gone(std::string key, int64_t revision) {
  constexpr size_t kMost = 10000;
  if (gone_.size() >= kMost) gone_.clear();
  int64_t& latest = gone_[std::move(key)];
  latest = std::max(latest, revision);
}

/// Until which tombstone the copy names nothing any more that was removed. What went between the
/// two lists is in both.
int64_t StoreMembership::carried_out_of(const Agreed& agreed) const {
  if (!are_worth_a_look(agreed.removed, own_.done)) return own_.done;
  std::map<std::string_view, int64_t> tombstones;
  for (const MetaEntry& entry : agreed.removed.entries)
    tombstones.emplace(entry.key, entry.revision);
  int64_t until = agreed.removed.revision;
  for (auto known = facts_.entries().lower_bound(kJobKeys);
       known != facts_.entries().end() && known->first.starts_with(kJobKeys); ++known)
    if (const auto tombstone = tombstones.find(key_of_removal(known->second));
        tombstone != tombstones.end())
      until = std::min(until, tombstone->second - 1);
  return until;
}

/// Where there are many nodes, and with each commit a checkpoint goes, each would say so each time.
/// Until then there is a tombstone more for each 64 nodes.
bool StoreMembership::are_worth_a_look(const Tombstones& removed, int64_t done) const {
  constexpr size_t kNodes = 64;
  size_t checkpoints = 0;
  for (const MetaEntry& entry : removed.entries) {
    if (entry.revision <= done) continue;
    if (is_removed_job_key(entry.key)) return true;
    ++checkpoints;
  }
  return checkpoints > cluster_.alive().size() / kNodes;
}

void StoreMembership::taken_over(const Agreed& agreed, const std::vector<MetaEntry>& drained,
                                 bool removed) {
  if (agreed.whole) facts_.take(kJobKeys, agreed.jobs);
  else facts_.take_changes(agreed.jobs, agreed.gone);
  if (agreed.whole || !agreed.gone.empty()) latest_known_.reset();
  if (latest_known_)
    for (const MetaEntry& entry : agreed.jobs)
      latest_known_ = std::max(*latest_known_, entry.revision);
  std::erase_if(gone_, [&](const auto& one) {
    const auto known = facts_.entries().find(one.first);
    return known == facts_.entries().end() || known->second.revision >= one.second;
  });
  facts_.take(kTombstones, agreed.removed.entries);
  facts_.take("drained/", drained);
  if (Result<> forgotten = forget_replaced(); forgotten.has_error())
    spdlog::debug("stores that this one replaces stay for now: {}", forgotten.error().message());
  take_stores();
  int64_t latest = std::max(facts_.seen(), agreed.removed.revision);
  for (const MetaEntry& entry : agreed.jobs) latest = std::max(latest, entry.revision);
  facts_.set_seen(latest);
  // At the next start a tombstone must be there still for what the copy names and the metadata do
  // not.
  if (!write_facts()) return;
  all_removals_ = true;
  const int64_t carried_out = removed ? carried_out_of(agreed) : own_.done;
  if (carried_out > own_.done && check_member(cluster_).has_value()) {
    MetaTransaction transaction;
    const std::string key = store_key(identity_.store);
    RegisteredStore next = own_;
    next.done = carried_out;
    transaction.compares = {{key, own_.meta_revision}};
    transaction.puts = {{key, next.to_text()}};
    Result<int64_t> said = commit_fenced(meta_, cluster_, std::move(transaction));
    if (said.has_value()) {
      own_ = std::move(next);
      own_.meta_revision = said.value();
    } else if (auto entry = meta_.get(key);
               entry.has_value()) {  // it was done after all, or the others forgot this store
      own_.meta_revision = entry.value() ? entry.value()->revision : 0;
      if (entry.value()) own_.done = registered_store_of(*entry.value()).done;
      else all_removals_ = false;
    }
  }
  const std::vector<std::string> alive = cluster_.alive();
  if (!are_worth_a_look(agreed.removed, 0) || alive.empty() || alive.front() != cluster_.self())
    return;
  if (Result<> forgotten = remove_tombstones(agreed.removed); forgotten.has_error())
    spdlog::debug("tombstones stay for now: {}", forgotten.error().message());
}

/// As many as there are nodes, and of interest only to ptc recover: so they are listed when one was
/// started since, and not after each change.
void StoreMembership::take_stores() {
  const Result<std::optional<MetaEntry>> membership = meta_.get(kMembership);
  if (membership.has_error()) return;
  const int64_t revision = membership.value() ? membership.value()->revision : 0;
  if (revision == stores_taken_at_) return;
  const Result<std::vector<MetaEntry>> stores = meta_.list(kStores);
  if (stores.has_error()) return;
  facts_.take(kStores, stores.value());
  stores_taken_at_ = revision;
}

/// Those that all stores have carried out.
Result<> StoreMembership::remove_tombstones(const Tombstones& removed) {
  PTC_TRY(auto stores, read_stores(meta_));
  const std::vector<std::string> alive = cluster_.alive();
  int64_t done = removed.revision;
  for (const RegisteredStore& store : stores) {
    if (removed.entries.size() > kMostTombstones && !is_among(alive, store.node)) {
      spdlog::warn(
          "store {} of node {} is away for so long that it is not told any more what was removed "
          "meanwhile; what it "
          "has of that is kept there",
          store.store, store.node);
      MetaTransaction transaction;
      transaction.compares = {{store_key(store.store), store.meta_revision}};
      transaction.deletes = {store_key(store.store)};
      PTC_TRY(commit_fenced(meta_, cluster_, std::move(transaction)));
      continue;
    }
    done = std::min(done, store.done);
  }
  std::vector<std::string> keys;
  for (const MetaEntry& entry : removed.entries)
    if (entry.revision <= done) keys.push_back(entry.key);
  for (size_t i = 0; i < keys.size(); i += kTombstonesAtOnce) {
    MetaTransaction transaction;
    transaction.deletes.assign(keys.begin() + i,
                               keys.begin() + std::min(keys.size(), i + kTombstonesAtOnce));
    PTC_TRY(commit_fenced(meta_, cluster_, std::move(transaction)));
  }
  return ok();
}

void StoreMembership::note(std::vector<MetaEntry> entries) {
  for (MetaEntry& entry : entries) facts_.note(std::move(entry));
  (void)write_facts();
}

/// Without it this node knows less of what it has seen when it starts, and decides as well. Tried
/// again with the next change.
bool StoreMembership::write_facts() {
  Result<> written = facts_.write();
  if (written.has_error() && !std::exchange(facts_behind_, true))
    spdlog::warn("the copy of what is agreed cannot be written: {}", written.error().message());
  if (written.has_value()) facts_behind_ = false;
  return written.has_value();
}

}  // namespace ptc
