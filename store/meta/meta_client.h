// The small facts that must be agreed on: which jobs, checkpoints and layouts exist. A sorted map
// of short strings with transactions, as etcd has it; big manifests live in files beside it.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "store/base/error.h"

namespace ptc {

struct MetaEntry {
  std::string key;
  std::string value;
  int64_t revision = 0;  // of the transaction that wrote it last
};

/// The membership of one process: keys put under it go, all at once, when it ends.
/// Its client keeps it alive until it is destroyed, which ends it; destroy it before the client. A
/// lease that ended stays so: whoever wants to belong again asks for a new one and decides anew.
/// Threads: any.
class MetaLease {
 public:
  using Clock = std::chrono::steady_clock;
  virtual ~MetaLease() = default;

  /// The store's name for it.
  virtual int64_t id() const = 0;
  /// Until then the store cannot have ended it, whatever happened: the moment when the last renewal
  /// that was answered had been sent, plus the time to live. Past as soon as it is known to be
  /// gone. (This clock stands still while the machine is suspended: hence the compare of
  /// leased_puts.)
  virtual Clock::time_point deadline() const = 0;
  /// False: act no more in the name of what is under it.
  bool alive() const { return Clock::now() < deadline(); }
};

/// What a transaction may have of compares, of keys that it writes, and of bytes: etcd's limits,
/// kept by every backend.
inline constexpr size_t kMaxTransactionKeys = 100, kMaxTransactionBytes = 5 << 18;

/// All or nothing. Every write of a decision names in `compares` what the decision was based on.
struct MetaTransaction {
  struct Compare {
    std::string key;
    int64_t revision;  // the key's revision; 0: it does not exist
  };
  std::vector<Compare> compares;
  std::vector<std::pair<std::string, std::string>> puts;
  std::vector<std::string> deletes;  // a key that is not there is ok
  /// Puts that go with `lease`, until the key is put again. Whoever acts for a node compares the
  /// revision of the node's own such key: 0, and so kConflict, once the lease ended.
  std::vector<std::pair<std::string, std::string>> leased_puts;
  const MetaLease* lease = nullptr;
};

struct MetaEvent {
  std::string key;                   // empty: a gap
  std::optional<std::string> value;  // nullopt: deleted
  int64_t revision = 0;

  /// What changed until `revision` may not all have been told: see watch().
  bool is_gap() const { return key.empty(); }
};

/// What is counted of a client, since it was opened, for metrics.
struct MetaNumbers {
  uint64_t calls = 0;         // that ended, with an answer of the store or without
  uint64_t failed_calls = 0;  // of these, without
  uint64_t retries = 0;       // once more, for an endpoint of the store did not answer
  uint64_t call_ns = 0;       // from the call to its end
  uint64_t term = 0;          // of the store's leader: grows with each election; 0: not known
};

/// Keys: UTF-8 paths such as "jobs/llama/layout". Values: at most 1 MiB.
/// Threads: any. Durable: what commit() returned survives kill -9 (in the backend's own store).
/// Errors: kUnavailable (the store does not answer; it says what was tried), kInvalidArgument.
/// Conformance: tests/store/meta_conformance.h; every backend runs it.
class MetaClient {
 public:
  virtual ~MetaClient() = default;

  virtual Result<std::optional<MetaEntry>> get(std::string_view key) = 0;
  /// Every key that begins with `prefix`, in byte order.
  virtual Result<std::vector<MetaEntry>> list(std::string_view prefix) = 0;
  /// What of that was written after `revision`, and how many keys there are in all, for who knows
  /// the rest: more than these say, and some have gone. nullopt: it is not to be had for less than
  /// list(), or is much.
  struct Changes {
    std::vector<MetaEntry> entries;
    size_t keys = 0;
  };
  virtual Result<std::optional<Changes>> changes(std::string_view /*prefix*/,
                                                 int64_t /*revision*/) {
    return std::optional<Changes>();
  }
  /// The new revision; one that may not be new when there was nothing to change. Revisions only
  /// grow. A key may be written once. kConflict when a compare fails or the lease ended: nothing
  /// was written. kInDoubt: nobody knows yet, and nothing of what it would need, nor of what it
  /// would replace, may be thrown away until settle(). Any other error means that nothing was
  /// written, and never will be.
  virtual Result<int64_t> commit(const MetaTransaction& transaction) = 0;
  /// Finds out what became of every commit() that failed with kInDoubt before this call. ok():
  /// get() and list() say it from now on, and none of them can be done later. kUnavailable: not
  /// now.
  virtual Result<> settle() { return ok(); }
  /// Why the store is not what it was, as the last call found: it answers with an earlier revision
  /// than before. Such answers are kUnavailable, and nothing is written to a store that gives them.
  virtual std::optional<std::string> set_back() { return std::nullopt; }
  /// Zeros where the store is this process's own.
  virtual MetaNumbers numbers() const { return {}; }

  /// A new lease, ended by the store when it has not heard from this process for `ttl` (a store may
  /// make that longer, never shorter). At least 1 s.
  virtual Result<std::unique_ptr<MetaLease>> lease(std::chrono::seconds ttl) = 0;

  /// Calls `on_event` for every change under `prefix` committed after this call, in order of
  /// revision, on a thread of the backend, until the returned handle is destroyed (which waits for
  /// a running call; so never destroy it inside one). `on_event` may call get and list. A store
  /// that was out of reach may have forgotten what came in between: then only the last state of
  /// each key that changed is told, a deletion with a later revision than its own, and after that,
  /// whatever the prefix, a gap: a key that came and went meanwhile is not told, though the watcher
  /// may have read it. Who keeps what it read lists anew then.
  using OnEvent = std::function<void(const MetaEvent&)>;
  virtual Result<std::shared_ptr<void>> watch(std::string prefix, OnEvent on_event) = 0;
};

/// The reference: a std::map. Documents the interface; keeps nothing. A lease lasts until
/// destroyed.
std::unique_ptr<MetaClient> make_memory_meta();

/// The embedded store of a cluster of one: an SQLite database file, WAL, synchronous=FULL. Several
/// processes may use it; watches see the commits of their own client only. A lease lasts until
/// destroyed; what a killed process had under one goes when the file is opened next.
Result<std::unique_ptr<MetaClient>> open_sqlite_meta(const std::string& path);

}  // namespace ptc
