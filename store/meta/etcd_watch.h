// One watch of etcd for all watchers of a client.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "store/meta/backend.h"
#include "store/meta/etcd_gateway.h"
#include "store/net/io_threads.h"

namespace ptc {

/// Everything under `prefix`, in byte order, and the revision it is of. Reads pages of one
/// revision.
struct EtcdListing {
  std::vector<MetaEntry> entries;
  int64_t revision = 0;
};
/// MetaClient::changes().
Task<std::optional<MetaClient::Changes>> changes_in_etcd(EtcdGateway& gateway, std::string prefix,
                                                         std::string strip, int64_t revision);
Task<EtcdListing> list_etcd(EtcdGateway& gateway, std::string prefix, std::string strip);

/// Publishes every change under a prefix to a hub, in order of revision, each once. A stream that
/// breaks, or whose member serves no reads any more, is followed by another, from the next revision
/// on; where that was compacted, everything is listed and compared with what was published, and a
/// gap told.
class EtcdWatch {
 public:
  /// `prefix` is taken off the keys.
  EtcdWatch(std::shared_ptr<const EtcdAccess> access, std::string prefix, WatchHub& hub);
  ~EtcdWatch();

  /// Returns once changes from here on will be published. Once; again after an error.
  Result<> start(IoThreads& io);

 private:
  asio::awaitable<void> run(std::stop_token stop);
  Task<> follow();
  Result<> take(const json::object& result);
  Task<> list_again();

  EtcdGateway gateway_;  // of its own, so that it can be stopped
  std::string prefix_;
  WatchHub& hub_;
  // Of the coroutine, once started: the state that was published.
  std::map<std::string, int64_t, std::less<>> revisions_;  // of each key
  int64_t complete_ = 0;  // everything up to this revision was published
  bool compacted_ = false;
  bool refused_ = false;  // and said so

  Background following_;  // last: it uses the rest
};

}  // namespace ptc
