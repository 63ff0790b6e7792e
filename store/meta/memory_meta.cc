#include <map>

#include "store/base/mutex.h"
#include "store/meta/backend.h"

namespace ptc {
namespace {

class MemoryMeta : public MetaClient {
 public:
  Result<std::optional<MetaEntry>> get(std::string_view key) override {
    MutexLock lock(mutex_);
    auto found = entries_.find(key);
    if (found == entries_.end()) return std::optional<MetaEntry>();
    return std::optional<MetaEntry>(found->second);
  }

  Result<std::vector<MetaEntry>> list(std::string_view prefix) override {
    MutexLock lock(mutex_);
    std::vector<MetaEntry> found;
    for (auto it = entries_.lower_bound(prefix);
         it != entries_.end() && it->first.starts_with(prefix); ++it)
      found.push_back(it->second);
    return found;
  }

  Result<std::optional<Changes>> changes(std::string_view prefix, int64_t revision) override {
    MutexLock lock(mutex_);
    Changes found;
    for (auto it = entries_.lower_bound(prefix);
         it != entries_.end() && it->first.starts_with(prefix); ++it, ++found.keys)
      if (it->second.revision > revision) found.entries.push_back(it->second);
    return std::optional(std::move(found));
  }

  Result<int64_t> commit(const MetaTransaction& transaction) override {
    PTC_TRY(check_transaction(transaction));
    MutexLock lock(mutex_);
    for (const auto& compare : transaction.compares) {
      auto found = entries_.find(compare.key);
      int64_t revision = found == entries_.end() ? 0 : found->second.revision;
      if (revision != compare.revision)
        return compare_failed(compare.key, compare.revision, revision);
    }
    write(transaction);
    return revision_;
  }

  Result<std::unique_ptr<MetaLease>> lease(std::chrono::seconds ttl) override {
    PTC_TRY(check_ttl(ttl));
    MutexLock lock(mutex_);
    return std::make_unique<LocalLease>(++leases_, [this](int64_t id) {
      MutexLock end_lock(mutex_);
      write({.deletes = leased_.of(id)});
    });
  }

  Result<std::shared_ptr<void>> watch(std::string prefix, OnEvent on_event) override {
    MutexLock lock(mutex_);
    return watches_.watch(std::move(prefix), std::move(on_event));
  }

 private:
  void write(const MetaTransaction& transaction) PTC_REQUIRES(mutex_) {
    int64_t revision = revision_ + 1;
    std::vector<MetaEvent> events;
    for (const auto* puts : {&transaction.puts, &transaction.leased_puts}) {
      for (const auto& [key, value] : *puts) {
        entries_[key] = {key, value, revision};
        events.push_back({key, value, revision});
      }
    }
    for (const std::string& key : transaction.deletes)
      if (entries_.erase(key) > 0) events.push_back({key, std::nullopt, revision});
    leased_.note(transaction);
    if (!events.empty()) revision_ = revision;
    watches_.publish(std::move(events));
  }

  Mutex mutex_;
  std::map<std::string, MetaEntry, std::less<>> entries_ PTC_GUARDED_BY(mutex_);
  int64_t revision_ PTC_GUARDED_BY(mutex_) = 0;
  int64_t leases_ PTC_GUARDED_BY(mutex_) = 0;  // how many there were
  LeasedKeys leased_ PTC_GUARDED_BY(mutex_);
  WatchHub watches_;  // last: its calls end first
};

}  // namespace

std::unique_ptr<MetaClient> make_memory_meta() { return std::make_unique<MemoryMeta>(); }

}  // namespace ptc
