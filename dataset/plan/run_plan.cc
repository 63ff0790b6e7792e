#include "dataset/plan/run_plan.h"

#include <algorithm>

namespace ptc {
namespace {

Segment segment_of(const OrderSpec& order, uint64_t dp, uint64_t from) {
  return {.from = from,
          .batch = order.batch,
          .dp = dp,
          .tail = order.tail,
          .assign = order.assign,
          .epochs = order.epochs};
}

bool cuts_alike(const Segment& a, const Segment& b) {
  return a.batch == b.batch && a.dp == b.dp && a.tail == b.tail && a.assign == b.assign &&
         a.epochs == b.epochs;
}

}  // namespace

Result<RunPlan> RunPlan::begin(const OrderSpec& order, uint64_t samples, uint64_t fingerprint,
                               uint64_t dp, uint64_t generation) {
  if (samples == 0) return invalid_argument("the data set has no samples");
  PTC_TRY(order.check(dp, samples));
  RunPlan plan;
  plan.run_ = {
      .samples = samples, .fingerprint = fingerprint, .seed = order.seed, .shuffle = order.shuffle};
  plan.segments_ = {segment_of(order, dp, 0)};
  plan.segments_[0].generation = generation;
  plan.next_generation_ = generation + 1;
  return plan;
}

Result<RunPlan::Changed> RunPlan::change(const OrderSpec& order, uint64_t dp,
                                         uint64_t consumed) const {
  PTC_CHECK(consumed >= last().from && consumed <= end());
  const bool same_run = order.seed == run_.seed && order.shuffle == run_.shuffle;
  if (consumed == 0) {
    PTC_TRY(order.check(dp, run_.samples));
    if (same_run && segments_.size() == 1 && cuts_alike(last(), segment_of(order, dp, 0))) {
      return Changed{*this, 0};
    }
    PTC_TRY(RunPlan plan, begin(order, run_.samples, run_.fingerprint, dp, next_generation_));
    return Changed{std::move(plan), 0};
  }
  PTC_TRY(order.check(dp, run_.samples));
  if (!same_run) {
    return invalid_argument(
        "{} samples of this run are consumed in the order of seed {}, shuffle {}: neither can "
        "change any more (rm -r dataset forgets the run, and the next one begins anew)",
        consumed, run_.seed, run_.shuffle.name());
  }
  Segment wanted = segment_of(order, dp, consumed);
  if (cuts_alike(last(), wanted)) return Changed{*this, consumed};
  if (order.epochs * run_.samples < consumed) {
    return invalid_argument("{} epoch{} of {} samples are less than the {} that are consumed",
                            order.epochs, order.epochs == 1 ? "" : "s", run_.samples, consumed);
  }
  const auto [below, above] = generation(last()).boundaries(consumed);
  if (below != consumed) {
    if (!order.round_down) {
      return invalid_argument(
          "{} consumed samples are not whole steps of batch {} from {} on: the nearest ends of "
          "steps are {} and {}. Write {} to `consumed` once the job is there, go back to a "
          "checkpoint that was committed with {}, or say \"round\": \"down\" in order.json to "
          "repeat from {} on",
          consumed, last().batch, last().from, below, above, above, below, below);
    }
    wanted.from = below;
    wanted.repeats = consumed - below;
  }
  Changed changed{*this, wanted.from};
  std::vector<Segment>& segments = changed.plan.segments_;
  if (segments.back().from == wanted.from) {
    wanted.repeats = std::max(wanted.repeats, segments.back().repeats);
    segments.pop_back();
  }
  if (segments.size() >= kMaxSegments) {
    return invalid_argument("a run changes at most {} times", kMaxSegments - 1);
  }
  wanted.generation = changed.plan.next_generation_++;
  segments.push_back(wanted);
  return changed;
}

Result<RunPlan::Changed> RunPlan::roll_back(const OrderSpec& order, uint64_t dp,
                                            uint64_t consumed) const {
  RunPlan before = *this;
  std::erase_if(before.segments_, [&](const Segment& segment) { return segment.from > consumed; });
  return before.change(order, dp, consumed);
}

const Segment* RunPlan::find(uint64_t generation) const {
  const auto found = std::find_if(segments_.begin(), segments_.end(),
                                  [&](const Segment& s) { return s.generation == generation; });
  return found == segments_.end() ? nullptr : &*found;
}

}  // namespace ptc
