#include "tools/ptc/job_states.h"

#include <fmt/format.h>

#include <filesystem>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <tuple>
#include <utility>

#include "store/base/json.h"
#include "tools/planner/profile/input.h"
#include "tools/ptc/model_directory.h"

namespace ptc::cli {
namespace {

/// Each directory is read once.
class StateDirectories {
 public:
  explicit StateDirectories(const planner::JobsAndProfiles& from) : from_(from) {
    const std::string& file = from.read.front();
    if (planner::has_a_place(file)) beside_ = std::filesystem::path(file).parent_path();
  }

  bool is_there(const planner::JobToTrain& job) const {
    std::error_code error;
    return !job.state_directory.empty() &&
           std::filesystem::is_directory(beside_ / job.state_directory, error);
  }
  Result<std::shared_ptr<const Model>> of(const planner::JobToTrain& job) {
    std::shared_ptr<const Model>& known = known_[job.state_directory];
    if (known != nullptr) return known;
    auto model = model_of_directory((beside_ / job.state_directory).string(), std::nullopt);
    if (model.has_error())
      return from_.file.error(job, "state", "'state': " + model.error().message());
    known = std::make_shared<const Model>(std::move(model).value());
    return known;
  }

 private:
  const planner::JobsAndProfiles& from_;
  std::filesystem::path beside_;
  std::map<std::string, std::shared_ptr<const Model>> known_;
};

}  // namespace

Result<std::vector<planner::ModelState>> states_of(const planner::JobsAndProfiles& from) {
  StateDirectories directories(from);
  std::vector<planner::ModelState> states;
  for (const planner::JobToTrain& job : from.file.jobs) {
    planner::ModelState& state = states.emplace_back();
    state.bytes = job.state_bytes;
    if (job.state_directory.empty()) continue;
    PTC_TRY(state.tensors, directories.of(job));
  }
  return states;
}

Result<> check_layouts(const planner::JobsAndProfiles& from) {
  StateDirectories directories(from);
  std::set<std::pair<std::string, std::string>> checked;  // models, and directories
  for (const planner::JobToTrain& job : from.file.jobs) {
    if (!directories.is_there(job)) continue;
    if (!checked.emplace(job.model, job.state_directory).second) continue;
    PTC_TRY(const auto model, directories.of(job));
    std::set<std::tuple<uint32_t, uint32_t, uint32_t>> right;
    for (const planner::ProfileRow& row : from.rows) {
      if (row.model != job.model || !row.iteration_s) continue;
      if (!right.emplace(row.tp, row.pp, row.dp).second) continue;
      LayoutSpec spec;
      spec.sizes.tp = row.tp;
      spec.sizes.pp = row.pp;
      spec.sizes.dp = row.dp;
      const Result<> possible = model->check(spec);
      if (possible.has_error())
        return invalid_argument("{}: job {} cannot have {}: {}", from.place(row),
                                ptc::quoted(job.name), row.way(), possible.error().message());
    }
  }
  return ok();
}

}  // namespace ptc::cli
