// The last reshard as its plan tells it, which all nodes have.
#pragma once

#include <optional>
#include <string>

#include "reshard/move/plan_report.h"
#include "reshard/plan/planner.h"

namespace ptc {

struct LastReshard {
  std::string checkpoint, from, to;
  TransferPlan::Totals totals;
  double seconds = 0;

  /// nullopt: there is no plan that was carried out.
  static std::optional<LastReshard> of(const PlanTexts& plan);
};

}  // namespace ptc
