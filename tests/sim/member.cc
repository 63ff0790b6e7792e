#include "tests/sim/member.h"

#include "tests/sim/planted.h"

namespace ptc::sim {
namespace {

using namespace std::chrono_literals;
constexpr Time kRetry = 500ms;
constexpr std::chrono::seconds kLease = 5s;

/// Whoever decides at once looks at the lease, and then at the fence; who asks for that alone will
/// decide later.
thread_local bool looked_at_lease = false;

}  // namespace

std::vector<std::string> Member::alive() const {
  std::vector<std::string> names;
  for (const auto& [name, revision] : members_)
    if (name != name_ || is_member()) names.push_back(name);
  return names;
}

std::shared_ptr<const MetaLease> Member::lease() const {
  looked_at_lease = true;
  return lease_;
}

MetaTransaction::Compare Member::fence() const {
  const MetaTransaction::Compare own{key(), is_member() ? revision_ : INT64_MAX};
  if (!std::exchange(looked_at_lease, false)) note_fence(name_, own.revision);
  return own;
}

MetaTransaction::Compare Member::fence_of(const std::string& node) const {
  if (node == name_) return fence();
  const auto known = members_.find(node);
  const MetaTransaction::Compare theirs{"nodes/" + node,
                                        known != members_.end() ? known->second : INT64_MAX};
  note_fence(node, theirs.revision);
  return theirs;
}

Result<> Member::begin() {
  PTC_TRY(watch_, meta_.watch("nodes/", [this](const MetaEvent&) {
    refresh_ = true;
    wake_all(this);
  }));
  PTC_TRY(auto former, meta_.get(key()));
  MetaTransaction transaction;
  transaction.puts = {{std::string(kMembership), name_}};
  if (former) {
    transaction.compares = {{key(), former->revision}};
    transaction.deletes = {key()};
  }
  PTC_TRY(meta_.commit(transaction));
  return read_members();
}

Result<> Member::join(JobStore& store) {
  PTC_TRY(join_once());
  PTC_TRY(read_members());
  store_ = &store;
  follower_ = std::thread([this] { follow(); });
  store.nodes_changed();
  return ok();
}

void Member::leave() {
  stopping_ = true;
  wake_all(this);
  if (follower_.joinable()) follower_.join();
  watch_.reset();
  lease_.reset();
  store_ = nullptr;
}

Result<> Member::join_once() {
  PTC_TRY(auto former, meta_.get(key()));
  PTC_TRY(auto fresh, meta_.lease(kLease));
  MetaTransaction transaction;
  transaction.compares = {{key(), former ? former->revision : 0}};
  transaction.puts = {{std::string(kMembership), name_}};
  transaction.leased_puts = {{key(), "up"}};
  transaction.lease = fresh.get();
  PTC_TRY(revision_, meta_.commit(transaction));
  lease_ = std::move(fresh);
  refresh_ = true;
  return ok();
}

Result<> Member::read_members() {
  PTC_TRY(auto entries, meta_.list("nodes/"));
  std::map<std::string, int64_t> now_there;
  for (const MetaEntry& entry : entries) now_there.emplace(entry.key.substr(6), entry.revision);
  const bool differs = now_there != members_;
  members_ = std::move(now_there);
  if (differs && store_ != nullptr) store_->nodes_changed();
  return ok();
}

void Member::follow() {
  name_thread("membership of " + name_);
  while (!stopping_) {
    if (!refresh_) wait_until(this, now() + kRetry);
    if (stopping_) return;
    bool read = std::exchange(refresh_, false);
    if (lease_ != nullptr && !lease_->alive() && join_once().has_value()) {
      read = true;
      store_->nodes_changed();
    }
    if (!read || read_members().has_value()) continue;
    refresh_ = true;
    wait_until(this, now() + kRetry);
  }
}

}  // namespace ptc::sim
