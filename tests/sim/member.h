// A simulated node as a member of its cluster: what reshard/node/cluster_node.h is to a real
// one, over the simulated agreement store and network. It joins under a lease, follows who is
// there, and joins again when its lease has ended.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <thread>

#include "reshard/cluster/cluster.h"
#include "reshard/node/job_store.h"
#include "tests/sim/network.h"

namespace ptc::sim {

class Member final : public Cluster {
 public:
  using Call = std::function<Result<std::string>(const std::string& node, const PeerRow& row,
                                                 const std::string& request, Time deadline,
                                                 const std::stop_token& stop)>;
  /// `meta` outlives it.
  Member(std::string name, MetaClient& meta, Call call)
      : name_(std::move(name)), meta_(meta), call_(std::move(call)) {}
  ~Member() override { leave(); }

  /// Before the store is opened: nobody decides with what a former life of this node had promised.
  Result<> begin();
  /// The others see it from here on. `store` outlives leave().
  Result<> join(JobStore& store);
  void leave();

  const std::string& self() const override { return name_; }
  std::vector<std::string> alive() const override;
  MetaTransaction::Compare fence() const override;
  MetaTransaction::Compare fence_of(const std::string& node) const override;
  std::shared_ptr<const MetaLease> lease() const override;

 private:
  Result<std::string> call(const std::string& node, const PeerRow& row, const std::string& request,
                           std::chrono::milliseconds time, std::stop_token stop) override {
    return call_(node, row, request, time, stop);
  }
  std::string key() const { return "nodes/" + name_; }
  bool is_member() const { return lease_ != nullptr && lease_->alive(); }
  Result<> join_once();
  Result<> read_members();
  void follow();

  const std::string name_;
  MetaClient& meta_;
  const Call call_;
  JobStore* store_ = nullptr;
  std::map<std::string, int64_t> members_;  // and the revision of their keys
  std::shared_ptr<MetaLease> lease_;
  int64_t revision_ = 0;  // of the own key
  bool refresh_ = true, stopping_ = false;
  std::shared_ptr<void> watch_;
  std::thread follower_;
};

}  // namespace ptc::sim
