// The parts of a Job, put together. Each stands alone: its header says what it keeps, and with
// which lock. What is left here is what goes over all of them: edits and removals (job.cc), taking
// over what others decided (job_load.cc), and what other nodes ask (job_peers.cc).
//
// Locks: that of the decisions (decisions.h) comes first; then those of the parts, each held for
// just a moment, and none while another part is called. What is known of the job is a value
// (known_job.h), which is read without any.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <set>
#include <stop_token>
#include <string>
#include <string_view>
#include <vector>

#include "reshard/job/activity.h"
#include "reshard/job/checkpoint_files.h"
#include "reshard/job/commits_led.h"
#include "reshard/job/decisions.h"
#include "reshard/job/doubts.h"
#include "reshard/job/hash_queue.h"
#include "reshard/job/job.h"
#include "reshard/job/job_events.h"
#include "reshard/job/job_peers.h"
#include "reshard/job/job_place.h"
#include "reshard/job/job_record.h"
#include "reshard/job/job_update.h"
#include "reshard/job/known_job.h"
#include "reshard/job/mender.h"
#include "reshard/job/part_maker.h"
#include "reshard/job/part_shelf.h"
#include "reshard/job/plan_relays.h"
#include "reshard/job/resharder.h"
#include "reshard/job/staged_parts.h"
#include "reshard/job/taken_dirs.h"
#include "reshard/job/verifier.h"

namespace ptc {

struct Job::Impl {
  Impl(Job* owner, std::string job_dir, JobServices job_services, JobListener* job_listener)
      : job(owner),
        place{owner->name(), owner->id(), std::move(job_dir), std::move(job_services),
              job_listener} {}

  // --- constant ---
  Job* job;
  const JobPlace place;
  const JobServices& services = place.services;
  JobListener* const listener = place.listener;
  const JobPeers peers{place.which(), *services.cluster};

  JobEvents events{place.dir + "/events.jsonl", services.node};
  /// What is known, and who is told of changes: those who wait for it, and what is done about it in
  /// the background.
  JobKnowledge knowledge{[this] {
                           note_events();
                           resharder.wake();
                         },
                         [this] { note_events(); }};

  // --- parts that stand alone: each has a lock of its own, or none ---
  Activities activities;
  Doubts doubts;
  Arrivals arrivals;
  const CheckpointFiles files{place, peers, knowledge, activities};
  Decisions decisions{place, files, knowledge};
  const Verifier::SyncAbout about = [this](const std::string& id) { return sync_about(id); };
  const Verifier verifier{place, peers, knowledge, about};
  Mender mender{place, peers, knowledge, verifier, decisions, about};
  PartShelf shelf{[this](const std::string& id) { return images_of(id); },
                  [this](const std::string& image) { (void)services.images->remove({image}); }};
  HashQueue hashing{place.name, place.incoming_dir(), [this] { return expected_of_files(); }};
  StagedParts staged{place};
  TakenDirs taken{
      place,
      peers,
      hashing,
      {[this]() -> Result<> {
         PTC_TRY(follow());
         return ok();
       },
       [this](const std::string& id) { shelf.drop(id); }, [this] { housekeeping.wake(); },
       [this](const std::string& incoming) { return staged.was_lost(incoming); },
       [this](const std::string& incoming) { staged.closed(incoming + "/"); }}};
  const PartMaker maker{
      {place, peers, knowledge, files, verifier, shelf, arrivals, taken, activities, about}};

  CommitsLed commits{{place, peers, knowledge, files, decisions, maker, hashing, staged, taken,
                      activities, doubts,
                      [this]() -> Result<> {
                        PTC_TRY(follow());
                        return ok();
                      },
                      [this] { housekeeping.wake(); }}};
  Resharder resharder{
      {place, peers, knowledge, files, decisions, maker, verifier, mender, shelf, activities,
       doubts, [this] { return hear_others(); },
       [this](const std::string& name, const std::string& id) { return remove(name, id, true); },
       [this] { housekeeping.wake(); }}};

  Loop housekeeping;  // its steps are keep_house()

  // --- helpers ---
  void note_events() {
    events.note([this] { return knowledge.now(); });
  }
  /// Of the checkpoint's stored state.
  PartShelf::ImageNames images_of(const std::string& id) const;
  HashQueue::Expected expected_of_files() const;
  bool at_rest(const KnownJob& known) const {
    return !known.has_work() && !activities.any_reshard() && !known.leads;
  }
  /// Whether the nodes are there, the rules and cuts fit, and there is room; asks other nodes.
  Result<> check_layout(const std::string& text, const Layout& wanted, const KnownJob& known) const;
  /// Bytes that a change of the checkpoint to `spec` would write, at most.
  static Result<uint64_t> bytes_to_write(const Checkpoint& checkpoint, const LayoutSpec& spec);

  /// What goes on beside all else: doubts, and what is left of commits that nobody will decide any
  /// more.
  std::optional<StepPool::Time> keep_house(const std::stop_token& stop);

  // job_load.cc
  Result<> load();
  Result<std::vector<NamedFile>> load_with(const FetchedFiles& fetched);
  Result<> sync();
  /// What is decided of this checkpoint is known from now on, whatever may be lacking of others.
  Result<> sync_about(const std::string& id);
  Result<Followed> follow();
  /// `nodes_alone`: as Job::follow_nodes_with().
  Result<Followed> follow_with(const FetchedFiles& fetched, bool nodes_alone = false);
  struct AgreedOn {
    JobRecord record;
    std::vector<std::string> drained;
  };
  Result<AgreedOn> read_agreed();
  std::vector<NamedFile> files_to_read(const JobRecord& state, const KnownJob& known,
                                       const std::vector<std::string>& alive) const;
  /// What others have decided by now is known from here on; nothing is read where only this node
  /// decides.
  Result<Followed> hear_others();
  std::string what_to_do_about(const std::string& name, const CheckpointRecord& record) const;
  void take_over(Agreed<AttributesInForce> known);
  void take_over_meanwhile(const Agreed<AttributesInForce>& coming);  // until then
  Result<> recover_commits();
  void remove_files_of(const CheckpointRecord& record);  // what was made here for it, too
  Result<> remove_damaged_not_in(const std::set<std::string>& ids);
  Result<> remove_damaged(const std::string& id);
  /// Fails unless tombstones say that these, which the metadata name no more, were removed.
  Result<> check_removed(const std::vector<std::string>& ids);

  // job_peers.cc
  Result<std::string> answer(PeerMethod method, std::string_view request);
  Result<bool> is_open_here(const std::string& id);  // a file of the checkpoint

  // job.cc
  Result<> see_what_came_back();
  Result<> save_layout(const std::string& text, const std::optional<Job::AtMost>& at_most);
  Result<Layout> read_layout(const std::string& text, const KnownJob& known) const;
  Result<> want_layout_again();  // with the mutex of the decisions held
  Result<> save_rules(const std::string& text, const std::optional<Job::AtMost>& at_most);
  /// What this node decides of owners and modes it takes over in the order of the decisions.
  Mutex attributes_mutex;  // after that of decisions
  Result<int64_t> decide(const JobUpdate::Decide& decide,
                         const std::optional<Job::AtMost>& at_most);
  /// Again where owners and modes have become others than `decide` says that it `read`.
  Result<int64_t> decide_again(const Agreed<AttributesInForce>& read,
                               const JobUpdate::Decide& decide);
  /// What is changed of what is agreed on; nullopt: nothing has to be.
  using ChangeOfAttributes =
      std::function<Result<std::optional<FileAttributes>>(const Agreed<AttributesInForce>& now)>;
  /// `besides`: all that it reads holds, and it is decided with the change.
  Result<> change_attributes(const std::string& name, const ChangeOfAttributes& change,
                             const JobUpdate::Decide& besides);
  Result<> open_text(const std::string& name, uint32_t mode,
                     const std::optional<NarrowedMode>& narrowed,
                     const JobUpdate::Decide& is_this_text);
  /// Whether that was news here.
  void tell_of_opened(const JobAttributes& after) const;
  bool take_over_of(const std::string& name, const JobAttributes& after, int64_t revision)
      PTC_REQUIRES(attributes_mutex);
  Result<> remove_rules(const std::optional<std::string>& only);
  Result<> pin(std::string_view name, bool pinned, std::string_view id);
  /// What has the name. kNotFound: that is another than `id` says (empty: any). kBusy:
  /// `only_unused`, and somebody reads it.
  Result<> remove(const std::string& name, std::string_view id, bool only_unused);
};

}  // namespace ptc
