#include "reshard/node/recover.h"

#include <fcntl.h>
#include <sys/stat.h>

#include <algorithm>
#include <boost/json/object.hpp>
#include <filesystem>
#include <map>
#include <set>

#include "reshard/cluster/tombstones.h"
#include "reshard/node/agreed_facts.h"
#include "reshard/node/parted_facts.h"
#include "store/base/file.h"
#include "store/base/json.h"

namespace ptc {
namespace {

struct Change {
  std::string key;
  std::optional<std::string> value;  // nullopt: it goes
};

/// All stores that any of these has seen, or `there` names, by their ids. How often each was
/// started, as the one says that has seen most of it: an older copy is known by that. What they
/// have carried out counts anew, for revisions begin again. One that only those name who have seen
/// less than the newest has been replaced since, if its node has another.
std::map<std::string, RegisteredStore> known_stores(const std::vector<SeenStore>& stores,
                                                    size_t newest,
                                                    const std::vector<MetaEntry>& there) {
  std::map<std::string, RegisteredStore> known;
  auto add = [&](const RegisteredStore& seen) {
    RegisteredStore& one =
        known.try_emplace(seen.store, RegisteredStore{seen.store, seen.node}).first->second;
    if (seen.starts >= one.starts) one.node = seen.node;
    one.starts = std::max(one.starts, seen.starts);
  };
  std::set<std::string> still, nodes;  // stores that are registered now, and whose they are
  auto is_still = [&](const RegisteredStore& one) {
    still.insert(one.store);
    nodes.insert(one.node);
  };
  for (const SeenStore& store : stores) {
    for (auto it = store.facts.entries().lower_bound(kStores);
         it != store.facts.entries().end() && it->first.starts_with(kStores); ++it) {
      add(registered_store_of(it->second));
      if (&store == &stores[newest]) is_still(registered_store_of(it->second));
    }
    const RegisteredStore itself{store.identity.store, store.identity.node, 0,
                                 store.identity.starts};
    add(itself);
    is_still(itself);
  }
  for (const MetaEntry& entry : there) {
    add(registered_store_of(entry));
    is_still(registered_store_of(entry));
  }
  std::erase_if(known, [&](const auto& one) {
    return !still.contains(one.first) && nodes.contains(one.second.node);
  });
  return known;
}

/// `same`: what is there is of the same cluster.
Result<std::vector<Change>> changes_to(const std::vector<SeenStore>& stores, size_t chosen,
                                       bool same, MetaClient& meta) {
  const auto& seen = stores[chosen].facts.entries();
  std::vector<Change> changes;
  for (const std::string_view prefix : kAgreedPrefixes) {
    PTC_TRY(auto now, meta.list(prefix));
    std::map<std::string, std::string> wanted;
    if (prefix == kStores) {
      for (const auto& [id, store] :
           known_stores(stores, chosen, same ? now : std::vector<MetaEntry>()))
        wanted.emplace(store_key(id), store.to_text());
    } else {
      for (auto it = seen.lower_bound(prefix); it != seen.end() && it->first.starts_with(prefix);
           ++it)
        wanted.emplace(it->first, it->second.value);
    }
    std::map<std::string_view, const MetaEntry*> there;
    for (const MetaEntry& entry : now) there.emplace(entry.key, &entry);
    for (const auto& [key, value] : wanted)
      if (const auto is = there.find(key); is == there.end() || is->second->value != value)
        changes.push_back({key, value});
    for (const MetaEntry& entry : now)
      if (!wanted.contains(entry.key)) changes.push_back({entry.key, std::nullopt});
  }
  return changes;
}

/// Where the files of a checkpoint lie, as far as these stores know.
void look_at_files(const std::vector<SeenStore>& stores, const std::string& stored_file,
                   RecoverReport::Checkpoint& one) {
  Result<std::string> text = Error(Code::kNotFound, "");
  for (const SeenStore& store : stores)
    if (text.has_error())
      text = read_text_file(AT_FDCWD, store.directory + "/" + stored_file, kMaxStoredBytes);
  if (text.has_error()) return;
  auto state = parse_json(text.value(), {.max_bytes = kMaxStoredBytes});
  boost::system::error_code bad;
  const json::value* images =
      state.has_value() ? state.value().find_pointer("/images", bad) : nullptr;
  if (images == nullptr || !images->is_array()) return;
  one.known = true;
  std::map<std::string, size_t> elsewhere;
  for (const json::value& image : images->get_array()) {
    if (!image.is_object()) continue;
    const std::string node = json_text(image.get_object(), "node");
    const auto store = std::find_if(stores.begin(), stores.end(),
                                    [&](const SeenStore& s) { return s.identity.node == node; });
    if (store == stores.end()) {
      ++elsewhere[node];
      continue;
    }
    struct stat info {};
    const json::value* bytes = image.get_object().if_contains("bytes");
    const bool there =
        ::stat((store->directory + "/images/" + json_text(image.get_object(), "id")).c_str(),
               &info) == 0 &&
        bytes != nullptr && whole_number(*bytes) == static_cast<uint64_t>(info.st_size);
    ++(there ? one.files : one.missing);
    if (there) one.bytes += static_cast<uint64_t>(info.st_size);
  }
  one.elsewhere.assign(elsewhere.begin(), elsewhere.end());
}

/// Of what each choice leaves out.
void compare_views(const std::vector<SeenStore>& stores, RecoverReport& report) {
  const int64_t history = stores[report.newest].identity.history;
  report.left_out.resize(stores.size());
  for (size_t i = 0; i < stores.size(); ++i) {
    report.can_be_chosen.push_back(stores[i].identity.history == history);
    if (!report.can_be_chosen[i]) continue;
    std::map<std::string, std::vector<std::string>> known;  // to which nodes
    for (size_t j = 0; j < stores.size(); ++j) {
      if (j == i) continue;
      int64_t since = kNoneShared;
      if (stores[j].identity.history == history) {
        const int64_t parted = parted_at(stores[i].facts, stores[j].facts);
        since = parted > 0 ? parted : stores[i].facts.jobs_seen() + 1;
        if (parted > 0)
          report.parted = report.parted > 0 ? std::min(report.parted, parted) : parted;
      }
      for (const std::string& what : left_out(stores[j].facts, stores[i].facts, since))
        known[what].push_back(stores[j].identity.node);
    }
    for (auto& [what, nodes] : known) {
      std::sort(nodes.begin(), nodes.end());
      report.left_out[i].push_back({what, std::move(nodes)});
    }
  }
}

Result<size_t> store_of(const std::string& node, const std::vector<SeenStore>& stores,
                        const RecoverReport& report) {
  std::vector<size_t> found;
  for (size_t i = 0; i < stores.size(); ++i)
    if (stores[i].identity.node == node) found.push_back(i);
  if (found.size() != 1)
    return invalid_argument("{} of these stores {} of node {}", found.empty() ? "none" : "several",
                            found.empty() ? "is" : "are", node);
  if (!report.can_be_chosen[found.front()])
    return invalid_argument(
        "the store of node {} is of history {}, and that of node {} of {}: what was agreed was "
        "made anew since",
        node, stores[found.front()].identity.history, stores[report.newest].identity.node,
        stores[report.newest].identity.history);
  return found.front();
}

}  // namespace

Result<SeenStore> look_at_store(const std::string& directory) {
  SeenStore store;
  store.directory = directory;
  struct stat info {};
  if (::stat(directory.c_str(), &info) != 0)
    return errno_error(errno, "there is no store that can be looked at: " + directory);
  PTC_TRY(auto identity, read_store_identity(directory));
  if (!identity || identity->cluster.empty())
    return make_error(Code::kNotFound, "{} is no store of a cluster", directory);
  store.identity = *std::move(identity);
  PTC_TRY(store.facts, AgreedFacts::open(agreed_facts_path(directory), /*read_only=*/true));
  if (store.facts.entries().empty())
    return make_error(Code::kNotFound, "the store {} has not seen yet what is agreed", directory);
  return store;
}

Result<RecoverReport> look_at_all(const std::vector<SeenStore>& stores, MetaClient& meta,
                                  const std::string& from) {
  RecoverReport report;
  for (size_t i = 0; i < stores.size(); ++i) {
    const SeenStore &one = stores[i], &newest = stores[report.newest];
    if (one.identity.cluster != newest.identity.cluster)
      return invalid_argument("{} and {} belong to different clusters ({} and {})",
                              newest.directory, one.directory, newest.identity.cluster,
                              one.identity.cluster);
    if (std::pair(one.identity.history, one.facts.seen()) >
        std::pair(newest.identity.history, newest.facts.seen()))
      report.newest = i;
  }
  compare_views(stores, report);
  report.chosen = report.newest;
  if (!from.empty()) {
    PTC_TRY(report.chosen, store_of(from, stores, report));
  }
  const SeenStore& chosen = stores[report.chosen];
  PTC_TRY(auto there, read_cluster_identity(meta));
  PTC_TRY(auto jobs_there, meta.list("jobs/"));
  if (there && there->id != chosen.identity.cluster && !jobs_there.empty())
    return make_error(Code::kAlreadyExists,
                      "another cluster ({}) is there, with jobs: the stores belong to {} ({})",
                      there->id, chosen.identity.cluster_name, chosen.identity.cluster);
  if (there && there->id == chosen.identity.cluster && !there->recovering &&
      there->history > chosen.identity.history)
    return make_error(
        Code::kAlreadyExists,
        "what is agreed was made anew since the store {} was there: start the node, and "
        "it says what to do",
        chosen.directory);
  PTC_TRY(auto alive, meta.list("nodes/"));
  for (const MetaEntry& entry : alive)
    report.alive.push_back(entry.key.substr(std::string_view("nodes/").size()));
  PTC_TRY(auto changes,
          changes_to(stores, report.chosen, there && there->id == chosen.identity.cluster, meta));
  for (Change& change : changes) report.changes.push_back(std::move(change.key));
  AgreedFacts now;
  now.take("jobs/", jobs_there);
  report.gone = left_out(now, chosen.facts, kNoneShared);
  for (const auto& [id, other] : known_stores(stores, report.chosen, {}))
    if (std::none_of(stores.begin(), stores.end(),
                     [&](const SeenStore& s) { return s.identity.store == id; }))
      report.others.push_back(other);
  for (const auto& [key, entry] : chosen.facts.entries()) {
    if (!key.starts_with("jobs/")) continue;
    const std::string rest = key.substr(5);
    const size_t slash = rest.find('/');
    if (slash == std::string::npos) report.jobs.push_back(rest);
    constexpr std::string_view kCheckpoints = "/checkpoints/";
    if (slash == std::string::npos || rest.compare(slash, kCheckpoints.size(), kCheckpoints) != 0)
      continue;
    RecoverReport::Checkpoint one;
    one.job = rest.substr(0, slash);
    one.name = rest.substr(slash + kCheckpoints.size());
    auto record = parse_json(entry.value);
    if (record.has_value() && record.value().is_object())
      look_at_files(stores,
                    fmt::format("jobs/{}/checkpoints/{}/{}", one.job,
                                json_text(record.value().get_object(), "id"),
                                json_text(record.value().get_object(), "stored")),
                    one);
    report.checkpoints.push_back(std::move(one));
  }
  return report;
}

Result<> recover(const std::vector<SeenStore>& stores, size_t chosen, MetaClient& meta) {
  const SeenStore& store = stores[chosen];
  PTC_TRY(auto there, read_cluster_identity(meta));
  const bool same = there && there->id == store.identity.cluster;
  ClusterIdentity identity;
  identity.id = store.identity.cluster;
  if (same) identity.recovered = there->recovered;
  identity.history =
      std::max(store.identity.history, same ? there->history - there->recovering : 0) + 1;
  std::erase_if(identity.recovered,
                [&](const auto& one) { return one.history == identity.history; });
  identity.recovered.push_back({identity.history, store.identity.store, store.facts.seen()});
  identity.recovering = true;
  auto put_identity = [&](int64_t before) {
    MetaTransaction transaction;
    transaction.compares = {{kIdentityKey, before}};
    transaction.puts = {{kIdentityKey, identity.to_text()}};
    return meta.commit(transaction);
  };
  PTC_TRY(int64_t ours, put_identity(there ? there->meta_revision : 0));
  PTC_TRY(auto changes, changes_to(stores, chosen, same, meta));
  for (size_t i = 0; i < changes.size();) {
    MetaTransaction transaction;
    transaction.compares = {{kIdentityKey, ours}};
    size_t bytes = 0;
    for (size_t keys = 0; i < changes.size() && keys < kStepKeys; ++i, ++keys) {
      bytes += changes[i].key.size() + (changes[i].value ? changes[i].value->size() : 0);
      if (bytes > kStepBytes && keys > 0) break;
      if (changes[i].value) transaction.puts.emplace_back(changes[i].key, *changes[i].value);
      else transaction.deletes.push_back(changes[i].key);
    }
    PTC_TRY(meta.commit(transaction));
  }
  identity.recovering = false;
  PTC_TRY(put_identity(ours));
  return ok();
}

}  // namespace ptc
