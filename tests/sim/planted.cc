#include "tests/sim/planted.h"

#include <algorithm>
#include <map>

#include "reshard/cluster/cluster.h"

namespace ptc::sim {
namespace {

using D = Decision;

bool is_leader(const std::string& key) { return key.starts_with("leaders/"); }
bool is_layout(const std::string& key) { return key.ends_with("/layout"); }
bool is_in_force(const std::string& key) { return key.ends_with("/in_force"); }
bool is_sequence(const std::string& key) { return key.ends_with("/sequence"); }
bool is_attributes(const std::string& key) { return key.ends_with("/attributes"); }
bool is_of_data_set(const std::string& key) { return key.find("/dataset/") != std::string::npos; }
bool is_record(const std::string& key) { return is_checkpoint_key(key); }
bool is_job(const std::string& key) { return is_job_key(key); }
bool is_node(const std::string& key) { return key.starts_with(kMemberKeys); }
bool is_membership(const std::string& key) { return key == kMembership; }

/// What the thread was told of nodes, for the decision that it prepares; and what it read last.
struct Looks {
  std::map<std::string, int64_t> promised;
  bool membership = false, nodes = false;
  bool drained = false,
       drains = false;  // it has listed these, beside such a look; and then began with that
  bool away = false;
};
thread_local Looks looks;
bool mattered = false;  // threads run one at a time

bool is_of(const Break& planted, Decision decision) {
  return std::find(planted.decisions.begin(), planted.decisions.end(), decision) !=
         planted.decisions.end();
}

void see_nodes_as_promised(bool own, const std::string& self, std::vector<MetaEntry>& listed) {
  for (const auto& [node, revision] : looks.promised) {
    if ((node == self) != own) continue;
    const std::string key = std::string(kMemberKeys) + node;
    auto entry = std::find_if(listed.begin(), listed.end(),
                              [&](const MetaEntry& one) { return one.key == key; });
    if (entry == listed.end()) entry = listed.insert(entry, MetaEntry{key, "", 0});
    looks.away = looks.away || entry->revision != revision;
    mattered = mattered || looks.away;
    entry->revision = revision;
  }
}

}  // namespace

const std::vector<Break>& planted_breaks() {
  using What = Break::What;
  static const std::vector<Break> breaks = {
      {"flip-leader", {D::kFlip}, What::kKey, is_leader, "ce", "", "S"},
      {"flip-layout", {D::kFlip}, What::kKey, is_layout, "ce", "e"},
      {"flip-in-force", {D::kFlip}, What::kKey, is_in_force, "cek", "c"},
      {"flip-checkpoint", {D::kFlip}, What::kKey, is_record, "cce", "rp"},
      {"flip-makers", {D::kFlip}, What::kOtherNodes, nullptr, "ce", "k"},
      {"older-leader", {D::kOlder}, What::kKey, is_leader, "CCEEdx", "d", "S"},
      {"older-checkpoint", {D::kOlder}, What::kKey, is_record, "CCEEdx", "rp"},
      {"older-makers", {D::kOlder}, What::kOtherNodes, nullptr, "CCEEdx", "k"},
      {"trim-checkpoint", {D::kTrim}, What::kKey, is_record, "CcEEx", "rp"},
      {"commit-in-force", {D::kCommit}, What::kKey, is_in_force, "c", "e"},
      {"commit-sequence", {D::kCommit}, What::kKey, is_sequence, "C", "C"},
      {"commit-name", {D::kCommit}, What::kKey, is_record, "C", "N"},
      {"commit-nodes", {D::kCommit}, What::kOtherNodes, nullptr, "C", "k"},
      {"commit-own-node", {D::kCommit}, What::kOwnNode, nullptr, "C", "", "S"},
      {"removal-in-force", {D::kRemoval}, What::kKey, is_in_force, "cr", "ce"},
      {"removal-checkpoint", {D::kRemoval}, What::kKey, is_record, "Cr", "p"},
      {"pin-checkpoint", {D::kPin}, What::kKey, is_record, "Cp", "re"},
      {"replaced-checkpoint", {D::kReplaced}, What::kKey, is_record, "CL", "p"},
      {"mended-checkpoint", {D::kMended}, What::kKey, is_record, "CM", "p"},
      {"layout-layout", {D::kLayout}, What::kKey, is_layout, "e", "e"},
      {"layout-drained", {D::kLayout}, What::kDrained, nullptr, "ce", "d"},
      {"drain-drained", {D::kDrain}, What::kDrained, nullptr, "D", "D"},
      {"parts-drained", {D::kFlip, D::kOlder, D::kCommit}, What::kDrained, nullptr, "ce", "d"},
      {"attributes-attributes", {D::kAttributes}, What::kKey, is_attributes, "a", "a"},
      {"attributes-job", {D::kAttributes}, What::kKey, is_job, "A", "R"},
      {"rules-job", {D::kRules}, What::kKey, is_job, "U", "R"},
      {"data-set-job", {D::kDataSet}, What::kKey, is_job, "T", "R"},
      {"data-set-record", {D::kDataSet}, What::kKey, is_of_data_set, "t", "t"},
      {"job-job", {D::kMakeJob}, What::kKey, is_job, "j", "j"},
      {"job-removal-commit", {D::kRemoveJob}, What::kKey, is_sequence, "jo", "o"},
      {"job-removal-job", {D::kRemoveJob}, What::kKey, is_job, "j", "jR"},
      {"lead-leader", {D::kLead}, What::kKey, is_leader, "e", "e"},
      {"end-of-lead-leader", {D::kEndLead}, What::kKey, is_leader, "e", "e", "S"},
      {"commit-own-lease", {D::kCommit}, What::kKey, is_node, "C", "S"},
      {"parts-membership", {D::kFlip, D::kOlder, D::kCommit}, What::kKey, is_membership, "Ce", "k"},
  };
  return breaks;
}

const Break* planted_break(std::string_view name) {
  for (const Break& one : planted_breaks())
    if (one.name == name) return &one;
  return nullptr;
}

bool takes_out(const Break* planted, Decision decision, const std::string& compared) {
  const bool taken = planted != nullptr && planted->what == Break::What::kKey &&
                     is_of(*planted, decision) && planted->takes(compared);
  mattered = mattered || taken;
  return taken;
}

void note_fence(const std::string& node, int64_t revision) { looks.promised[node] = revision; }

void note_get(std::string_view key) {
  looks.membership = key == kMembership;
  looks.nodes = looks.away = false;
  if (looks.membership) looks.drains = looks.drained;
  else looks.drained = false;
}

void look_away(const Break* planted, std::string_view prefix, const std::string& self,
               std::vector<MetaEntry>& listed) {
  const bool at_nodes = looks.membership && prefix == kMemberKeys,
             at_drained = looks.nodes && prefix == kDrainedKeys;
  looks.membership = false;
  looks.nodes = at_nodes;
  if (prefix == kDrainedKeys && !at_drained) looks.drained = true;
  if (planted == nullptr) return;
  using What = Break::What;
  if (at_nodes && (planted->what == What::kOtherNodes || planted->what == What::kOwnNode))
    see_nodes_as_promised(planted->what == What::kOwnNode, self, listed);
  // Whoever saves a layout or drains a node has asked nobody for anything; and the second lists
  // what is drained.
  const Decision looking = !looks.promised.empty() ? D::kFlip
                           : looks.drains          ? D::kDrain
                                                   : D::kLayout;
  if (!at_drained || planted->what != What::kDrained || !is_of(*planted, looking)) return;
  mattered = mattered || !listed.empty();
  listed.clear();
}

bool a_break_has_mattered() { return mattered; }

bool may_be_decided(const Break* planted, Decision decision) {
  const bool may = !looks.away || planted == nullptr || is_of(*planted, decision);
  looks.away = false;
  if (decision == D::kLead) looks.promised.clear();
  return may;
}

}  // namespace ptc::sim
