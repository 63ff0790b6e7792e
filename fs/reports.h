// What a mount says about itself, as the texts of .ptc/: version, nodes.json, stats, requests.
#pragma once

#include <boost/json/object.hpp>
#include <cstdint>
#include <string>
#include <vector>

#include "fs/tree.h"

namespace ptc {

std::string version_text(Tree& tree);
/// All nodes of the cluster, what lies on them together, and copies that are missing.
boost::json::object nodes_document(Tree& tree);
std::string nodes_text(Tree& tree);
std::string stats_text(Tree& tree);
std::string requests_text(Tree& tree);

/// Of the file system that the store is on; zeros when it does not say.
struct StoreSpace {
  uint64_t total_bytes = 0, used_bytes = 0;
};
StoreSpace store_space(const Tree& tree);

/// Bytes of images of checkpoints that lie on this node.
uint64_t materialised_bytes(const Tree& tree);

/// A node that is there, or that was and is still counted on.
struct NodeReport {
  std::string name;
  const char* state;          // up, away; fenced: this one, cut off from the others
  uint64_t stored_bytes = 0;  // of checkpoints, that lie there, within reach or not
  bool draining = false;
};
std::vector<NodeReport> node_reports(const Tree& tree);  // by name

/// Bytes of copies that the job's `replicas` asks for and that this node cannot reach. Copies of a file count, whatever
/// they were made for.
uint64_t missing_copy_bytes(const Job& job);

double uptime_seconds(const Tree& tree);

}  // namespace ptc
