// layout.json, and the name of a layout in a path: "tp4-pp2-dp2".
#pragma once

#include <boost/json/fwd.hpp>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "reshard/ptc/parallel_config.h"
#include "store/base/error.h"

namespace ptc {

inline constexpr uint64_t kMaxReplicas = 64;
/// What "rules" says of the job's own.
inline constexpr std::string_view kRulesFile = "rules.json";

class RuleSet;

/// Rules that a layout cuts by, in place of those with which a checkpoint was committed. Immutable.
class LayoutRules {
 public:
  LayoutRules() = default;  // none: those of the commit
  explicit LayoutRules(std::shared_ptr<const RuleSet> set) : set_(std::move(set)) {}

  explicit operator bool() const { return set_ != nullptr; }
  const std::shared_ptr<const RuleSet>& set() const { return set_; }
  const std::string& text() const;
  /// Eight hex digits of the text, as a layout's name has them.
  std::string id() const;
  friend bool operator==(const LayoutRules& a, const LayoutRules& b) {
    return a.set_ == b.set_ || (a && b && a.text() == b.text());
  }

 private:
  std::shared_ptr<const RuleSet> set_;
};

enum class Naming { kGlobal, kStage };
enum class OptimizerCut { kReplicated, kZero1, kFsdp };

/// The part of a layout that decides what the files of a rank hold: two layouts with equal specs
/// have equal files. Everything under checkpoints/<name>/layouts/ depends on it alone.
struct LayoutSpec {
  ParallelConfig sizes;
  RankOrder order;
  /// Stretches of layers that each stage has, as Megatron's virtual pipelines: of the model's
  /// chunks() stretches, in its order, stage s has those with numbers s, s + pp, s + 2·pp …
  uint32_t vpp = 1;
  std::vector<uint32_t> stages;  // layers per stage, or stretch, also 0; empty: as even as possible
  /// With `stages`: the stage, or stretch, that has what belongs to no layer. nullopt: the first
  /// has the embedding, the last the head with the norm before it, and that of the head has
  /// `mtp_layers` layers that predict further tokens.
  std::optional<uint32_t> embedding_at, head_at, mtp_at;
  uint32_t mtp_layers = 0;
  Naming naming = Naming::kGlobal;
  OptimizerCut optimizer = OptimizerCut::kReplicated;
  /// Neighbouring dp ranks that share what is cut over dp; each such group holds the same as the
  /// others: hybrid sharding. Divides dp. 0, never dp itself: all of them are one group.
  uint32_t dp_shard = 0;
  /// What is cut over dp is cut over context-parallel ranks too, and what ep does not cut over the
  /// expert-parallel ranks that have it: so do Megatron's distributed optimizer, and FSDP over a
  /// flattened mesh. Never where there is one of them.
  bool shard_cp = false, shard_ep = false;
  LayoutRules rules;
  friend bool operator==(const LayoutSpec&, const LayoutSpec&) = default;

  RankCoords coords(uint64_t global_rank) const { return order.coords(sizes, global_rank); }
  /// Expert-parallel ranks that have the same of what is no expert's.
  uint32_t ep_copies() const {
    return sizes.etp == 0 ? sizes.ep : sizes.different_ranks() / sizes.tp;
  }
  /// How many ranks of each dimension share what is cut over dp; 1 of all others.
  ParallelConfig sharing(bool experts) const {
    if (optimizer == OptimizerCut::kReplicated) return {};
    return {.dp = dp_shard != 0 ? dp_shard : sizes.dp,
            .ep = shard_ep && !experts ? ep_copies() : 1,
            .cp = shard_cp ? sizes.cp : 1};
  }
  /// Among how many ranks experts are cut over dp; 1 where all of them hold the same. All else is
  /// cut among dense_parts().
  uint32_t dp_parts() const { return sharing(true).dp * sharing(true).cp; }
  uint32_t dense_parts() const { return dp_parts() * sharing(false).ep; }
  /// Which of dp_parts() the rank has: the ranks of a group count in the order of global ranks.
  uint32_t dp_part(const RankCoords& rank) const;
  /// Of the ranks that have this one of dp_parts(), the dp and cp of the first.
  RankCoords of_dp_part(uint32_t part) const { return order.coords(sharing(true), part); }
  /// What dp_parts() counts: "dp", "dp·cp".
  std::string_view dp_text() const { return shard_cp ? "dp·cp" : "dp"; }
  /// At most kMaxWorldSize.
  uint32_t chunks() const { return sizes.pp * vpp; }

  uint32_t embedding_chunk() const { return embedding_at.value_or(0); }
  uint32_t head_chunk() const { return head_at.value_or(chunks() - 1); }
  uint32_t mtp_chunk() const { return mtp_at.value_or(head_chunk()); }
  uint32_t embedding_stage() const { return embedding_chunk() % sizes.pp; }
  uint32_t head_stage() const { return head_chunk() % sizes.pp; }
  uint32_t mtp_stage() const { return mtp_chunk() % sizes.pp; }
  /// As even as possible, the embedding first and the head last.
  void forget_stages();

  /// "tp4-pp2-dp2", behind it all that is not the default, in one order (layout.cc), and last, with
  /// `rules`, "-rules_<8 hex>" of these, with `stages`, "+<8 hex>". Stable for ever: later fields
  /// are left out at their default.
  std::string name() const;
  bool name_says_all() const { return stages.empty() && !rules; }
  /// The spec of a name that says all, as name() returns it: nothing else ("tp02", missing parts,
  /// another order) is accepted, so that one layout has one path. kInvalidArgument.
  static Result<LayoutSpec> from_name(std::string_view name);
  /// The id at the end of a name with rules and without stages; empty: it is none.
  static std::string_view rules_in_name(std::string_view name);

  /// For files and metadata: the fields that are not default. from_json believes what it reads.
  boost::json::object to_json() const;
  static Result<LayoutSpec> from_json(const boost::json::object& object);
};

/// Everything in layout.json.
struct Layout {
  LayoutSpec spec;
  std::vector<std::string> devices;  // global rank → "node:device"; empty: ptcfs places
  uint32_t replicas = 0;             // further copies on other nodes
  uint32_t keep = 0;                 // newest checkpoints that stay; 0: all
  /// "memory": "device": each rank's files are in the memory of its device, on its node, and not in
  /// the host's.
  bool in_devices = false;
  /// What it says of `spec.rules`, which parse() leaves to the job: "rules.json", the one it has
  /// now, or the id of rules that a layout had before; empty: nothing.
  std::string rules;

  /// Parses and checks all that can be checked without a model: JSON (strict, no duplicate keys,
  /// ≤ 1 MiB), keys (an unknown one names the nearest), types, ranges, format, order, that devices
  /// are as many as ranks (each "node:index"), stages as many as pp·vpp. tp, pp and
  /// dp are required, the rest has defaults. Errors: kInvalidArgument, "line 2, column 3: …".
  static Result<Layout> parse(std::string_view text);
};

/// Layers of each pipeline stage: `stages` if given (they must add up to `layers`), else as even as
/// possible, the first stages taking the remainder. Returns chunks() + 1 boundaries: stage s has
/// layers [b[s], b[s+1]), and with vpp also those of stretches s + pp, s + 2·pp … More stages than
/// layers: the last stages are empty. Layers that predict further tokens may have the numbers
/// behind the others': then `layers` counts them, and `stages` does not.
Result<std::vector<uint32_t>> stage_boundaries(const LayoutSpec& spec, uint32_t layers);

/// The text of a new job's layout.json: one rank.
std::string default_layout_text();

}  // namespace ptc
