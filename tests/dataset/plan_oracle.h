// What a data set's plan means, done slowly and obviously: position by position.
#pragma once

#include <cstdint>
#include <map>
#include <vector>

#include "dataset/plan/generation.h"

namespace ptc {

struct OracleStep {
  uint64_t epoch = 0, begin = 0, end = 0;    // end: where positions go on
  std::vector<uint64_t> positions;           // of G, in order, padding too
  std::vector<std::vector<uint64_t>> ranks;  // positions of each
};

inline uint64_t oracle_rank(const Assign& assign, uint64_t place, uint64_t size, uint64_t dp) {
  if (assign.kind == Assign::Kind::kStride) return place % dp;
  if (assign.kind == Assign::Kind::kMicro) return place / assign.micro % dp;
  for (uint64_t rank = 0; rank < dp; ++rank) {
    if (rank * size / dp <= place && place < (rank + 1) * size / dp) return rank;
  }
  return dp;
}

/// All steps of a segment, to the end of the run.
inline std::vector<OracleStep> oracle_steps(const Run& run, const Segment& segment) {
  std::vector<OracleStep> steps;
  const uint64_t end = segment.epochs * run.samples;
  for (uint64_t p = segment.from; p < end;) {
    OracleStep step{.epoch = p / run.samples, .begin = p};
    const uint64_t epoch_end = (step.epoch + 1) * run.samples;
    while (step.positions.size() < segment.batch &&
           p < (segment.tail == Tail::kCarry ? end : epoch_end)) {
      step.positions.push_back(p++);
    }
    step.end = p;
    for (uint64_t pad = 0; segment.tail == Tail::kPad && step.positions.size() < segment.batch;
         ++pad) {
      step.positions.push_back(step.epoch * run.samples + pad % run.samples);
    }
    if (segment.tail == Tail::kDrop && step.positions.size() < segment.batch) continue;
    step.ranks.resize(segment.dp);
    for (uint64_t i = 0; i < step.positions.size(); ++i) {
      step.ranks[oracle_rank(segment.assign, i, step.positions.size(), segment.dp)].push_back(
          step.positions[i]);
    }
    steps.push_back(std::move(step));
  }
  return steps;
}

/// Ids in the order of an epoch, remembered.
class OracleIds {
 public:
  explicit OracleIds(const Run& run) : run_(run) {}
  uint64_t operator()(uint64_t position) {
    const uint64_t epoch = position / run_.samples;
    std::vector<uint64_t>& ids = epochs_[epoch];
    if (ids.empty()) {
      const SampleOrder order(run_.samples, run_.shuffle, run_.seed, epoch);
      for (uint64_t p = 0; p < run_.samples; ++p) ids.push_back(order.at(p));
    }
    return ids[position % run_.samples];
  }

 private:
  Run run_;
  std::map<uint64_t, std::vector<uint64_t>> epochs_;
};

}  // namespace ptc
