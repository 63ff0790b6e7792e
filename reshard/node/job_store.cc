#include "reshard/node/job_store.h"

#include <fcntl.h>
#include <fmt/ranges.h>
#include <spdlog/spdlog.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <map>
#include <thread>
#include <utility>

#include "reshard/cluster/lone_node.h"
#include "reshard/cluster/tell.h"
#include "reshard/cluster/tombstones.h"
#include "reshard/job/drain.h"
#include "reshard/job/job_place.h"
#include "reshard/job/job_record.h"
#include "reshard/job/names.h"
#include "reshard/job/staged_parts.h"
#include "reshard/move/space.h"
#include "reshard/node/agreement_follower.h"
#include "reshard/node/job_changes.h"
#include "reshard/node/job_table.h"
#include "reshard/node/store_contents.h"
#include "reshard/node/store_membership.h"
#include "reshard/node/time_for_others.h"
#include "store/base/file.h"
#include "store/base/json.h"
#include "store/base/mutex.h"
#include "store/base/random_id.h"
#include "store/base/wall_time.h"
#include "store/transport/device.h"

namespace ptc {
namespace {

constexpr unsigned kMostReshards = 64, kMostHashing = 8;  // at once, of all jobs
constexpr size_t kMostNamed = 32;             // of a job's files that are in no checkpoint
constexpr std::string_view kNameAll = "all";  // in PeerMethod::kHolds; "": one is enough

/// When this node's lease may have ended, since the epoch. 0: it has none, or it is not known.
int64_t lease_ended_ns(const Cluster& cluster) {
  using Clock = MetaLease::Clock;
  const std::shared_ptr<const MetaLease> lease = cluster.lease();
  const Clock::time_point ended = lease != nullptr ? lease->deadline() : Clock::time_point::min();
  if (ended == Clock::time_point::min() || ended > Clock::now()) return 0;
  return now_ns() - std::chrono::nanoseconds(Clock::now() - ended).count();
}

}  // namespace

struct JobStore::Impl {
  std::string directory;
  std::string memory_id, version;  // NodeNumbers
  std::string node;
  UniqueFd lock_fd;
  JobListener* listener = nullptr;
  std::unique_ptr<MetaClient> own_meta;  // of a cluster of one, as the next
  std::unique_ptr<LoneNode> lone_node;
  MetaClient* meta = nullptr;  // since open(), as the next
  Cluster* cluster = nullptr;
  std::unique_ptr<ImageStore> images;
  std::shared_ptr<SharedResults> results;
  std::unique_ptr<Executor> executor;
  std::unique_ptr<NodeReports> reports;
  // A reshard waits for other nodes most of the time, hashing for the memory.
  StepPool reshards{kMostReshards, "ptcfs-reshard"},
      hashing{std::clamp(std::thread::hardware_concurrency(), 1u, kMostHashing), "ptcfs-hash"};
  std::unique_ptr<RemovedCheckpoints> removed;
  Pace pace;
  PieceSizes pieces;
  bool reads_damaged = false;
  JobTable jobs;
  std::unique_ptr<StoreContents> contents;
  std::shared_ptr<const OwnStore> own_store;

  JobServices services() {
    return {meta,
            images.get(),
            executor.get(),
            results.get(),
            removed.get(),
            reports.get(),
            &reshards,
            &hashing,
            node,
            cluster,
            &pace,
            [this] { wake_scrubber(); },
            [this] { return follower->catch_up(); },
            pieces,
            reads_damaged,
            own_store};
  }
  JobRef make_job(const std::string& name, const std::string& id) {
    return JobRef(new Job(name, id, contents->job_dir(name), services(), listener));
  }

  std::unique_ptr<Follower> follower;
  /// Threads: any, also while it begins or ends.
  void wake_scrubber() {
    MutexLock lock(scrubber_mutex);
    if (scrubber != nullptr) scrubber->wake();
  }
  std::unique_ptr<Scrubber> exchange_scrubber(std::unique_ptr<Scrubber> next) {
    MutexLock lock(scrubber_mutex);
    return std::exchange(scrubber, std::move(next));
  }
  Mutex scrubber_mutex;
  std::unique_ptr<Scrubber> scrubber
      PTC_GUARDED_BY(scrubber_mutex);  // once all jobs are loaded; ends before what it looks at

  /// In steps, for etcd takes no more at once, the first of them with `puts` if all `compares`
  /// hold. By the others there is no such job: what belongs to one that was made meanwhile stays,
  /// and who made it has removed the rest.
  Result<> delete_keys(const std::string& job_key, const std::vector<std::string>& keys,
                       std::vector<std::pair<std::string, std::string>> puts,
                       std::vector<MetaTransaction::Compare> compares) {
    constexpr size_t kMostAtOnce = 64;
    for (size_t i = 0; i < keys.size(); i += kMostAtOnce) {
      MetaTransaction transaction;
      transaction.puts = std::exchange(puts, {});
      transaction.compares = std::exchange(compares, {{job_key, 0}});
      transaction.deletes.assign(keys.begin() + i,
                                 keys.begin() + std::min(keys.size(), i + kMostAtOnce));
      Result<int64_t> done = commit_fenced(*meta, *cluster, std::move(transaction));
      if (done.has_error() && done.error().code() == Code::kConflict && i > 0) break;
      PTC_TRY(std::move(done));
    }
    return ok();
  }
  std::string numbers_text(const JobStore& store) const;
  void add_what_others_say(std::map<std::string, NodeReport>& by_name) const;
  /// Takes over what other nodes decided, now.
  Result<> sync() { return follower->sync(); }
  /// Nobody else decides, and so what is agreed on is at hand; or he waits for ever.
  bool waits_for_all(std::chrono::milliseconds patience) const {
    return patience == patience.zero() || !cluster->shares_decisions();
  }
  Result<JobRef> make(const std::string& name, const JobAttributes& attributes,
                      JobChanges::Change* change);
  Result<> prepare(const std::string& name);
  /// Unless nobody wants it now; then nothing was done (Change::put_off).
  Result<JobRef> create(const std::string& name, const std::string& id,
                        const JobAttributes& attributes, JobChanges::Change* wanted_by);
  Result<JobRef> what_was_made(const std::string& name, const std::string& id);
  Result<> unmake(std::string_view name, bool force, std::string_view id,
                  std::chrono::milliseconds patience, JobChanges::Change* change);
  /// False, and nothing was done: whether the job is empty on the other nodes is to be asked first.
  /// `asked`: it is, of the job with this id. `wanted_by`: as of create().
  Result<bool> remove(std::string_view name, bool force, std::string_view id, bool asked,
                      JobChanges::Change* wanted_by);
  /// A change of jobs ended, and nobody was there to be told.
  void tell_jobs_changed();
  void note_unheard(const JobChanges::Wish& wish, const Result<JobRef>& outcome);
  Result<> check_empty_elsewhere(const WhichJob& job, std::chrono::milliseconds at_most);
  Result<UserFiles> user_files_on(const std::string& on, const WhichJob& job) const;
  Result<JobRef> find_asked(const WhichJob& which);
  Result<std::string> answer_about_job(const PeerRow& row, const JobRequest& request);
  Result<> service_changed();

  JobChanges job_changes{[this](const auto& wish, const auto& outcome) {
    note_unheard(wish, outcome);
  }};  // last: they use all of the above
};

JobStore::JobStore(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}

JobStore::~JobStore() {
  if (impl_ == nullptr) return;
  impl_->job_changes.stop();
  impl_->follower->stop();
  impl_->pace.stop();
  for (const JobRef& job : jobs()) job->stop();
  impl_->follower->note_last();
  (void)impl_->exchange_scrubber(nullptr);
}

void JobStore::note_last() {
  impl_->follower->stop();
  impl_->follower->note_last();
}

Result<std::unique_ptr<JobStore>> JobStore::open(const JobStoreOptions& options,
                                                 JobListener* listener) {
  auto impl = std::make_unique<Impl>();
  impl->directory = options.directory;
  impl->listener = listener;
  impl->node = options.node.empty() ? "localhost" : options.node;
  impl->version = options.version;
  impl->pieces = options.pieces;
  impl->reads_damaged = options.reads_damaged;
  // A lease that is broken raises SIGIO, which would end the process; see open_for_writing().
  std::signal(SIGIO, SIG_IGN);
  PTC_TRY(make_directory(AT_FDCWD, impl->directory));
  impl->memory_id = memory_id_of(impl->directory);
  PTC_TRY(impl->lock_fd, open_file(AT_FDCWD, impl->directory + "/lock", O_RDWR | O_CREAT));
  // A daemon that was just unmounted needs a moment to end.
  PTC_TRY(bool locked, lock_file(impl->lock_fd.get(), std::chrono::seconds(5)));
  if (!locked) return make_error(Code::kBusy, "in use by another ptcfs daemon");
  std::unique_ptr<StoreMembership> belongs;
  std::unique_ptr<Transport> by;
  std::function<std::unique_ptr<Follower>()> follower;  // once there is what follows
  if (options.cluster) {
    const ClusterServices& in = *options.cluster;
    impl->meta = in.meta;
    impl->cluster = in.cluster;
    by = in.transport();
    MembershipOptions membership{impl->directory, impl->node, in.name,         in.where,
                                 in.join,         in.begin,   in.check_let_in, in.join_as};
    PTC_TRY(belongs, StoreMembership::open(std::move(membership), *impl->meta, *impl->cluster));
    follower = [&, store = impl.get()] {
      return std::make_unique<AgreementFollower>(
          *store->meta, *store->cluster, std::move(belongs), store->jobs, *store->contents,
          listener, [store](const std::string& name, const std::string& id) {
            return store->make_job(name, id);
          });
    };
  } else {
    PTC_TRY(open_alone(impl->directory, impl->node));
    PTC_TRY(impl->own_meta, open_sqlite_meta(impl->directory + "/meta.db"));
    impl->lone_node = std::make_unique<LoneNode>(impl->node);
    impl->meta = impl->own_meta.get();
    impl->cluster = impl->lone_node.get();
    by = make_loopback_transport();
    follower = [] { return std::make_unique<Follower>(); };
  }
  PTC_TRY(impl->images, ImageStore::open(impl->directory + "/images",
                                         {.reserve = options.reserve, .devices = options.devices}));
  unsigned threads = options.copy_threads != 0 ? options.copy_threads
                                               : std::max(1u, std::thread::hardware_concurrency());
  impl->results = options.results != nullptr ? options.results : std::make_shared<SharedResults>();
  impl->removed = std::make_unique<RemovedCheckpoints>(*impl->cluster, impl->reshards);
  impl->reports = std::make_unique<NodeReports>(*impl->cluster);
  by = make_device_transport(options.devices, std::move(by));
  if (options.cluster) by = options.cluster->over_links(std::move(by));
  impl->executor = std::make_unique<Executor>(threads, std::move(by));
  PTC_TRY(make_directory(AT_FDCWD, impl->directory + "/jobs"));

  StoreContents& contents =
      *(impl->contents = std::make_unique<StoreContents>(impl->directory, *impl->images));
  PTC_TRY(impl->own_store,
          StagedParts::own_store(*impl->meta, *impl->cluster, contents.store_id()));
  impl->follower = follower();

  PTC_TRY(auto entries, impl->meta->list("jobs/"));
  PTC_TRY(auto removed, read_tombstones(*impl->meta));
  const std::map<std::string, std::string> names = jobs_in(entries);
  PTC_TRY(contents.settle_directories(names, removed));
  for (const auto& [name, id] : names) {
    PTC_TRY(contents.open_job_directory(name, id, removed));
    JobRef job = impl->make_job(name, id);
    Result<> loaded = job->load();
    if (loaded.has_error() && loaded.error().code() == Code::kNotFound) {
      PTC_TRY(contents.settle_removed_meanwhile(name, id, *impl->meta));
      continue;
    }
    PTC_TRY(std::move(loaded));
    for (const std::string& what : job->kept())
      contents.keep(fmt::format("jobs/{}/{}", name, what), "no checkpoint of its job names it");
    MutexLock change(impl->jobs.changes);
    impl->jobs.insert(job);
  }
  contents.settle_found_images(impl->jobs.list(), /*at_start=*/true);
  if (!impl->cluster->remembers_removals() && !removed.entries.empty() && !contents.has_left()) {
    std::vector<std::string> keys;
    for (const MetaEntry& entry : removed.entries) keys.push_back(entry.key);
    PTC_TRY(impl->delete_keys(keys.front(), keys, {}, {}));
  }
  (void)impl->exchange_scrubber(std::make_unique<Scrubber>(
      options.scrub, impl->pace, [store = impl.get()] { return store->jobs.list(); }));
  for (const JobRef& job : impl->jobs.list()) job->start();
  PTC_TRY(impl->follower->start());
  return std::unique_ptr<JobStore>(new JobStore(std::move(impl)));
}

std::optional<std::string> JobStore::distrusted() const { return impl_->cluster->distrusted(); }
std::optional<NodeService> JobStore::service() const {
  return service_of(*impl_->cluster, *impl_->follower, *impl_->meta);
}
std::vector<std::string> JobStore::kept() const { return impl_->contents->kept(); }

/// Each node has an incoming/ of its own.
Result<UserFiles> JobStore::Impl::user_files_on(const std::string& on, const WhichJob& job) const {
  if (on == cluster->self()) return user_files_in(contents->job_dir(job.name), kMostNamed);
  PTC_TRY(auto text, cluster->ask(on, PeerMethod::kHolds, request_about(job, kNameAll)));
  return UserFiles::from_text(text);
}

Result<> JobStore::Impl::check_empty_elsewhere(const WhichJob& job,
                                               std::chrono::milliseconds at_most) {
  const std::string request = request_about(job, "");
  std::vector<Cluster::Question> questions;
  for (const std::string& other : cluster->alive())
    if (other != cluster->self()) questions.push_back({other, request});
  const auto answers = cluster->ask_all(PeerMethod::kHolds, questions, {}, at_most);
  for (size_t i = 0; i < answers.size(); ++i) {
    if (answers[i].has_error()) return answers[i].error();
    if (const std::string& file = answers[i].value(); !file.empty())
      return make_error(Code::kBusy, "job {} holds {} on node {}", job.name, file,
                        questions[i].node);
  }
  return ok();
}

void JobStore::nodes_changed() {
  impl_->follower->want_sync();
  impl_->removed->nodes_changed();
}

/// Not another of its name.
Result<JobRef> JobStore::Impl::find_asked(const WhichJob& which) {
  const auto find = [&] {
    JobRef job = jobs.find(which.name);
    return job != nullptr && job->id() == which.id ? job : nullptr;
  };
  if (JobRef job = find()) return job;
  PTC_TRY(sync());  // made a moment ago, on the node that asks
  if (JobRef job = find()) return job;
  return make_error(Code::kNotFound, "job {} was removed{}", which.name,
                    jobs.find(which.name) != nullptr ? ", and another has its name by now" : "");
}

Result<std::string> JobStore::Impl::answer_about_job(const PeerRow& row,
                                                     const JobRequest& request) {
  if (row.handler == PeerHandler::kRemoved) {
    PTC_TRY(auto id, checkpoint_asked_of(request.body));
    if (removed->is_open_here(id)) return std::string("yes");
    const JobRef job = jobs.find(request.job.name);
    if (job == nullptr || job->id() != request.job.id) {
      const MutexLock taken_over(jobs.changes);  // its removal
      return std::string(removed->is_open_here(id) ? "yes" : "no");
    }
  }
  PTC_TRY(auto job, find_asked(request.job));
  if (row.handler == PeerHandler::kListener) {
    if (listener != nullptr) listener->data_set_changed(job->name());
    return std::string();
  }
  if (row.handler == PeerHandler::kStore) {
    if (request.body == kNameAll) {
      PTC_TRY(auto files, user_files_in(contents->job_dir(job->name()), kMostNamed));
      return files.to_text();
    }
    PTC_TRY(auto file, user_file_in(contents->job_dir(job->name())));
    return file.value_or("");
  }
  return job->answer(row.method, request.body);
}

Result<std::string> JobStore::answer(PeerMethod method, std::string_view request) {
  const PeerRow& row = row_of(method);
  PTC_TRY(check_request(row, request.size()));
  if (row.about == PeerAbout::kJob) {
    PTC_TRY(auto about, JobRequest::parse(request));
    return impl_->answer_about_job(row, about);
  }
  if (method == PeerMethod::kChanged) {
    PTC_TRY(impl_->follower->take_over());
    return std::string();
  }
  if (method == PeerMethod::kWithout) return impl_->removed->answer_without(request);
  if (method == PeerMethod::kNumbers) return impl_->numbers_text(*this);
  if (method == PeerMethod::kSpace) {
    PTC_TRY(const NodeRoom room, NodeRoom::of_store(*impl_->images, request));
    return room.to_text();
  }
  return invalid_argument("a store does not answer '{}'", row.name);
}

Result<> JobStore::drain(const std::string& node) {
  PTC_TRY(check_member(*impl_->cluster));
  PTC_TRY(impl_->sync());
  PTC_TRY(begin_drain(*impl_->meta, *impl_->cluster, jobs(), *impl_->images, node));
  spdlog::info("node {} is being drained", node);
  return impl_->service_changed();
}

Result<> JobStore::cancel_drain(const std::string& node) {
  PTC_TRY(ptc::cancel_drain(*impl_->meta, *impl_->cluster, node));
  spdlog::info("node {} is in service again", node);
  return impl_->service_changed();
}

Result<> JobStore::Impl::service_changed() {
  PTC_TRY(sync());
  tell_others(*cluster, "");
  return ok();
}

std::vector<std::string> JobStore::drained() const { return impl_->follower->drained(); }

uint64_t JobStore::bytes_on(std::string_view node) const {
  uint64_t bytes = 0;
  for (const JobRef& job : jobs()) bytes += job->bytes_on(node);
  return bytes;
}

NodeNumbers JobStore::numbers() const {
  NodeNumbers numbers;
  if (auto space = impl_->images->space()) {
    numbers.memory_total_bytes = space.value().total_bytes;
    numbers.memory_used_bytes =
        space.value().total_bytes - std::min(space.value().total_bytes, space.value().free_bytes);
  }
  numbers.memory_id = impl_->memory_id;
  numbers.version = impl_->version;
  numbers.time_ns = static_cast<uint64_t>(now_ns());
  for (const PeerNumbers& peer : traffic()) numbers.add(peer);
  return numbers;
}

std::vector<PeerNumbers> JobStore::traffic() const { return impl_->cluster->traffic(); }

std::string JobStore::Impl::numbers_text(const JobStore& store) const {
  NodeAnswer own{store.numbers(), {}};
  for (const JobRef& job : jobs.list())
    if (auto progress = job->own_progress())
      own.reshards.emplace(job->name(), *std::move(progress));
  return own.to_text();
}

std::vector<NodeReport> JobStore::node_reports() const {
  std::map<std::string, NodeReport> by_name;
  auto of = [&](const std::string& name) -> NodeReport& {
    return by_name.try_emplace(name, NodeReport{name}).first->second;
  };
  for (const JobRef& job : jobs())
    for (const CheckpointRef& checkpoint : job->checkpoints()) {
      const std::shared_ptr<const StoredState> stored = checkpoint->stored();
      for (size_t i = 0; i < stored->images.size(); ++i) {
        const std::string& node = stored->images[i].node;
        of(node.empty() ? impl_->node : node).stored_bytes += stored->layouts()[i].bytes;
      }
    }
  for (const std::string& name : drained()) of(name).draining = true;
  for (const std::string& name : nodes()) of(name).state = "up";
  impl_->add_what_others_say(by_name);
  NodeReport& own = of(impl_->node);
  if (std::string_view(own.state) != "up") {
    own.state = "fenced";
    own.since_ns = lease_ended_ns(*impl_->cluster);
  }
  own.numbers = numbers();
  own.age_seconds = 0;
  std::vector<NodeReport> reports;
  for (auto& [name, report] : by_name) reports.push_back(std::move(report));
  return reports;
}

void JobStore::Impl::add_what_others_say(std::map<std::string, NodeReport>& by_name) const {
  for (const Cluster::Seen& seen : cluster->seen()) {
    NodeReport& report = by_name.try_emplace(seen.node, NodeReport{seen.node}).first->second;
    const bool up = std::string_view(report.state) == "up";
    if (up == seen.there)
      report.since_ns = seen.since_ns;  // else it has just changed, and that is heard of soon
  }
  const auto now = std::chrono::steady_clock::now();
  for (auto& [name, heard] : reports->heard()) {
    const auto report = by_name.find(name);
    if (report == by_name.end() || std::string_view(report->second.state) != "up") continue;
    report->second.numbers = std::move(heard.answer.numbers);
    report->second.clock = heard.clock;
    report->second.age_seconds = std::chrono::duration<double>(now - heard.when).count();
  }
}

JobStore::Uncommitted JobStore::uncommitted_on(const std::string& node) const {
  Uncommitted all;
  bool silent = false;
  size_t others = 0;  // that a node that does not answer is not asked about
  for (const JobRef& job : jobs()) {
    if (silent) {
      ++others;
      continue;
    }
    const Result<UserFiles> files = impl_->user_files_on(node, {job->name(), job->id()});
    if (files.has_error()) {
      if (files.error().code() == Code::kNotFound) continue;  // it was removed meanwhile
      all.not_asked.push_back(fmt::format("job {}: {}", job->name(), files.error().message()));
      silent = files.error().code() == Code::kUnavailable;
      continue;
    }
    for (const std::string& name : files.value().names)
      all.found.push_back(fmt::format("{} of job {}", name, job->name()));
    all.names += files.value().names.size() + files.value().more;
    if (const uint64_t more = files.value().more; more > 0)
      all.found.push_back(fmt::format("and {} more of job {}", more, job->name()));
  }
  if (others > 0)
    all.not_asked.push_back(fmt::format("and {} more job{}", others, others == 1 ? "" : "s"));
  return all;
}

Result<JobRef> JobStore::create_job(const std::string& name, const JobAttributes& attributes,
                                    std::chrono::milliseconds patience) {
  PTC_TRY(check_name(name, "job", "status.json"));
  PTC_TRY(check_member(*impl_->cluster));
  const TimeForOthers with_others(patience);
  Impl& impl = *impl_;
  auto make = [&impl, name, attributes](JobChanges::Change* change) -> Result<JobRef> {
    return impl.make(name, attributes, change);
  };
  PTC_TRY(auto job, impl.waits_for_all(patience)
                        ? make(nullptr)
                        : impl.job_changes.ask({.name = name, .attributes = attributes}, patience,
                                               [make](auto& change) { return make(&change); }));
  tell_others(*impl.cluster, name, with_others.left());
  return job;
}

/// `change`: of somebody who may have left; null: he waits as long as it takes.
Result<JobRef> JobStore::Impl::make(const std::string& name, const JobAttributes& attributes,
                                    JobChanges::Change* change) {
  using Clock = std::chrono::steady_clock;
  constexpr auto kPrepared = std::chrono::seconds(2);  // others may have made and removed it since
  for (;;) {
    PTC_TRY(prepare(name));
    const Clock::time_point prepared = Clock::now();
    if (change != nullptr) {
      PTC_TRY(change->wait_for_somebody());
      if (Clock::now() - prepared > kPrepared) continue;
    }
    PTC_TRY(auto id, random_id());
    Result<JobRef> made = create(name, id, attributes, change);
    const bool in_doubt = made.has_error() && made.error().code() == Code::kInDoubt;
    if (change == nullptr || (!in_doubt && !change->put_off())) return made;
    if (!in_doubt) continue;
    spdlog::warn("job {}: whether it was made is not known yet: {}", name, made.error().message());
    JobRef job;
    PTC_TRY(change->until_done([&]() -> Result<> {
      PTC_TRY(meta->settle());
      PTC_TRY(job, what_was_made(name, id));
      return ok();
    }));
    if (job == nullptr) return make_error(Code::kUnavailable, "job {} was not made", name);
    return job;
  }
}

/// What is left under its name of an earlier job, if the removal of that was cut off, goes.
Result<> JobStore::Impl::prepare(const std::string& name) {
  MutexLock change(jobs.changes);
  (void)contents->carry_out_left();
  if (jobs.find(name) != nullptr)
    return make_error(Code::kAlreadyExists, "job {} exists already", name);
  const std::string prefix = "jobs/" + name;
  PTC_TRY(auto left, meta->list(prefix + "/"));
  std::vector<std::string> left_keys;
  for (MetaEntry& entry : left) left_keys.push_back(std::move(entry.key));
  PTC_TRY(auto there, meta->get(prefix));
  if (!there) {
    PTC_TRY(delete_keys(prefix, left_keys, {}, {{prefix, 0}}));
  }
  return ok();
}

Result<JobRef> JobStore::Impl::create(const std::string& name, const std::string& id,
                                      const JobAttributes& attributes,
                                      JobChanges::Change* wanted_by) {
  MutexLock change(jobs.changes);
  if (jobs.find(name) != nullptr)
    return make_error(Code::kAlreadyExists, "job {} exists already", name);
  if (wanted_by != nullptr && !wanted_by->wanted())
    return make_error(Code::kCancelled, "nobody waits for it");
  PTC_TRY(contents->open_job_directory(name, id, {}, /*is_new=*/true));
  JobDecision decision(name);
  decision.create(id, time_text(now_ns()));
  decision.put(LayoutEdit{.text = default_layout_text(), .layout = {}, .revision = 1});
  decision.put(InForce{.spec = {}, .revision = 1, .current = {}});
  if (attributes != JobAttributes()) decision.put_attributes(attributes);
  const Result<int64_t> decided = commit_fenced(*meta, *cluster, std::move(decision).transaction());
  if (decided.has_error()) {
    // While it is in doubt the directory may be a job's.
    if (decided.error().code() != Code::kInDoubt) (void)contents->carry_out({name, id, false});
    return decided.error();
  }
  JobRef job = make_job(name, id);
  PTC_TRY(job->load());
  job->start();
  jobs.insert(job);
  spdlog::info("job {} created", name);
  return job;
}

/// Of a job of which that was in doubt; null: nothing, and nothing is left of it.
Result<JobRef> JobStore::Impl::what_was_made(const std::string& name, const std::string& id) {
  PTC_TRY(const auto there, meta->get("jobs/" + name));
  if (there && job_id_of(there->value) == id) {
    JobRef job = jobs.find(name);  // the follower may have seen it already
    if (job == nullptr || job->id() != id) {
      PTC_TRY(follower->take_over());
      job = jobs.find(name);
    }
    if (job != nullptr && job->id() == id) return job;
    return make_error(Code::kUnavailable, "job {} is not known here yet", name);
  }
  MutexLock change(jobs.changes);
  (void)contents->carry_out({name, id, false});
  return JobRef();
}

Result<> JobStore::remove_job(std::string_view name, bool force, std::string_view id,
                              std::chrono::milliseconds patience) {
  PTC_TRY(check_member(*impl_->cluster));
  const TimeForOthers with_others(patience);
  Impl& impl = *impl_;
  JobChanges::Wish wish{.name = std::string(name), .removed = std::string(id)};
  if (const JobRef job = id.empty() ? impl.jobs.find(name) : nullptr) wish.removed = job->id();
  if (impl.waits_for_all(patience) || force || wish.removed.empty()) {
    PTC_TRY(impl.unmake(name, force, id, patience, nullptr));
  } else {
    // Others have less time, so that it is told which of them does not answer; never much less.
    const auto time = std::max(patience - patience / 16, std::chrono::milliseconds(1600));
    auto remove = [&impl, wish, time](auto& change) -> Result<JobRef> {
      PTC_TRY(impl.unmake(wish.name, false, wish.removed, time, &change));
      return JobRef();
    };
    PTC_TRY(impl.job_changes.ask(wish, patience, remove));
  }
  tell_others(*impl.cluster, std::string(name),
              std::max(with_others.left(), with_others.a_moment()));
  return ok();
}

Result<> JobStore::Impl::unmake(std::string_view name, bool force, std::string_view id,
                                std::chrono::milliseconds patience, JobChanges::Change* change) {
  std::optional<TimeForOthers> with_others(patience);
  (void)sync();  // what was removed on another node just now is no reason to refuse; the decision
                 // compares all
  // As before a checkpoint is removed.
  tell_others(*cluster, std::string(name), with_others->a_moment());
  std::string meant(id);
  for (bool done = false; !done;) {
    if (change != nullptr) {
      PTC_TRY(change->wait_for_somebody());
    }
    if (with_others->left() <= std::chrono::milliseconds(1)) with_others.emplace(patience);
    bool asked = false;
    if (JobRef job = jobs.find(name); job != nullptr && !force) {
      // Others may not answer for a while: without `changes`, for which all wait who make jobs,
      // remove them, or take over what is agreed.
      if (meant.empty()) meant = job->id();
      if (job->id() == meant && job->checkpoints().empty()) {
        PTC_TRY(check_empty_elsewhere({job->name(), meant}, with_others->left()));
        asked = true;
      }
    }
    const Result<bool> decided = remove(name, force, meant, asked, change);
    if (change != nullptr && change->put_off()) continue;
    if (change != nullptr && decided.has_error() && decided.error().code() == Code::kInDoubt) {
      spdlog::warn("job {}: whether it was removed is not known yet: {}", name,
                   decided.error().message());
      bool gone = false;
      PTC_TRY(change->until_done([&]() -> Result<> {
        PTC_TRY(meta->settle());
        PTC_TRY(gone, is_removed(*meta, removed_job_key(meant)));
        if (gone) {
          PTC_TRY(follower->take_over());
        }
        return ok();
      }));
      if (!gone) return make_error(Code::kUnavailable, "job {} was not removed", name);
      return ok();
    }
    PTC_TRY(done, decided);
  }
  return ok();
}

void JobStore::tell_jobs_changed() { impl_->tell_jobs_changed(); }

void JobStore::Impl::tell_jobs_changed() {
  MutexLock change(jobs.changes);
  if (listener != nullptr) listener->jobs_changed();
}

void JobStore::Impl::note_unheard(const JobChanges::Wish& wish, const Result<JobRef>& outcome) {
  const std::string_view what = wish.removed.empty() ? "made" : "removed";
  if (outcome.has_error())
    return spdlog::info("job {} was not {}: {}", wish.name, what, outcome.error().message());
  spdlog::info("job {} was {} when nobody waited for it any more", wish.name, what);
  tell_jobs_changed();
  tell_others(*cluster, wish.name);
}

Result<bool> JobStore::Impl::remove(std::string_view name, bool force, std::string_view id,
                                    bool asked, JobChanges::Change* wanted_by) {
  MutexLock change(jobs.changes);
  JobRef job = jobs.find(name);
  if (job == nullptr) return make_error(Code::kNotFound, "there is no job '{}'", name);
  if (!id.empty() && job->id() != id)
    return make_error(Code::kNotFound,
                      "job {} is another by now: the one that was meant was removed", name);
  if (!force) {
    size_t count = job->checkpoints().size();
    if (count > 0)
      return make_error(Code::kBusy, "job {} holds {} checkpoint{}", name, count,
                        count == 1 ? "" : "s");
    if (const std::vector<std::string> unreadable = job->unreadable(); !unreadable.empty())
      return make_error(Code::kBusy,
                        "job {} holds {}, which cannot be read here (its status.json says why)",
                        name, fmt::join(unreadable, ", "));
    PTC_TRY(auto file, user_file_in(contents->job_dir(name)));
    if (file) return make_error(Code::kBusy, "job {} holds {}", name, *file);
    if (!asked) return false;  // it has come, or its last checkpoint has gone, since
  }
  PTC_TRY(job->close());
  // What was looked at above may have changed. From here on nothing comes into it on this node, so
  // that what is found now holds until the job is gone; of other nodes: tombstones.h.
  std::unique_ptr<Seal> seal;
  auto seal_empty = [&]() -> Result<> {
    if (listener != nullptr) {
      PTC_TRY(seal, listener->seal_job(job->name()));
    }
    PTC_TRY(auto file, user_file_in(contents->job_dir(name)));
    if (file) return make_error(Code::kBusy, "job {} holds {}", name, *file);
    return ok();
  };
  if (!force) {
    if (Result<> empty = seal_empty(); empty.has_error()) {
      job->reopen();
      return empty.error();
    }
  }
  const std::string tombstone = removed_job_key(job->id());
  auto forget = [&]() -> Result<> {
    // Since the check something may have been committed; now nothing can be any more.
    if (!force && !job->checkpoints().empty())
      return make_error(Code::kBusy, "job {} holds a checkpoint", name);
    std::vector<std::string> checkpoints = job->unreadable();
    for (const CheckpointRef& checkpoint : job->checkpoints())
      checkpoints.push_back(checkpoint->name());
    for (const std::string& checkpoint : checkpoints)
      if (job->is_pinned(checkpoint))
        return Error(
            Code::kPermissionDenied,
            fmt::format("checkpoint {} of job {} is pinned; ptc pin {}/{} --remove takes that off",
                        checkpoint, name, name, checkpoint),
            EPERM);
    const std::string itself = fmt::format("jobs/{}", name);
    PTC_TRY(auto there, meta->get(itself));
    if (!there || job_id_of(there->value) != job->id())  // it, or another of its name
      return make_error(Code::kNotFound, "job {} was removed on another node", name);
    PTC_TRY(auto entries, meta->list(itself + "/"));
    const std::string in_force = itself + "/in_force", sequence = itself + "/sequence";
    std::vector<std::string> keys{itself, in_force, sequence, JobPlace::looked_key_of(name)};
    int64_t last_commit = 0;
    for (MetaEntry& entry : entries) {
      if (!force && entry.key.starts_with(fmt::format("jobs/{}/dataset/", name)))
        return make_error(Code::kBusy, "job {} holds a data set, which rm -r {}/dataset forgets",
                          name, name);
      if (!force && entry.key.starts_with(fmt::format("jobs/{}/checkpoints/", name)))
        return make_error(Code::kBusy,
                          "job {} holds a checkpoint, which another node has just committed", name);
      if (entry.key == sequence) last_commit = entry.revision;
      if (entry.key != in_force && entry.key != sequence) keys.push_back(std::move(entry.key));
    }
    PTC_TRY(StagedParts::add_keys(*meta, name, keys));
    std::vector<MetaTransaction::Compare> compares{{itself, there->revision},
                                                   {sequence, last_commit}};
    if (!force)  // nor is there a data set by then, of which each first decision puts one of these
      for (const char* key : {"source", "order", "consumed", "saved"})
        compares.push_back({fmt::format("{}/dataset/{}", itself, key), 0});
    if (wanted_by != nullptr && !wanted_by->wanted())
      return make_error(Code::kCancelled, "nobody waits for it");
    return delete_keys(itself, keys, {{tombstone, removed_job_text(name, force)}},
                       std::move(compares));
  };
  constexpr int kTries = 5;  // a commit may come in between, on another node
  Result<> forgotten = forget();
  const auto again = [&] {
    return forgotten.has_error() && forgotten.error().code() == Code::kConflict;
  };
  for (int tries = 1; tries < kTries && again(); ++tries) forgotten = forget();
  if (forgotten.has_error()) {
    job->reopen();
    return forgotten.error();
  }
  jobs.erase(job->name());
  job->forget();
  const bool gone = contents->carry_out({job->name(), job->id(), force}).has_value();
  if (gone) note_carried_out(*meta, *cluster, tombstone);
  spdlog::info("job {} removed", name);
  return true;
}

JobRef JobStore::find(std::string_view name) const { return impl_->jobs.find(name); }
std::vector<JobRef> JobStore::jobs() const { return impl_->jobs.list(); }
size_t JobStore::job_count() const { return impl_->jobs.count(); }
const std::string& JobStore::node() const { return impl_->node; }
std::vector<std::string> JobStore::nodes() const { return impl_->cluster->alive(); }
ImageStore& JobStore::images() { return *impl_->images; }
const std::string& JobStore::directory() const { return impl_->directory; }

}  // namespace ptc
