#include "tests/support/job_nodes.h"

#include <algorithm>
#include <boost/json/object.hpp>
#include <filesystem>

#include "store/base/json.h"
#include "store/transport/transport.h"

namespace ptc::testing {
namespace {

constexpr const char* kFirstLayout = R"({"format": "ptc-layout/1", "tp": 1, "pp": 1, "dp": 1})";

template <class Done>
void must_be_done(const Done& done) {
  if (done.has_value()) return;
  ADD_FAILURE() << done.error().message();
  std::abort();
}

}  // namespace

/// Who is a member never changes; a lease lasts as long as the node.
class JobNode::Peers final : public Cluster {
 public:
  Peers(JobNodes& all, std::string self) : all_(all), self_(std::move(self)) {
    lease_ = all_.meta().lease(std::chrono::seconds(60)).value();
    const MetaTransaction joins{.leased_puts = {{"nodes/" + self_, "here"}}, .lease = lease_.get()};
    must_be_done(all_.meta().commit(joins));
  }
  const std::string& self() const override { return self_; }
  std::vector<std::string> alive() const override { return all_.names_; }
  std::optional<MetaTransaction::Compare> fence() const override { return fence_of(self_); }
  MetaTransaction::Compare fence_of(const std::string& node) const override {
    const auto entry = all_.meta().get("nodes/" + node).value();
    return {"nodes/" + node, entry ? entry->revision : 0};
  }
  std::shared_ptr<const MetaLease> lease() const override { return lease_; }

 private:
  Result<std::string> call(const std::string& node, const PeerRow& row, const std::string& request,
                           std::chrono::milliseconds, std::stop_token) override {
    if (std::optional<Error> error = all_.asks(node, row.method)) return *std::move(error);
    PTC_TRY(const auto parsed, JobRequest::parse(request));
    for (const auto& other : all_.nodes_)
      if (other->place.services.node == node) return other->answer(row.method, parsed.body);
    return make_error(Code::kUnavailable, "there is no node '{}'", node);
  }

  JobNodes& all_;
  const std::string self_;
  std::shared_ptr<const MetaLease> lease_;
};

/// An item whose image is on another node is copied out of that node's store.
class JobNode::Fetches final : public Transport {
 public:
  explicit Fetches(JobNodes& all) : all_(all) {}
  using Transport::fetch;
  Result<> fetch(std::span<FetchItem> items, std::stop_token stop,
                 std::chrono::milliseconds) override {
    for (FetchItem& item : items) {
      if (item.source->is_here()) {
        PTC_TRY(local_->fetch(std::span(&item, 1), stop));
        continue;
      }
      const std::string& node = item.source->node();
      if (std::optional<Error> error = all_.fetches(node)) return *std::move(error);
      const auto other = std::find_if(all_.nodes_.begin(), all_.nodes_.end(), [&](const auto& one) {
        return one->place.services.node == node;
      });
      auto image = (*other)->store.open(item.source->id(), item.source->bytes());
      if (image.has_error()) return make_error(Code::kUnavailable, "{}", image.error().message());
      FetchItem there = item;
      there.source = image.value().get();
      PTC_TRY(local_->fetch(std::span(&there, 1), stop));
      item.begin = there.begin;
      item.target_at_begin = there.target_at_begin;
    }
    return ok();
  }

 private:
  JobNodes& all_;
  const std::unique_ptr<Transport> local_ = make_loopback_transport();
};

class JobNode::Meta final : public MetaClient {
 public:
  Meta(JobNodes& all, std::string self) : all_(all), self_(std::move(self)) {}
  Result<std::optional<MetaEntry>> get(std::string_view key) override {
    return all_.meta().get(key);
  }
  Result<std::vector<MetaEntry>> list(std::string_view prefix) override {
    return all_.meta().list(prefix);
  }
  Result<int64_t> commit(const MetaTransaction& transaction) override {
    if (std::optional<Error> error = all_.decides(self_, transaction)) return *std::move(error);
    return all_.meta().commit(transaction);
  }
  Result<> settle() override {
    if (std::optional<Error> error = all_.settles()) return *std::move(error);
    return ok();
  }
  Result<std::unique_ptr<MetaLease>> lease(std::chrono::seconds ttl) override {
    return all_.meta().lease(ttl);
  }
  Result<std::shared_ptr<void>> watch(std::string prefix, OnEvent on_event) override {
    return all_.meta().watch(std::move(prefix), std::move(on_event));
  }

 private:
  JobNodes& all_;
  const std::string self_;
};

class JobNode::CountedSeal final : public Seal {
 public:
  explicit CountedSeal(std::atomic<int>& count) : count_(count) { ++count_; }
  ~CountedSeal() override { --count_; }
  void committed() override {}

 private:
  std::atomic<int>& count_;
};

JobNode::JobNode(JobNodes& all, const std::string& name, JobNodes::Kind kind,
                 const std::string& images_dir)
    : all_(all),
      meta_(std::make_unique<Meta>(all, name)),
      cluster_(kind == JobNodes::Kind::kAlone ? std::unique_ptr<Cluster>(new LoneNode(name))
                                              : std::make_unique<Peers>(all, name)),
      images_(ImageStore::open(images_dir.empty() ? dir_.path().string() + "/images" : images_dir)
                  .value()),
      executor_(1, std::make_unique<Fetches>(all)),
      removed_(*cluster_, pool_),
      place{"job",
            "id-of-the-job",
            dir_.path().string() + "/job",
            {.meta = meta_.get(),
             .images = images_.get(),
             .executor = &executor_,
             .results = &results_,
             .removed = &removed_,
             .reports = nullptr,
             .reshards = &pool_,
             .hashing = &pool_,
             .node = name,
             .cluster = cluster_.get()},
            this},
      shelf(
          [this](const std::string& id) {
            PartShelf::ImageNames decided;
            const JobKnowledge::Snapshot now = knowledge.now();
            if (const CheckpointRecord* known = now->find_id(id))
              for (const StoredImage& image : known->where->images) decided.insert(image.id);
            return decided;
          },
          [this](const std::string& image) { (void)store.remove({image}); }),
      taken(place, peers, hashing,
            {[this]() -> Result<> {
               PTC_TRY(follow());
               return ok();
             },
             [this](const std::string& id) { shelf.drop(id); }, [] {}}),
      commits({place, peers, knowledge, files, decisions, maker, hashing, staged, taken, activities,
               doubts,
               [this]() -> Result<> {
                 PTC_TRY(follow());
                 return ok();
               },
               [] {}}),
      resharder({place, peers, knowledge, files, decisions, maker, verifier, mender, shelf,
                 activities, doubts,
                 [this]() -> Result<Followed> {
                   if (!cluster.shares_decisions()) return Followed();
                   return follow();
                 },
                 [this](const std::string& checkpoint, const std::string&) -> Result<> {
                   auto error = all_.removes(place.services.node, checkpoint);
                   if (error) return *std::move(error);
                   return ok();
                 },
                 [this] { ++looks_at_doubts; }}) {
  std::filesystem::create_directories(place.incoming_dir());
}

JobNode::~JobNode() {
  const auto attempts = commits.stop();
  activities.stop_all();
  taken.stop();
  arrivals.stop();
  resharder.stop();
  for (const auto& attempt : attempts) attempt->stop();
}

/// As Job::Impl::follow_with() does, of what tests do: checkpoints come and are stored otherwise.
Result<Followed> JobNode::follow() {
  MutexLock change(decisions.mutex());
  PTC_TRY(const auto given_up, taken.given_up());
  PTC_TRY(const auto state, JobRecord::read(*place.services.meta, place.name));
  const std::vector<std::string> alive = cluster.alive();
  knowledge.update([&](KnownJob& now) { now.alive = alive; });
  const JobKnowledge::Snapshot before = knowledge.now();
  std::map<std::string, CheckpointRecord, std::less<>> checkpoints;
  std::vector<std::pair<CheckpointRecord, std::shared_ptr<const StoredState>>> replaced;
  std::set<std::string> ids, decided;
  for (const auto& [name, entry] : state.checkpoints) {
    ids.insert(entry.id);
    const auto known = before->checkpoints.find(name);
    CheckpointRecord next;
    if (known != before->checkpoints.end()) next = known->second;
    FetchedFiles fetched;
    files.fetch(files.lacking(CheckpointFiles::files_of(entry), fetched), fetched);
    if (next.checkpoint == nullptr) {
      PTC_TRY(next, files.load(entry, fetched));
      decided.insert(entry.id);
    } else if (next.stored != entry.stored) {
      PTC_TRY(next.where, files.load_stored(*next.checkpoint, entry, fetched));
      decided.insert(entry.id);
      replaced.emplace_back(next, next.checkpoint->stored());
    }
    static_cast<Agreed<CheckpointEntry>&>(next) = entry;
    checkpoints.emplace(name, std::move(next));
  }
  knowledge.update([&](KnownJob& now) {
    const bool edited = now.saved.revision != state.saved.revision;
    const bool flipped = now.in_force.meta_revision != state.in_force.meta_revision;
    const bool wanted_again = !edited && now.saved.meta_revision != state.saved.meta_revision;
    now.saved = state.saved;
    now.in_force = state.in_force;
    now.sequence = state.sequence;
    now.custom_specs = state.custom_specs;
    now.followed_alive = alive;
    now.followed_whole = true;
    if (flipped || wanted_again) now.failed.reset();
    if (edited) activities.stop_reshards();
    for (const auto& [record, then] : replaced) record.checkpoint->replace_stored(record.where);
    now.checkpoints = std::move(checkpoints);
    if (cluster.shares_bytes() && (edited || flipped || !decided.empty())) now.look_anyway = true;
  });
  const JobKnowledge::Snapshot after = knowledge.now();
  for (const auto& [name, record] : after->checkpoints)
    if (decided.contains(record.id)) files.confirm(record);
  for (const auto& [record, then] : replaced) {
    files.remove_images_not_in(*then, *record.where);
    PTC_TRY(files.remove_stale(record.id, after->find_id(record.id)->stored));
  }
  for (const std::string& id : decided) shelf.drop(id);
  taken.settle(given_up, ids);
  knowledge.tell();
  return Followed();
}

void JobNode::settle_doubts() {
  doubts.settle([&]() -> Result<> {
    PTC_TRY(place.services.meta->settle());
    PTC_TRY(follow());
    return ok();
  });
}

/// As Job::Impl::answer() does.
Result<std::string> JobNode::answer(PeerMethod method, std::string_view request) {
  const PeerRow& row = row_of(method);
  if (row.handler == PeerHandler::kMaker) {
    PTC_TRY(auto part, maker.make_for(request));
    return part.to_text();
  }
  const size_t line_end = std::min(request.find('\n'), request.size());
  const std::string_view rest = request.substr(std::min(line_end + 1, request.size()));
  PTC_TRY(auto value,
          parse_json(request.substr(0, line_end), {.max_bytes = row.max_request_bytes}));
  const json::object& object = value.as_object();
  const std::string id(object.at("id").as_string());
  const auto text_of = [&](const char* key) { return std::string(object.at(key).as_string()); };
  switch (row.handler) {
    case PeerHandler::kTaken:
      return taken.answer(method, object, id, rest);
    case PeerHandler::kCommits:
      return commits.outcome_of(id);
    case PeerHandler::kArrivals:
      return arrivals.answer(object, id);
    case PeerHandler::kVerifier:
      return verifier.answer(object, id, text_of("stored"));
    case PeerHandler::kMender:
      if (method == PeerMethod::kMend) return mender.answer(object, id, text_of("stored"));
      return std::string();
    case PeerHandler::kShelf: {
      PTC_TRY(about(id));
      shelf.drop(id, object.at("epoch").as_int64());
      if (object.contains("stored")) files.remove_undecided(id, text_of("stored"));
      return std::string();
    }
    case PeerHandler::kRemoved:
      return std::string("no");
    case PeerHandler::kFiles: {
      if (method == PeerMethod::kFile) return files.piece(object, {id, text_of("file")});
      if (object.contains("from")) {
        PTC_TRY(taken.note(object, id));
      }
      PTC_TRY(files.keep(id, object, rest));
      return std::string();
    }
    default:
      return invalid_argument("a job does not answer '{}'", row.name);
  }
}

Result<> JobNode::edit(const std::string& text) {
  MutexLock change(decisions.mutex());
  PTC_TRY(const auto layout, Layout::parse(text));
  bool again = false;
  LayoutEdit edit{text, layout, 0};
  const auto edits = [&](JobUpdate& update) -> Result<bool> {
    again = text == update.saved().text;
    edit.revision = update.saved().revision + (again ? 0 : 1);
    update.put(edit);
    update.put(layout.spec);
    return true;
  };
  PTC_TRY(const int64_t decided, decisions.update(edits));
  knowledge.update([&](KnownJob& known) {
    known.saved = {edit, decided};
    known.custom_specs[layout.spec.name()] = layout.spec;
    known.forget_errors();
    if (again) known.failed.reset();
    else activities.stop_reshards();
  });
  knowledge.tell();
  return ok();
}

std::map<std::string, std::string> JobNode::write(const Sample& sample, const LayoutSpec& spec,
                                                  const std::string& name) {
  return write_ranks(sample, spec, incoming(name));
}

void JobNode::commit(const Sample& sample, const LayoutSpec& spec, const std::string& name) {
  (void)write(sample, spec, name);
  const Result<> committed = commits.commit(name, name, CommitsLed::Clock::time_point::max());
  ASSERT_TRUE(committed.has_value()) << committed.error().message();
}

CheckpointRecord JobNode::record(const std::string& name) const {
  return knowledge.now()->checkpoints.at(name);
}

std::set<std::string> JobNode::images() const {
  std::set<std::string> ids;
  const std::vector<ImageId> list = store.list().value();
  for (const ImageId& id : list) ids.insert(id.text);
  return ids;
}

std::set<std::string> JobNode::named_images() const {
  std::set<std::string> ids;
  const JobKnowledge::Snapshot now = knowledge.now();
  for (const auto& [name, known] : now->checkpoints)
    for (const StoredImage& image : known.where->images)
      if (image.node == place.node_key()) ids.insert(image.id);
  return ids;
}

std::set<std::string> JobNode::files_about() const {
  namespace fs = std::filesystem;
  std::set<std::string> names;
  for (const char* part : {"checkpoints", "committing"}) {
    std::error_code none;
    for (const auto& entry : fs::recursive_directory_iterator(fs::path(place.dir) / part, none))
      names.insert(fs::relative(entry.path(), place.dir).string());
  }
  return names;
}

Result<std::unique_ptr<Seal>> JobNode::seal(const std::string&, const std::string& name, GivesWay) {
  if (std::optional<Error> error = seals(name)) return *std::move(error);
  return std::unique_ptr<Seal>(std::make_unique<CountedSeal>(seals_now));
}

JobNodes::JobNodes(unsigned nodes, Kind kind, const std::string& images_of_first) {
  JobDecision creates("job");
  creates.create("id-of-the-job", "2026-01-01T00:00:00Z");
  creates.put(LayoutEdit{kFirstLayout, Layout::parse(kFirstLayout).value(), 1});
  creates.put(InForce{LayoutSpec(), 1, {}});
  must_be_done(meta_->commit(std::move(creates).transaction()));
  for (unsigned i = 0; i < nodes; ++i) names_.push_back(name(i));
  for (unsigned i = 0; i < nodes; ++i)
    nodes_.push_back(
        std::make_unique<JobNode>(*this, name(i), kind, i == 0 ? images_of_first : ""));
  follow();
}

JobNodes::~JobNodes() {
  for (const auto& node : nodes_) {  // none is asked from here on
    for (const auto& attempt : node->commits.stop()) attempt->stop();
    node->resharder.stop();
  }
}

void JobNodes::follow() {
  for (const auto& node : nodes_) {
    const auto followed = node->follow();
    ASSERT_TRUE(followed.has_value()) << followed.error().message();
  }
}

}  // namespace ptc::testing
