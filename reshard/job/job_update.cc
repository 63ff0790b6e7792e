#include "reshard/job/job_update.h"

#include "reshard/job/drain.h"
#include "reshard/job/leadership.h"

namespace ptc {

JobUpdate::JobUpdate(const JobPlace& place, JobKnowledge::Snapshot known, const Leadership* leader)
    : place_(place), known_(std::move(known)), decision_(place.name) {
  if (leader != nullptr) leader->name_in(decision_);
}

const CheckpointRecord* JobUpdate::record_of(std::string_view name) {
  const CheckpointRecord* record = known_->record_of(name);
  if (record == nullptr) decision_.rests_on_no_checkpoint(name);
  else if (read_.insert(record).second) decision_.rests_on(name, *record);
  return record;
}

const CheckpointRecord* JobUpdate::checkpoint(std::string_view name) {
  (void)record_of(name);
  const auto shown = known_->checkpoints.find(name);
  return shown == known_->checkpoints.end() ? nullptr : &shown->second;
}

Result<Agreed<AttributesInForce>> JobUpdate::glance_at_attributes() const {
  return JobRecord::read_attributes(*place_.services.meta, place_.name);
}

Result<Agreed<AttributesInForce>> JobUpdate::attributes() {
  PTC_TRY(auto now, glance_at_attributes());
  decision_.rests_on(now);
  return now;
}

Result<Agreed<RulesText>> JobUpdate::rules() {
  PTC_TRY(auto now, JobRecord::read_rules(*place_.services.meta, place_.name));
  decision_.rests_on(now);
  return now;
}

Result<Agreed<LookedOver>> JobUpdate::looked_over(std::string_view id) {
  PTC_TRY(auto now, JobRecord::read_looked_over(*place_.services.meta, place_.name, id));
  decision_.rests_on_looked_over(id, now.meta_revision);
  return now;
}

void JobUpdate::rests_on(const std::vector<MetaTransaction::Compare>& read) {
  decision_.rests_on_keys(read);
}

void JobUpdate::in_service(const std::string& node) {
  decision_.rests_on_key(drained_key(node), 0);
}

Result<MetaTransaction> JobUpdate::transaction() && {
  PTC_TRY(decision_.check());
  return std::move(decision_).transaction();
}

}  // namespace ptc
