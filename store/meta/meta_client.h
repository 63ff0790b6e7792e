// The small facts that must be agreed on: which jobs, checkpoints and layouts exist. A sorted map
// of short strings with transactions, as etcd has it; big manifests live in files beside it.
#pragma once

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

/// All or nothing. Every write of a decision names in `compares` what the decision was based on.
struct MetaTransaction {
  struct Compare {
    std::string key;
    int64_t revision;  // the key's revision; 0: it does not exist
  };
  std::vector<Compare> compares;
  std::vector<std::pair<std::string, std::string>> puts;
  std::vector<std::string> deletes;  // a key that is not there is ok
};

struct MetaEvent {
  std::string key;
  std::optional<std::string> value;  // nullopt: deleted
  int64_t revision = 0;
};

/// Keys: UTF-8 paths such as "jobs/llama/layout". Values: at most 1 MiB.
/// Threads: any. Durable: what commit() returned survives kill -9 (in the backend's own store).
/// Conformance: tests/store/meta_conformance.h; every backend runs it.
class MetaClient {
 public:
  virtual ~MetaClient() = default;

  virtual Result<std::optional<MetaEntry>> get(std::string_view key) = 0;
  /// Every key that begins with `prefix`, in byte order.
  virtual Result<std::vector<MetaEntry>> list(std::string_view prefix) = 0;
  /// The new revision; the old one when there was nothing to change. Revisions only grow. A key
  /// may be written once. kConflict when a compare fails: nothing was written.
  virtual Result<int64_t> commit(const MetaTransaction& transaction) = 0;
  /// Whether the last commit() failed in such a way that the next start may find it done all the same.
  /// Then nothing of what it would need, nor of what it would replace, may be thrown away. Otherwise an
  /// error means that nothing was written.
  virtual bool in_doubt() { return false; }

  /// Calls `on_event` for every change under `prefix` committed after this call, in order of
  /// revision, on a thread of the backend, until the returned handle is destroyed (which waits for
  /// a running call; so never destroy it inside one). `on_event` may call get and list.
  using OnEvent = std::function<void(const MetaEvent&)>;
  virtual Result<std::shared_ptr<void>> watch(std::string prefix, OnEvent on_event) = 0;
};

/// The reference: a std::map. Documents the interface; keeps nothing.
std::unique_ptr<MetaClient> make_memory_meta();

/// The embedded store of a cluster of one: an SQLite database file, WAL, synchronous=FULL. Several
/// processes may use it; watches see the commits of their own client only.
Result<std::unique_ptr<MetaClient>> open_sqlite_meta(const std::string& path);

}  // namespace ptc
