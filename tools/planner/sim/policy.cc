#include "tools/planner/sim/policy.h"

#include <algorithm>
#include <set>

#include "store/base/json.h"
#include "tools/planner/profile/analyser.h"
#include "tools/planner/profile/input.h"
#include "tools/planner/sim/random.h"

namespace ptc::planner {
namespace {

constexpr std::string_view kAccumulation = "+accumulation", kUnpriced = "+unpriced";

struct Known {
  Policy policy;
  const char* what;
};
const std::vector<Known>& known() {
  static const std::vector<Known> kKnown = {
      {{"elastic"}, "GPUs and batch of all jobs, for the most speed-up in sum"},
      {{.name = "elastic-completion", .objective = Objective::kCompletion},
       "the same, those first that have little left"},
      {{.name = "elastic-overtaking",
        .objective = Objective::kOvertaking,
        .is_simulated_only = true},
       "the same, and who runs may have to wait again"},
      {{.name = "max-batch", .batch = BatchRule::kMost}, "GPUs alone, at the largest batch"},
      {{.name = "min-batch", .batch = BatchRule::kLeast}, "GPUs alone, at the smallest batch"},
      {{.name = "random-batch", .batch = BatchRule::kRandom}, "GPUs alone, at a batch drawn"},
      {{.name = "asked", .takes_asked = true},
       "the GPUs that were asked for (one, if none were), first come first served"},
      {{.name = "pollux", .objective = Objective::kFairness, .is_simulated_only = true},
       "Pollux's aim, over all ways of sharing the GPUs"},
      {{.name = "rubick", .takes_what_is_free = true, .is_simulated_only = true},
       "as Rubick: each job takes what is free, those that GPUs speed up least first"}};
  return kKnown;
}

}  // namespace

std::vector<std::pair<std::string, std::string>> known_policies() {
  std::vector<std::pair<std::string, std::string>> all;
  for (const Known& one : known()) all.emplace_back(one.policy.name, one.what);
  return all;
}

Result<Policy> parse_policy(const std::string& name) {
  std::string_view plain = name;
  const auto ends_in = [&](std::string_view ending) {
    if (!plain.ends_with(ending)) return false;
    plain.remove_suffix(ending.size());
    return true;
  };
  const bool ignores_prices = ends_in(kUnpriced);
  const bool accumulates = ends_in(kAccumulation);
  std::set<std::string> names;
  for (const Known& one : known()) {
    if (one.policy.name == plain) {
      Policy policy = one.policy;
      policy.name = name;
      policy.accumulates = accumulates;
      policy.ignores_prices = ignores_prices;
      return policy;
    }
    names.insert(one.policy.name);
  }
  return invalid_argument("there is no policy {}{}", ptc::quoted(name),
                          what_there_is(std::string(plain), names, names.size()));
}

PolicyCurves::PolicyCurves(const Policy& policy, const std::vector<const ProfileRow*>& rows,
                           const std::vector<JobToTrain>& kinds,
                           const std::vector<NodeOfCluster>& nodes,
                           const std::map<std::string, Efficiency>* efficiency, bool spreads)
    : policy_(policy),
      kinds_(kinds),
      nodes_(nodes),
      of_kind_(kinds.size()),
      efficiency_(efficiency),
      spreads_(spreads) {
  std::map<std::tuple<std::string, std::string, uint64_t, uint64_t>, uint32_t> first;
  for (uint32_t i = 0; i < kinds.size(); ++i) {
    const auto [place, is_new] = first.try_emplace(
        {kinds[i].model, kinds[i].technique, kinds[i].least_batch, kinds[i].most_batch}, i);
    alike_.push_back(place->second);
    if (!is_new) continue;
    Kind& kind = of_kind_[i];
    std::vector<const ProfileRow*> of_model;
    for (const ProfileRow* row : rows) {
      if (row->model != kinds[i].model) continue;
      of_model.push_back(row);
      if (kinds[i].technique.empty() || row->technique == kinds[i].technique)
        kind.rows.push_back(row);
    }
    if (kinds[i].most_batch <= kMostBatch) {
      kind.made = interpolated(kind.rows, batch_ladder(kinds[i].least_batch, kinds[i].most_batch),
                               policy.accumulates);
      for (const ProfileRow& row : kind.made) kind.rows.push_back(&row);
    }
    std::set<uint64_t> batches;
    for (const ProfileRow* row : can_be_had(kind.rows, nodes, spreads))
      if (row->iteration_s && row->batch >= kinds[i].least_batch &&
          row->batch <= kinds[i].most_batch)
        batches.insert(row->batch);
    kind.batches.assign(batches.begin(), batches.end());
    if (!kind.batches.empty()) continue;
    for (const ProfileRow& row : kind.made) of_model.push_back(&row);
    kind.misfit = why_none_fits(kinds[i], kinds[i].technique, of_model, RoomOnNodes(nodes));
  }
}

Result<> PolicyCurves::check(const JobsFile& file) const {
  for (size_t i = 0; i < kinds_.size(); ++i)
    if (const auto& misfit = of_kind_[alike_[i]].misfit)
      return file.error(kinds_[i], misfit->key, misfit->why);
  return ok();
}

const Efficiency* PolicyCurves::efficiency_of(const ArrivingJob& job) const {
  if (efficiency_ == nullptr) return nullptr;
  const auto found = efficiency_->find(kinds_[job.kind].model);
  return found == efficiency_->end() ? nullptr : &found->second;
}

Result<const Curve*> PolicyCurves::of(const ArrivingJob& job, uint64_t seed, size_t epoch) {
  const JobToTrain& kind = kinds_[job.kind];
  const uint32_t alike = alike_[job.kind];
  const std::vector<uint64_t>& batches = of_kind_[alike].batches;
  if (batches.empty())
    return invalid_argument("job {}: {}", ptc::quoted(job.name), of_kind_[alike].misfit->why);
  uint64_t batch = 0;  // any
  switch (policy_.batch) {
    case BatchRule::kBest:
      break;
    case BatchRule::kMost:
      batch = batches.back();
      break;
    case BatchRule::kLeast:
      batch = batches.front();
      break;
    case BatchRule::kRandom:
      batch = batches[Random(seed).below(batches.size())];
      break;
  }
  const uint32_t asked = policy_.takes_asked ? std::max(job.asked_gpus, 1u) : 0;
  const auto [place, is_new] = curves_.try_emplace({alike, batch, asked, epoch});
  Curve& curve = place->second;
  if (is_new) {
    std::function<double(uint64_t)> worth;
    if (const Efficiency* efficiency = efficiency_of(job))
      worth = [=](uint64_t samples) { return efficiency->of(epoch, samples); };
    curve = make_curve(of_kind_[alike].rows, kind.model, batch == 0 ? kind.least_batch : batch,
                       batch == 0 ? kind.most_batch : batch, nodes_, worth, spreads_);
    if (asked != 0) {  // the fewest that are as many, or the most that there are
      auto taken = std::find_if(curve.points.begin(), curve.points.end(),
                                [&](const CurvePoint& point) { return point.gpus >= asked; });
      if (taken == curve.points.end()) --taken;
      curve.points = {*taken};
    }
  }
  return &curve;
}

}  // namespace ptc::planner
