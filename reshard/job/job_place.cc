#include "reshard/job/job_place.h"

#include "reshard/cluster/tombstones.h"

namespace ptc {

Result<MetaTransaction::Compare> JobPlace::existence() const {
  const std::string key = "jobs/" + name;
  int64_t known = revision->load();
  if (known == 0) {
    PTC_TRY(const auto entry, services.meta->get(key));
    if (!entry || job_id_of(entry->value) != id)
      return make_error(Code::kNotFound, "job {} is gone", name);
    revision->store(known = entry->revision);
  }
  return MetaTransaction::Compare{key, known};
}

Result<int64_t> JobPlace::commit(MetaTransaction transaction) const {
  PTC_TRY(check_member(*services.cluster));  // before anything is read there
  PTC_TRY(transaction.compares.emplace_back(), existence());
  Result<int64_t> done = commit_fenced(*services.meta, *services.cluster, std::move(transaction));
  // It may be gone, or the agreed facts made anew.
  if (done.has_error() && done.error().code() == Code::kConflict) revision->store(0);
  return done;
}

}  // namespace ptc
