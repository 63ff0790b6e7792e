// Statistical efficiency, as Pollux counts it: how much a sample is worth at some batch, beside one
// of the smallest batch that was tried.
//
// With the gradient's squared norm sqr and variance var, an iteration at `scale` times the smallest
// batch makes gain = (var + sqr) / (var / scale + sqr) times the progress: a sample is worth
// gain / scale.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "store/base/error.h"

namespace ptc::planner {

/// Of one model. Immutable once read.
class Efficiency {
 public:
  size_t epochs() const { return epochs_.size(); }
  /// Samples of the smallest batch with which the epoch ends.
  double ends_at(size_t epoch) const { return epochs_[epoch].ends_at; }
  /// In (0, 1]; between batches that were tried on the line between these, beyond as at the last,
  /// below the first 1.
  double of(size_t epoch, uint64_t batch) const;

 private:
  friend class EfficiencyReader;
  struct Gradient {
    double sqr = 0, var = 0;
  };
  struct Epoch {
    double ends_at = 0;
    std::map<uint64_t, Gradient> of_batch;
  };
  std::vector<Epoch> epochs_;
};

/// A table (CSV) of models: model, batch, epoch (from 1), steps (iterations of the smallest batch
/// until the epoch's end; of several batches the fewest), grad_sqr, grad_var. kInvalidArgument:
/// "name: line 3, column 7 (…): …".
Result<std::map<std::string, Efficiency>> read_efficiency(std::string_view text,
                                                          const std::string& name);

}  // namespace ptc::planner
