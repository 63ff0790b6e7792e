// Calls between daemons (store/rpc), and what is counted of them on both sides.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "reshard/cluster/peer_calls.h"
#include "store/base/mutex.h"
#include "store/rpc/peer_server.h"
#include "store/rpc/peers.h"

namespace ptc {

class TcpCalls final : public PeerCalls {
 public:
  /// `peers` outlives it.
  explicit TcpCalls(Peers& peers) : peers_(peers) {}

  /// Who answers the others, and is counted too; returns who did so until now. Null: nobody.
  std::unique_ptr<PeerServer> serve(std::unique_ptr<PeerServer> server);
  /// Where it listens; empty: nobody does.
  std::string address() const;

  void set(const std::string& node, const std::string& address) override;
  void remove(const std::string& node) override;
  Result<> meet(const std::string& node, const std::string& address) override;
  Result<std::string> call(const std::string& node, const PeerRow& row, const std::string& request,
                           std::chrono::milliseconds time, std::stop_token stop) override;
  /// Without a thread for each, as the next.
  std::vector<Result<>> meet_all(const std::vector<Place>& others,
                                 const std::string& own_address) override;
  std::vector<Result<std::string>> call_all(const std::vector<Cluster::Question>& questions,
                                            const PeerRow& row, AskManner manner,
                                            std::stop_token stop) override;
  std::vector<PeerNumbers> numbers() const override;

 private:
  Peers& peers_;
  mutable Mutex mutex_;
  std::unique_ptr<PeerServer> server_ PTC_GUARDED_BY(mutex_);
};

}  // namespace ptc
