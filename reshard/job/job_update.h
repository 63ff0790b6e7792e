// One decision about a job, as it is made: what it reads of the job is what it rests on.
#pragma once

#include <cstdint>
#include <functional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "reshard/job/job_place.h"
#include "reshard/job/job_record.h"
#include "reshard/job/known_job.h"
#include "store/base/error.h"

namespace ptc {

class Leadership;

/// What Decisions::update() hands to whoever decides. Each read notes its key, with the revision
/// that it was read at, and the transaction compares all of them. So a decision rests on whatever
/// it has looked at, unless it says that it only glances at it. Threads: one, until `decide` has
/// returned; what it has read goes then.
class JobUpdate {
 public:
  /// Reads, and says what changes. false: nothing does, and nothing is written; an error: nor is
  /// there. Where a decision is tried again it is called again.
  using Decide = std::function<Result<bool>(JobUpdate&)>;

  /// `leader`: who decides as such, and no more once another leads; null: any node may.
  JobUpdate(const JobPlace& place, JobKnowledge::Snapshot known, const Leadership* leader);

  // Reads of what this node knows, all as it was at one moment.
  const Agreed<LayoutEdit>& saved() { return read(known_->saved); }
  const Agreed<InForce>& in_force() { return read(known_->in_force); }
  const Agreed<LastSequence>& sequence() { return read(known_->sequence); }
  /// Null: none of this name can be shown here.
  const CheckpointRecord* checkpoint(std::string_view name);
  /// Also one that cannot be shown. Null: there is none, and none shall come.
  const CheckpointRecord* record_of(std::string_view name);
  /// There is none of this name, whatever is known here.
  void no_checkpoint(std::string_view name) { decision_.rests_on_no_checkpoint(name); }

  // Reads of the agreement store, as it is now.
  Result<Agreed<AttributesInForce>> attributes();
  Result<Agreed<RulesText>> rules();
  Result<Agreed<LookedOver>> looked_over(std::string_view id);

  // What was read elsewhere, or at another time.
  /// Before this began: of nodes that were asked to do something for it, for one.
  void rests_on(const std::vector<MetaTransaction::Compare>& read);
  void rests_on(const Agreed<AttributesInForce>& attributes) { decision_.rests_on(attributes); }
  void in_service(const std::string& node);  // it is not being drained
  /// What somebody else compares and changes in the same transaction.
  void add(const MetaTransaction& other) { decision_.add(other); }

  // Looks at what the decision does not rest on. Whoever uses one says why beside it: it only says
  // something of it; or what is written is right whatever becomes of it; or it follows from what
  // is read.
  const KnownJob& glance() const { return *known_; }
  Result<Agreed<AttributesInForce>> glance_at_attributes() const;

  // What changes: of a key that was read, or the decision fails with kInternal.
  void put(const LayoutEdit& edit) { decision_.put(edit); }
  void put(const InForce& in_force) { decision_.put(in_force); }
  void put(const LastSequence& sequence) { decision_.put(sequence); }
  void put(std::string_view checkpoint, const CheckpointEntry& entry) {
    decision_.put(checkpoint, entry);
  }
  void put_attributes(const JobAttributes& attributes) { decision_.put_attributes(attributes); }
  void put_looked_over(std::string_view id, const LookedOver& looked) {
    decision_.put_looked_over(id, looked);
  }
  void remove(std::string_view checkpoint, const CheckpointEntry& entry) {
    decision_.remove(checkpoint, entry);
  }
  // And whatever there is by then (JobDecision::check()).
  void put(const LayoutSpec& spec) { decision_.put(spec); }
  void put_rules(std::string_view text) { decision_.put_rules(text); }
  void remove_rules() { decision_.remove_rules(); }
  void forget_looked_over(std::string_view id) { decision_.forget_looked_over(id); }

  Result<MetaTransaction> transaction() &&;

 private:
  template <class Value>
  const Value& read(const Value& known) {
    if (read_.insert(&known).second) decision_.rests_on(known);
    return known;
  }

  const JobPlace& place_;
  const JobKnowledge::Snapshot known_;
  std::set<const void*> read_;  // of that
  JobDecision decision_;
};

/// Of a decision that rests on no more than others read for it.
inline Result<bool> nothing_besides(JobUpdate&) { return true; }

}  // namespace ptc
