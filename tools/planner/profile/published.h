// Tables that others have published of how fast models train, as profiles.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "store/base/error.h"
#include "tools/planner/profile/profile.h"

namespace ptc::planner {

struct Published {
  std::vector<ProfileRow> rows;
  std::vector<std::string> left_out;  // kinds of rows, each with the reason
};

/// Of one model, whose name the file does not say. kInvalidArgument names file, line and column.
///
/// morphling (Alibaba's reconfigurable-dl-scheduler, simulator/traces/MODEL/placements.csv):
/// exec_plan is three digits, data, tensor and pipeline parallel, or a variant of data parallelism;
/// placement, GPUs a node, a digit each; iter_time in seconds, 0 for what failed. It says no batch:
/// `batch` is that of all rows.
Result<Published> read_morphling(std::string_view text, const std::string& file,
                                 const std::string& model, uint64_t batch);
/// pollux (petuum's adaptdl, simulator/traces/MODEL/placements.csv): placement, local_bsz,
/// step_time.
Result<Published> read_pollux(std::string_view text, const std::string& file,
                              const std::string& model);
/// elasticflow (scheduler/throughputs_DEVICE/MODEL.csv): global_batch_size, and of each number of
/// GPUs the iterations a second.
Result<Published> read_elasticflow(std::string_view text, const std::string& file,
                                   const std::string& model);

}  // namespace ptc::planner
