#include "fs/quota.h"

#include <algorithm>
#include <cerrno>

#include "store/base/size_text.h"

namespace ptc {
namespace {

/// Whether so much more is too much. What is less than before never is.
bool exceeds(const QuotaAmount& used, const QuotaAmount& more, const QuotaLimit& limit) {
  const auto too_much = [](int64_t now, int64_t added, uint64_t most) {
    return added > 0 && most != UINT64_MAX && static_cast<uint64_t>(std::max<int64_t>(0, now + added)) > most;
  };
  return too_much(used.bytes, more.bytes, limit.bytes) || too_much(used.files, more.files, limit.files);
}

void add_to(QuotaAmount& all, const QuotaAmount& more) {
  all.bytes += more.bytes;
  all.files += more.files;
}

}  // namespace

Result<QuotaLimit> QuotaLimit::parse(std::string_view text) {
  QuotaLimit limit;
  const size_t comma = std::min(text.find_first_of(",;"), text.size());
  const std::string_view bytes = text.substr(0, comma);
  if (bytes != "none") {
    PTC_TRY(limit.bytes, parse_size(bytes));
  }
  if (comma == text.size()) return limit;
  if (const std::string_view files = text.substr(comma + 1); files != "none") {
    PTC_TRY(limit.files, parse_size(files));
  }
  return limit;
}

void Quotas::set_limits(QuotaLimit user, QuotaLimit job) {
  std::lock_guard lock(mutex_);
  each_user_ = user;
  each_job_ = job;
}

void Quotas::set_job_limit(const std::string& job, std::optional<QuotaLimit> limit) {
  std::lock_guard lock(mutex_);
  jobs_[job].limit = limit;
}

bool Quotas::limits(const std::string& job) const {
  std::lock_guard lock(mutex_);
  if (each_user_.any()) return true;
  const auto found = jobs_.find(job);
  return (found == jobs_.end() ? each_job_ : limit_of(found->second)).any();
}

std::optional<Quotas::Space> Quotas::space_of(const std::string& job) const {
  std::lock_guard lock(mutex_);
  const auto found = jobs_.find(job);
  const Space space = found == jobs_.end() ? Space{each_job_, {}} : Space{limit_of(found->second), found->second.all};
  return space.limit.any() ? std::optional(space) : std::nullopt;
}

FsResult<> Quotas::reserve(const std::string& job, uid_t user, QuotaAmount amount) {
  std::lock_guard lock(mutex_);
  Job& of = jobs_[job];
  if (exceeds(of.all, amount, limit_of(of)) || (user != 0 && exceeds(users_[user], amount, each_user_)))
    return Errno{EDQUOT};
  add_locked(of, user, amount);
  return ok();
}

void Quotas::add(const std::string& job, uid_t user, QuotaAmount amount) {
  std::lock_guard lock(mutex_);
  add_locked(jobs_[job], user, amount);
}

void Quotas::add_locked(Job& job, uid_t user, QuotaAmount amount) {
  add_to(job.all, amount);
  add_to(job.by_user[user], amount);
  add_to(users_[user], amount);
}

void Quotas::recount(const std::string& job, const std::function<std::pair<ByUser, ByUser>()>& count) {
  const auto alone = gate(job);
  std::unique_lock gate_lock(*alone);
  const auto [outside, inside] = count();
  std::lock_guard lock(mutex_);
  Job& of = jobs_[job];
  for (const auto& [user, amount] : of.by_user) add_to(users_[user], {-amount.bytes, -amount.files});
  of.by_user.clear();
  of.all = {};
  for (const ByUser* part : {&outside, &inside})
    for (const auto& [user, amount] : *part) add_locked(of, user, amount);
  for (const auto& [file, of_user] : of.nameless) add_locked(of, of_user.first, of_user.second());
}

std::shared_ptr<std::shared_mutex> Quotas::gate(const std::string& job) {
  std::lock_guard lock(mutex_);
  return jobs_[job].gate;
}

void Quotas::add_nameless(const std::string& job, const void* file, uid_t user, std::function<QuotaAmount()> amount) {
  std::lock_guard lock(mutex_);
  jobs_[job].nameless.insert_or_assign(file, std::pair(user, std::move(amount)));
}

void Quotas::remove_nameless(const std::string& job, const void* file) {
  std::lock_guard lock(mutex_);
  const auto of = jobs_.find(job);
  if (of == jobs_.end()) return;
  const auto found = of->second.nameless.find(file);
  if (found == of->second.nameless.end()) return;
  const QuotaAmount amount = found->second.second();
  add_locked(of->second, found->second.first, {-amount.bytes, -amount.files});
  of->second.nameless.erase(found);
}

void Quotas::forget(const std::string& job) {
  std::lock_guard lock(mutex_);
  const auto found = jobs_.find(job);
  if (found == jobs_.end()) return;
  for (const auto& [user, amount] : found->second.by_user) add_to(users_[user], {-amount.bytes, -amount.files});
  jobs_.erase(found);
}

}  // namespace ptc
