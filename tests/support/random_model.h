// Random models of every family, with odd and small sizes, and layouts that fit them.
#pragma once

#include <map>
#include <random>
#include <string>
#include <vector>

#include "reshard/ptc/model.h"
#include "tests/support/slow_oracle.h"

namespace ptc::testing {

struct RandomModel {
  std::string config;               // config.json
  std::vector<TensorInfo> tensors;  // global
  SlowOracle oracle;
  ParallelConfig widest;  // tp and ep that fit by construction
};

/// One of all families; with_optimizer: and Adam's state.
RandomModel random_model(std::mt19937_64& random, bool with_optimizer);

/// A layout that the model can be cut by, of at most `max_ranks` ranks. Its naming, order, stages
/// and optimizer are random too.
LayoutSpec random_layout(std::mt19937_64& random, const RandomModel& model, const Model& bound,
                         uint64_t max_ranks = 1000);

/// layout.json that says this.
std::string layout_json(const LayoutSpec& spec);

}  // namespace ptc::testing
