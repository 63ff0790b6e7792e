// Copies beyond those that are wanted go: what a node that came back no longer needs elsewhere,
// what an edit of `replicas` or `devices` left behind, what only the newest checkpoint needs.
//
// This is the one place where bytes go that are good and that nothing new has taken the place of.
// So it is a step of its own, after all else is as it is wanted, and each of these holds:
// * Nothing is to come. A plan has superfluous images only where it writes, copies and moves
//   nothing (superfluous.h): all copies that are wanted are decided on and lie on nodes in service.
//   It is computed anew without the images that would go, and they all stay where it then lacks
//   anything.
// * What stays is read, now, by each node that has it: every copy of every tensor and file of which
//   one goes, to the last byte, and each has the checksum of the commit. Where one has not, nothing
//   goes: it is mended from the others first, those that are one too many among them.
// * What stays is on nodes that live and are not being drained when it is decided, the same ones as
//   were read. The decision names for each, as it was before it was asked, the revision of
//   nodes/<node>, which a start puts anew, and that there is no drained/<node> (commit_fenced()).
// * Nobody wants more meanwhile, and nobody has moved or taken out any of it: the decision names
//   the layout that is wanted, the checkpoint's record, in which its generation stands, and the
//   leader.
// * It is one transaction as any: files are unlinked by nodes that know it to be made. In doubt,
//   nothing is. Who has an image open keeps it, also from another node (RemoteFiles).
// What fails here fails no reshard: copies stay, and are looked at again.
#include <spdlog/spdlog.h>

#include "reshard/job/resharder.h"
#include "reshard/job/wanted_states.h"
#include "reshard/move/superfluous.h"

namespace ptc {

Result<> Resharder::trim_all(const Attempt& attempt) {
  std::vector<std::string> names;
  {
    const JobKnowledge::Snapshot known = uses_.knowledge.now();  // which the loop needs to its end
    for (const auto& [name, record] : known->checkpoints)
      if (shares_bytes_ || uses_devices(attempt.wanted, *record.where)) names.push_back(name);
  }
  Result<> all = ok();
  for (const std::string& name : names) {
    Result<CheckpointRecord> record = uses_.verifier.find(name);
    if (record.has_error()) continue;  // it was removed
    const Checkpoint& checkpoint = *record.value().checkpoint;
    auto trim_one = [&]() -> Result<> {
      std::vector<std::string> nodes = uses_.knowledge.now()->followed_in_service();
      PTC_TRY(auto state,
              record.value().checkpoint == attempt.newest
                  ? wanted_state(uses_.place, checkpoint, attempt.wanted, std::move(nodes))
                  : where_it_is(uses_.place, record.value(), attempt.wanted.replicas,
                                std::move(nodes)));
      PTC_TRY(auto change, plan_change(checkpoint, *record.value().where, state));
      return change->superfluous.empty() ? ok() : trim(record.value(), *change, attempt);
    };
    Result<> trimmed = ok();
    try {
      trimmed = trim_one();
    } catch (const std::exception& error) {  // no memory
      trimmed = make_error(Code::kNoSpace, "{}", error.what());
    }
    if (trimmed.has_error() && all.has_value() && uses_.knowledge.now()->has(checkpoint))
      all = std::move(trimmed);
  }
  return all;
}

void Resharder::look_again_at_copies(const Error& error) {
  // Each time all that stays is read: what lasts, such as a store that is full, shall not cost that
  // each second.
  constexpr auto kTryAgain = std::chrono::seconds(1), kAtMost = std::chrono::seconds(300);
  copies_tried_again_ = std::min(2 * std::max(copies_tried_again_, kTryAgain / 2), kAtMost);
  spdlog::info("job {}: copies beyond those that are wanted stay for now: {}", uses_.place.name,
               error.message());
  uses_.knowledge.update([&](KnownJob& known) {
    known.look_anyway = true;
    known.others_first = std::chrono::steady_clock::now() + copies_tried_again_;
  });
  uses_.knowledge.tell();
}

Result<> Resharder::trim(const CheckpointRecord& record, const ChangePlan& change,
                         const Attempt& attempt) {
  const Checkpoint& checkpoint = *record.checkpoint;
  const StoredState& stored = *record.where;
  const std::vector<uint32_t>& going = change.superfluous;
  const std::map<std::string, std::vector<uint32_t>> beside =
      copies_beside(checkpoint, stored, going);
  Fences fences;  // before they are asked
  for (const auto& [node, images] : beside)
    if (node != uses_.place.node_key())
      fences.push_back(uses_.place.services.cluster->fence_of(node));
  const std::string spec = stored.spec.name();
  const std::unique_ptr<Activity> activity =
      uses_.activities.begin({Activity::Kind::kTrim, checkpoint.name(), spec, spec});
  activity->begin("comparing copies");
  PTC_TRY(auto contents, uses_.verifier.read_images(record, stored, beside, cuts_of(stored),
                                                    /*pace=*/nullptr, activity->stop_token()));
  if (!are_good(checkpoint, stored, going, contents)) {
    PTC_TRY(auto found, uses_.mender.repair(checkpoint.name(), activity->stop_token()));
    if (!found.replaceable.empty())
      return make_error(Code::kCancelled, "checkpoint {} had damaged copies", checkpoint.name());
    spdlog::warn("job {}: checkpoint {}: no copy goes, though there are more than are wanted: {}",
                 uses_.place.name, checkpoint.name(), found.message());
    return ok();
  }
  const auto is_wanted = [&](const LayoutEdit& saved) -> Result<> {
    return saved.revision == attempt.revision
               ? ok()
               : Result<>(Error(Code::kCancelled, "a newer edit came"));
  };
  const auto still_holds = [&](JobUpdate& update) -> Result<bool> {
    update.rests_on(fences);
    for (const auto& [node, images] : beside) update.in_service(node);
    PTC_TRY(is_wanted(update.saved()));
    return true;
  };
  PTC_TRY(is_wanted(uses_.knowledge.now()->saved));  // before anything is written down for it
  PTC_TRY(bool done, uses_.decisions.replace_images(record, images_without(stored, going),
                                                    attempt.leadership.get(), still_holds));
  if (!done) return Error(Code::kConflict, "something has changed meanwhile");
  spdlog::info("job {}: checkpoint {}: {} of {} images were copies beyond those that are wanted",
               uses_.place.name, checkpoint.name(), going.size(), stored.images.size());
  return ok();
}

}  // namespace ptc
