// One node of several that decide about a job, without the others: for tests of one part.
#pragma once

#include <chrono>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "reshard/cluster/cluster.h"
#include "store/meta/meta_client.h"

namespace ptc {

/// It is there as long as its lease. Nobody can be asked for anything.
class DecidingNode final : public Cluster {
 public:
  DecidingNode(MetaClient& meta, std::string name)
      : name_(std::move(name)), lease_(meta.lease(std::chrono::seconds(10)).value()) {
    MetaTransaction joins;
    joins.leased_puts = {{"nodes/" + name_, "here"}};
    joins.lease = lease_.get();
    fence_ = {"nodes/" + name_, meta.commit(joins).value()};
  }
  const std::string& self() const override { return name_; }
  std::vector<std::string> alive() const override { return {name_}; }
  Result<std::string> call(const std::string&, const PeerRow&, const std::string&,
                           std::chrono::milliseconds, std::stop_token) override {
    return make_error(Code::kUnavailable, "nobody");
  }
  std::optional<MetaTransaction::Compare> fence() const override { return fence_; }
  MetaTransaction::Compare fence_of(const std::string&) const override { return {"", 0}; }
  std::shared_ptr<const MetaLease> lease() const override { return lease_; }
  void is_cut_off() { lease_.reset(); }

 private:
  const std::string name_;
  std::shared_ptr<const MetaLease> lease_;
  MetaTransaction::Compare fence_;
};

}  // namespace ptc
