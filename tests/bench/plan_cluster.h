// A change of layout on a cluster of many nodes, as the nodes of it compute it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "reshard/ptc/layout.h"

namespace ptc::bench {

struct ClusterCase {
  std::string config;     // config.json of the model; its optimizer is Adam
  const char *from, *to;  // sizes
  OptimizerCut cut = OptimizerCut::kReplicated;
  size_t nodes = 1;
  uint32_t replicas = 0;
};

/// Seconds of each step.
struct ClusterTimes {
  double files = 0;          // what each state's files are, wanted
  double stored = 0;         // what the images hold that are there, and the index over it
  double settle = 0;         // after a commit: ranks placed, each file to all nodes that read it
  double place = 0;          // ranks
  double plan = 0;           // files placed, and which bytes go where: for all nodes
  double part = 0;           // what one node makes
  double report = 0;         // plan.json and plan.svg
  double sets = 0;           // names of one rank's files, and of its tensors
  double wanted = 0;         // the same as `files`, of the layout that is changed to
  uint64_t arrays = 0;       // in all files of both layouts, each as often as some node has it
  uint64_t distinct = 0;     // … each once
  uint64_t part_arrays = 0;  // in the files of the node of `part`
};

/// Aborts where something cannot be planned.
ClusterTimes plan_on_cluster(const ClusterCase& one);

}  // namespace ptc::bench
