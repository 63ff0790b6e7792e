#include "reshard/job/job.h"

#include <fcntl.h>
#include <fmt/ranges.h>
#include <spdlog/spdlog.h>

#include <algorithm>
#include <boost/json/array.hpp>
#include <boost/json/object.hpp>
#include <boost/json/serialize.hpp>
#include <ctime>

#include "reshard/cluster/tell.h"
#include "reshard/cluster/tombstones.h"
#include "reshard/job/commit_attempt.h"
#include "reshard/job/drain.h"
#include "reshard/job/job_parts.h"
#include "reshard/job/wanted_states.h"
#include "reshard/move/change.h"
#include "reshard/move/placement.h"
#include "reshard/move/space.h"
#include "reshard/ptc/model_facts.h"
#include "reshard/ptc/rule_set.h"
#include "store/base/file.h"
#include "store/base/mutex.h"
#include "store/base/size_text.h"
#include "store/base/utf8.h"
#include "store/base/wall_time.h"

namespace ptc {

PartShelf::ImageNames Job::Impl::images_of(const std::string& id) const {
  PartShelf::ImageNames names;
  const JobKnowledge::Snapshot known = knowledge.now();
  if (const CheckpointRecord* record = known->find_id(id))
    for (const StoredImage& image : record->where->images) names.insert(image.id);
  return names;
}

/// What the job's files have been written as until now.
HashQueue::Expected Job::Impl::expected_of_files() const {
  const JobKnowledge::Snapshot known = knowledge.now();
  const CheckpointRecord* newest = known->latest();
  return {known->in_force.current ? known->in_force.spec : known->saved.layout.spec,
          newest != nullptr ? newest->checkpoint : nullptr};
}

Job::Job(std::string name, std::string id, std::string dir, JobServices services,
         JobListener* listener)
    : name_(std::move(name)),
      id_(std::move(id)),
      files_dir_(dir + "/files"),
      impl_(std::make_unique<Impl>(this, std::move(dir), services, listener)) {}

Job::~Job() { stop(); }

Result<> Job::load() { return impl_->load(); }
Result<> Job::sync() { return impl_->sync(); }
Result<Followed> Job::follow() { return impl_->follow(); }
Result<Followed> Job::follow_with(const FetchedFiles& fetched) {
  return impl_->follow_with(fetched);
}

Result<Followed> Job::follow_nodes_with(const FetchedFiles& fetched) {
  return impl_->follow_with(fetched, /*nodes_alone=*/true);
}
void Job::fetch(const std::vector<NamedFile>& files, FetchedFiles& fetched) {
  impl_->files.fetch(files, fetched);
}
Result<std::vector<NamedFile>> Job::load_with(const FetchedFiles& fetched) {
  return impl_->load_with(fetched);
}
MetaClient& Job::meta() const { return *impl_->services.meta; }
Result<> Job::may_decide() const { return check_member(*impl_->services.cluster); }
Result<int64_t> Job::decide(MetaTransaction transaction) {
  return impl_->place.commit(std::move(transaction));
}
Result<int64_t> Job::decide(const MetaTransaction& transaction,
                            const std::optional<AtMost>& at_most) {
  return impl_->decide(
      [&](JobUpdate& update) -> Result<bool> {
        update.add(transaction);
        return true;
      },
      at_most);
}
void Job::tell_data_set_changed() const {
  tell_others_of_data_set(*impl_->services.cluster, impl_->place.which());
}
Result<std::string> Job::answer(PeerMethod method, std::string_view request) {
  return impl_->answer(method, request);
}

std::string Job::events_text() const {
  impl_->note_events();
  return impl_->events.text();
}

void Job::start() {
  impl_->events.begin(*impl_->knowledge.now());
  impl_->resharder.start(*impl_->services.reshards);
  impl_->hashing.start(*impl_->services.hashing);
  impl_->staged.start(*impl_->services.hashing);
  impl_->housekeeping.start(*impl_->services.reshards, [this](const std::stop_token& stop) {
    return impl_->keep_house(stop);
  });
}

void Job::stop() {
  impl_->events.end();
  const std::vector<std::shared_ptr<CommitAttempt>> attempts = impl_->commits.stop();
  impl_->activities.stop_all();
  impl_->taken.stop();
  impl_->arrivals.stop();
  impl_->resharder.stop();
  impl_->hashing.stop();
  impl_->staged.stop();
  impl_->housekeeping.stop();
  for (const auto& attempt : attempts) attempt->stop();
}

Result<> Job::close() {
  if (impl_->commits.close()) return ok();
  return make_error(Code::kBusy, "a checkpoint of job {} is being committed", name_);
}

void Job::reopen() { impl_->commits.reopen(); }

std::optional<StepPool::Time> Job::Impl::keep_house(const std::stop_token& stop) {
  constexpr auto kTurn = std::chrono::seconds(2);
  doubts.settle([&]() -> Result<> {
    PTC_TRY(services.meta->settle());
    PTC_TRY(follow());
    return ok();
  });
  const bool commits_left = commits.look_after();
  taken.look_after(stop);
  if (!commits_left && !taken.any() && !doubts.any()) return std::nullopt;
  return std::min(std::chrono::steady_clock::now() + kTurn, taken.next_look());
}

std::optional<std::vector<ImageId>> Job::images_in_use() const {
  const JobKnowledge::Snapshot known = impl_->knowledge.now();
  if (!known->damaged.empty()) return std::nullopt;
  std::vector<ImageId> ids;
  for (const auto& [name, record] : known->checkpoints) {
    for (const StoredImage& image : record.where->images) ids.push_back({image.id});
  }
  return ids;
}

std::vector<std::string> Job::kept() const { return impl_->knowledge.now()->unnamed; }

Result<uint64_t> Job::Impl::bytes_to_write(const Checkpoint& checkpoint, const LayoutSpec& spec) {
  if (state_key(checkpoint.stored()->spec) == state_key(spec)) return uint64_t{0};
  PTC_TRY(auto targets, checkpoint.target_images(spec));
  uint64_t bytes = 0;
  for (const StateFile& target : *targets) bytes += target.layout.bytes;
  return bytes;
}

namespace {

constexpr uint64_t kMostParts = 8'000'000;  // of tensors, each some hundred bytes that describe it

/// Whether the model can be cut so.
Result<> check_spec(const Model& model, const LayoutSpec& spec) {
  PTC_TRY(model.check(spec));
  if (model.layers() > 0 && spec.chunks() > model.layers())
    return invalid_argument("{} is {}, and the model has {} layers: some {} would have none",
                            spec.vpp > 1 ? "pp·vpp" : "pp", spec.chunks(), model.layers(),
                            spec.vpp > 1 ? "stretches of layers" : "stages");
  return ok();
}

/// Whether all of its states are few enough to be computed at once. Of a layout by name one is
/// looked at after the other.
Result<> check_parts(const Model& model, const LayoutSpec& spec) {
  const ParallelConfig& sizes = spec.sizes;
  // A stage has its share of the tensors, a group of experts, too.
  const double parts = static_cast<double>(state_count(spec)) *
                       static_cast<double>(model.tensors().size()) /
                       (static_cast<double>(sizes.pp) * sizes.ep);
  if (parts > static_cast<double>(kMostParts))
    return invalid_argument(
        "{} tensors for {} ranks that differ make some {:.0f} parts, more than the {} that are "
        "computed at most; with more tp, pp or ep, or dp_shard, fewer ranks differ or each has "
        "less",
        model.tensors().size(), state_count(spec), parts, kMostParts);
  return ok();
}

/// Both, of a layout that is to be decided. Those that were are read as they always were, and
/// what they rest on keeps nobody from an edit of all else: to leave a node, for one.
Result<> check_new_spec(const Model& model, const LayoutSpec& spec, const KnownJob& known) {
  PTC_TRY(check_spec(model, spec));
  PTC_TRY(check_parts(model, spec));
  if (spec.chunks() == 1 && !spec.stages.empty() && model.layers() > 0 &&
      spec.stages != known.saved.layout.spec.stages) {
    PTC_TRY(stage_boundaries(spec, model.layers()));
  }
  for (const LayoutSpec* decided : {&known.in_force.spec, &known.saved.layout.spec})
    if (same_stages_and_experts(spec, *decided)) return ok();
  return check_facts(model, spec);
}

/// The key of layout.json that keeps `spec` from fitting: with its default the model would fit.
std::string blamed_key(const Model& model, const LayoutSpec& spec, const KnownJob& known) {
  auto fits_with = [&](auto&& change) {
    LayoutSpec other = spec;
    change(other);
    return check_new_spec(model, other, known).has_value();
  };
  if (!spec.stages.empty() && fits_with([](LayoutSpec& other) { other.forget_stages(); }))
    return "stages";
  if (spec.vpp > 1 && fits_with([](LayoutSpec& other) { other.vpp = 1, other.forget_stages(); }))
    return "vpp";
  if (spec.sizes.pp > 1 && fits_with([](LayoutSpec& other) { other.sizes.pp = 1; })) return "pp";
  if (spec.sizes.etp != 0 && fits_with([](LayoutSpec& other) { other.sizes.etp = 0; }))
    return "etp";
  if (fits_with([](LayoutSpec& other) { other.optimizer = OptimizerCut::kReplicated; }))
    return "optimizer";
  if (spec.sizes.tp > 1 && fits_with([](LayoutSpec& other) { other.sizes.tp = 1; })) return "tp";
  if (spec.sizes.ep > 1 && fits_with([](LayoutSpec& other) { other.sizes.ep = 1; })) return "ep";
  return spec.sizes.tp > 1 ? "tp" : spec.sizes.ep > 1 ? "ep" : "pp";
}

}  // namespace

Result<> Job::Impl::check_layout(const std::string& text, const Layout& wanted,
                                 const KnownJob& known) const {
  std::map<std::string_view, size_t> rank_of;
  const std::vector<std::string> nodes = services.cluster->alive();
  const std::vector<std::string>& not_in_service = known.drained;
  for (size_t i = 0; i < wanted.devices.size(); ++i) {
    const std::string node = node_of(wanted.devices[i]);
    if (std::find(nodes.begin(), nodes.end(), node) == nodes.end())
      return invalid_argument("{}: node '{}' is not part of this cluster (nodes: {})",
                              json_place(text, {"devices", std::to_string(i)}), node,
                              fmt::join(nodes, ", "));
    if (std::find(not_in_service.begin(), not_in_service.end(), node) != not_in_service.end())
      return invalid_argument(
          "{}: node '{}' is being drained: name another, or take it into service "
          "again (ptc drain {} --cancel)",
          json_place(text, {"devices", std::to_string(i)}), node, node);
    if (auto [before, is_new] = rank_of.try_emplace(wanted.devices[i], i); !is_new)
      return invalid_argument("{}: device '{}' is given to rank {} already",
                              json_place(text, {"devices", std::to_string(i)}), wanted.devices[i],
                              before->second);
  }
  CheckpointRef newest;
  uint64_t given_back = 0;  // by the reshard that this edit would end
  if (const CheckpointRecord* record = known.latest()) newest = record->checkpoint;
  if (const auto shown = activities.reshard(); shown && shown->phase == "moving")
    given_back = shown->bytes_total;
  if (wanted.in_devices) {
    Result<> there = check_devices(place, wanted, nodes_in_service(place, known));
    if (there.has_error())
      return std::move(there).error().with_context(json_place(text, {"memory"}));
  }
  if (newest == nullptr) return ok();
  const auto model = newest->model_under(wanted.spec);
  if (model.has_error())
    return Error(model.error())
        .with_context(fmt::format("{}: these rules do not fit checkpoint {}",
                                  json_place(text, {"rules"}), newest->name()));
  Result<> fits = check_new_spec(*model.value(), wanted.spec, known);
  if (fits.has_error())
    return std::move(fits).error().with_context(
        fmt::format("{}: layout {} does not fit checkpoint {}",
                    json_place(text, {blamed_key(*model.value(), wanted.spec, known)}),
                    wanted.spec.name(), newest->name()));
  const std::optional<std::string> loss = newest->loss();
  if (loss && state_key(wanted.spec) != state_key(newest->stored()->spec))
    return invalid_argument("{}; no other layout can be made of it", *loss);
  if (services.cluster->shares_bytes() || uses_devices(wanted, *newest->stored())) {
    if (loss) return ok();  // nothing can be planned
    const std::shared_ptr<const StoredState> stored = newest->stored();
    PTC_TRY(auto state, wanted_state(place, *newest, wanted, nodes_in_service(place, known)));
    PTC_TRY(auto plan, plan_change(*newest, *stored, state));
    BytesByPlace needed;
    add_bytes(*plan, *stored, needed);
    if (const auto found = needed.find({place.node_key()}); found != needed.end())
      found->second -= std::min(found->second, given_back);
    Result<> room = check_space(*services.cluster, *services.images, needed);
    // A node that does not answer now is seen to when the files are moved.
    if (room.has_error() && room.error().code() == Code::kUnavailable) return ok();
    return room;
  }
  PTC_TRY(uint64_t needed, bytes_to_write(*newest, wanted.spec));
  PTC_TRY(auto space, services.images->space());
  if (needed > space.free_bytes + given_back)
    return invalid_argument(
        "not enough memory on node {}: layout {} of checkpoint {} needs {} beside "
        "what is there, {} of {} are free; remove checkpoints (ptc rm), or give "
        "the store more (ptcfs --memory)",
        services.node, wanted.spec.name(), newest->name(), format_size(needed),
        format_size(space.free_bytes), format_size(space.total_bytes));
  return ok();
}

/// What lies on a node that has come back is within reach a moment later than the node is there:
/// until then no layout is refused for want of it.
Result<> Job::Impl::see_what_came_back() {
  CheckpointRef newest;
  {
    const JobKnowledge::Snapshot known = knowledge.now();
    if (const CheckpointRecord* record = known->latest()) newest = record->checkpoint;
  }
  if (newest == nullptr || !newest->loss()) return ok();
  (void)newest->catch_up();
  const std::optional<std::string> loss = newest->loss();
  if (!loss) return ok();
  const std::vector<std::string> there = services.cluster->alive();
  for (const std::shared_ptr<const StoredState> now = newest->stored();
       const StoredImage& image : now->images)
    if (image.image == nullptr && !image.missing && is_among(there, image.node))
      return make_error(Code::kUnavailable, "{}; {} has just come back: save the layout again",
                        *loss, image.node);
  return ok();
}

std::string Job::plan_json() const { return impl_->knowledge.now()->shown_plan().json; }

std::string Job::plan_svg() const {
  const JobKnowledge::Snapshot known = impl_->knowledge.now();
  const PlanTexts& plan = known->shown_plan();
  return plan.svg.empty() ? ptc::plan_svg({.job = name_}) : plan.svg;
}

std::optional<std::string> Job::current_target() const {
  const JobKnowledge::Snapshot known = impl_->knowledge.now();
  if (!known->in_force.current) return std::nullopt;
  return fmt::format("checkpoints/{}/layouts/{}", *known->in_force.current,
                     known->in_force.spec.name());
}

std::vector<CheckpointRef> Job::checkpoints() const {
  const JobKnowledge::Snapshot known = impl_->knowledge.now();
  std::map<std::pair<int64_t, std::string>, CheckpointRef> by_sequence;
  for (const auto& [name, record] : known->checkpoints)
    by_sequence.emplace(std::pair(record.sequence, name), record.checkpoint);
  std::vector<CheckpointRef> list;
  for (auto& [sequence, checkpoint] : by_sequence) list.push_back(std::move(checkpoint));
  return list;
}

std::vector<std::string> Job::unreadable() const {
  const JobKnowledge::Snapshot known = impl_->knowledge.now();
  std::vector<std::string> names;
  for (const auto& [name, one] : known->damaged) names.push_back(name);
  return names;
}

CheckpointRef Job::find_checkpoint(std::string_view name) const {
  const JobKnowledge::Snapshot known = impl_->knowledge.now();
  const auto it = known->checkpoints.find(name);
  return it == known->checkpoints.end() ? nullptr : it->second.checkpoint;
}

Result<LayoutSpec> Job::find_layout(const Checkpoint& checkpoint, std::string_view name) const {
  const JobKnowledge::Snapshot known = impl_->knowledge.now();
  Result<LayoutSpec> spec = Error(Code::kNotFound, "no such layout");
  const std::string_view rules = LayoutSpec::rules_in_name(name);
  if (const auto it = known->custom_specs.find(name); it != known->custom_specs.end()) {
    spec = it->second;
  } else if (!rules.empty()) {  // of other sizes than those that were saved with these
    const LayoutRules these = known->rules_of_id(rules);
    if (these) spec = LayoutSpec::from_name(name.substr(0, name.rfind('-')));
    if (spec.has_value()) spec.value().rules = these;
    if (spec.has_value() && spec.value().name() != name) spec = Error(Code::kNotFound, "");
  } else if (name.find('+') == std::string_view::npos) {
    spec = LayoutSpec::from_name(name);
  }
  if (spec.has_error()) return make_error(Code::kNotFound, "'{}' is no layout", name);
  const auto model = checkpoint.model_under(spec.value());
  if (model.has_error()) return Error(Code::kNotFound, model.error().message());
  Result<> fits = check_spec(*model.value(), spec.value());
  if (fits.has_value()) fits = checkpoint.check_facts_under(spec.value());
  if (fits.has_error()) return Error(Code::kNotFound, fits.error().message());
  return spec;
}

std::vector<std::string> Job::materialised_layouts(const Checkpoint& checkpoint) const {
  return {checkpoint.stored()->spec.name()};
}

void Job::note_closed(const std::string& path) {
  impl_->staged.closed(path);
  impl_->hashing.closed(path);
}
void Job::note_moved_in(const std::string& path) { impl_->staged.closed(path + "/"); }
void Job::note_writer(uint64_t inode) { impl_->hashing.hashes().forget(inode); }

Result<> Job::commit(const std::string& incoming, const std::string& name,
                     std::chrono::milliseconds patience) {
  constexpr auto kTellTime =
      std::chrono::milliseconds(200);  // of one that waits for no longer than that
  const bool forever = patience == patience.max();
  PTC_TRY(impl_->commits.commit(
      incoming, name,
      forever ? CommitsLed::Clock::time_point::max() : CommitsLed::Clock::now() + patience));
  if (forever) tell_others(*impl_->services.cluster, name_);
  else tell_others(*impl_->services.cluster, name_, kTellTime);
  return ok();
}

Result<> Job::remove_checkpoint(std::string_view name, std::string_view which) {
  PTC_TRY(check_member(*impl_->services.cluster));
  std::string id(which);
  auto known_id = [&] {
    const JobKnowledge::Snapshot known = impl_->knowledge.now();
    const CheckpointRecord* record = known->record_of(name);
    return record != nullptr ? record->id : std::string();
  };
  if (id.empty()) id = known_id();
  PTC_TRY(impl_->hear_others());
  // Where its bytes lie now all shall know, also those who have a file of it open.
  tell_others(*impl_->services.cluster, name_);
  if (id.empty()) id = known_id();
  constexpr int kTries = 10;
  Result<> removed = impl_->remove(std::string(name), id, /*only_unused=*/false);
  // Another node may have decided something about it, a flip for one, that is not known here yet.
  for (int tries = 1;
       tries < kTries && removed.has_error() && removed.error().code() == Code::kConflict;
       ++tries) {
    PTC_TRY(impl_->follow());
    removed = impl_->remove(std::string(name), id, /*only_unused=*/false);
  }
  PTC_TRY(std::move(removed));
  tell_others(*impl_->services.cluster, name_);
  return ok();
}

Result<> Job::pin_checkpoint(std::string_view name, bool pinned, std::string_view id) {
  PTC_TRY(impl_->pin(name, pinned, id));
  tell_others(*impl_->services.cluster, name_);
  return ok();
}

namespace {

Result<> check_id(std::string_view job, std::string_view name, std::string_view id,
                  const CheckpointRecord& record) {
  if (id.empty() || record.id == id) return ok();
  return make_error(Code::kNotFound,
                    "checkpoint {} of job {} is another by now: the one that was meant was removed",
                    name, job);
}

}  // namespace

Result<> Job::Impl::pin(std::string_view name, bool pinned, std::string_view id) {
  MutexLock change(decisions.mutex());
  CheckpointRecord record;
  const auto pins = [&](JobUpdate& update) -> Result<bool> {
    const CheckpointRecord* known = update.record_of(name);
    if (known == nullptr)
      return make_error(Code::kNotFound, "job {} has no checkpoint '{}'", job->name(), name);
    PTC_TRY(check_id(job->name(), name, id, *known));
    if (known->pinned == pinned) return false;
    record = *known;
    record.pinned = pinned;
    update.put(name, record);
    return true;
  };
  PTC_TRY(record.meta_revision, decisions.update(pins));
  if (record.meta_revision == 0) return ok();
  knowledge.update([&](KnownJob& known) {
    if (const auto it = known.checkpoints.find(name); it != known.checkpoints.end())
      it->second = record;
    else if (const auto one = known.damaged.find(name); one != known.damaged.end())
      one->second.record = record;
  });
  knowledge.tell();  // it may be one too many now
  spdlog::info("job {}: checkpoint {} {}", job->name(), name,
               pinned ? "pinned" : "not pinned any more");
  return ok();
}

bool Job::is_pinned(std::string_view checkpoint) const {
  const JobKnowledge::Snapshot now = impl_->knowledge.now();
  const CheckpointRecord* known = now->record_of(checkpoint);
  return known != nullptr && known->pinned;
}

Result<std::string> Job::dry_run(const std::string& layout_text) const {
  PTC_TRY(auto wanted, read_layout(layout_text));
  const JobKnowledge::Snapshot known = impl_->knowledge.now();
  PTC_TRY(impl_->check_layout(layout_text, wanted, *known));
  CheckpointRef newest;
  if (const CheckpointRecord* record = known->latest()) newest = record->checkpoint;
  if (newest == nullptr)
    return make_error(Code::kNotFound, "job {} has no checkpoint yet: nothing would move", name_);
  auto start = std::chrono::steady_clock::now();
  std::shared_ptr<const StoredState> stored = newest->stored();
  PTC_TRY(auto state,
          wanted_state(impl_->place, *newest, wanted, nodes_in_service(impl_->place, *known)));
  PTC_TRY(auto plan, plan_change(*newest, *stored, state));
  std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
  return PlanReport(name_, impl_->services.node, *newest, *stored, wanted.spec, *plan)
      .texts("dry-run", seconds.count())
      .json;
}

void Job::wait_settled() {
  impl_->knowledge.wait([&](const KnownJob& known) { return impl_->at_rest(known); });
}

bool Job::is_settled() const { return impl_->at_rest(*impl_->knowledge.now()); }

void Job::forget() {
  stop();
  impl_->knowledge.update([](KnownJob& now) { now.removed = true; });
  const JobKnowledge::Snapshot known = impl_->knowledge.now();
  for (const auto& [name, record] : known->checkpoints) {
    impl_->services.removed->note(record.id, record.checkpoint);
    impl_->remove_files_of(record);
  }
  // Somebody may hold the job for long, and no images with it.
  impl_->knowledge.update([](KnownJob& now) {
    for (auto& [name, record] : now.checkpoints) record.where = record.checkpoint->stored();
  });
  if (impl_->place.listener != nullptr) impl_->place.listener->job_removed(name_);
}

Result<> Job::Impl::remove(const std::string& name, std::string_view id, bool only_unused) {
  MutexLock change(decisions.mutex());
  CheckpointRecord record;
  InForce next;
  bool was_current = false;
  const auto removes = [&](JobUpdate& update) -> Result<bool> {
    const CheckpointRecord* it = update.record_of(name);
    if (it == nullptr || (it->checkpoint == nullptr && only_unused))
      return make_error(Code::kNotFound, "job {} has no checkpoint '{}'", job->name(), name);
    record = *it;
    PTC_TRY(check_id(job->name(), name, id, record));
    if (record.pinned)
      return Error(Code::kPermissionDenied,
                   fmt::format("checkpoint {} is pinned; ptc pin {}/{} --remove takes that off",
                               name, job->name(), name),
                   EPERM);
    next = update.in_force();
    was_current = next.current == name;
    if (only_unused && (record.checkpoint->in_use() || was_current))
      return make_error(Code::kBusy, "checkpoint {} is being read", name);
    activities.stop_with(name);
    update.remove(name, record);
    if (was_current) {
      next.current.reset();
      update.put(next);
    }
    return true;
  };
  PTC_TRY(int64_t meta_revision, decisions.update(removes));
  knowledge.update([&](KnownJob& known) {
    if (record.checkpoint != nullptr) services.removed->note(record.id, record.checkpoint);
    known.checkpoints.erase(name);
    if (const auto one = known.damaged.find(name);
        one != known.damaged.end() && one->second.record.id == record.id)
      known.damaged.erase(one);
    if (was_current) known.in_force = {next, meta_revision};
    known.failed.reset();
    if (listener != nullptr) listener->names_changed();
  });
  knowledge.tell();
  if (listener != nullptr) listener->checkpoint_changed(job->name(), name);
  if (record.checkpoint != nullptr) remove_files_of(record);
  else {
    PTC_TRY(remove_damaged(record.id));
  }
  note_carried_out(*services.meta, *services.cluster, removed_checkpoint_key(record.id));
  spdlog::info("job {}: checkpoint {} removed", job->name(), name);
  return ok();
}

uint64_t Job::bytes_on(std::string_view node) const {
  return impl_->knowledge.now()->bytes_on(node);
}

std::optional<uint64_t> Job::rank_on(std::string_view node) const {
  const JobKnowledge::Snapshot known = impl_->knowledge.now();
  const std::vector<std::string>& devices = known->saved.layout.devices;
  for (uint64_t rank = 0; rank < devices.size(); ++rank)
    if (node_of(devices[rank]) == node) return rank;
  return std::nullopt;
}

Result<> Job::add_bytes_without(const std::string& node, BytesByPlace& bytes) const {
  const JobKnowledge::Snapshot known = impl_->knowledge.now();
  std::vector<std::string> nodes = nodes_in_service(impl_->place, *known);
  std::erase(nodes, node);
  const CheckpointRecord* newest = known->latest();
  for (const auto& [name, record] : known->checkpoints) {
    const Checkpoint& checkpoint = *record.checkpoint;
    Result<WantedState> state =
        &record == newest ? wanted_state(impl_->place, checkpoint, known->saved.layout, nodes)
                          : where_it_is(impl_->place, record, known->saved.layout.replicas, nodes);
    if (state.has_error()) return std::move(state).error();
    const std::shared_ptr<const StoredState>& stored = record.where;
    Result<std::shared_ptr<const ChangePlan>> plan =
        plan_change(checkpoint, *stored, state.value());
    // What is lost already, nobody can move.
    if (plan.has_error() && plan.error().code() == Code::kCorrupt && checkpoint.loss()) continue;
    if (plan.has_error())
      return std::move(plan).error().with_context(
          fmt::format("job {}, checkpoint {}", name_, checkpoint.name()));
    add_bytes(*plan.value(), *stored, bytes);
  }
  return ok();
}

}  // namespace ptc
