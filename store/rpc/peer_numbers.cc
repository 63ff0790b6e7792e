#include "store/rpc/peer_numbers.h"

#include "store/base/mutex.h"

namespace ptc {

std::shared_ptr<PeerCounters> PeerCounterTable::of(const std::string& node) {
  MutexLock lock(mutex_);
  auto& counters = nodes_[node];
  if (!counters) counters = std::make_shared<PeerCounters>();
  return counters;
}

std::vector<PeerNumbers> PeerCounterTable::numbers() const {
  MutexLock lock(mutex_);
  std::vector<PeerNumbers> all;
  for (const auto& [node, counted] : nodes_) {
    all.push_back({node, counted->bytes_sent, counted->bytes_received, counted->connections,
                   counted->broken_connections, counted->checksum_failures, counted->retries,
                   counted->calls, counted->failed_calls, counted->call_ns});
  }
  return all;
}

}  // namespace ptc
