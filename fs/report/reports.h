// What a mount says about itself, as the texts of .ptc/: version, nodes.json, stats, requests,
// daemon.json.
#pragma once

#include <boost/json/object.hpp>
#include <cstdint>
#include <string>

#include "fs/tree/tree.h"

namespace ptc {

std::string version_text(Tree& tree);
/// All nodes of the cluster, those that are away, too; sums over them, in which nothing is counted
/// twice; and copies that are missing. What another node says of itself may be a moment old.
boost::json::object nodes_document(Tree& tree);
std::string nodes_text(Tree& tree);
std::string stats_text(Tree& tree);
std::string requests_text(Tree& tree);
/// How the daemon was started, what it may have of the machine and has, and what this kernel does
/// for it: what `ptc doctor` looks at.
std::string daemon_text(Tree& tree);

/// Of the file system that the store is on; zeros when it does not say.
struct StoreSpace {
  uint64_t total_bytes = 0, used_bytes = 0;
};
StoreSpace store_space(const Tree& tree);

/// Bytes of images of checkpoints that lie on this node.
uint64_t materialised_bytes(const Tree& tree);

double uptime_seconds(const Tree& tree);

}  // namespace ptc
