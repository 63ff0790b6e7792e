#include "reshard/cluster/lone_node.h"

namespace ptc {

Result<std::string> LoneNode::call(const std::string& node, const PeerRow&, const std::string&,
                                   std::chrono::milliseconds, std::stop_token) {
  return make_error(Code::kUnavailable, "there is no node '{}'", node);
}

}  // namespace ptc
