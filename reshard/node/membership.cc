#include "reshard/node/membership.h"

#include <spdlog/spdlog.h>
#include <sys/random.h>

#include <boost/json/object.hpp>
#include <boost/json/serialize.hpp>
#include <utility>

#include "store/base/json.h"

namespace ptc {
namespace {

constexpr auto kRetry = std::chrono::milliseconds(500);
constexpr auto kAfterConflict = std::chrono::milliseconds(20);
constexpr auto kLook = std::chrono::seconds(1);  // whether the agreement store is what it was

std::string address_in(const std::string& text) { return json_text(text, "address"); }

bool passes(const Error& error) {
  return error.code() == Code::kConflict || error.code() == Code::kUnavailable ||
         error.code() == Code::kBusy;
}

}  // namespace

Membership::Membership(MemberOptions options, MetaClient& meta, PeerCalls& calls)
    : options_(std::move(options)), meta_(meta), calls_(calls) {}

Membership::~Membership() {
  leave();
  watch_.reset();
}

std::string Membership::key() const { return std::string(kMemberKeys) + options_.node; }

bool Membership::is_member() const { return lease_ != nullptr && lease_->alive(); }

std::vector<std::string> Membership::alive() const {
  std::lock_guard lock(mutex_);
  std::vector<std::string> names;
  for (const auto& [name, known] : members_)
    if (name != options_.node || is_member()) names.push_back(name);
  return names;
}

MetaTransaction::Compare Membership::fence() const {
  std::lock_guard lock(mutex_);
  // A revision that no key has: nothing is decided by a node that is no member.
  return {key(), is_member() ? revision_ : INT64_MAX};
}

MetaTransaction::Compare Membership::fence_of(const std::string& node) const {
  if (node == options_.node) return fence();
  std::lock_guard lock(mutex_);
  const auto known = members_.find(node);
  return {std::string(kMemberKeys) + node,
          known != members_.end() ? known->second.revision : INT64_MAX};
}

std::shared_ptr<const MetaLease> Membership::lease() const {
  std::lock_guard lock(mutex_);
  return lease_;
}

std::vector<Cluster::Seen> Membership::seen() const {
  return seen_nodes_ != nullptr ? seen_nodes_->all() : std::vector<Seen>();
}

std::vector<Membership::Member> Membership::members() const {
  std::lock_guard lock(mutex_);
  std::vector<Member> list;
  for (const auto& [name, known] : members_) list.push_back({name, known.address});
  return list;
}

Result<> Membership::begin(const std::string& store) {
  store_ = store;
  PTC_TRY(seen_nodes_, SeenNodes::open(meta_));
  PTC_TRY(watch_, meta_.watch(std::string(kMemberKeys), [this](const MetaEvent&) {
    std::lock_guard lock(mutex_);
    refresh_ = true;
    wanted_.notify_all();
  }));
  PTC_TRY(forget_former_self());
  return read_members();
}

/// Who is killed does not answer. Another who does has a copy of this store, or is of the name by
/// mistake.
Result<> Membership::check_not_running(const MetaEntry& entry) {
  const std::string address = address_in(entry.value);
  if (calls_.meet(options_.node, address).has_error()) return ok();
  const bool copied = json_text(entry.value, "store") == store_;
  return make_error(
      Code::kAlreadyExists, "node {} runs at {}{}: stop it first, or give this node another {}",
      options_.node, address, copied ? ", with this store or one that it was copied from" : "",
      copied ? "store" : "name (--node)");
}

/// What a daemon that was killed over this store had promised to others is thrown away when the
/// store is opened: so nobody may decide anything with it from now on.
Result<> Membership::forget_former_self() {
  PTC_TRY(auto entry, meta_.get(key()));
  if (entry) {
    PTC_TRY(check_not_running(*entry));
  }
  MetaTransaction transaction;
  transaction.puts = {{std::string(kMembership), options_.node}};
  if (entry && json_text(entry->value, "store") == store_) {
    transaction.compares = {{key(), entry->revision}};
    transaction.deletes = {key()};
  }
  PTC_TRY(meta_.commit(transaction));
  return ok();
}

Result<> Membership::meet_the_others() {
  PTC_TRY(read_members());
  std::vector<Meetings::Other> others;
  {
    std::lock_guard lock(mutex_);
    for (const auto& [name, known] : members_)
      if (name != options_.node) others.push_back({name, known.address, known.revision});
  }
  Result<> met = meetings_->meet(others, address_);
  if (met.has_value()) return ok();
  const bool refused = met.error().code() == Code::kPermissionDenied;
  return make_error(
      met.error().code(), "this node, {} at {}, is not let into the cluster: {}{}", options_.node,
      address_, met.error().message(),
      refused
          ? "; all nodes have the same --secret, and certificates of one authority that name them"
          : "");
}

/// A new lease, and this node's key under it.
Result<> Membership::join_once() {
  PTC_TRY(check_identity(meta_, *this));
  PTC_TRY(auto entry, meta_.get(key()));
  // Of this store, or of one that was lost: nobody else can listen there.
  const bool former_self =
      entry && (json_text(entry->value, "store") == store_ || address_in(entry->value) == address_);
  if (entry && !former_self)
    return make_error(Code::kBusy,
                      "node {} is in the cluster already, at {}: give this one another "
                      "name (--node), or wait until the other's lease has ended",
                      options_.node, address_in(entry->value));
  if (entry && address_in(entry->value) != address_) {
    PTC_TRY(check_not_running(*entry));
  }
  PTC_TRY(auto membership, meta_.get(kMembership));
  PTC_TRY(meet_the_others());
  PTC_TRY(auto fresh, meta_.lease(options_.lease));
  uint64_t boot = 0;
  if (::getrandom(&boot, sizeof boot, 0) != sizeof boot) return errno_error(errno, "getrandom");
  MetaTransaction transaction;
  transaction.compares = {{key(), entry ? entry->revision : 0},
                          {std::string(kMembership), membership ? membership->revision : 0}};
  transaction.puts = {{std::string(kMembership), options_.node}, SeenNodes::joined(options_.node)};
  transaction.leased_puts = {
      {key(),
       json::serialize(json::object{
           {"address", address_}, {"store", store_}, {"boot", fmt::format("{:016x}", boot)}})}};
  transaction.lease = fresh.get();
  PTC_TRY(int64_t revision, meta_.commit(transaction));
  std::shared_ptr<MetaLease> before;  // ends without the lock
  std::lock_guard lock(mutex_);
  before = std::exchange(lease_, std::move(fresh));
  revision_ = revision;
  refresh_ = true;
  wanted_.notify_all();
  return ok();
}

Result<> Membership::join(const std::string& address, std::function<void()> changed) {
  address_ = address;
  changed_ = std::move(changed);
  // The key of a daemon that was killed stays until its lease ends, under this name or another.
  meetings_.emplace(calls_);
  const auto deadline = std::chrono::steady_clock::now() + 3 * options_.lease;
  Result<> joined = join_once();
  while (joined.has_error() && passes(joined.error()) &&
         std::chrono::steady_clock::now() < deadline) {
    std::this_thread::sleep_for(joined.error().code() == Code::kConflict ? kAfterConflict : kRetry);
    joined = join_once();
  }
  PTC_TRY(std::move(joined));
  PTC_TRY(read_members());
  follower_ = std::jthread([this](std::stop_token stop) { follow(std::move(stop)); });
  changed_();
  return ok();
}

void Membership::leave() {
  follower_ = {};
  std::shared_ptr<MetaLease> lease;
  std::lock_guard lock(mutex_);
  lease.swap(lease_);
}

Result<> Membership::read_members() {
  PTC_TRY(check_identity(meta_, *this));  // else those who were there before still count
  PTC_TRY(auto entries, meta_.list(kMemberKeys));
  std::map<std::string, Known> now;
  for (const MetaEntry& entry : entries)
    now.emplace(entry.key.substr(kMemberKeys.size()),
                Known{address_in(entry.value), entry.revision});
  bool differs = false;
  std::vector<std::string> there;
  for (const auto& [name, known] : now) there.push_back(name);
  {
    std::lock_guard lock(mutex_);
    for (const auto& [name, known] : now) {
      if (members_.contains(name) && members_[name] == known) continue;
      differs = true;
      if (name == options_.node) continue;
      calls_.set(name, known.address);
      spdlog::info("node {} is there, at {}", name, known.address);
    }
    for (const auto& [name, known] : members_) {
      if (now.contains(name)) continue;
      differs = true;
      if (name == options_.node) continue;
      calls_.remove(name);
      spdlog::warn("node {} is gone", name);
    }
    members_ = std::move(now);
  }
  if (differs) tell();
  return seen_nodes_->update(*this, there);
}

void Membership::tell() {
  if (changed_) changed_();
}

void Membership::look_at_identity() {
  const bool before = distrusted().has_value();
  (void)check_identity(meta_, *this);
  if (!before && distrusted()) tell();  // it looks on
}

Result<> Membership::join_again() {
  if (told_.empty()) {
    told_ = "its lease may have ended";
    spdlog::warn("node {} decides nothing until it has joined again: {}", options_.node, told_);
    meetings_.emplace(calls_);
  }
  Result<> joined = join_once();
  if (joined.has_value()) {
    told_.clear();
    spdlog::info("node {} has joined again", options_.node);
    tell();
  } else if (joined.error().code() != Code::kConflict && joined.error().message() != told_) {
    told_ = joined.error().message();
    spdlog::warn("node {} has not joined again: {}", options_.node, told_);
  }
  return joined;
}

void Membership::follow(std::stop_token stop) {
  auto next_look = std::chrono::steady_clock::now();
  bool later = false;  // read nodes/, once what is said is believed
  std::string unread;  // why nodes/ could not be read, as the log has it
  while (!stop.stop_requested()) {
    bool read = false, lost = false;
    {
      std::unique_lock lock(mutex_);
      wanted_.wait_for(lock, stop, kRetry, [&] { return refresh_; });
      read = std::exchange(refresh_, false);
      lost = lease_ != nullptr && !lease_->alive();
    }
    if (stop.stop_requested()) return;
    if (const auto now = std::chrono::steady_clock::now(); now >= next_look) {
      next_look = now + kLook;
      look_at_identity();
    }
    if (distrusted()) {
      later = later || read;
      continue;
    }
    read = std::exchange(later, false) || read;
    if (lost) read = join_again().has_value() || read;
    if (!read) continue;
    Result<> done = read_members();
    if (done.has_value()) unread.clear();
    if (done.has_value()) continue;
    if (done.error().message() != unread)
      spdlog::warn("who is in the cluster cannot be read: {}", done.error().message());
    unread = done.error().message();
    std::unique_lock lock(mutex_);
    wanted_.wait_for(lock, stop, kRetry, [] { return false; });
    refresh_ = true;
  }
}

}  // namespace ptc
