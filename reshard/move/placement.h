// Which node a rank runs on, and so which nodes need which files.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

#include "reshard/checkpoint/checkpoint.h"
#include "reshard/ptc/layout.h"
#include "store/base/error.h"
#include "store/base/memory_place.h"

namespace ptc {

/// What nodes hold of each target of a layout, in the order of Checkpoint::target_images.
struct HeldOfTargets {
  std::string stored_key;  // StoredLayouts::key() of what this is of
  std::vector<SourceIndex::HeldOf> of_target;
};

struct Placement {
  /// By global rank: where its files lie. The memory is the host's, whichever device the rank runs
  /// on, but where put_in_devices() was called. No node: on none in particular.
  std::vector<MemoryPlace> place_of_rank;
  /// What place_ranks() has added up for it, if anything; place_files() would do so again.
  std::shared_ptr<const HeldOfTargets> held;

  friend bool operator==(const Placement& a, const Placement& b) {
    return a.place_of_rank == b.place_of_rank;
  }
};

/// The node of a device as layout.json names it, "w0:1".
std::string node_of(const std::string& device);
bool is_among(const std::vector<std::string>& nodes, const std::string& node);
/// Those that `devices` names; none if it is left out.
std::set<std::string> nodes_of(const Layout& layout);

/// Numbers of nodes by name: those of `nodes`, to which others are added. Threads: one; `nodes`
/// outlives it, and is changed by nobody else.
class NumberedNodes {
 public:
  explicit NumberedNodes(std::vector<std::string>& nodes);
  uint32_t of(const std::string& node);
  std::optional<uint32_t> find(const std::string& node) const;

 private:
  std::vector<std::string>& nodes_;
  std::unordered_map<std::string, uint32_t> numbers_;
};

/// The placement that layout.json asks for: `devices` if it has them; else one that keeps the most
/// bytes where they are. Then ranks are put on `alive` (not empty, sorted) in equal blocks, whole
/// tensor-parallel groups where a block is that large, and the blocks go to nodes so that these
/// hold most of what they need already (plan/assignment.h).
/// Cost: O(n log n) in the arrays of files that differ, and, for each file, in the nodes that hold
/// something of it; then that of the assignment.
Result<Placement> place_ranks(const Layout& layout, const Checkpoint& checkpoint,
                              const StoredState& stored, const std::vector<std::string>& alive);

/// The devices of nodes, in the order of their numbers.
using DevicesOfNodes = std::map<std::string, std::vector<NodeMemory>>;

/// Each rank's files go into the memory of its device: the one that `layout.devices` gives it
/// ("w0:1": device 1), else the ranks of a node take turns over its devices. A rank on a node that
/// is not in `devices` stays as it is, and so does one whose node has none, or not that one.
void put_in_devices(const Layout& layout, const DevicesOfNodes& devices, Placement& placement);
/// kInvalidArgument: one would stay whose node is in `devices`; says what to do.
Result<> check_devices_of_ranks(const Layout& layout, const DevicesOfNodes& devices,
                                const Placement& placement);

/// Where each file of `targets` (Checkpoint::target_images) shall be: once in each memory of the
/// ranks that read it (of nodes that are alive), and in the host's memory of so many more nodes
/// that `replicas` have it there beside the first, as far as there are nodes. Of copies in devices
/// only one counts, as the first: all others may end with their daemons at once. Nodes that hold
/// most of it already come first, of these those that have just this file, of these those that have
/// it in no device, then in turn. One entry a copy, its place in `layout`; `layout.node` is the
/// number of the node in `nodes`, to which nodes are added.
std::vector<StateFile> place_files(std::vector<StateFile> targets, const LayoutSpec& spec,
                                   const Placement& placement, uint32_t replicas,
                                   const std::vector<std::string>& alive, const StoredState& stored,
                                   std::vector<std::string>& nodes);

}  // namespace ptc
