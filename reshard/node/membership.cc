#include "reshard/node/membership.h"

#include <pthread.h>
#include <spdlog/spdlog.h>
#include <sys/random.h>

#include <algorithm>
#include <boost/json/object.hpp>
#include <boost/json/serialize.hpp>
#include <utility>

#include "store/base/json.h"
#include "store/base/mutex.h"

namespace ptc {
namespace {

constexpr auto kRetry = std::chrono::milliseconds(500);
constexpr auto kAfterConflict = std::chrono::milliseconds(20);
// Whether the agreement store is what it was; each answer and each decision shows that, too.
constexpr auto kLook = std::chrono::seconds(3);
/// Between one change of who is there and the next that is taken over, for each member.
constexpr auto kPauseOfOne = std::chrono::milliseconds(1), kLongestPause = 1000 * kPauseOfOne;

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
std::string Membership::joining_key() const { return std::string(kJoiningKeys) + options_.node; }

Membership::Known Membership::known_of(const std::string& value, int64_t revision) {
  return {address_in(value), json_text(value, "boot"), revision};
}

bool Membership::is_member() const {
  return lease_ != nullptr && lease_->alive() && key_is_there();
}

/// What others know of this node is what it knows itself.
bool Membership::key_is_there() const {
  const auto own = members_.find(options_.node);
  return own != members_.end() && own->second.revision == revision_;
}

std::vector<std::string> Membership::alive() const {
  MutexLock lock(mutex_);
  std::vector<std::string> names;
  for (const auto& [name, known] : members_)
    if (name != options_.node || is_member()) names.push_back(name);
  return names;
}

std::optional<MetaTransaction::Compare> Membership::fence() const {
  MutexLock lock(mutex_);
  // A revision that no key has: nothing is decided by a node that is no member.
  return MetaTransaction::Compare{key(), is_member() ? revision_ : INT64_MAX};
}

MetaTransaction::Compare Membership::fence_of(const std::string& node) const {
  if (node == options_.node) return *fence();
  MutexLock lock(mutex_);
  const auto known = members_.find(node);
  return {std::string(kMemberKeys) + node,
          known != members_.end() ? known->second.revision : INT64_MAX};
}

std::shared_ptr<const MetaLease> Membership::lease() const {
  MutexLock lock(mutex_);
  return lease_;
}

std::vector<Cluster::Seen> Membership::seen() const {
  return seen_nodes_ != nullptr ? seen_nodes_->all() : std::vector<Seen>();
}

std::vector<Membership::Member> Membership::members() const {
  MutexLock lock(mutex_);
  std::vector<Member> list;
  for (const auto& [name, known] : members_) list.push_back({name, known.address});
  return list;
}

Result<> Membership::check_let_in(bool is_new) const {
  constexpr size_t kMostAsked = 3;  // who was killed is listed until its lease has ended
  if (is_new) {
    PTC_TRY(const auto entry, meta_.get(key()));
    if (entry) {
      PTC_TRY(check_not_running(*entry));
    }
  }
  PTC_TRY(auto entries, meta_.list(kMemberKeys));
  size_t asked = 0;
  for (const MetaEntry& entry : entries) {
    const std::string name = entry.key.substr(kMemberKeys.size());
    if (name == options_.node) continue;
    const Result<> met = calls_.meet(name, address_in(entry.value));
    if (met.has_value()) return ok();
    if (met.error().code() == Code::kPermissionDenied) return not_let_in(met.error());
    if (++asked == kMostAsked) break;
  }
  return ok();
}

Result<> Membership::begin(const std::string& store) {
  store_ = store;
  PTC_TRY(seen_nodes_, SeenNodes::open(meta_));
  PTC_TRY(watch_, meta_.watch(std::string(kMemberKeys), [this](const MetaEvent& event) {
    MutexLock lock(mutex_);
    // Many come within a moment: the follower is woken once for all that it has not seen.
    if (events_.empty() && !gap_) wanted_.notify_all();
    if (event.is_gap()) gap_ = true;
    else events_.push_back(event);
  }));
  PTC_TRY(while_it_passes([this] { return forget_former_self(); }));
  return read_members();
}

/// Until what another daemon of this store, or of this name, left in the agreement store has gone,
/// and that store answers.
Result<> Membership::while_it_passes(const std::function<Result<>()>& step) const {
  const auto deadline = std::chrono::steady_clock::now() + 3 * options_.lease;
  Result<> done = step();
  while (done.has_error() && passes(done.error()) && std::chrono::steady_clock::now() < deadline) {
    std::this_thread::sleep_for(done.error().code() == Code::kConflict ? kAfterConflict : kRetry);
    done = step();
  }
  return done;
}

/// Who is killed does not answer. Another who does has a copy of this store, or is of the name by
/// mistake.
Result<> Membership::check_not_running(const MetaEntry& entry) const {
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

/// Two copies of a store that reach the agreement store and not each other would take the place
/// from each other for ever. So the later stays, and this one is out until it is started again:
/// then its store says how often it was started.
Result<> Membership::check_not_replaced() const {
  if (replaced_by_.empty()) return ok();
  return make_error(Code::kAlreadyExists,
                    "this store, or one that was copied from it, was started later at {}, as node "
                    "{} too: stop one of the two",
                    replaced_by_, options_.node);
}

/// Of this store, or of one that was lost, which nobody else can have listened for there: then it
/// is free.
Result<> Membership::check_name_is_free(const std::optional<MetaEntry>& entry) {
  if (!entry) return ok();
  const std::string address = address_in(entry->value);
  if (json_text(entry->value, "store") != store_ && address != address_)
    return make_error(Code::kBusy,
                      "node {} is in the cluster already, at {}: give this one another "
                      "name (--node), or wait until the other's lease has ended",
                      options_.node, address);
  if (address == address_) return ok();
  if (was_member_ && replaced_by_.empty()) replaced_by_ = address;
  PTC_TRY(check_not_replaced());
  return check_not_running(*entry);
}

/// Under a new lease, unless it has said so, and that holds.
Result<> Membership::say_that_it_joins() {
  Attempt& attempt = *attempt_;
  if (attempt.lease != nullptr && attempt.lease->alive()) return ok();
  attempt.lease.reset();
  PTC_TRY(auto former, meta_.get(joining_key()));
  PTC_TRY(check_name_is_free(former));
  uint64_t boot = 0;
  if (::getrandom(&boot, sizeof boot, 0) != sizeof boot) return errno_error(errno, "getrandom");
  attempt.value = json::serialize(json::object{
      {"address", address_}, {"store", store_}, {"boot", fmt::format("{:016x}", boot)}});
  PTC_TRY(auto lease, meta_.lease(options_.lease));
  MetaTransaction transaction;
  transaction.compares = {{joining_key(), former ? former->revision : 0}};
  if (const auto identity = this->identity()) transaction.compares.push_back(*identity);
  transaction.leased_puts = {{joining_key(), attempt.value}};
  transaction.lease = lease.get();
  PTC_TRY(attempt.revision, meta_.commit(transaction));
  attempt.lease = std::move(lease);
  return ok();
}

/// All that may be members before this node is.
Result<> Membership::meet_the_others() {
  Attempt& attempt = *attempt_;
  std::vector<Meetings::Other> others;
  // In this order: who is in neither listing came later, or is gone.
  PTC_TRY(auto joining, meta_.list(kJoiningKeys));
  PTC_TRY(read_members());
  {
    MutexLock lock(mutex_);
    for (const auto& [name, known] : members_)
      if (name != options_.node) others.push_back({name, known.address, known.boot});
    for (const MetaEntry& entry : joining) {
      const std::string name = entry.key.substr(kJoiningKeys.size());
      if (name == options_.node || entry.revision > attempt.revision) continue;
      const Known known = known_of(entry.value, entry.revision);
      if (const auto member = members_.find(name); member == members_.end()) {
        calls_.set(name, known.address);
        attempt.met.insert(name);
      } else if (member->second.boot == known.boot) {
        continue;
      }
      others.push_back({name, known.address, known.boot, /*joins=*/true});
    }
  }
  // By name, from behind the own one on: many that come at once begin with others each, and not all
  // with the first few.
  std::ranges::stable_sort(others, {}, &Meetings::Other::name);
  std::ranges::rotate(others,
                      std::ranges::upper_bound(others, options_.node, {}, &Meetings::Other::name));
  Result<> met = attempt.meetings.meet(others, address_);
  return met.has_value() ? ok() : Result<>(not_let_in(met.error()));
}

Error Membership::not_let_in(const Error& error) const {
  return make_error(
      error.code(), "this node, {}{}, is not let into the cluster: {}{}", options_.node,
      address_.empty() ? "" : " at " + address_, error.message(),
      error.code() == Code::kPermissionDenied
          ? "; all nodes have the same --secret, and certificates of one authority that name them"
          : "");
}

Result<> Membership::join_once() {
  PTC_TRY(check_identity(meta_, *this));
  PTC_TRY(check_not_replaced());
  PTC_TRY(auto entry, meta_.get(key()));
  PTC_TRY(check_name_is_free(entry));
  PTC_TRY(say_that_it_joins());
  PTC_TRY(meet_the_others());
  Attempt& attempt = *attempt_;
  MetaTransaction transaction;
  transaction.compares = {{key(), entry ? entry->revision : 0}, {joining_key(), attempt.revision}};
  if (const auto identity = this->identity()) transaction.compares.push_back(*identity);
  transaction.puts = {{std::string(kMembership), options_.node}, SeenNodes::joined(options_.node)};
  transaction.deletes = {joining_key()};
  transaction.leased_puts = {{key(), attempt.value}};
  transaction.lease = attempt.lease.get();
  const Result<int64_t> joined = meta_.commit(transaction);
  if (joined.has_error()) {  // or in doubt: what was put goes with the lease
    attempt.lease.reset();
    return joined.error();
  }
  std::shared_ptr<MetaLease> before;  // ends without the lock
  MutexLock lock(mutex_);
  before = std::exchange(lease_, std::move(attempt.lease));
  revision_ = joined.value();
  members_[options_.node] = known_of(attempt.value, revision_);
  forget_attempt();
  return ok();
}

/// Who joined beside it, and is no member, is called no more.
void Membership::forget_attempt() {
  for (const std::string& name : attempt_->met)
    if (!members_.contains(name)) calls_.remove(name);
  attempt_.reset();
}

Result<> Membership::join(const std::string& address, std::function<void()> changed) {
  address_ = address;
  changed_ = std::move(changed);
  // The key of a daemon that was killed stays until its lease ends, under this name or another.
  attempt_.emplace(calls_);
  Result<> joined = while_it_passes([this] { return join_once(); });
  if (joined.has_error()) {
    attempt_->lease.reset();  // which may take a while: without the lock
    MutexLock lock(mutex_);
    forget_attempt();
  }
  PTC_TRY(std::move(joined));
  was_member_ = true;
  follower_ = std::jthread([this](std::stop_token stop) { follow(std::move(stop)); });
  changed_();
  return ok();
}

void Membership::leave() {
  follower_ = {};
  std::shared_ptr<MetaLease> lease;
  MutexLock lock(mutex_);
  lease.swap(lease_);
}

Result<> Membership::read_members() {
  PTC_TRY(check_identity(meta_, *this));  // else those who were there before still count
  PTC_TRY(auto entries, meta_.list(kMemberKeys));
  std::map<std::string, Known> now;
  for (const MetaEntry& entry : entries)
    now.emplace(entry.key.substr(kMemberKeys.size()), known_of(entry.value, entry.revision));
  take_over(std::move(now));
  return ok();
}

Result<> Membership::take_events(std::vector<MetaEvent> events) {
  PTC_TRY(check_identity(meta_, *this));
  std::map<std::string, Known> now;
  {
    MutexLock lock(mutex_);
    now = members_;
  }
  for (const MetaEvent& event : events) {
    const std::string name = event.key.substr(kMemberKeys.size());
    const auto known = now.find(name);
    if (known != now.end() && event.revision < known->second.revision)
      continue;  // was listed since
    if (event.value) now[name] = known_of(*event.value, event.revision);
    else now.erase(name);
  }
  take_over(std::move(now));
  return ok();
}

void Membership::take_over(std::map<std::string, Known> now) {
  bool differs = false;
  {
    MutexLock lock(mutex_);
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
}

Result<> Membership::note_who_is_gone() {
  std::vector<std::string> there;
  for (Member& member : members()) there.push_back(std::move(member.name));
  return seen_nodes_->update(*this, there);
}

std::chrono::steady_clock::duration Membership::pause() const {
  MutexLock lock(mutex_);
  return std::min<std::chrono::steady_clock::duration>(members_.size() * kPauseOfOne,
                                                       kLongestPause);
}

void Membership::tell() {
  if (changed_) changed_();
}

void Membership::join_again(std::string why) {
  if (told_.empty()) {
    told_ = std::move(why);
    ++lease_losses_;
    spdlog::warn("node {} decides nothing until it has joined again: {}", options_.node, told_);
    attempt_.emplace(calls_);
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
}

/// What was taken for lost was not: etcd's new leader, for one, has prolonged all leases.
void Membership::believe_again() {
  told_.clear();
  attempt_->lease.reset();  // which may take a while: without the lock
  {
    MutexLock lock(mutex_);
    forget_attempt();
  }
  spdlog::info("node {} was one of the cluster all the time", options_.node);
  tell();
}

void Membership::follow(std::stop_token stop) {
  ::pthread_setname_np(::pthread_self(), "ptcfs-member");
  using Clock = std::chrono::steady_clock;
  auto next_look = Clock::now(), next_change = next_look;
  // When it is noted who is gone: after a while in which nobody comes, for they may come back.
  Clock::time_point note_at = next_look;
  // nodes/, for what was heard of it was not believed, or not all, or it could not be asked
  bool read = false;
  std::vector<MetaEvent> events;
  std::string unread;   // why it could not be done, as the log has it
  bool doubts = false;  // the agreement store is not believed
  while (!stop.stop_requested()) {
    std::string lost;
    {
      MutexLock lock(mutex_);
      // While all is well, not before the lease may have ended: an idle node sleeps.
      const bool calm = !doubts && told_.empty() && !read && lease_ != nullptr;
      const Clock::time_point look_at =
          calm ? std::min(next_look, lease_->deadline()) : Clock::now() + kRetry;
      wanted_.wait_until(mutex_, stop, std::min(note_at, look_at),
                         [&]() PTC_REQUIRES(mutex_) { return gap_ || !events_.empty(); });
      if (gap_) next_look = Clock::now();  // it was out of reach, and may be another now
      if ((gap_ || !events_.empty()) && Clock::now() < next_change)
        wanted_.wait_until(mutex_, stop, next_change, [] { return false; });
      events = std::exchange(events_, {});
      read = std::exchange(gap_, false) || read;
      if (lease_ != nullptr && !lease_->alive()) lost = "its lease may have ended";
      else if (lease_ != nullptr && !key_is_there()) lost = "its key is not there any more";
    }
    if (stop.stop_requested()) return;
    const Clock::time_point now = Clock::now();
    if (now >= next_look) {
      next_look = now + kLook;
      (void)check_identity(meta_, *this);
    }
    const bool doubted = std::exchange(doubts, distrusted().has_value());
    if (doubts) {
      if (!doubted) tell();  // whoever found it: who follows what is agreed on looks on
      read = read || !events.empty();
      note_at = now + kRetry;
      continue;
    }
    if (!lost.empty()) join_again(std::move(lost));
    else if (!told_.empty()) believe_again();
    if (read || !events.empty()) {
      const Result<> done = read ? read_members() : take_events(std::move(events));
      note_at = next_change = Clock::now() + pause();
      read = done.has_error();
      if (!read) unread.clear();
      if (!read) continue;
      note_at = Clock::now() + kRetry;
      if (done.error().message() != unread)
        spdlog::warn("who is in the cluster cannot be read: {}", done.error().message());
      unread = done.error().message();
    } else if (now >= note_at) {
      const Result<> noted = note_who_is_gone();
      note_at = Clock::time_point::max();
      if (noted.has_value()) unread.clear();
      if (noted.has_value()) continue;
      note_at = Clock::now() + kRetry;
      if (noted.error().message() != unread)
        spdlog::warn("who is gone cannot be noted: {}", noted.error().message());
      unread = noted.error().message();
    }
  }
}

}  // namespace ptc
