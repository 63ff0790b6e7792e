// A cluster of one, without an agreement store: there is nobody to ask, and nobody else decides.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "reshard/cluster/cluster.h"

namespace ptc {

/// It has no lease, needs none, and is not cut off. What is stored does not name it: the host may
/// be given another name. Threads: any.
class LoneNode final : public Cluster {
 public:
  explicit LoneNode(std::string name) : name_(std::move(name)) {}

  const std::string& self() const override { return name_; }
  std::vector<std::string> alive() const override { return {name_}; }
  std::optional<MetaTransaction::Compare> fence() const override { return std::nullopt; }
  /// That there is no such node.
  MetaTransaction::Compare fence_of(const std::string& node) const override {
    return {std::string(kMemberKeys) + node, 0};
  }
  std::shared_ptr<const MetaLease> lease() const override { return nullptr; }
  bool may_decide() const override { return true; }
  bool shares_bytes() const override { return false; }
  bool shares_decisions() const override { return false; }
  bool remembers_removals() const override { return false; }

 private:
  Result<std::string> call(const std::string& node, const PeerRow& row, const std::string& request,
                           std::chrono::milliseconds time, std::stop_token stop) override;

  const std::string name_;
};

}  // namespace ptc
