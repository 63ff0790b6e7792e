// What a change costs a simulated job: a number of seconds, what others measured, or what ptcfs's
// own plan and the autoscaler's prices (../price/) say.
#pragma once

#include <cstdint>
#include <memory>
#include <string_view>
#include <vector>

#include "store/base/error.h"
#include "tools/planner/elastic/curve.h"
#include "tools/planner/price/movement.h"
#include "tools/planner/price/prices.h"
#include "tools/planner/profile/jobs_file.h"

namespace ptc::planner {

struct Change {
  uint32_t kind = 0;
  const CurvePoint* from = nullptr;  // what it has, or had when it was stopped; null: nothing yet
  const CurvePoint* to = nullptr;
  bool runs = false;   // else it starts
  bool stays = false;  // on nodes that it has, as far as they go
};

/// Threads: one.
class ChangePrices {
 public:
  virtual ~ChangePrices() = default;
  /// Seconds for which the job stands still; ≥ 0.
  virtual double of(const Change& change) = 0;
  /// kInvalidArgument: one of these changes has no price.
  virtual Result<> check(uint32_t kind, const Curve& curve) = 0;
};

/// The same for all.
std::unique_ptr<ChangePrices> constant_prices(double change_s, double start_s);

/// A table (CSV): seconds; model; from and to, numbers of GPUs: 0 from is a start. A line without
/// from and to is of all changes of its model that no other line is of; one without a model, of all
/// models that have no line. kInvalidArgument: "name: line 3, column 7 (…): …".
Result<std::unique_ptr<ChangePrices>> measured_prices(std::string_view text,
                                                      const std::string& name,
                                                      const std::vector<JobToTrain>& kinds);

/// What a model's state is: its tensors, or only how many bytes.
struct ModelState {
  std::shared_ptr<const Model> tensors;  // null: not known
  double bytes = 0;
};
/// `states`: by kind. What moves is of ptcfs's own plan; what it takes is Prices::of().
std::unique_ptr<ChangePrices> planned_prices(const std::vector<JobToTrain>& kinds,
                                             std::vector<ModelState> states,
                                             const std::vector<NodeOfCluster>& nodes,
                                             const ChangeCosts& costs);

}  // namespace ptc::planner
