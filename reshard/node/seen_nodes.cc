#include "reshard/node/seen_nodes.h"

#include <algorithm>
#include <boost/json/object.hpp>
#include <boost/json/serialize.hpp>
#include <chrono>
#include <set>

#include "store/base/json.h"
#include "store/base/mutex.h"

namespace ptc {
namespace {

constexpr std::string_view kSeenKeys = "seen/";
constexpr int64_t kForgottenAfterNs = int64_t{7} * 24 * 3600 * 1'000'000'000;

int64_t wall_clock_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::system_clock::now().time_since_epoch())
      .count();
}

std::string seen_key(const std::string& node) { return std::string(kSeenKeys) + node; }

std::string text_of(const Cluster::Seen& seen) {
  return json::serialize(json::object{{"there", seen.there}, {"since_ns", seen.since_ns}});
}

Cluster::Seen seen_from(std::string node, std::string_view text) {
  Cluster::Seen seen{std::move(node)};
  auto value = parse_json(text);
  if (!value || !value.value().is_object()) return seen;
  const json::object& object = value.value().get_object();
  if (const json::value* there = object.if_contains("there"))
    seen.there = there->is_bool() && there->get_bool();
  auto since = json_uint(object, "since_ns", INT64_MAX);
  if (since) seen.since_ns = static_cast<int64_t>(since.value().value_or(0));
  return seen;
}

/// Who sees to a node that is gone: the next of those that are there, by name, and after the last
/// the first.
const std::string& next_of(const std::string& gone, const std::vector<std::string>& there) {
  const auto next = std::upper_bound(there.begin(), there.end(), gone);
  return next != there.end() ? *next : there.front();
}

}  // namespace

Result<std::unique_ptr<SeenNodes>> SeenNodes::open(MetaClient& meta) {
  std::unique_ptr<SeenNodes> nodes(new SeenNodes(meta));
  PTC_TRY(nodes->watch_,
          meta.watch(std::string(kSeenKeys), [all = nodes.get()](const MetaEvent& event) {
            if (event.is_gap()) all->gap_ = true;
            else all->take(event.key, event.value ? &*event.value : nullptr, event.revision);
          }));
  PTC_TRY(nodes->list());
  return nodes;
}

Result<> SeenNodes::list() {
  std::vector<std::pair<std::string, int64_t>> before;
  {
    MutexLock lock(mutex_);
    for (const auto& [node, known] : known_) before.emplace_back(node, known.revision);
  }
  PTC_TRY(auto entries, meta_.list(kSeenKeys));
  std::set<std::string> listed;
  for (const MetaEntry& entry : entries) {
    take(entry.key, &entry.value, entry.revision);
    listed.insert(entry.key.substr(kSeenKeys.size()));
  }
  MutexLock lock(mutex_);
  for (const auto& [node, revision] : before)  // and nothing was heard of since
    if (Known& known = known_[node]; !listed.contains(node) && known.revision == revision)
      known.removed = true;
  return ok();
}

SeenNodes::~SeenNodes() { watch_.reset(); }

std::pair<std::string, std::string> SeenNodes::joined(const std::string& node) {
  return {seen_key(node), text_of({node, true, wall_clock_ns()})};
}

void SeenNodes::take(const std::string& key, const std::string* value, int64_t revision) {
  std::string node = key.substr(kSeenKeys.size());
  MutexLock lock(mutex_);
  Known& known = known_[node];
  if (revision < known.revision) return;  // an event of before the list
  known = {seen_from(std::move(node), value != nullptr ? *value : ""), revision, value == nullptr};
}

Result<> SeenNodes::update(const Cluster& cluster, const std::vector<std::string>& there) {
  if (!std::binary_search(there.begin(), there.end(), cluster.self())) return ok();
  if (gap_.exchange(false)) {
    const Result<> listed = list();
    if (listed.has_error()) gap_ = true;
    PTC_TRY(listed);
  }
  const int64_t oldest = wall_clock_ns() - kForgottenAfterNs;
  std::vector<std::string> gone, forgotten;
  {
    MutexLock lock(mutex_);
    for (const auto& [node, known] : known_) {
      if (known.removed || std::binary_search(there.begin(), there.end(), node)) continue;
      if (next_of(node, there) != cluster.self()) continue;
      if (known.seen.there) gone.push_back(node);
      else if (known.seen.since_ns < oldest) forgotten.push_back(node);
    }
  }
  for (const std::string& node : gone) {
    PTC_TRY(note_gone(cluster, node));
  }
  for (const std::string& node : forgotten) {
    MetaTransaction transaction;
    transaction.compares = {{std::string(kMemberKeys) + node, 0}, *cluster.fence()};
    transaction.deletes = {seen_key(node)};
    (void)meta_.commit(transaction);  // else another time
  }
  return ok();
}

Result<> SeenNodes::note_gone(const Cluster& cluster, const std::string& node) {
  constexpr int kTries = 5;  // it may come and go meanwhile
  for (int tries = 1;; ++tries) {
    PTC_TRY(auto entry, meta_.get(seen_key(node)));
    if (!entry) return ok();
    Cluster::Seen seen = seen_from(node, entry->value);
    if (!seen.there) return ok();
    seen.there = false;
    seen.since_ns = wall_clock_ns();
    MetaTransaction transaction;
    transaction.compares = {
        {entry->key, entry->revision}, {std::string(kMemberKeys) + node, 0}, *cluster.fence()};
    if (const auto identity = cluster.identity()) transaction.compares.push_back(*identity);
    transaction.puts = {{entry->key, text_of(seen)}};
    Result<int64_t> noted = meta_.commit(transaction);
    if (noted.has_value()) return ok();
    if (noted.error().code() != Code::kConflict) return std::move(noted).error();
    PTC_TRY(auto back, meta_.get(std::string(kMemberKeys) + node));
    if (back || tries == kTries) return ok();
  }
}

std::vector<Cluster::Seen> SeenNodes::all() const {
  MutexLock lock(mutex_);
  std::vector<Cluster::Seen> all;
  for (const auto& [node, known] : known_)
    if (!known.removed) all.push_back(known.seen);
  return all;
}

}  // namespace ptc
