#include "store/meta/backend.h"

#include <pthread.h>

#include <algorithm>
#include <map>
#include <unordered_map>

#include "store/base/mutex.h"

namespace ptc {
namespace {

constexpr size_t kMaxKeyBytes = 4096;
constexpr size_t kMaxValueBytes = 1 << 20;

Result<> check_key(std::string_view key) {
  if (key.empty()) return invalid_argument("a metadata key is empty");
  if (key.size() > kMaxKeyBytes)
    return invalid_argument("a metadata key has {} bytes, but at most {} are allowed: '{}…'",
                            key.size(), kMaxKeyBytes, key.substr(0, 80));
  return ok();
}

/// etcd takes 128 operations of a kind, and 1.5 MiB; its client adds some.
Result<> check_size(const MetaTransaction& transaction) {
  size_t bytes = 0;
  for (const auto* puts : {&transaction.puts, &transaction.leased_puts})
    for (const auto& [key, value] : *puts) bytes += key.size() + value.size();
  for (const std::string& key : transaction.deletes) bytes += key.size();
  for (const auto& compare : transaction.compares)
    bytes += 2 * compare.key.size();  // it is read, too, when it fails
  const size_t writes =
      transaction.puts.size() + transaction.leased_puts.size() + transaction.deletes.size();
  if (writes > kMaxTransactionKeys || transaction.compares.size() > kMaxTransactionKeys ||
      bytes > kMaxTransactionBytes)
    return invalid_argument(
        "a change of {} keys and {} bytes that compares {} is too large: it may have {} keys, {} "
        "compares and {} bytes",
        writes, bytes, transaction.compares.size(), kMaxTransactionKeys, kMaxTransactionKeys,
        kMaxTransactionBytes);
  return ok();
}

}  // namespace

Result<> check_transaction(const MetaTransaction& transaction) {
  PTC_TRY(check_size(transaction));
  std::vector<std::string_view> written;
  for (const auto& compare : transaction.compares) {
    PTC_TRY(check_key(compare.key));
  }
  for (const auto* puts : {&transaction.puts, &transaction.leased_puts}) {
    for (const auto& [key, value] : *puts) {
      PTC_TRY(check_key(key));
      if (value.size() > kMaxValueBytes)
        return invalid_argument(
            "the value of '{}' has {} bytes, but at most {} are allowed; put it "
            "into a file and its name here",
            key, value.size(), kMaxValueBytes);
      written.push_back(key);
    }
  }
  for (const std::string& key : transaction.deletes) {
    PTC_TRY(check_key(key));
    written.push_back(key);
  }
  std::sort(written.begin(), written.end());
  if (auto twice = std::adjacent_find(written.begin(), written.end()); twice != written.end())
    return invalid_argument("a transaction writes the key '{}' twice", *twice);
  if (!transaction.leased_puts.empty()) {
    const std::string& key = transaction.leased_puts[0].first;
    if (transaction.lease == nullptr)
      return invalid_argument("no lease is given for the key '{}'", key);
    if (!transaction.lease->alive()) return lease_ended(key);
  }
  return ok();
}

Result<> check_ttl(std::chrono::seconds ttl) {
  if (ttl < std::chrono::seconds(1))
    return invalid_argument("a lease of {} s is too short; it must last 1 s at least", ttl.count());
  return ok();
}

Error lease_ended(std::string_view key) {
  return make_error(Code::kConflict,
                    "the lease for the key '{}' has ended: this node was taken for dead", key);
}

Error compare_failed(std::string_view key, int64_t expected_revision, int64_t found_revision) {
  auto text = [](int64_t revision) {
    return revision == 0 ? std::string("absent") : fmt::format("at revision {}", revision);
  };
  return make_error(Code::kConflict, "metadata key '{}' is {}, not {}: somebody else changed it",
                    key, text(found_revision), text(expected_revision));
}

std::string prefix_end(std::string_view prefix) {
  std::string end(prefix);
  while (!end.empty() && end.back() == '\xFF') end.pop_back();
  if (!end.empty()) end.back() = static_cast<char>(end.back() + 1);
  return end;
}

void LeasedKeys::note(const MetaTransaction& transaction) {
  for (const auto& [key, value] : transaction.puts) lease_of_.erase(key);
  for (const std::string& key : transaction.deletes) lease_of_.erase(key);
  for (const auto& [key, value] : transaction.leased_puts) lease_of_[key] = transaction.lease->id();
}

std::vector<std::string> LeasedKeys::of(int64_t lease) const {
  std::vector<std::string> keys;
  for (const auto& [key, id] : lease_of_)
    if (id == lease) keys.push_back(key);
  return keys;
}

struct WatchHub::State {
  Mutex mutex;
  ConditionVariable changed;  // the queue, `stopping` or `running`
  /// By prefix, and how many prefixes have which length: an event is looked up once for each
  /// length, however many watch.
  std::unordered_map<std::string, std::vector<std::shared_ptr<Watcher>>> watchers
      PTC_GUARDED_BY(mutex);
  std::map<size_t, size_t> lengths PTC_GUARDED_BY(mutex);
  uint64_t next_watcher PTC_GUARDED_BY(mutex) = 0;
  std::deque<MetaEvent> queue PTC_GUARDED_BY(mutex);
  uint64_t next_event PTC_GUARDED_BY(mutex) = 0;  // number of the next event to be published
  bool has_thread PTC_GUARDED_BY(mutex) = false;  // since the first watcher came
  bool stopping PTC_GUARDED_BY(mutex) = false;
  Watcher* running PTC_GUARDED_BY(mutex) = nullptr;  // whose on_event is being called

  void add(const std::shared_ptr<Watcher>& watcher) PTC_REQUIRES(mutex) {
    size_t& prefixes = lengths[watcher->prefix.size()];
    auto& same = watchers[watcher->prefix];
    same.push_back(watcher);
    if (same.size() == 1) ++prefixes;
  }
  void remove(Watcher& watcher) PTC_REQUIRES(mutex) {
    watcher.removed = true;
    const auto same = watchers.find(watcher.prefix);
    std::erase_if(same->second, [&](const auto& one) { return one.get() == &watcher; });
    if (!same->second.empty()) return;
    watchers.erase(same);
    const auto length = lengths.find(watcher.prefix.size());
    if (--length->second == 0) lengths.erase(length);
  }
  /// Those that see an event, in the order in which they began to watch.
  std::vector<std::shared_ptr<Watcher>> watchers_of(const MetaEvent& event, uint64_t number) const
      PTC_REQUIRES(mutex) {
    std::vector<std::shared_ptr<Watcher>> found;
    auto take = [&](const std::vector<std::shared_ptr<Watcher>>& same) {
      for (const auto& watcher : same)
        if (watcher->first_event <= number) found.push_back(watcher);
    };
    if (event.is_gap()) {
      for (const auto& [prefix, same] : watchers) take(same);
    } else {
      for (const auto& [length, prefixes] : lengths) {
        if (length > event.key.size()) break;
        const auto same = watchers.find(event.key.substr(0, length));
        if (same != watchers.end()) take(same->second);
      }
    }
    std::sort(found.begin(), found.end(),
              [](const auto& a, const auto& b) { return a->number < b->number; });
    return found;
  }
};

/// Takes its watcher away when the last copy of it goes.
class WatchHub::Handle {
 public:
  Handle(std::shared_ptr<State> state, std::shared_ptr<Watcher> watcher)
      : state_(std::move(state)), watcher_(std::move(watcher)) {}
  Handle(const Handle&) = delete;
  ~Handle() {
    MutexLock lock(state_->mutex);
    state_->remove(*watcher_);
    state_->changed.wait(state_->mutex, [this]() PTC_REQUIRES(state_->mutex) {
      return state_->running != watcher_.get();
    });
  }

 private:
  std::shared_ptr<State> state_;
  std::shared_ptr<Watcher> watcher_;
};

WatchHub::WatchHub() : state_(std::make_shared<State>()) {}

WatchHub::~WatchHub() {
  {
    MutexLock lock(state_->mutex);
    state_->stopping = true;
  }
  state_->changed.notify_all();
  if (thread_.joinable()) thread_.join();
}

Result<std::shared_ptr<void>> WatchHub::watch(std::string prefix, MetaClient::OnEvent on_event) {
  MutexLock lock(state_->mutex);
  try {
    if (!state_->has_thread) thread_ = std::thread([state = state_] { dispatch(state); });
    state_->has_thread = true;
  } catch (const std::system_error& error) {
    return make_error(Code::kUnavailable, "no thread to watch the metadata: {}", error.what());
  }
  auto watcher = std::make_shared<Watcher>(Watcher{.prefix = std::move(prefix),
                                                   .on_event = std::move(on_event),
                                                   .first_event = state_->next_event,
                                                   .number = state_->next_watcher++});
  state_->add(watcher);
  return std::shared_ptr<void>(std::make_shared<Handle>(state_, std::move(watcher)));
}

void WatchHub::publish(std::vector<MetaEvent> events) {
  {
    MutexLock lock(state_->mutex);
    if (state_->has_thread)  // else nobody has ever watched
      for (MetaEvent& event : events) state_->queue.push_back(std::move(event));
    state_->next_event += events.size();
  }
  state_->changed.notify_all();
}

void WatchHub::dispatch(const std::shared_ptr<State>& state) {
  ::pthread_setname_np(::pthread_self(), "ptcfs-watch");
  std::vector<std::shared_ptr<Watcher>> wanted;  // goes without the lock, and what they hold, too
  UniqueLock lock(state->mutex);
  for (;;) {
    state->changed.wait(state->mutex, [&]() PTC_REQUIRES(state->mutex) {
      return state->stopping || !state->queue.empty();
    });
    if (state->stopping) return;
    uint64_t number = state->next_event - state->queue.size();
    MetaEvent event = std::move(state->queue.front());
    state->queue.pop_front();
    wanted = state->watchers_of(event, number);
    for (const auto& watcher : wanted) {
      if (watcher->removed) continue;  // meanwhile: it must not be called any more
      state->running = watcher.get();
      lock.unlock();
      watcher->on_event(event);
      lock.lock();
      state->running = nullptr;
      state->changed.notify_all();
      if (state->stopping) return;
    }
    const MutexUnlock unlock(state->mutex);
    wanted.clear();
  }
}

}  // namespace ptc
