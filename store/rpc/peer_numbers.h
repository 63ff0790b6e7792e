// What is counted of the traffic with each peer, for metrics.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "store/base/mutex.h"

namespace ptc {

/// Since the start of the process.
struct PeerNumbers {
  std::string node;
  uint64_t bytes_sent = 0, bytes_received = 0;  // on the wire, without TLS's own
  uint64_t connections = 0;                     // that were made and let in
  uint64_t broken_connections = 0;              // that ended in the middle of something
  uint64_t checksum_failures = 0;               // frames that did not arrive as they were sent
  uint64_t retries = 0;                         // fetches that went on over another connection
  uint64_t calls = 0;         // of this node that ended, with an answer or without
  uint64_t failed_calls = 0;  // of these, without
  uint64_t call_ns = 0;       // from the call to its end, with connecting

  /// Of other connections with the same node.
  void add(const PeerNumbers& other) {
    bytes_sent += other.bytes_sent;
    bytes_received += other.bytes_received;
    connections += other.connections;
    broken_connections += other.broken_connections;
    checksum_failures += other.checksum_failures;
    retries += other.retries;
    calls += other.calls;
    failed_calls += other.failed_calls;
    call_ns += other.call_ns;
  }
};

/// The same while it is being counted. Threads: any.
struct PeerCounters {
  std::atomic<uint64_t> bytes_sent{0}, bytes_received{0}, connections{0}, broken_connections{0},
      checksum_failures{0}, retries{0}, calls{0}, failed_calls{0}, call_ns{0};
};

/// Counters by node, kept as long as the table. Threads: any.
class PeerCounterTable {
 public:
  std::shared_ptr<PeerCounters> of(const std::string& node);
  std::vector<PeerNumbers> numbers() const;

 private:
  mutable Mutex mutex_;
  std::map<std::string, std::shared_ptr<PeerCounters>> nodes_ PTC_GUARDED_BY(mutex_);
};

}  // namespace ptc
