#include "reshard/cluster/cluster.h"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <functional>
#include <map>
#include <utility>

#include "store/base/mutex.h"

namespace ptc {

Result<std::string> Cluster::ask(const std::string& node, PeerMethod method,
                                 const std::string& request, std::stop_token stop,
                                 std::chrono::milliseconds at_most) {
  const PeerRow& row = row_of(method);
  return ask_by(row, request.size(), at_most, stop, [&](std::chrono::milliseconds time) {
    return call(node, row, request, time, stop);
  });
}

std::vector<Result<std::string>> Cluster::ask_all(PeerMethod method,
                                                  const std::vector<Question>& questions,
                                                  std::stop_token stop,
                                                  std::chrono::milliseconds at_most,
                                                  AfterAnswer then) {
  const PeerRow& row = row_of(method);
  size_t bytes = 0;
  for (const Question& one : questions) bytes = std::max(bytes, one.request.size());
  return ask_all_by(row, questions.size(), bytes, at_most, [&](AskManner manner) {
    manner.then = std::move(then);
    return call_all(questions, row, std::move(manner), stop);
  });
}

std::vector<Result<std::string>> Cluster::call_all(const std::vector<Question>& questions,
                                                   const PeerRow& row, AskManner manner,
                                                   std::stop_token stop) {
  std::vector<std::string_view> requests;
  for (const Question& one : questions) requests.push_back(one.request);
  return ask_each(row, requests, manner, stop,
                  [&](size_t i, std::string_view request, std::chrono::milliseconds left) {
                    return call(questions[i].node, row, std::string(request), left, stop);
                  });
}

bool Cluster::may_decide() const {
  const std::shared_ptr<const MetaLease> held = lease();
  return held != nullptr && held->alive();
}

void Cluster::belongs_to(MetaTransaction::Compare identity) {
  MutexLock lock(identity_mutex_);
  identity_ = std::move(identity);
}

std::optional<MetaTransaction::Compare> Cluster::identity() const {
  MutexLock lock(identity_mutex_);
  return identity_;
}

void Cluster::distrust(const std::string& why) {
  {
    MutexLock lock(identity_mutex_);
    if (distrusted_ == why) return;
    distrusted_ = why;
  }
  spdlog::error(
      "the agreement store is not believed: {}. Nothing is decided or taken over; what is here can "
      "be read. "
      "Give the nodes the store that they had, or stop them all, make what was agreed anew (ptc "
      "recover), and "
      "start them again",
      why);
}

void Cluster::trust() {
  {
    MutexLock lock(identity_mutex_);
    if (!std::exchange(distrusted_, std::nullopt)) return;
  }
  spdlog::info("the agreement store is the one that it was, and is believed again");
}

std::optional<std::string> Cluster::distrusted() const {
  MutexLock lock(identity_mutex_);
  return distrusted_;
}

Result<> check_trusted(const Cluster& cluster) {
  const std::optional<std::string> why = cluster.distrusted();
  if (!why) return ok();
  return make_error(Code::kUnavailable,
                    "node {} decides nothing, for the agreement store is not believed: {}",
                    cluster.self(), *why);
}

Result<> check_identity(MetaClient& meta, Cluster& cluster) {
  const std::optional<MetaTransaction::Compare> identity = cluster.identity();
  if (!identity) return ok();
  Result<std::optional<MetaEntry>> now = meta.get(identity->key);
  if (const std::optional<std::string> why = meta.set_back()) cluster.distrust(*why);
  PTC_TRY(auto entry, std::move(now));
  if (!entry) cluster.distrust("the identity of the cluster is gone: its data were lost");
  else if (entry->revision != identity->revision)
    cluster.distrust(
        "it has the identity of another cluster, or was "
        "made anew");
  else return ok();
  return check_trusted(cluster);
}

Result<> check_member(const Cluster& cluster) {
  PTC_TRY(check_trusted(cluster));
  if (cluster.may_decide()) return ok();
  return make_error(Code::kUnavailable,
                    "node {} is cut off from its cluster, and decides nothing until "
                    "it has joined again: try again then, or on another node",
                    cluster.self());
}

namespace {

using Compares = std::vector<MetaTransaction::Compare>;

bool is_of_a_node(const MetaTransaction::Compare& compare) {
  return compare.key.starts_with(kMemberKeys) || compare.key.starts_with(kDrainedKeys);
}

/// Whether all hold now.
Result<> check_compares(MetaClient& meta, const Compares& compares) {
  std::map<std::string, int64_t> revisions;
  for (std::string_view prefix : {kMemberKeys, kDrainedKeys}) {
    PTC_TRY(auto entries, meta.list(prefix));
    for (MetaEntry& entry : entries) revisions.emplace(std::move(entry.key), entry.revision);
  }
  for (const auto& [key, revision] : compares) {
    const auto found = revisions.find(key);
    if ((found == revisions.end() ? 0 : found->second) != revision)
      return make_error(Code::kConflict, "{} is not what it was any more", key);
  }
  return ok();
}

}  // namespace

Result<int64_t> commit_fenced(MetaClient& meta, const Cluster& cluster,
                              MetaTransaction transaction) {
  PTC_TRY(check_member(cluster));
  Compares& compares = transaction.compares;
  const auto split =
      std::stable_partition(compares.begin(), compares.end(), std::not_fn(is_of_a_node));
  const Compares of_nodes(split, compares.end());
  compares.erase(split, compares.end());
  if (const auto fence = cluster.fence()) compares.push_back(*fence);
  if (const auto identity = cluster.identity()) compares.push_back(*identity);
  if (of_nodes.empty()) return meta.commit(transaction);
  compares.push_back({std::string(kMembership), 0});
  // A lease that ends in between is not seen: what that node has made is there, as if it had died a
  // moment later.
  constexpr int kMostTimes = 20;  // nodes that come at that very moment, and change nothing of this
  for (int again = 1;; ++again) {
    PTC_TRY(auto membership, meta.get(kMembership));
    compares.back().revision = membership ? membership->revision : 0;
    PTC_TRY(check_compares(meta, of_nodes));
    Result<int64_t> done = meta.commit(transaction);
    if (done.has_value() || done.error().code() != Code::kConflict || again == kMostTimes)
      return done;
    PTC_TRY(auto now, meta.get(kMembership));
    if ((now ? now->revision : 0) == compares.back().revision) return done;
  }
}

}  // namespace ptc
