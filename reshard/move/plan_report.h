// A plan as people see it: plan.json and plan.svg.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "reshard/checkpoint/checkpoint.h"
#include "reshard/move/change.h"
#include "reshard/plan/plan_svg.h"

namespace ptc {

/// The two texts of a plan in one state of affairs.
struct PlanTexts {
  std::string json = "{}\n";
  std::string svg;

  /// Both as one file, which the nodes of a cluster give each other.
  std::string to_text() const;
  static Result<PlanTexts> from_text(std::string_view text);
};

class PlanReport {
 public:
  /// `node`: this node's name, for plans of a cluster of one, in which nodes have none.
  PlanReport(std::string job, std::string node, const Checkpoint& checkpoint,
             const StoredState& stored, const LayoutSpec& to, const ChangePlan& plan);

  /// `state`: dry-run, running, done. `seconds` is how long that took.
  PlanTexts texts(std::string_view state, double seconds) const;

 private:
  std::vector<std::string> nodes_;  // as the plan's pairs number them
  TransferPlan::Totals totals_;
  std::vector<TransferPlan::Pair> pairs_;
  PlanPicture picture_;
};

/// The picture of `plan`: a bar for the ranks of each state, which share their files; above 64
/// states a bar for each pipeline stage (or for as many neighbouring states as make 64 bars).
PlanPicture picture_of(const StoredState& stored, const LayoutSpec& to, const ChangePlan& plan);

/// The file with the plan that led to this stored state; empty: it was a commit.
std::string plan_file_of(const std::string& stored_file);

}  // namespace ptc
