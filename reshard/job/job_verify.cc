// What a job is asked about its bytes: whether they are right (verifier.h), and that they be mended
// (mender.h); by people, and by the scrub.
#include <algorithm>
#include <boost/json/array.hpp>
#include <boost/json/object.hpp>
#include <boost/json/serialize.hpp>
#include <chrono>
#include <thread>

#include "reshard/job/job_parts.h"
#include "reshard/move/placement.h"

namespace ptc {
namespace {

json::object report_of(const Checkpoint& checkpoint, const Findings& found) {
  return {{"checkpoint", checkpoint.name()},
          {"tensors", checkpoint.manifest().checksums.size()},
          {"images", found.images},
          {"bytes", found.bytes},
          {"away", json::array(found.away.begin(), found.away.end())}};
}

/// Whether all that is out of reach is so because the nodes that have it are, as far as is known.
bool is_only_away(const Checkpoint& checkpoint) {
  const std::shared_ptr<const StoredState> now = checkpoint.stored();
  return std::none_of(now->images.begin(), now->images.end(), [](const StoredImage& image) {
    return image.image == nullptr && (image.missing || image.node.empty());
  });
}

}  // namespace

Result<std::string> Job::verify(std::string_view checkpoint_name, std::stop_token stop) const {
  constexpr int kTries = 50;
  constexpr auto kAgain = std::chrono::milliseconds(100);
  constexpr auto kMended = std::chrono::seconds(10);
  for (int tries = 1;; ++tries) {
    // What others decided a moment ago; a node that is cut off looks at what it knows.
    (void)impl_->hear_others();
    PTC_TRY(auto record, impl_->verifier.find(checkpoint_name));
    const Checkpoint& checkpoint = *record.checkpoint;
    if (const auto loss = checkpoint.loss())
      return make_error(is_only_away(checkpoint) ? Code::kUnavailable : Code::kCorrupt, "{}",
                        *loss);
    Result<Findings> found = impl_->verifier.examine(record, nullptr, stop);
    if (found.has_error() && found.error().code() == Code::kBusy &&
        tries < kTries) {  // it is being moved
      std::this_thread::sleep_for(kAgain);
      continue;
    }
    if (found.has_error()) return std::move(found).error();
    // Once it is known it is not read for longer than mending takes; and what others knew to be
    // wrong may be right again.
    if (!found.value().good() || checkpoint.damage() != nullptr) {
      impl_->mender.note_damage(record.checkpoint->name());
      // Who hears of it may read it the next moment.
      impl_->mender.wait_until_tried(record.checkpoint->name(), kMended);
    }
    if (!found.value().good()) return make_error(Code::kCorrupt, "{}", found.value().message());
    return json::serialize(report_of(checkpoint, found.value()));
  }
}

Result<std::string> Job::repair(std::string_view checkpoint_name) {
  PTC_TRY(check_member(*impl_->services.cluster));
  PTC_TRY(auto found, impl_->mender.repair_and_tell(std::string(checkpoint_name)));
  if (!found.beyond.empty()) return make_error(Code::kCorrupt, "{}", found.message());
  PTC_TRY(auto record, impl_->verifier.find(checkpoint_name));
  json::object report = report_of(*record.checkpoint, found);
  report["repaired"] = json::array(found.replaced.begin(), found.replaced.end());
  return json::serialize(report);
}

std::optional<Job::ToLookOver> Job::next_to_look_over(int64_t since_ns) const {
  const Impl& impl = *impl_;
  const std::vector<std::string> there = impl.services.cluster->alive();
  const JobKnowledge::Snapshot known = impl.knowledge.now();
  std::optional<ToLookOver> next;
  for (const auto& [name, record] : known->checkpoints) {
    const std::shared_ptr<const StoredState>& stored = record.where;
    const auto first =
        std::find_if(stored->nodes.begin(), stored->nodes.end(), [&](const std::string& node) {
          return node.empty() || is_among(there, node);  // one that is alone is there
        });
    if (first == stored->nodes.end() || *first != impl.place.node_key()) continue;
    const auto looked = known->looked_over.find(record.id);
    int64_t last = looked != known->looked_over.end() ? looked->second.time_ns : 0;
    if (const int64_t committed = record.checkpoint->manifest().time_ns; committed >= since_ns)
      last = std::max(last, committed);
    // What was away then, and is there now, was not looked at.
    if (looked != known->looked_over.end() &&
        std::any_of(looked->second.away.begin(), looked->second.away.end(),
                    [&](const std::string& node) { return is_among(there, node); }))
      last = 0;
    if (!next || last < next->last_ns) next = ToLookOver{name, last};
  }
  return next;
}

Result<> Job::look_over(const std::string& name) { return impl_->mender.look_over(name); }

bool Job::see_to_damage() {
  const bool mended = impl_->mender.mend_noted();
  return impl_->mender.refresh() && mended;
}

uint64_t Job::stored_bytes_here() const { return bytes_on(impl_->place.node_key()); }

void Job::note_looked_over(const std::string& id, std::string_view text, int64_t meta_revision) {
  std::optional<LookedOver> looked = LookedOver::from_text(text);
  if (!looked) return;
  const std::set<std::string> news = impl_->knowledge.update([&](KnownJob& known) {
    Agreed<LookedOver>& latest = known.looked_over[id];
    if (latest.meta_revision < meta_revision) latest = {*std::move(looked), meta_revision};
    return known.show_damage(impl_->services.reads_damaged);
  });
  if (news.empty()) return;
  impl_->mender.note_to_refresh(news);
  impl_->services.mending_wanted();
}

}  // namespace ptc
