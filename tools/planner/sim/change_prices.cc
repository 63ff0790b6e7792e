#include "tools/planner/sim/change_prices.h"

#include <algorithm>
#include <map>
#include <optional>
#include <set>
#include <tuple>
#include <utility>

#include "store/base/json.h"
#include "tools/planner/profile/csv.h"
#include "tools/planner/profile/input.h"

namespace ptc::planner {
namespace {

constexpr double kMostPrice = 1e9;

class ConstantPrices : public ChangePrices {
 public:
  ConstantPrices(double change_s, double start_s) : change_s_(change_s), start_s_(start_s) {}
  double of(const Change& change) override { return change.runs ? change_s_ : start_s_; }
  Result<> check(uint32_t /*kind*/, const Curve& /*curve*/) override { return ok(); }

 private:
  const double change_s_, start_s_;
};

class MeasuredPrices : public ChangePrices {
 public:
  explicit MeasuredPrices(const std::vector<JobToTrain>& kinds) : kinds_(kinds) {}

  Result<> read(const Csv& csv) {
    PTC_TRY(const size_t seconds, csv.needed("seconds"));
    const auto model = csv.column("model"), from = csv.column("from"), to = csv.column("to");
    if (from.has_value() != to.has_value())
      return invalid_argument("{}: line 1: 'from' and 'to' are there both, or neither", csv.name());
    name_ = csv.name();
    for (size_t i = 0; i < csv.rows(); ++i) {
      PTC_TRY(const double price, csv.number(i, seconds));
      if (price < 0 || price > kMostPrice)
        return csv.error(i, seconds, fmt::format("{} is not from 0 to {}", price, kMostPrice));
      Key key{model ? csv.at(i, *model) : "", 0, 0};
      const bool has_from = from && !csv.at(i, *from).empty(),
                 has_to = to && !csv.at(i, *to).empty();
      if (has_from != has_to)
        return csv.error(i, has_from ? *to : *from, "both numbers of GPUs are wanted, or neither");
      if (has_to) {
        PTC_TRY(std::get<1>(key), csv.whole(i, *from, 0, kMostGpus));
        PTC_TRY(std::get<2>(key), csv.whole(i, *to, 1, kMostGpus));
      }
      if (!seconds_.emplace(key, price).second)
        return csv.error(i, seconds, "a second line of this change");
      models_.insert(std::get<0>(key));
    }
    for (const JobToTrain& kind : kinds_)
      if (!models_.contains(kind.model) && !models_.contains(""))
        return invalid_argument("{}: no line is of model {}{}", name_, ptc::quoted(kind.model),
                                what_there_is(kind.model, models_));
    return ok();
  }

  double of(const Change& change) override {
    return find(change.kind, change.runs ? change.from->gpus : 0, change.to->gpus).value_or(0);
  }

  Result<> check(uint32_t kind, const Curve& curve) override {
    std::vector<uint32_t> before = {0};
    for (const CurvePoint& point : curve.points) before.push_back(point.gpus);
    for (const uint32_t from : before)
      for (const CurvePoint& to : curve.points)
        if (!find(kind, from, to.gpus))
          return invalid_argument(
              "{}: no line says what model {} takes from {} to {}, and none without from and to is "
              "of all its changes",
              name_, ptc::quoted(kinds_[kind].model), from, counted(to.gpus, "GPU"));
    return ok();
  }

 private:
  using Key = std::tuple<std::string, uint64_t, uint64_t>;  // to: 0 in a line of all changes

  std::optional<double> find(uint32_t kind, uint64_t from, uint64_t to) const {
    const std::string& model = models_.contains(kinds_[kind].model) ? kinds_[kind].model : kAll;
    for (const Key& key : {Key{model, from, to}, Key{model, 0, 0}})
      if (const auto found = seconds_.find(key); found != seconds_.end()) return found->second;
    return std::nullopt;
  }

  const std::string kAll;
  const std::vector<JobToTrain>& kinds_;
  std::string name_;
  std::map<Key, double> seconds_;
  std::set<std::string> models_;
};

LayoutSpec spec_of(const CurvePoint& point) {
  LayoutSpec spec;
  spec.sizes.tp = point.tp;
  spec.sizes.pp = point.pp;
  spec.sizes.dp = point.dp;
  if (point.technique == "fsdp") spec.optimizer = OptimizerCut::kFsdp;
  else if (point.technique.starts_with("zero")) spec.optimizer = OptimizerCut::kZero1;
  return spec;
}

class PlannedPrices : public ChangePrices {
 public:
  PlannedPrices(const std::vector<JobToTrain>& kinds, std::vector<ModelState> states,
                const std::vector<NodeOfCluster>& nodes, const ChangeCosts& costs)
      : kinds_(kinds), states_(std::move(states)), prices_(costs) {
    for (const NodeOfCluster& node : nodes) gpus_per_node_ = std::max(gpus_per_node_, node.gpus);
  }

  double of(const Change& change) override {
    Movement movement;
    if (change.from != nullptr)
      movement = known(change.kind, *change.from, *change.to, change.stays).value();
    return prices_.of(kinds_[change.kind].name, movement, change.runs);
  }

  Result<> check(uint32_t kind, const Curve& curve) override {
    for (const CurvePoint& from : curve.points)
      for (const CurvePoint& to : curve.points)
        for (const bool stays : {true, false}) {
          const auto movement = known(kind, from, to, stays);
          if (movement.has_error())
            return invalid_argument("job {}: ptcfs has no plan from {} to {}: {}",
                                    ptc::quoted(kinds_[kind].name), from.way, to.way,
                                    movement.error().message());
        }
    return ok();
  }

 private:
  Result<Movement> known(uint32_t kind, const CurvePoint& from, const CurvePoint& to, bool stays) {
    const auto key = std::make_tuple(kind, from.way, to.way, stays);
    if (const auto found = movements_.find(key); found != movements_.end()) return found->second;
    const LaidOut before{spec_of(from), gpus_per_node_, 0};
    const LaidOut after{spec_of(to), gpus_per_node_, stays ? 0 : before.nodes()};
    const ModelState& state = states_[kind];
    Movement movement;
    if (state.tensors != nullptr) {
      PTC_TRY(movement, movement_of(*state.tensors, before, after));
    } else {
      movement = movement_of(state.bytes, before, after);
    }
    return movements_[key] = movement;
  }

  const std::vector<JobToTrain>& kinds_;
  const std::vector<ModelState> states_;
  const Prices prices_;
  uint32_t gpus_per_node_ = 1;
  std::map<std::tuple<uint32_t, std::string, std::string, bool>, Movement> movements_;
};

}  // namespace

std::unique_ptr<ChangePrices> constant_prices(double change_s, double start_s) {
  return std::make_unique<ConstantPrices>(change_s, start_s);
}

Result<std::unique_ptr<ChangePrices>> measured_prices(std::string_view text,
                                                      const std::string& name,
                                                      const std::vector<JobToTrain>& kinds) {
  PTC_TRY(const Csv csv, Csv::parse(text, name));
  auto prices = std::make_unique<MeasuredPrices>(kinds);
  PTC_TRY(prices->read(csv));
  return std::unique_ptr<ChangePrices>(std::move(prices));
}

std::unique_ptr<ChangePrices> planned_prices(const std::vector<JobToTrain>& kinds,
                                             std::vector<ModelState> states,
                                             const std::vector<NodeOfCluster>& nodes,
                                             const ChangeCosts& costs) {
  return std::make_unique<PlannedPrices>(kinds, std::move(states), nodes, costs);
}

}  // namespace ptc::planner
