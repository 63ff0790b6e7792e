#include "reshard/job/next_step.h"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <iterator>

#include "store/base/wall_time.h"

namespace ptc {
namespace {

// Checkpoints that are too many but in use, and parts without a decision, are looked at again
// after this time.
constexpr auto kRetryRemoval = std::chrono::seconds(2);

/// Those of `keep`, but for what is current, pinned or newest.
std::vector<std::pair<std::string, std::string>> too_many_of(const KnownJob& known) {
  // Pinned ones stay besides those that `keep` counts.
  std::set<std::pair<int64_t, std::string>> by_sequence;
  for (const auto& [name, record] : known.checkpoints)
    if (!record.pinned) by_sequence.emplace(record.sequence, name);
  const uint64_t keep = known.saved.layout.keep;
  if (keep == 0 || by_sequence.size() <= keep) return {};
  const size_t too_many = by_sequence.size() - keep;
  // The newest stays, also while it is not current yet (or cannot become so).
  by_sequence.erase(std::prev(by_sequence.end()));
  std::vector<std::pair<std::string, std::string>> surplus;
  for (const auto& [sequence, name] : by_sequence) {
    if (surplus.size() == too_many) break;
    if (known.in_force.current != name)
      surplus.emplace_back(name, known.checkpoints.find(name)->second.id);
  }
  return surplus;
}

/// Some of it, within reach: what ended with a daemon is nobody's to move.
bool is_in_devices(const StoredState& stored) {
  return std::any_of(stored.images.begin(), stored.images.end(), [](const StoredImage& image) {
    return image.image != nullptr && !image.memory.is_host();
  });
}

/// An older one that this round has not brought where it shall be. `in_devices`: of those that
/// leave the memory of devices.
const CheckpointRecord* next_older(const KnownJob& known, bool in_devices, const Round& round) {
  const CheckpointRecord* newest = known.latest();
  for (const auto& [name, record] : known.checkpoints)
    if (&record != newest && !round.brought.contains(record.id) &&
        (!in_devices || is_in_devices(*record.where)))
      return &record;
  return nullptr;
}

}  // namespace

bool is_older_in_devices(const KnownJob& known) {
  return next_older(known, /*in_devices=*/true, {}) != nullptr;
}

JobStep next_step(const KnownJob& known, bool shares_bytes, bool parts, const Round& round,
                  KnownJob::Clock::time_point now) {
  using Kind = JobStep::Kind;
  if (round.another_leads) return {Kind::kWait, known.others_first};
  if (!round.began) {
    if (shares_bytes && now < known.others_first) return {Kind::kWait, known.others_first};
    if (known.has_work()) return {Kind::kLead};
  }
  if (round.leads) {
    if (round.gives_back) return {Kind::kGiveBack};
    const bool makes_room = round.newest_lacks_room && !round.newest_is_brought;
    if (!round.newest_is_brought && (!makes_room || round.room_is_made))
      return {Kind::kSettleNewest};
    const CheckpointRecord* older =
        next_older(known, /*in_devices=*/makes_room || !shares_bytes, round);
    if (older != nullptr) return {Kind::kSettleOlder, std::nullopt, *older};
    return {makes_room ? Kind::kMakeRoom : Kind::kGiveBack};
  }
  auto too_many = too_many_of(known);
  const bool again = !too_many.empty() || parts;
  if (!round.trimmed && !too_many.empty())
    return {Kind::kTrim, std::nullopt, std::nullopt, std::move(too_many)};
  if (!round.looked_at_parts && parts) return {Kind::kDropParts};
  if (known.has_work()) return {Kind::kWait, now};
  if (again) return {Kind::kWait, now + kRetryRemoval};
  return {Kind::kWait};
}

Outcome outcome_of(const Error* error, bool shares_bytes) {
  if (error == nullptr) return Outcome::kDone;
  const Code code = error->code();
  if (code == Code::kCancelled || code == Code::kConflict) return Outcome::kAbandoned;
  if (shares_bytes && (code == Code::kUnavailable || code == Code::kInDoubt))
    return Outcome::kTryAgain;
  return Outcome::kFailed;
}

void note_outcome(KnownJob& known, Outcome outcome, const Error* error, bool shares_bytes,
                  const std::string& job, const std::string& wanted, KnownJob::Failed of,
                  KnownJob::Clock::time_point now) {
  constexpr auto kTryAgain = std::chrono::seconds(1);
  constexpr auto kAfterAnother = std::chrono::milliseconds(100);
  known.leads = false;
  switch (outcome) {
    case Outcome::kDone:
      known.failed.reset();
      known.forget_error("reshard to ");
      break;
    case Outcome::kAbandoned:
      if (!shares_bytes) break;
      known.look_anyway = true;  // there may be more to do than the newer edit says
      known.others_first = now + kAfterAnother;
      break;
    case Outcome::kTryAgain:
      known.look_anyway = true;
      known.others_first = now + kTryAgain;
      known.last_error = {"reshard to " + wanted + " is tried again: " + error->message(),
                          now_ns()};
      spdlog::warn("job {}: {}", job, known.last_error->what);
      break;
    case Outcome::kFailed:
      ++known.counts.reshards_failed;
      known.failed = std::move(of);
      known.last_error = {"reshard to " + wanted + " failed: " + error->message() +
                              " (save layout.json again to try again)",
                          now_ns()};
      spdlog::error("job {}: {}", job, known.last_error->what);
      break;
  }
}

}  // namespace ptc
