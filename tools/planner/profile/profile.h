// What is known of how fast models train: a row for each way of training one that was tried.
//
//   model,technique,batch,tp,pp,dp,max_gpus_per_node,device,iteration_s,peak_bytes,origin
//   gpt2,ddp,256,1,1,4,4,A800,0.412,,measured
//   gpt2,fsdp,256,1,1,1,1,A800,oom,,measured
//
// Or JSON, an array of such rows: [{"model": "gpt2", "batch": 256, "iteration_s": 0.412}, …].
// Required: model, batch, iteration_s, and either `gpus` or some of tp, pp, dp (1 where absent),
// whose product it is. May be there: accumulation, in how many steps a batch was made (1). A column
// that looks like one of these, misspelt, is refused; others are not used, which is said.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "store/base/error.h"

namespace ptc::planner {

/// Samples of an iteration, at most.
inline constexpr uint64_t kMostBatch = uint64_t{1} << 40;

/// Seconds that an iteration takes.
inline constexpr double kLeastIteration = 1e-9, kMostIteration = 1e9;
inline constexpr uint64_t kMostGpus = 1 << 20;
inline constexpr uint64_t kMostAccumulation = 1 << 20;

/// One trial.
struct ProfileRow {
  std::string model;
  std::string technique;  // "ddp", "fsdp", …; may be empty
  std::string device;     // what was measured on; may be empty
  std::string origin;     // "measured", "modelled", "interpolated", or who says so
  uint64_t batch = 0;     // samples of an iteration, of all ranks
  uint32_t tp = 1, pp = 1, dp = 1;
  uint32_t gpus = 1;                  // tp × pp × dp
  uint32_t gpus_per_node = 0;         // most on one node, when it was measured; 0: not known
  uint64_t peak_bytes = 0;            // of a device's memory; 0: not known
  uint32_t accumulation = 1;          // steps that make one iteration, whose gradients are summed
  std::optional<double> iteration_s;  // > 0; none: out of memory, or it failed
  // Where it was read: one of the files, and there its tp, or its model. 0: nowhere.
  uint32_t file = 0, line = 0, column = 0;

  /// "tp2-pp1-dp4", "ddp tp1-pp1-dp4", or with accumulated gradients "ddp tp1-pp1-dp4, 2 steps".
  std::string way() const;
  /// From other rows: nobody has tried it.
  bool is_computed() const;
};

/// kInvalidArgument: "name: line 3, column 7 (iteration_s): …". `text` in a form above. `remarks`
/// get what its user should hear of: columns that are not used.
Result<std::vector<ProfileRow>> parse_profiles(std::string_view text, const std::string& name,
                                               std::vector<std::string>* remarks = nullptr);
/// The same forms; parse_profiles() of it is `rows` again.
std::string profiles_csv(const std::vector<ProfileRow>& rows);
std::string profiles_json(const std::vector<ProfileRow>& rows);
/// For a file of this name: JSON, if it ends in ".json".
std::string profiles_text(const std::vector<ProfileRow>& rows, const std::string& file);

/// The best that is known of a model with some number of GPUs.
struct FrontierPoint {
  uint32_t gpus = 0;
  double samples_per_s = 0;
  const ProfileRow* row = nullptr;  // which outlives it
};

/// What is looked at of the rows of one model.
struct FrontierOf {
  std::string model;
  uint64_t least_batch = 1, most_batch = UINT64_MAX;
  std::string technique;       // empty: all
  uint32_t gpus_per_node = 0;  // only what was measured packed onto nodes of so many; 0: all
  std::function<bool(uint32_t gpus)> can_be_had = {};  // empty: any number
  std::optional<std::string> device = {};              // none: all
  std::function<double(uint64_t batch)> worth = {};    // of a sample; empty: 1
  bool keeps_all = false;                              // also what no more than fewer GPUs give
};

/// Of trials that all have no time, why: "it took more than 60 s (and 3 other reasons)", the reason
/// of most first, and what helps; "out of memory" where no row says another one.
std::string why_no_time(std::span<const ProfileRow* const> rows);

/// Whether its GPUs lay on as few nodes as there can be, of so many each; or that is not known.
bool is_packed(const ProfileRow& row, uint32_t gpus_per_node);

/// By GPUs, ascending; those are left out that no more than fewer GPUs give. Rows that were out of
/// memory give nothing. Cost: O(n log n).
std::vector<FrontierPoint> frontier(std::span<const ProfileRow* const> rows, const FrontierOf& of);
std::vector<FrontierPoint> frontier(const std::vector<ProfileRow>& rows, const FrontierOf& of);

/// Those of `models` on one kind of GPU: `device`; where that is empty, the only one there is. Of a
/// model whose rows name none, all. kInvalidArgument: which kinds there are, if several and none is
/// chosen, or a model has none of the one that is.
Result<std::vector<const ProfileRow*>> rows_of_device(const std::vector<ProfileRow>& rows,
                                                      const std::set<std::string>& models,
                                                      const std::string& device);

}  // namespace ptc::planner
