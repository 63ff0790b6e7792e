// What profiles say of numbers of GPUs and batches that nobody tried: the job analyser of
// 2006.13878.
//
//   t_iteration(b, r) = t_processing(b / r) + t_communication(r)          r replicas, b samples
//
// t_processing is what one replica takes with some samples: measured, on the line between the two
// nearest that were. t_communication(r) = m·2(r−1)/r + l·(r−1) + a·(n−1)/n on n nodes: the bytes
// of a ring, its steps, and what goes over nodes. m, l, a ≥ 0 are what errs least, in parts of each
// iteration's time, on the trials of the same technique, tp and pp with several replicas. Where
// there are none they are of the cluster: a table of what it takes to sum so many bytes.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "store/base/error.h"
#include "tools/planner/profile/profile.h"

namespace ptc::planner {

/// m, l and a of above, in seconds; of a cluster m and a are of a byte.
struct Communication {
  std::array<double, 3> factors = {};
  double seconds(uint32_t replicas, uint32_t nodes) const;
};

/// A table: gpus, bytes, seconds, and may be max_gpus_per_node (else all are on one).
/// kInvalidArgument: "name: line 3, column 2 (bytes): …".
Result<Communication> parse_communication(std::string_view text, const std::string& name);

struct FitOptions {
  uint32_t most_gpus = 0;      // 1, 2, 4 … and this; 0: as many as were tried
  uint32_t gpus_per_node = 0;  // 0: the most that a trial had on one; where none says it, all
  std::optional<Communication> cluster = {};
  std::map<std::string, double> bytes = {};  // that the replicas of a model sum
};

/// Of one model, technique, device, tp and pp.
struct FittedWay {
  std::string name;                         // "gpt2 ddp tp1-pp1 on A100"
  size_t single = 0, others = 0;            // trials with one replica, and with several
  size_t modelled = 0;                      // rows
  double median_error = 0, most_error = 0;  // of `others`, in parts of their times
  std::string none;                         // why there is no model, if there is none
};

struct Fit {
  std::vector<ProfileRow> rows;  // modelled, of what was not tried
  std::vector<FittedWay> ways;
};

/// Batches are those that were tried of a model, their doubles between, and what fits: never more
/// samples a replica than one was measured with. Rows that are modelled already, interpolated, or
/// accumulate are passed over. kInvalidArgument: more than a million rows, or too many that could
/// be; it says what makes them fewer. Cost: O(rows · log + ways × counts × batches).
Result<Fit> fit(const std::vector<ProfileRow>& rows, const FitOptions& options);

}  // namespace ptc::planner
