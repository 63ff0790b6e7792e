// What the metadata say exists: at start, and whenever other nodes have changed it. And what a
// crash left half-done.
#include <fcntl.h>
#include <fmt/ranges.h>
#include <spdlog/spdlog.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <boost/json/object.hpp>
#include <cstring>
#include <filesystem>
#include <set>

#include "reshard/cluster/tombstones.h"
#include "reshard/job/drain.h"
#include "reshard/job/job_parts.h"
#include "reshard/move/placement.h"
#include "reshard/move/plan_report.h"
#include "store/base/file.h"
#include "store/base/mutex.h"
#include "store/base/utf8.h"
#include "store/base/wall_time.h"

namespace ptc {
namespace {

// Of a change that another node made, that node is the first to see to what follows from it.
constexpr auto kOthersFirst = std::chrono::milliseconds(200);

/// Whether a stored state was opened with these nodes within reach (sorted), from `self`.
bool was_opened_with(const StoredState& stored, const std::vector<std::string>& alive,
                     const std::string& self) {
  return std::all_of(stored.images.begin(), stored.images.end(), [&](const StoredImage& image) {
    const bool reachable =
        !image.missing && std::binary_search(alive.begin(), alive.end(), image.node);
    return image.node == self || (image.image != nullptr) == reachable;
  });
}

}  // namespace

Result<> Job::Impl::load() {
  for (FetchedFiles fetched;;) {
    PTC_TRY(auto to_fetch, load_with(fetched));
    if (to_fetch.empty()) return ok();
    files.fetch(to_fetch, fetched);
  }
}

Result<std::vector<NamedFile>> Job::Impl::load_with(const FetchedFiles& fetched) {
  Result<Followed> followed = follow_with(fetched);
  if (followed.has_value() && !followed.value().to_fetch.empty())
    return std::move(followed.value().to_fetch);
  Result<> known = ok();
  if (followed.has_error()) known = followed.error();
  else if (followed.value().lacking)
    known = make_error(Code::kUnavailable, "{}", followed.value().lacking->message());
  const bool read = knowledge.now()->saved.meta_revision !=
                    0;  // else nothing is known of what may be thrown away
  if (known.has_error() && (!read || known.error().code() != Code::kUnavailable))
    return known.error();
  PTC_TRY(recover_commits());
  knowledge.update([](KnownJob& now) {
    // Who was to bring the newest into the memory of devices may have ended before that.
    const CheckpointRecord* newest = now.latest();
    if (newest != nullptr && now.saved.layout.in_devices && !newest->checkpoint->loss())
      now.look_anyway = true;
  });
  return std::vector<NamedFile>();
}

Result<> Job::Impl::sync() {
  PTC_TRY(auto followed, follow());
  if (followed.lacking) return make_error(Code::kUnavailable, "{}", followed.lacking->message());
  return ok();
}

Result<> Job::Impl::sync_about(const std::string& id) {
  PTC_TRY(auto followed, follow());
  if (followed.without.contains(id))
    return make_error(Code::kUnavailable, "{}", followed.lacking->message());
  return ok();
}

Result<Followed> Job::Impl::hear_others() {
  return services.cluster->shares_decisions() ? follow() : Followed();
}

/// What other nodes have to give for it is fetched while nothing is locked; it may be long.
Result<Followed> Job::Impl::follow() {
  for (FetchedFiles fetched;;) {
    PTC_TRY(auto followed, follow_with(fetched));
    if (followed.to_fetch.empty()) return followed;
    files.fetch(followed.to_fetch, fetched);
  }
}

/// Of what is agreed, files that are to be read for the first time, or once more.
std::vector<NamedFile> Job::Impl::files_to_read(const JobRecord& state, const KnownJob& known,
                                                const std::vector<std::string>& alive) const {
  std::vector<NamedFile> all;
  for (const auto& [name, entry] : state.checkpoints) {
    const auto before = known.checkpoints.find(name);
    const bool is_known = before != known.checkpoints.end() && before->second.id == entry.id;
    const bool decided_anew = !is_known || before->second.stored != entry.stored;
    if (!is_known) {
      for (NamedFile& file : CheckpointFiles::files_of(entry)) all.push_back(std::move(file));
    } else if (decided_anew || !was_opened_with(*before->second.where, alive, place.node_key())) {
      all.push_back(CheckpointFiles::file_of(entry, entry.stored));
    }
    if (const std::string plan = plan_file_of(entry.stored); decided_anew && !plan.empty())
      all.push_back({entry.id, plan});
  }
  return all;
}

bool Job::follows_keys_alone() const {
  return impl_->knowledge.now()->follows_record() && !impl_->taken.any();
}

bool Job::has_followed(const std::vector<std::string>& alive) const {
  return impl_->knowledge.now()->followed_alive == alive;
}

Result<Job::Impl::AgreedOn> Job::Impl::read_agreed() {
  AgreedOn agreed;
  PTC_TRY(agreed.record, JobRecord::read(*services.meta, job->name()));
  // Of this name there may be another job by now, whose checkpoints are none of this one's. No id
  // comes back: what was read before it was found here was said of this job.
  PTC_TRY(const auto there, services.meta->get("jobs/" + job->name()));
  if (!there || job_id_of(there->value) != job->id())
    return make_error(Code::kNotFound, "job {} was removed", job->name());
  take_over_meanwhile(agreed.record.attributes);
  PTC_TRY(agreed.drained, drained_nodes(*services.meta));
  return agreed;
}

Result<Followed> Job::Impl::follow_with(const FetchedFiles& fetched, bool nodes_alone) {
  PTC_TRY(check_trusted(*services.cluster));
  MutexLock change(decisions.mutex());
  PTC_TRY(auto given_up, taken.given_up());
  const JobKnowledge::Snapshot before_all = knowledge.now();
  const uint64_t shelved = shelf.now();
  AgreedOn agreed;
  if (before_all->removed) return make_error(Code::kNotFound, "job {} was removed", job->name());
  // A commit that was given up, as it seems, may have been decided since the record was read.
  if (nodes_alone && given_up.empty() && before_all->follows_record()) {
    agreed = {before_all->record(), before_all->drained};
  } else {
    PTC_TRY(agreed, read_agreed());
  }
  JobRecord& state = agreed.record;
  const std::vector<std::string>& now_drained = agreed.drained;
  const std::vector<std::string> now_alive = services.cluster->alive();
  if (auto to_fetch = files.lacking(files_to_read(state, *before_all, now_alive), fetched);
      !to_fetch.empty())
    return Followed{.to_fetch = std::move(to_fetch)};
  const auto& known = before_all->checkpoints;
  const std::vector<std::string>& were_alive = before_all->followed_alive;
  const bool nodes_changed = were_alive != now_alive;
  const bool only_lost =  // nodes, and none came
      nodes_changed &&
      std::includes(were_alive.begin(), were_alive.end(), now_alive.begin(), now_alive.end());
  const bool service_changed = before_all->followed_drained != now_drained;
  knowledge.update([&](KnownJob& now) {
    now.alive = now_alive;
    now.drained = now_drained;
  });

  std::vector<std::string> ids_gone;
  for (const auto& [name, record] : known)
    if (auto now = state.checkpoints.find(name);
        now == state.checkpoints.end() || now->second.id != record.id)
      ids_gone.push_back(record.id);
  PTC_TRY(check_removed(ids_gone));

  struct Change {
    CheckpointRecord record;
    std::shared_ptr<const StoredState> stored;  // null: as before
  };
  std::map<std::string, Change> changes_of;
  std::map<std::string, Unreadable, std::less<>> now_damaged;
  std::set<std::string> mended;
  std::set<std::string> ids;  // of all that there are
  for (const auto& [name, entry] : state.checkpoints) ids.insert(entry.id);
  std::optional<Error> lacking;
  std::set<std::string> without;
  std::optional<PlanTexts> newest_plan;
  int64_t plan_revision = 0;
  for (const auto& [name, entry] : state.checkpoints) {
    Change next;
    auto before = known.find(name);
    if (before != known.end() && before->second.id == entry.id) next.record = before->second;
    const bool decided_anew = next.record.stored != entry.stored;
    auto load = [&]() -> Result<> {
      if (next.record.checkpoint == nullptr) {
        PTC_TRY(next.record, files.load(entry, fetched));
      } else if (next.record.stored != entry.stored ||
                 !was_opened_with(*next.record.where, now_alive, place.node_key())) {
        PTC_TRY(next.stored, files.load_stored(*next.record.checkpoint, entry, fetched));
      }
      return ok();
    };
    Result<> loaded = ok();
    try {
      loaded = load();
    } catch (const std::exception& error) {  // a damaged file of our own
      loaded = make_error(Code::kCorrupt, "{}", error.what());
    }
    if (loaded.has_error()) {
      // Everything else stays intact, and so do its files: they may still be mended by hand.
      // Its files may be with a node that does not answer now, or find no room here: until then it
      // is as it was, and this node, which does not know all, leads nothing.
      Unreadable one{{entry, nullptr, nullptr}, loaded.error().message()};
      if (services.cluster->shares_bytes() && loaded.error().code() != Code::kCorrupt) {
        one.lost = loaded.error().code() == Code::kNotFound;
        if (one.lost) one.why += what_to_do_about(name, one.record);
        without.insert(entry.id);
        if (!lacking || !one.lost)
          lacking = make_error(one.lost ? Code::kNotFound : Code::kUnavailable, "checkpoint {}: {}",
                               name, one.why);
        if (next.record.checkpoint != nullptr) {
          changes_of.emplace(name, Change{before->second, nullptr});
          continue;
        }
      }
      now_damaged.emplace(name, std::move(one));
      continue;
    }
    if (decided_anew && entry.meta_revision > plan_revision) {
      if (std::optional<PlanTexts> plan = files.load_plan(entry.id, entry.stored, fetched)) {
        newest_plan = std::move(plan);
        plan_revision = entry.meta_revision;
      }
    }
    if (before != known.end() && before->second.id == entry.id &&
        before->second.mended != entry.mended)
      mended.insert(name);
    static_cast<Agreed<CheckpointEntry>&>(next.record) = entry;
    changes_of.emplace(name, std::move(next));
  }

  std::vector<std::pair<CheckpointRecord, std::shared_ptr<const StoredState>>>
      replaced;  // and before
  std::vector<CheckpointRecord> gone;
  bool shown_changed = false, flipped = false, removed = false;
  std::set<std::string> to_tell,
      decided;  // what was made here for a plan stays until there is a decision
  knowledge.update([&](KnownJob& now) {
    removed = now.removed;
    if (removed) return;
    const bool edited = now.saved.revision != state.saved.revision;
    const bool wanted_again = !edited && now.saved.meta_revision != state.saved.meta_revision;
    shown_changed = now.saved.text != state.saved.text || now.rules_text != state.rules_text ||
                    now.in_force.current != state.in_force.current;
    now.saved = std::move(state.saved);
    now.rules_text = std::move(state.rules_text);
    now.custom_specs = std::move(state.custom_specs);
    for (auto& [id, look] : now.looked_over) {  // of some it was heard since that was read
      const auto then = before_all->looked_over.find(id);
      if (then != before_all->looked_over.end() && then->second.meta_revision == look.meta_revision)
        continue;
      Agreed<LookedOver>& read = state.looked_over[id];
      if (read.meta_revision < look.meta_revision) read = std::move(look);
    }
    now.looked_over = std::move(state.looked_over);
    flipped = now.in_force.meta_revision != state.in_force.meta_revision;
    now.in_force = std::move(state.in_force);
    now.sequence = state.sequence;
    if (flipped || wanted_again)
      now.failed.reset();  // another node could do it, or it is to be tried once more
    if (edited || wanted_again) now.forget_errors();
    if (edited) activities.stop_reshards();  // what finds the newer edit begins after that
    now.take_over_damaged(place.name, std::move(now_damaged));
    for (auto& [name, record] : now.checkpoints) {
      auto next = changes_of.find(name);
      if (next != changes_of.end() && next->second.record.id == record.id) continue;
      if (const auto bad = now.damaged.find(name);
          bad != now.damaged.end() && bad->second.record.id == record.id)
        continue;
      services.removed->note(record.id, record.checkpoint);
      gone.push_back(record);
      to_tell.insert(name);
    }
    for (auto& [name, next] : changes_of) {
      const auto before = known.find(name);
      const bool is_new = before == known.end() || before->second.id != next.record.id;
      if (is_new) to_tell.insert(name);
      if (is_new || before->second.stored != next.record.stored) decided.insert(name);
      if (next.stored != nullptr) {
        replaced.emplace_back(next.record, next.record.checkpoint->stored());
        next.record.checkpoint->replace_stored(next.stored);
        next.record.where = replaced.back().first.where = next.stored;
        to_tell.insert(name);
      }
    }
    if (now.failed && decided.contains(now.failed->checkpoint)) now.failed.reset();
    now.checkpoints.clear();
    for (auto& [name, next] : changes_of) now.checkpoints.emplace(name, next.record);
    mended.merge(now.show_damage(services.reads_damaged));
    if (newest_plan && plan_revision > now.last_plan_revision)
      now.set_last_plan(std::make_shared<const PlanTexts>(*std::move(newest_plan)), plan_revision);
    now.followed_alive = now_alive;
    now.followed_whole = !lacking;
    now.followed_drained = now_drained;
    if (service_changed) now.failed.reset();  // another plan
    if (services.cluster->shares_bytes() &&
        (nodes_changed || service_changed || flipped || edited || !to_tell.empty())) {
      now.look_anyway = true;
      activities.stop_trims();  // what is to be made goes first
      now.others_first = std::chrono::steady_clock::now();
      // What an edit asks for is done where it was made; what a loss asks for, by the first that is
      // left.
      const bool first = only_lost && !flipped && !edited && !now_alive.empty() &&
                         now_alive.front() == services.cluster->self();
      if (!first) now.others_first += kOthersFirst;
    }
    if (!gone.empty() && listener != nullptr) listener->names_changed();
  });
  if (removed) return make_error(Code::kNotFound, "job {} was removed", job->name());
  take_over(std::move(state.attributes));  // after the texts that they are of
  mender.note_to_refresh(mended);
  if (flipped || !decided.empty()) services.reports->decided(job->name());
  knowledge.tell();
  if (listener != nullptr) {
    if (shown_changed) listener->job_changed(job->name());
    for (const std::string& name : to_tell) listener->checkpoint_changed(job->name(), name);
  }
  for (const auto& [name, next] : changes_of) {
    if (!decided.contains(name)) continue;
    files.confirm(next.record);
    if (next.stored != nullptr) continue;  // what was before is known
    PTC_TRY(files.remove_earlier_states(next.record, /*drafts_too=*/false));
  }
  for (const CheckpointRecord& record : gone) remove_files_of(record);
  PTC_TRY(remove_damaged_not_in(ids));
  for (const auto& [record, before] : replaced) {
    files.remove_images_not_in(*before, *record.checkpoint->stored());
    PTC_TRY(files.remove_stale(record.id, record.stored));
  }
  for (const auto& [name, next] : changes_of)
    if (decided.contains(name)) shelf.drop_of_before(shelved, next.record.id);
  taken.settle(given_up, ids);
  // What came of one that was removed meanwhile.
  for (const auto& [name, one] : fetched)
    if (!ids.contains(name.id) && !taken.holds(name.id) &&
        files.has(name.id, CheckpointFiles::kDraftMark))
      (void)remove_tree(AT_FDCWD, place.checkpoint_dir(name.id));
  if (!mended.empty()) services.mending_wanted();
  return Followed{std::move(lacking), std::move(without)};
}

/// Of one that is lost: who had it, as is agreed.
std::string Job::Impl::what_to_do_about(const std::string& name,
                                        const CheckpointRecord& record) const {
  const std::vector<std::string> there = services.cluster->alive();
  std::vector<std::string> nodes;
  for (const std::string& node : record.nodes)
    nodes.push_back(
        fmt::format("{} ({})", node, is_among(there, node) ? "there, without it" : "away"));
  if (record.more_nodes > 0) nodes.push_back(fmt::format("{} others", record.more_nodes));
  return fmt::format(
      "{}; start those that are away, or, where their stores are lost for good, ptc rm {}/{} "
      "removes it (ptc rm "
      "--force {} the whole job)",
      nodes.empty() ? "" : fmt::format("; its bytes were on {}", fmt::join(nodes, ", ")),
      job->name(), name, job->name());
}

void Job::Impl::take_over_meanwhile(const Agreed<AttributesInForce>& coming) {
  {
    const JobKnowledge::Snapshot known = knowledge.now();
    if (coming.meta_revision <= known->attributes.meta_revision) return;
    tell_of_opened(coming.all->meanwhile(*known->attributes.all));  // to another owner, or group
  }
  const bool newer = knowledge.update([&](KnownJob& now) {
    if (coming.meta_revision <= now.attributes.meta_revision) return false;
    now.set_attributes(
        {{std::make_shared<const JobAttributes>(coming.all->meanwhile(*now.attributes.all))},
         now.attributes.meta_revision});
    return true;
  });
  if (newer && listener != nullptr) listener->attributes_changed(job->name());
}

void Job::Impl::take_over(Agreed<AttributesInForce> known) {
  tell_of_opened(*known.all);
  const bool newer = knowledge.update([&](KnownJob& now) {
    // Of the same revision this node may know less: take_over_of().
    const auto& before = now.attributes;
    if (known.meta_revision < before.meta_revision ||
        (known.meta_revision == before.meta_revision && *known.all == *before.all))
      return false;
    now.set_attributes(std::move(known));
    return true;
  });
  if (newer && listener != nullptr) listener->attributes_changed(job->name());
}

void Job::Impl::remove_files_of(const CheckpointRecord& record) {
  files.remove(record);
  shelf.drop(record.id);
}

/// Of one that could not be read here, and so was not known, the files stay; until it is removed.
Result<> Job::Impl::remove_damaged_not_in(const std::set<std::string>& ids) {
  std::vector<std::string> not_named;
  {
    const JobKnowledge::Snapshot now = knowledge.now();
    std::set_difference(now->damaged_ids.begin(), now->damaged_ids.end(), ids.begin(), ids.end(),
                        std::back_inserter(not_named));
  }
  for (const std::string& id : not_named) {
    PTC_TRY(bool removed, is_removed(*services.meta, removed_checkpoint_key(id)));
    if (!removed) continue;
    PTC_TRY(remove_damaged(id));
  }
  return ok();
}

Result<> Job::Impl::remove_damaged(const std::string& id) {
  PTC_TRY(files.remove_unreadable(id));
  knowledge.update([&](KnownJob& now) { now.damaged_ids.erase(id); });
  return ok();
}

Result<> Job::Impl::check_removed(const std::vector<std::string>& ids) {
  for (const std::string& id : ids) {
    PTC_TRY(bool removed, is_removed(*services.meta, removed_checkpoint_key(id)));
    if (removed) continue;
    PTC_TRY(bool with_its_job, is_removed(*services.meta, removed_job_key(job->id())));
    if (with_its_job) return make_error(Code::kNotFound, "job {} was removed", job->name());
    return make_error(Code::kUnavailable,
                      "checkpoint {} of job {} is named no more, but nobody removed it: what the "
                      "agreement store says is not taken over",
                      id, job->name());
  }
  return ok();
}

Result<> Job::Impl::recover_commits() {
  PTC_TRY(remove_tree(AT_FDCWD, place.dir + "/" + kScratchDir));
  const JobKnowledge::Snapshot known = knowledge.now();
  std::unordered_map<std::string, std::string> stored_files;  // of committed ids
  std::vector<std::string> unnamed;
  for (const auto& [name, record] : known->checkpoints)
    stored_files.emplace(record.id, record.stored);

  PTC_TRY(auto cut_off, names_in(place.dir + "/committing"));
  for (const std::string& id : cut_off) {
    const std::string directory = place.dir + "/committing/" + id;
    bool decided = stored_files.contains(id) || known->damaged_ids.contains(id);
    if (!decided) {
      PTC_TRY(decided, is_removed(*services.meta, removed_checkpoint_key(id)));
    }
    PTC_TRY(auto names, names_in(directory));
    if (decided) {
      for (const std::string& name : names)
        rmdir(fmt::format("{}/incoming/{}", job->files_dir(), name).c_str());  // ShownName
      PTC_TRY(remove_tree(AT_FDCWD, directory));
      continue;
    }
    for (const std::string& name : names) {
      const std::string from = directory + "/" + name;
      const std::string to = job->files_dir() + "/incoming/" + name;
      const std::string other = job->files_dir() + "/incoming/recovered-" + id;
      // One of the two may be a ShownName, which is empty.
      if (std::error_code error; std::filesystem::exists(to, error) && rmdir(from.c_str()) == 0)
        continue;
      if (rename(from.c_str(), to.c_str()) == 0 || rename(from.c_str(), other.c_str()) == 0)
        spdlog::info("job {}: the commit of incoming/{} was cut off and is taken back", job->name(),
                     name);
      else
        spdlog::error("job {}: incoming/{} could not be put back ({}); it is in {}", job->name(),
                      name, std::strerror(errno), from);
    }
    rmdir(directory.c_str());
  }
  PTC_TRY(auto ids, names_in(place.dir + "/checkpoints"));
  for (const std::string& id : ids) {
    const std::string directory = place.checkpoint_dir(id);
    if (known->damaged_ids.contains(id)) continue;
    if (stored_files.contains(id)) continue;
    std::error_code error;
    if (std::filesystem::exists(directory + "/" + CheckpointFiles::kDraftMark, error) ||
        std::filesystem::is_empty(directory, error)) {
      PTC_TRY(remove_tree(AT_FDCWD, directory));
      continue;
    }
    PTC_TRY(bool removed, is_removed(*services.meta, removed_checkpoint_key(id)));
    if (removed) {
      PTC_TRY(remove_checkpoint_directory(*services.images, directory));
      continue;
    }
    unnamed.push_back("checkpoints/" + id);
  }
  knowledge.update([&](KnownJob& now) { now.unnamed = std::move(unnamed); });
  for (const auto& [name, record] : known->checkpoints) {
    PTC_TRY(files.remove_earlier_states(record, /*drafts_too=*/true));
  }
  return ok();
}

}  // namespace ptc
