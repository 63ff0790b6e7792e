#include "reshard/node/agreement_follower.h"

#include <pthread.h>
#include <spdlog/spdlog.h>

#include <algorithm>
#include <functional>
#include <set>
#include <string_view>
#include <unordered_map>
#include <utility>

#include "reshard/job/drain.h"
#include "store/base/mutex.h"

namespace ptc {
namespace {

constexpr std::chrono::seconds kCatchUp{2},
    kNoCatchUp{20};  // how long one waits; nobody after one waited in vain

/// Equal but for 2⁻⁶⁴ where the same keys have the same revisions.
uint64_t with_key(uint64_t hash, std::string_view key, int64_t revision) {
  constexpr uint64_t kOdd = 0x9e3779b97f4a7c15;
  hash = (hash ^ std::hash<std::string_view>{}(key)) * kOdd;
  hash ^= hash >> 32;
  hash = (hash ^ static_cast<uint64_t>(revision)) * kOdd;
  return hash ^ (hash >> 29);
}

/// The name in jobs/<name>… .
std::string_view job_of(std::string_view key) {
  const std::string_view rest = key.substr(std::string_view("jobs/").size());
  return rest.substr(0, rest.find('/'));
}

bool is_of_data_set(std::string_view key) {
  return key.substr(std::string_view("jobs/").size() + job_of(key).size()).starts_with("/dataset/");
}

/// Of which something has changed, where that is known.
std::set<std::string, std::less<>> jobs_of(const StoreMembership::Agreed& agreed) {
  std::set<std::string, std::less<>> jobs;
  for (const MetaEntry& entry : agreed.jobs) jobs.emplace(job_of(entry.key));
  for (const std::string& key : agreed.gone) jobs.emplace(job_of(key));
  return jobs;
}

using KeysByJob = std::unordered_map<std::string_view, uint64_t>;

/// By name of a job: of all that is agreed on of it, but of its data set, which has followers of
/// its own.
KeysByJob keys_by_job(const std::vector<MetaEntry>& entries) {
  KeysByJob keys;
  for (const MetaEntry& entry : entries) {
    const std::string_view name = job_of(entry.key);
    if (is_of_data_set(entry.key)) continue;
    uint64_t& hash = keys[name];
    hash = with_key(hash, entry.key, entry.revision);
  }
  return keys;
}

}  // namespace

std::map<std::string, std::string> jobs_in(const std::vector<MetaEntry>& entries) {
  std::map<std::string, std::string> jobs;
  for (const MetaEntry& entry : entries)
    if (std::string rest = entry.key.substr(5); rest.find('/') == std::string::npos)
      jobs.emplace(std::move(rest), job_id_of(entry.value));
  return jobs;
}

Result<> AgreementFollower::start() {
  auto look = [this](const MetaEvent&) { want_sync(); };
  auto look_at_jobs = [this, look](const MetaEvent& event) {
    if (!event.is_gap() && !event.value) note_gone(event);
    if (note_looked_over(event)) return;
    if (event.key.find("/dataset/") == std::string::npos) look(event);
    else if (event.value)
      note_put({event.key, *event.value, event.revision});  // it has followers of its own
  };
  PTC_TRY(watch_, meta_.watch("jobs/", look_at_jobs));
  PTC_TRY(drained_watch_, meta_.watch(drained_key(""), look));
  {
    MutexLock lock(mutex_);
    stale_ = true;
  }
  thread_ = std::jthread([this](std::stop_token stop) { follow(std::move(stop)); });
  return ok();
}

void AgreementFollower::stop() {
  stops_ = true;
  watch_.reset();
  drained_watch_.reset();
  thread_ = {};
}

void AgreementFollower::note_last() {
  if (check_member(cluster_).has_error()) return;
  MutexLock turn(turn_);
  MutexLock change(jobs_.changes);
  const auto agreed = look();
  if (agreed.has_error()) return;
  const auto drained = meta_.list(drained_key(""));
  if (drained.has_value())
    membership_->taken_over(agreed.value(), drained.value(), /*removed=*/false);
}

void AgreementFollower::note_put(MetaEntry entry) {
  MutexLock lock(mutex_);
  put_meanwhile_.push_back(std::move(entry));
  wanted_.notify_all();
}

void AgreementFollower::note_gone(const MetaEvent& event) {
  constexpr size_t kMost = 10000;
  MutexLock lock(mutex_);
  if (gone_meanwhile_.size() >= kMost) gone_meanwhile_.clear();  // then all is looked at
  gone_meanwhile_.emplace_back(event.key, event.revision);
  wanted_.notify_all();
}

void AgreementFollower::want_sync() {
  MutexLock lock(mutex_);
  stale_ = true;
  ++syncs_wanted_;
  wanted_.notify_all();
}

std::vector<std::string> AgreementFollower::drained() const {
  MutexLock lock(drained_mutex_);
  return drained_;
}

std::string AgreementFollower::behind() const {
  const std::shared_ptr<const MetaLease> lease = cluster_.lease();
  MutexLock lock(mutex_);
  if (!not_synced_.empty()) return not_synced_;
  return synced_lease_.lock() == lease ? "" : "not read yet since this node has joined";
}

void AgreementFollower::follow(std::stop_token stop) {
  ::pthread_setname_np(::pthread_self(), "ptcfs-follow");
  constexpr std::chrono::milliseconds kRetry{500}, kRetryLost{10'000};
  using Clock = std::chrono::steady_clock;
  constexpr Clock::time_point kNever = Clock::time_point::max();
  Clock::time_point retry = kNever;  // whatever comes meanwhile
  std::string told;                  // in the log
  while (!stop.stop_requested()) {
    std::vector<MetaEntry> put;
    bool wanted = false;
    uint64_t until = 0;
    {
      MutexLock lock(mutex_);
      const auto any = [&]() PTC_REQUIRES(mutex_) { return stale_ || !put_meanwhile_.empty(); };
      if (retry == kNever) wanted_.wait(mutex_, stop, any);
      else if (!wanted_.wait_until(mutex_, stop, retry, any) || Clock::now() >= retry)
        stale_ = true;
      wanted = std::exchange(stale_, false);
      until = syncs_wanted_;
      put.swap(put_meanwhile_);
    }
    if (stop.stop_requested()) return;
    if (!put.empty()) {
      MutexLock turn(turn_);
      membership_->note(std::move(put));
    }
    if (!wanted) continue;
    std::vector<std::string> alive = cluster_.alive();
    std::weak_ptr<const MetaLease> lease = cluster_.lease();
    const Result<TakenOver> taken_over = take_over();
    const Error* error = nullptr;
    bool may_come = true;  // soon
    if (taken_over.has_error()) error = &taken_over.error();
    else if (taken_over.value().lacking) error = &*taken_over.value().lacking;
    else if (taken_over.value().left) error = &*taken_over.value().left, may_come = false;
    if (std::string why = error != nullptr ? error->message() : "";
        !cluster_.distrusted() && why != told) {
      if (error != nullptr)
        spdlog::warn("what other nodes decided cannot be taken over yet: {}", why);
      told = std::move(why);
    }
    retry = kNever;
    MutexLock lock(mutex_);
    not_synced_ = taken_over.has_error() ? taken_over.error().message() : "";
    if (taken_over.has_value()) {
      syncs_done_ = until;
      synced_alive_ = std::move(alive);
      synced_lease_ = std::move(lease);
      synced_.notify_all();
      if (error != nullptr)
        retry =
            Clock::now() + (!may_come || error->code() == Code::kNotFound ? kRetryLost : kRetry);
      continue;
    }
    wanted_.wait_for(mutex_, stop, kRetry, [] { return false; });
    stale_ = true;
  }
}

bool AgreementFollower::catch_up() {
  const std::vector<std::string> alive = cluster_.alive();
  MutexLock lock(mutex_);
  if (syncs_done_ >= syncs_wanted_) {
    if (alive == synced_alive_) return false;
    stale_ = true;
    ++syncs_wanted_;
    wanted_.notify_all();
  }
  const auto now = std::chrono::steady_clock::now();
  if (now < next_catch_up_) return false;
  const uint64_t until = syncs_wanted_;
  const bool done = synced_.wait_for(mutex_, kCatchUp,
                                     [&]() PTC_REQUIRES(mutex_) { return syncs_done_ >= until; });
  if (!done) next_catch_up_ = now + kNoCatchUp;
  return done;
}

Result<> AgreementFollower::sync() {
  PTC_TRY(auto followed, take_over());
  if (followed.lacking) return make_error(Code::kUnavailable, "{}", followed.lacking->message());
  return ok();
}

bool AgreementFollower::Fetches::any() const {
  return std::any_of(jobs.begin(), jobs.end(),
                     [](const auto& one) { return !one.second.wanted.empty(); });
}

Result<TakenOver> AgreementFollower::take_over() {
  for (Fetches fetches;;) {
    Result<TakenOver> done = take_over_with(fetches);
    if (!fetches.any()) return done;  // what fails of one job keeps nothing from another
    for (auto& [id, one] : fetches.jobs) one.job->fetch(std::exchange(one.wanted, {}), one.fetched);
  }
}

/// Which jobs there are now; those that were removed go.
Result<AgreementFollower::Agreement> AgreementFollower::take_over_jobs() {
  MutexLock change(jobs_.changes);
  Agreement agreement;
  PTC_TRY(agreement.agreed, look());
  PTC_TRY(agreement.drained_entries, meta_.list(drained_key("")));
  {
    MutexLock lock(drained_mutex_);
    drained_.clear();
    for (const MetaEntry& entry : agreement.drained_entries)
      drained_.push_back(entry.key.substr(drained_key("").size()));
  }
  const StoreMembership::Agreed& agreed = agreement.agreed;
  agreement.to_load = jobs_in(agreed.jobs);
  std::vector<JobRef> gone;
  for (const JobRef& job : jobs_.list()) {
    const auto now = agreement.to_load.find(job->name());
    const bool is_named = now != agreement.to_load.end() && now->second == job->id();
    const bool same = is_named || !agreed.whole;  // then its key has not changed, or not its id
    (same ? agreement.known : gone).push_back(job);
    if (is_named) agreement.to_load.erase(now);
  }
  for (const JobRef& job : gone)
    if (!agreed.removed.jobs.contains(job->id()))
      return make_error(
          Code::kUnavailable,
          "job {} is named no more, but nobody removed it: what the agreement store says "
          "is not taken over",
          job->name());
  for (const JobRef& job : gone) {
    spdlog::info("job {} was removed by another node", job->name());
    jobs_.erase(job->name());
    job->forget();
  }
  if (!gone.empty() && listener_ != nullptr) listener_->jobs_changed();
  // One of which something cannot be had now, or removed, holds up no other, unless it is etcd that
  // does not answer. Until all is, it is not said that what was decided is carried out here.
  agreement.carried_out = contents_.carry_out_left();
  for (const JobRef& job : gone)
    if (Result<> removed =
            contents_.carry_out({job->name(), job->id(), agreed.removed.forced(job->id())});
        removed.has_error())
      agreement.carried_out = std::move(removed);
  if (Result<> removed = remove_opened(agreement.to_load, agreed.removed); removed.has_error())
    agreement.carried_out = std::move(removed);
  return agreement;
}

Result<TakenOver> AgreementFollower::take_over_with(Fetches& fetches) {
  MutexLock turn(turn_);
  PTC_TRY(Agreement agreement, take_over_jobs());
  const auto& [agreed, drained_entries, known, to_load, carried_out] = agreement;
  Result<> whole = ok();
  std::optional<Error> lacking;
  // A job of which nothing has changed is as it was: with thousands of them, each change of one
  // would else be thousands of questions.
  const auto keys = agreed.whole ? keys_by_job(agreed.jobs) : KeysByJob();
  const std::set<std::string, std::less<>> changed =
      agreed.whole ? std::set<std::string, std::less<>>() : jobs_of(agreed);
  uint64_t drained_keys = 0;
  for (const MetaEntry& entry : drained_entries)
    drained_keys = with_key(drained_keys, entry.key, entry.revision);
  const std::vector<std::string> alive = cluster_.alive();
  if (looked_.size() > known.size())
    std::erase_if(looked_, [&](const auto& one) {
      return std::none_of(known.begin(), known.end(),
                          [&](const JobRef& job) { return job->id() == one.first; });
    });
  // By this node, in between; of one that is just being removed, that is waited for.
  const auto was_removed = [this](const JobRef& job) {
    MutexLock change(jobs_.changes);
    return jobs_.find(job->name()) != job;
  };
  for (const JobRef& job : known) {
    if (stops_) return make_error(Code::kCancelled, "this node stops");
    if (jobs_.find(job->name()) != job) continue;
    const auto before = looked_.find(job->id());
    Looked now{0, drained_keys};
    if (agreed.whole) {
      if (const auto own = keys.find(job->name()); own != keys.end()) now.keys = own->second;
    } else if (before != looked_.end() && !changed.contains(job->name())) {
      now.keys = before->second.keys;
    } else {
      for (const auto& [key, revision] : membership_->keys_of(job->name(), agreed))
        now.keys = with_key(now.keys, key, revision);
    }
    bool same = false;
    if (before != looked_.end()) {
      same = before->second == now && job->follows_keys_alone();
      if (same && job->has_followed(alive)) continue;
      looked_.erase(before);
    }
    const auto asked = fetches.jobs.find(job->id());
    const FetchedFiles none, &fetched = asked != fetches.jobs.end() ? asked->second.fetched : none;
    Result<Followed> followed = same ? job->follow_nodes_with(fetched) : job->follow_with(fetched);
    const bool is_whole =
        followed.has_value() && followed.value().to_fetch.empty() && !followed.value().lacking;
    if (!is_whole && was_removed(job)) continue;
    if (followed.has_value() && !followed.value().to_fetch.empty()) {
      Fetches::OfJob& one = fetches.jobs[job->id()];
      one.job = job;
      one.wanted = std::move(followed.value().to_fetch);
      continue;
    }
    if (followed.has_value() && followed.value().lacking &&
        (!lacking || lacking->code() == Code::kNotFound))
      lacking = std::move(*followed.value().lacking).with_context("job " + job->name());
    if (followed.has_value() && !followed.value().lacking) looked_.insert_or_assign(job->id(), now);
    PTC_TRY(
        note_failure(job->name(), followed.has_value() ? ok() : Result<>(followed.error()), whole));
  }
  for (const auto& [name, id] : to_load) {
    PTC_TRY(note_failure(name, load_new(name, id, agreed.removed, fetches), whole));
  }
  {
    MutexLock change(jobs_.changes);
    if (!to_load.empty() && listener_ != nullptr) listener_->jobs_changed();
    PTC_TRY(std::move(whole));
    failed_ = false;
    if (fetches.any()) return TakenOver{};
    if (!lacking)
      contents_.settle_found_images(
          jobs_.list(), /*at_start=*/false);  // else drafts may belong to what is not known
  }
  membership_->taken_over(agreed, drained_entries, carried_out.has_value());
  if (carried_out.has_error()) return TakenOver{std::move(lacking), carried_out.error()};
  return TakenOver{std::move(lacking), std::nullopt};
}

/// `first`: of all jobs. An error: no other need be tried.
Result<> AgreementFollower::note_failure(const std::string& name, Result<> taken_over,
                                         Result<>& first) {
  if (taken_over.has_value()) return ok();
  if (first.has_value()) first = std::move(taken_over).error().with_context("job " + name);
  PTC_TRY(meta_.get(kIdentityKey));
  return ok();
}

/// What changed, or all; that where a job has the name of another that it was.
Result<StoreMembership::Agreed> AgreementFollower::look() {
  constexpr std::chrono::milliseconds kMoment{200};  // in all
  const auto until = std::chrono::steady_clock::now() + kMoment;
  const auto note = [&](std::chrono::steady_clock::time_point deadline) PTC_REQUIRES(turn_) {
    std::vector<std::pair<std::string, int64_t>> gone;
    {
      MutexLock lock(mutex_);
      wanted_.wait_until(mutex_, deadline,
                         [&]() PTC_REQUIRES(mutex_) { return stops_ || !gone_meanwhile_.empty(); });
      gone.swap(gone_meanwhile_);
    }
    for (auto& [key, revision] : gone) membership_->note_gone(std::move(key), revision);
    return !gone.empty() && std::chrono::steady_clock::now() < until;
  };
  note({});
  PTC_TRY(auto agreed, membership_->look(/*whole=*/std::exchange(failed_, true),
                                         [&]() PTC_REQUIRES(turn_) { return note(until); }));
  if (agreed.whole) return agreed;
  for (const auto& [name, id] : jobs_in(agreed.jobs))
    if (const JobRef job = jobs_.find(name); job != nullptr && job->id() != id)
      return membership_->look(/*whole=*/true);
  return agreed;
}

/// Of jobs that were removed before they were loaded here. `names`: of those that are to be.
Result<> AgreementFollower::remove_opened(const std::map<std::string, std::string>& names,
                                          const Tombstones& removed) {
  Result<> all = ok();
  for (auto next = opened_.begin(); next != opened_.end();) {
    const auto one = next++;
    const auto& [name, id] = *one;
    const auto now = names.find(name);
    if ((now != names.end() && now->second == id) || !removed.jobs.contains(id)) continue;
    if (Result<> done = contents_.carry_out({name, id, removed.forced(id)}); done.has_error())
      all = std::move(done);
    opened_.erase(one);
  }
  return all;
}

Result<> AgreementFollower::load_new(const std::string& name, const std::string& id,
                                     const Tombstones& removed_meanwhile, Fetches& fetches) {
  MutexLock change(jobs_.changes);
  if (jobs_.find(name) != nullptr) return ok();  // this node has removed it, and made another
  PTC_TRY(contents_.open_job_directory(name, id, removed_meanwhile));
  opened_.insert_or_assign(name, id);
  const auto asked = fetches.jobs.find(id);
  JobRef job = asked != fetches.jobs.end() ? asked->second.job : make_job_(name, id);
  PTC_TRY(auto to_fetch,
          job->load_with(asked != fetches.jobs.end() ? asked->second.fetched : FetchedFiles()));
  if (!to_fetch.empty()) {
    Fetches::OfJob& one = fetches.jobs[id];
    one.job = std::move(job);
    one.wanted = std::move(to_fetch);
    return ok();
  }
  job->start();
  jobs_.insert(job);
  opened_.erase(name);
  spdlog::info("job {} was created by another node", name);
  return ok();
}

/// It concerns no decision, and there is one for each checkpoint and day: only its job hears of it.
bool AgreementFollower::note_looked_over(const MetaEvent& event) {
  constexpr std::string_view kWhat = "/looked_over/";
  const size_t at = event.key.find(kWhat);
  if (!event.key.starts_with("jobs/") || at == std::string::npos) return false;
  const JobRef job = jobs_.find(std::string_view(event.key).substr(5, at - 5));
  if (job != nullptr && event.value)
    job->note_looked_over(event.key.substr(at + kWhat.size()), *event.value, event.revision);
  return true;
}

}  // namespace ptc
