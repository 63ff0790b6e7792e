// <job>/incoming/: real directories that become checkpoints.
#pragma once

#include <string>
#include <utility>

#include "fs/nodes/real_node.h"

namespace ptc {

/// A real directory; only that `mv incoming/<name> checkpoints/` is known by its source.
class IncomingDir : public RealNode {
 public:
  IncomingDir(JobViewRef job, UniqueFd fd, std::string key)
      : RealNode(std::move(job), std::move(fd), std::move(key)) {}
  NameLife name_life() const override { return NameLife::kForever; }
};

}  // namespace ptc
