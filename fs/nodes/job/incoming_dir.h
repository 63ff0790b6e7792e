// <job>/incoming/: real directories that become checkpoints.
#pragma once

#include <string>
#include <utility>

#include "fs/tree/real_node.h"

namespace ptc {

/// A real directory; only that `mv incoming/<name> checkpoints/` is known by its source.
class IncomingDir : public RealNode {
 public:
  IncomingDir(JobViewRef job, HostFile file, std::string key)
      : RealNode(std::move(job), std::move(file), std::move(key)) {}
  NameLife name_life() const override { return NameLife::kForever; }
  FsResult<> set_attributes(const AttributeChange& change, Handle* handle) override {
    PTC_TRY(RealNode::set_attributes(change, handle));
    return job().agree_on(kIncomingName, change);
  }
};

}  // namespace ptc
