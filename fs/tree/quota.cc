#include "fs/tree/quota.h"

#include <algorithm>
#include <cerrno>
#include <utility>

#include "store/base/mutex.h"
#include "store/base/size_text.h"

namespace ptc {
namespace {

constexpr auto kMoment = std::chrono::milliseconds(100);  // also on a machine that is busy
constexpr auto kLookAgain = std::chrono::milliseconds(10);
constexpr unsigned kMostWait = 4;  // each on a thread of requests

/// Whether so much more is too much. What is less than before never is; what cannot even be counted
/// always is.
bool exceeds(const QuotaAmount& used, const QuotaAmount& more, const QuotaLimit& limit) {
  const auto too_much = [](int64_t now, int64_t added, uint64_t most) {
    int64_t sum = 0;
    return added > 0 && (__builtin_add_overflow(now, added, &sum) ||
                         (sum > 0 && static_cast<uint64_t>(sum) > most));
  };
  return too_much(used.bytes, more.bytes, limit.bytes) ||
         too_much(used.files, more.files, limit.files);
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
  MutexLock lock(mutex_);
  each_user_ = user;
  each_job_ = job;
}

void Quotas::set_job_limit(const std::string& job, std::optional<QuotaLimit> limit, uid_t owner) {
  MutexLock lock(mutex_);
  Job& of = *account_locked(job);
  of.limit = limit;
  if (!each_user_.any() && !limit_of(of).any()) {
    of.owner.reset();
    of.due = false;
  } else if (std::exchange(of.owner, owner) != owner) {
    of.due = true;
  }
}

bool Quotas::is_due(const std::string& job) const {
  MutexLock lock(mutex_);
  const auto found = jobs_.find(job);
  return found != jobs_.end() && found->second->due;
}

bool Quotas::limits(const std::string& job) const {
  MutexLock lock(mutex_);
  if (each_user_.any()) return true;
  const auto found = jobs_.find(job);
  return (found == jobs_.end() ? each_job_ : limit_of(*found->second)).any();
}

std::optional<Quotas::Space> Quotas::space_of(const Account& account) {
  look();
  MutexLock lock(mutex_);
  const Space space{limit_of(*account), account->all};
  return space.limit.any() ? std::optional(space) : std::nullopt;
}

Quotas::Account Quotas::account(const std::string& job) {
  MutexLock lock(mutex_);
  return account_locked(job);
}

Quotas::Account Quotas::account_locked(const std::string& job) {
  Account& account = jobs_[job];
  if (account == nullptr) account = std::make_shared<Job>();
  return account;
}

std::vector<std::string> Quotas::jobs() const {
  MutexLock lock(mutex_);
  std::vector<std::string> names;
  for (const auto& [name, account] : jobs_) names.push_back(name);
  return names;
}

bool Quotas::fits_locked(const Job& job, uid_t user, const QuotaAmount& amount) {
  return !exceeds(job.all, amount, limit_of(job)) &&
         (user == 0 || !exceeds(users_[user], amount, each_user_));
}

FsResult<> Quotas::reserve(const Account& account, uid_t user, QuotaAmount amount) {
  look();
  MutexLock lock(mutex_);
  if (!fits_locked(*account, user, amount)) return Errno{EDQUOT};
  add_locked(*account, user, amount);
  return ok();
}

FsResult<> Quotas::reserve_in_a_moment(const Account& account, uid_t user, QuotaAmount amount) {
  const auto until = Clock::now() + kMoment;
  for (;;) {
    if (const FsResult<> reserved = reserve(account, user, amount)) return reserved;
    MutexLock lock(mutex_);
    if (waiting_ >= kMostWait || Clock::now() >= until || !is_any_going_locked(*account, user))
      return Errno{EDQUOT};
    ++waiting_;
    went_.wait_for(mutex_, kLookAgain);  // of an image nobody says when it goes
    --waiting_;
  }
}

bool Quotas::has_room(uid_t user, QuotaAmount amount) {
  look();
  MutexLock lock(mutex_);
  return user == 0 || !exceeds(users_[user], amount, each_user_);
}

void Quotas::note_going_locked(const Job& job, uid_t user, FileRef file,
                               std::weak_ptr<const void> image) {
  const auto now = Clock::now();
  while (!going_.empty() && going_.front().until <= now) going_.pop_front();
  going_.push_back({now + kMoment, std::move(file), std::move(image), &job, user});
}

bool Quotas::is_any_going_locked(const Job& job, uid_t user) {
  const auto now = Clock::now();
  std::erase_if(going_, [&](const Going& one) PTC_REQUIRES(mutex_) {
    return one.until <= now || (one.file != nullptr ? one.file->gone : one.image.expired());
  });
  return std::any_of(going_.begin(), going_.end(),
                     [&](const Going& one) { return one.job == &job || one.user == user; });
}

void Quotas::add(const Account& account, uid_t user, QuotaAmount amount) {
  MutexLock lock(mutex_);
  add_locked(*account, user, amount);
}

void Quotas::add_locked(Job& job, uid_t user, QuotaAmount amount) {
  QuotaAmount& of_user = job.by_user[user];
  // By whatever way: what is not there cannot go, or he would get that much more elsewhere.
  amount.bytes = std::max(amount.bytes, -of_user.bytes);
  amount.files = std::max(amount.files, -of_user.files);
  for (QuotaAmount* sum : {&of_user, &job.all, &users_[user]}) add_to(*sum, amount);
}

void Quotas::clear_locked(Job& job) {
  for (const auto& [user, amount] : job.by_user)
    add_to(users_[user], {-amount.bytes, -amount.files});
  job.by_user.clear();
  job.all = {};
}

void Quotas::recount(const std::string& job, const std::function<Counted()>& count) {
  const Account account = this->account(job);
  ExclusiveLock gate_lock(account->gate);
  Job& of = *account;
  {
    MutexLock lock(mutex_);
    of.due = false;
  }
  const Counted counted = count();
  const AllSeen seen = look_at_all(of);
  MutexLock lock(mutex_);
  if (of.gone) return;
  clear_locked(of);
  for (const auto& [user, amount] : counted.outside) add_locked(of, user, amount);
  std::unordered_map<const void*, Held> before = std::exchange(of.images, {});
  for (const Held& image : counted.images) {
    add_locked(of, image.user, {image.bytes, 0});
    const auto held = image.image.lock();
    if (held == nullptr) continue;
    before.erase(held.get());
    of.images.insert_or_assign(held.get(), image);
  }
  for (auto& [key, image] : before) {
    note_going_locked(of, image.user, nullptr, image.image);
    of.removed.push_back(std::move(image));
  }
  std::erase_if(of.removed, [](const Held& image) { return image.image.expired(); });
  for (const Held& image : of.removed) add_locked(of, image.user, {image.bytes, 0});
  bool by_kernel = false;
  for (auto& [key, file] : of.files) {
    by_kernel = by_kernel || file->by_kernel;
    if (const auto now = seen.find(key); now != seen.end()) file->seen = now->second;
    else continue;  // it was opened, or made, a moment ago
    file->alone = !file->seen.named;
    if (file->alone) add_locked(of, file->seen.user, file->seen.amount);
  }
  if (by_kernel || !of.removed.empty()) look_after_locked(account);
}

SharedMutex& Quotas::gate(const Account& account) { return account->gate; }

Quotas::Account Quotas::detach(const std::string& job) {
  MutexLock lock(mutex_);
  const auto found = jobs_.find(job);
  if (found == jobs_.end()) return nullptr;
  Account account = std::move(found->second);
  jobs_.erase(found);
  return account;
}

void Quotas::settle(const Account& account) {
  if (account == nullptr) return;
  ExclusiveLock gate_lock(account->gate);
  Job& of = *account;
  const AllSeen seen = look_at_all(of);
  MutexLock lock(mutex_);
  of.gone = true;
  clear_locked(of);
  for (auto& [key, image] : std::exchange(of.images, {})) {
    note_going_locked(of, image.user, nullptr, image.image);
    of.removed.push_back(std::move(image));
  }
  std::erase_if(of.removed, [](const Held& image) { return image.image.expired(); });
  for (const Held& image : of.removed) add_locked(of, image.user, {image.bytes, 0});
  for (auto& [key, file] : of.files) {
    if (const auto now = seen.find(key); now != seen.end()) file->seen = now->second;
    file->alone = true;
    note_going_locked(of, file->seen.user, file);
    add_locked(of, file->seen.user, file->seen.amount);
  }
  look_after_locked(account);
}

Quotas::AllSeen Quotas::look_at_all(Job& job) {
  std::vector<std::pair<const void*, FileRef>> files;
  {
    MutexLock lock(mutex_);
    files.assign(job.files.begin(), job.files.end());
  }
  AllSeen all;
  for (const auto& [key, file] : files) {
    MutexLock looking(file->looking);
    if (file->look) all.emplace(key, file->look());
  }
  return all;
}

void Quotas::look_after_locked(const Account& account) {
  if (!std::exchange(account->looked_after, true)) looked_after_.push_back(account);
}

void Quotas::look() {
  std::vector<std::pair<Account, FileRef>> files;
  {
    MutexLock lock(mutex_);
    std::erase_if(looked_after_, [&](const Account& account) PTC_REQUIRES(mutex_) {
      Job& of = *account;
      std::erase_if(of.removed, [&](const Held& image) PTC_REQUIRES(mutex_) {
        if (!image.image.expired()) return false;
        add_locked(of, image.user, {-image.bytes, 0});
        return true;
      });
      bool more = !of.removed.empty();
      for (const auto& [key, file] : of.files) {
        if (!file->by_kernel) continue;
        more = true;
        files.emplace_back(account, file);
      }
      of.looked_after = more;
      return !more;
    });
  }
  for (const auto& [account, file] : files) {
    MutexLock looking(file->looking);
    if (!file->look) continue;
    const Seen now = file->look();
    MutexLock lock(mutex_);
    if (now.user == file->seen.user)  // who changes that counts it
      add_locked(*account, now.user, {now.amount.bytes - file->seen.amount.bytes, 0});
    file->seen = now;
  }
}

void Quotas::know_file(const Account& account, const void* key, std::function<Seen()> look,
                       bool by_kernel) {
  FileRef file;
  {
    MutexLock lock(mutex_);
    FileRef& known = account->files[key];
    if (known == nullptr) known = std::make_shared<File>(std::move(look));
    if (!by_kernel || known->by_kernel) return;
    file = known;
  }
  MutexLock looking(file->looking);
  if (!file->look) return;
  const Seen now = file->look();
  MutexLock lock(mutex_);
  if (std::exchange(file->by_kernel, true)) return;
  file->seen = now;
  if (each_user_.any() || limit_of(*account).any()) look_after_locked(account);
}

void Quotas::note_alone(const Account& account, const void* key) {
  MutexLock lock(mutex_);
  if (const auto found = account->files.find(key); found != account->files.end())
    found->second->alone = true;
}

void Quotas::note_nameless(const Account& account, const void* key, uid_t user) {
  MutexLock lock(mutex_);
  const auto found = account->files.find(key);
  if (found == account->files.end()) return;
  found->second->alone = true;
  note_going_locked(*account, user, found->second);
}

void Quotas::forget_file(const Account& account, const void* key) {
  FileRef file;
  {
    MutexLock lock(mutex_);
    const auto found = account->files.find(key);
    if (found == account->files.end()) return;
    file = found->second;
  }
  MutexLock looking(file->looking);
  if (!file->look) return;
  const Seen now = std::exchange(file->look, nullptr)();
  MutexLock lock(mutex_);
  if (file->alone) {
    const Seen& counted = file->by_kernel ? file->seen : now;
    add_locked(*account, counted.user, {-counted.amount.bytes, -counted.amount.files});
  } else if (file->by_kernel && now.user == file->seen.user) {
    add_locked(*account, now.user, {now.amount.bytes - file->seen.amount.bytes, 0});
  }
  account->files.erase(key);
  file->gone = true;
  went_.notify_all();
}

}  // namespace ptc
