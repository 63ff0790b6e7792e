// What the nodes of a cluster know and others do not: the lines of a file.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "store/base/error.h"

namespace ptc {

/// The first line proves this node to others; any line proves others to it, so that a secret is
/// exchanged in steps while the nodes run: the new one below the old one on every node, then above
/// it, then alone. Threads: any; nothing changes it.
class SharedSecret {
 public:
  /// A file of mode 0600, up to 4096 bytes; a line has 32 bytes or more, white space at its end and
  /// empty lines do not count. kInvalidArgument, with what to do.
  static Result<SharedSecret> read(const std::string& path);

  /// HMAC-SHA256 of the text under the first line, 32 bytes.
  std::string proof(std::string_view text) const;
  bool proves(std::string_view proof, std::string_view text) const;

 private:
  std::vector<std::string> lines_;
};

}  // namespace ptc
