#include "dataset/plan/generation.h"

#include <algorithm>
#include <numeric>

namespace ptc {

Generation::Generation(const Run& run, const Segment& segment)
    : run_(run), segment_(segment), end_(segment.epochs * run.samples) {
  PTC_CHECK(run.samples > 0 && segment.dp > 0 && segment.batch >= segment.dp &&
            segment.from <= end_);
}

uint64_t Generation::epoch_begin(uint64_t epoch) const {
  return std::max(segment_.from, epoch * run_.samples);
}

/// Under carry, steps that begin before `epoch`.
uint64_t Generation::steps_before(uint64_t epoch) const {
  return (std::min(epoch_begin(epoch), end_) - segment_.from + segment_.batch - 1) / segment_.batch;
}

uint64_t Generation::steps(uint64_t epoch) const {
  if (epoch < first_epoch() || epoch >= end_epoch()) return 0;
  if (segment_.tail == Tail::kCarry) return steps_before(epoch + 1) - steps_before(epoch);
  const uint64_t positions = (epoch + 1) * run_.samples - epoch_begin(epoch);
  return (positions + (segment_.tail == Tail::kDrop ? 0 : segment_.batch - 1)) / segment_.batch;
}

Step Generation::step(uint64_t epoch, uint64_t index) const {
  Step step{.epoch = epoch};
  uint64_t limit = end_;
  if (segment_.tail == Tail::kCarry) {
    step.begin = segment_.from + (steps_before(epoch) + index) * segment_.batch;
  } else {
    step.begin = epoch_begin(epoch) + index * segment_.batch;
    limit = (epoch + 1) * run_.samples;
  }
  step.positions = std::min(segment_.batch, limit - step.begin);
  if (segment_.tail == Tail::kPad) step.padded = segment_.batch - step.positions;
  return step;
}

/// How many of a batch of `size` are a rank's.
uint64_t Generation::share(uint64_t size, uint64_t rank) const {
  const uint64_t ranks = segment_.dp, micro = segment_.assign.micro;
  switch (segment_.assign.kind) {
    case Assign::Kind::kStride:
      return (size + ranks - 1 - rank) / ranks;
    case Assign::Kind::kMicro: {
      const uint64_t rest = size % (ranks * micro), before = rank * micro;
      return size / (ranks * micro) * micro + (rest > before ? std::min(micro, rest - before) : 0);
    }
    case Assign::Kind::kContig:
      break;
  }
  return (rank + 1) * size / ranks - rank * size / ranks;
}

/// Where in a batch of `size` a rank's `local`th sample is.
uint64_t Generation::place(uint64_t size, uint64_t rank, uint64_t local) const {
  const uint64_t ranks = segment_.dp, micro = segment_.assign.micro;
  switch (segment_.assign.kind) {
    case Assign::Kind::kStride:
      return local * ranks + rank;
    case Assign::Kind::kMicro:
      return (local / micro * ranks + rank) * micro + local % micro;
    case Assign::Kind::kContig:
      break;
  }
  return rank * size / ranks + local;
}

/// Of what is at a place in a batch.
uint64_t Generation::position(const Step& step, uint64_t place) const {
  if (place < step.positions) return step.begin + place;
  return step.epoch * run_.samples + (place - step.positions) % run_.samples;
}

uint64_t Generation::local_size(const Step& step, uint64_t rank) const {
  return share(step.size(), rank);
}

std::vector<uint64_t> Generation::local_positions(const Step& step, uint64_t rank, uint64_t first,
                                                  uint64_t count) const {
  const uint64_t size = local_size(step, rank);
  std::vector<uint64_t> positions;
  if (first >= size) return positions;
  count = std::min(count, size - first);
  positions.reserve(count);
  for (uint64_t i = first; i < first + count; ++i) {
    positions.push_back(position(step, place(step.size(), rank, i)));
  }
  return positions;
}

std::vector<uint64_t> Generation::ids(const std::vector<uint64_t>& positions) const {
  std::vector<uint64_t> ids;
  ids.reserve(positions.size());
  std::optional<SampleOrder> order;
  uint64_t epoch = 0;
  for (uint64_t position : positions) {
    const uint64_t of = position / run_.samples;
    if (!order || of != epoch) order.emplace(run_.samples, run_.shuffle, run_.seed, epoch = of);
    ids.push_back(order->at(position - of * run_.samples));
  }
  return ids;
}

std::vector<uint64_t> Generation::local_ids(const Step& step, uint64_t rank, uint64_t first,
                                            uint64_t count) const {
  return ids(local_positions(step, rank, first, count));
}

uint64_t Generation::local_samples_before(uint64_t epoch, uint64_t rank) const {
  const uint64_t whole = share(segment_.batch, rank);
  epoch = std::min(epoch, end_epoch());
  if (epoch <= first_epoch()) return 0;
  if (segment_.tail == Tail::kCarry) {
    const uint64_t steps = steps_before(epoch), full = (end_ - segment_.from) / segment_.batch;
    return std::min(steps, full) * whole +
           (steps > full ? share((end_ - segment_.from) % segment_.batch, rank) : 0);
  }
  auto in_epoch = [&](uint64_t positions) {
    const uint64_t rest = positions % segment_.batch;
    const uint64_t last = segment_.tail == Tail::kDrop || rest == 0 ? 0
                          : segment_.tail == Tail::kPad             ? whole
                                                                    : share(rest, rank);
    return positions / segment_.batch * whole + last;
  };
  return in_epoch((first_epoch() + 1) * run_.samples - segment_.from) +
         (epoch - first_epoch() - 1) * in_epoch(run_.samples);
}

std::vector<uint64_t> Generation::rank_ids(uint64_t rank, uint64_t first, uint64_t count) const {
  // The last epoch that begins with no more than `first` samples before it.
  uint64_t low = first_epoch(), high = end_epoch();
  while (low + 1 < high) {
    const uint64_t middle = low + (high - low) / 2;
    (local_samples_before(middle, rank) <= first ? low : high) = middle;
  }
  const uint64_t whole = share(segment_.batch, rank);
  std::vector<uint64_t> found;
  for (uint64_t epoch = low; epoch < end_epoch() && found.size() < count; ++epoch) {
    const uint64_t before = local_samples_before(epoch, rank), next = first + found.size();
    uint64_t skip = next - before;
    const uint64_t step_count = steps(epoch);
    if (step_count == 0) continue;
    // A cut batch, the last one, may have a sample more for this rank than a whole one.
    for (uint64_t i = std::min(skip / whole, step_count - 1);
         i < step_count && found.size() < count; ++i) {
      const std::vector<uint64_t> part =
          local_ids(step(epoch, i), rank, skip - i * whole, count - found.size());
      found.insert(found.end(), part.begin(), part.end());
      skip = (i + 1) * whole;
    }
  }
  return found;
}

uint64_t Generation::global_samples(uint64_t epoch) const {
  const uint64_t count = steps(epoch);
  return count == 0 ? 0 : (count - 1) * segment_.batch + step(epoch, count - 1).size();
}

std::vector<uint64_t> Generation::global_ids(uint64_t epoch, uint64_t first, uint64_t count) const {
  const uint64_t all = global_samples(epoch);
  std::vector<uint64_t> positions;
  if (first >= all) return positions;
  count = std::min(count, all - first);
  positions.reserve(count);
  for (uint64_t i = first; i < first + count; ++i) {
    positions.push_back(position(step(epoch, i / segment_.batch), i % segment_.batch));
  }
  return ids(positions);
}

uint64_t Generation::global_samples() const {
  if (segment_.tail == Tail::kCarry) return end_ - segment_.from;
  if (first_epoch() == end_epoch()) return 0;
  return global_samples(first_epoch()) +
         (end_epoch() - first_epoch() - 1) * global_samples(end_epoch() - 1);
}

uint64_t Generation::global_position(uint64_t index) const {
  if (segment_.tail == Tail::kCarry) return segment_.from + index;
  uint64_t epoch = first_epoch();
  if (const uint64_t in_first = global_samples(epoch); index >= in_first) {
    const uint64_t in_each = global_samples(epoch + 1);
    epoch += 1 + (index - in_first) / in_each;
    index = (index - in_first) % in_each;
  }
  return position(step(epoch, index / segment_.batch), index % segment_.batch);
}

std::pair<uint64_t, uint64_t> Generation::boundaries(uint64_t position) const {
  uint64_t begin = segment_.from, limit = end_;
  if (segment_.tail != Tail::kCarry) {
    const uint64_t epoch = position / run_.samples;
    begin = std::min(epoch_begin(epoch), end_);
    limit = std::min((epoch + 1) * run_.samples, end_);
  }
  const uint64_t below = begin + (position - begin) / segment_.batch * segment_.batch;
  if (position == below || position == limit) return {position, position};
  return {below, std::min(below + segment_.batch, limit)};
}

std::optional<std::pair<uint64_t, uint64_t>> Generation::step_at(uint64_t position) const {
  position = std::max(position, segment_.from);
  if (position >= end_) return std::nullopt;
  auto steps_to = [&](uint64_t begin) {
    return (position - begin + segment_.batch - 1) / segment_.batch;
  };
  if (segment_.tail == Tail::kCarry) {
    const uint64_t steps = steps_to(segment_.from), begin = segment_.from + steps * segment_.batch;
    if (begin >= end_) return std::nullopt;
    const uint64_t epoch = begin / run_.samples;
    return std::pair(epoch, steps - steps_before(epoch));
  }
  const uint64_t epoch = position / run_.samples, index = steps_to(epoch_begin(epoch));
  if (index < steps(epoch)) return std::pair(epoch, index);
  if (epoch + 1 < end_epoch()) return std::pair(epoch + 1, uint64_t{0});
  return std::nullopt;
}

uint64_t Generation::dropped_count(uint64_t epoch) const {
  if (segment_.tail != Tail::kDrop || epoch < first_epoch() || epoch >= end_epoch()) return 0;
  return (epoch + 1) * run_.samples - epoch_begin(epoch) - steps(epoch) * segment_.batch;
}

std::vector<uint64_t> Generation::dropped(uint64_t epoch) const {
  std::vector<uint64_t> positions(dropped_count(epoch));
  std::iota(positions.begin(), positions.end(), (epoch + 1) * run_.samples - positions.size());
  return positions;
}

uint64_t Generation::padding_count(uint64_t epoch) const {
  const uint64_t count = segment_.tail == Tail::kPad ? steps(epoch) : 0;
  return count == 0 ? 0 : step(epoch, count - 1).padded;
}

std::vector<uint64_t> Generation::padding(uint64_t epoch) const {
  std::vector<uint64_t> positions;
  const uint64_t count = padding_count(epoch);
  positions.reserve(count);
  for (uint64_t i = 0; i < count; ++i) positions.push_back(epoch * run_.samples + i % run_.samples);
  return positions;
}

}  // namespace ptc
