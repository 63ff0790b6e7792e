#include "reshard/job/job_store.h"

#include <fcntl.h>
#include <spdlog/spdlog.h>
#include <sys/stat.h>
#include <unistd.h>

#include <boost/json/object.hpp>
#include <boost/json/serialize.hpp>
#include <chrono>
#include <csignal>
#include <filesystem>
#include <map>
#include <set>
#include <thread>

#include "reshard/job/drain.h"
#include "reshard/job/job_impl.h"
#include "reshard/job/space.h"
#include "reshard/job/tell.h"
#include "store/base/file.h"
#include "store/base/json.h"
#include "store/base/utf8.h"

namespace ptc {
namespace {

Result<> check_job_name(std::string_view name) {
  if (name.empty() || name[0] == '.' || name.size() > 255 || name.find('/') != std::string_view::npos)
    return invalid_argument("'{}' is no name for a job", name);
  if (!is_utf8(name))
    return invalid_argument("the name of the job, {}, is not UTF-8, and could not be written in "
                            "status.json", quoted(name));
  return ok();
}

// Ordinary files of the user's own that a job directory holds beside an empty incoming/.
Result<std::optional<std::string>> user_file_in(const std::string& files_dir) {
  namespace fs = std::filesystem;
  std::error_code error;
  for (fs::directory_iterator it(files_dir + "/incoming", error), end; !error && it != end;)
    return std::optional("incoming/" + it->path().filename().string());
  if (error) return errno_error(error.value(), "reading " + files_dir + "/incoming");
  for (fs::directory_iterator it(files_dir, error), end; !error && it != end; it.increment(error))
    if (it->path().filename() == "dataset") {
      if (!std::filesystem::is_empty(it->path(), error)) return std::optional<std::string>("dataset/");
    } else if (it->path().filename() != "incoming") return std::optional(it->path().filename().string());
  if (error) return errno_error(error.value(), "reading " + files_dir);
  return std::optional<std::string>();
}

bool holds_anything(const std::string& directory) {
  std::error_code error;
  return std::filesystem::exists(directory, error) && !std::filesystem::is_empty(directory, error);
}

}  // namespace

struct JobStore::Impl {
  std::string directory;
  std::string node;
  UniqueFd lock_fd;
  JobListener* listener = nullptr;
  std::unique_ptr<MetaClient> own_meta;  // of a cluster of one
  MetaClient* meta = nullptr;
  Cluster* cluster = nullptr;
  std::unique_ptr<ImageStore> images;
  std::shared_ptr<SharedResults> results;
  std::unique_ptr<Executor> executor;
  std::unique_ptr<RemovedCheckpoints> removed;
  std::mutex changes;                              // create and remove, one at a time
  mutable std::mutex mutex;
  std::map<std::string, JobRef, std::less<>> jobs;  // guarded by mutex
  std::vector<std::string> drained;                 // guarded by mutex

  std::string job_dir(std::string_view name) const { return fmt::format("{}/jobs/{}", directory, name); }
  JobServices services() const { return {meta, images.get(), executor.get(), results.get(), removed.get(), node, cluster}; }

  // In a cluster: follows what other nodes decide.
  std::mutex sync_mutex;
  std::condition_variable_any sync_wanted;
  bool stale = false;  // guarded by sync_mutex
  std::shared_ptr<void> watch, drained_watch;
  std::jthread sync_thread;

  /// In steps, for etcd takes no more at once; the first key says whether there is a job.
  Result<> delete_keys(const std::vector<std::string>& keys) {
    constexpr size_t kMostAtOnce = 64;
    for (size_t i = 0; i < keys.size(); i += kMostAtOnce) {
      MetaTransaction transaction;
      transaction.deletes.assign(keys.begin() + i,
                                 keys.begin() + std::min(keys.size(), i + kMostAtOnce));
      PTC_TRY(commit_fenced(*meta, cluster, std::move(transaction)));
    }
    return ok();
  }
  void want_sync() {
    std::lock_guard lock(sync_mutex);
    stale = true;
    sync_wanted.notify_all();
  }
  void sync_loop(std::stop_token stop);
  Result<> sync();
  std::vector<std::string> found_images;  // in the store when it was opened, perhaps nobody's; guarded by changes
  void remove_found_images();
  JobRef find(std::string_view name) const;
  Result<JobRef> create(const std::string& name);
  Result<> remove(std::string_view name, bool force);
  Result<> make_job_directory(const std::string& name);
  Result<> check_empty_elsewhere(const std::string& name);
  Result<std::string> user_file_on(const std::string& on, const std::string& job) const;
  Result<> service_changed();
};

JobStore::JobStore(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}

JobStore::~JobStore() {
  if (impl_ == nullptr) return;
  impl_->watch.reset();
  impl_->drained_watch.reset();
  impl_->sync_thread = {};
  for (const JobRef& job : jobs()) job->stop();
}

Result<std::unique_ptr<JobStore>> JobStore::open(const JobStoreOptions& options,
                                                 JobListener* listener) {
  auto impl = std::make_unique<Impl>();
  impl->directory = options.directory;
  impl->listener = listener;
  impl->node = options.node;
  if (impl->node.empty()) {
    char host[256] = "localhost";
    gethostname(host, sizeof host - 1);
    impl->node = host;
  }
  // A lease that is broken raises SIGIO, which would end the process; see open_for_writing().
  std::signal(SIGIO, SIG_IGN);
  PTC_TRY(make_directory(AT_FDCWD, impl->directory));
  PTC_TRY(impl->lock_fd, open_file(AT_FDCWD, impl->directory + "/lock", O_RDWR | O_CREAT));
  // A daemon that was just unmounted needs a moment to end.
  PTC_TRY(bool locked, lock_file(impl->lock_fd.get(), std::chrono::seconds(5)));
  if (!locked)
    return make_error(Code::kBusy, "the store {} is in use by another ptcfs daemon", impl->directory);
  // Without its metadata everything in the store would look like rubbish of a crash.
  impl->cluster = options.cluster.cluster;
  if (impl->cluster == nullptr && !std::filesystem::exists(impl->directory + "/meta.db") &&
      (holds_anything(impl->directory + "/jobs") || holds_anything(impl->directory + "/images")))
    return make_error(Code::kCorrupt, "the store {} has jobs but no meta.db, which says what is in them: "
                      "put it back, or give ptcfs another store", impl->directory);
  impl->meta = options.cluster.meta;
  if (impl->cluster == nullptr) {
    PTC_TRY(impl->own_meta, open_sqlite_meta(impl->directory + "/meta.db"));
    impl->meta = impl->own_meta.get();
  }
  PTC_TRY(impl->images, ImageStore::open(impl->directory + "/images"));
  unsigned threads = options.copy_threads != 0 ? options.copy_threads
                                               : std::max(1u, std::thread::hardware_concurrency());
  impl->results = options.results != nullptr ? options.results : std::make_shared<SharedResults>();
  impl->removed = std::make_unique<RemovedCheckpoints>(impl->cluster);
  impl->executor = std::make_unique<Executor>(
      threads, impl->cluster != nullptr ? options.cluster.transport() : make_loopback_transport());
  PTC_TRY(make_directory(AT_FDCWD, impl->directory + "/jobs"));

  PTC_TRY(auto entries, impl->meta->list("jobs/"));
  std::set<std::string> names;
  for (const MetaEntry& entry : entries)
    if (std::string rest = entry.key.substr(5); rest.find('/') == std::string::npos) names.insert(rest);
  std::vector<ImageId> keep;
  bool all_known = true;
  for (const std::string& name : std::set(names)) {
    if (impl->cluster != nullptr) {
      PTC_TRY(impl->make_job_directory(name));
    }
    JobRef job(new Job(name, impl->job_dir(name), impl->services(), listener));
    Result<> loaded = job->load();
    if (loaded.has_error() && loaded.error().code() == Code::kNotFound) {  // removed by another node just now
      names.erase(name);
      continue;
    }
    PTC_TRY(std::move(loaded));
    std::optional<std::vector<ImageId>> used = job->images_in_use();
    all_known = all_known && used;
    if (used) keep.insert(keep.end(), used->begin(), used->end());
    impl->jobs.emplace(name, std::move(job));
  }
  if (all_known) {
    PTC_TRY(impl->images->remove_all_but(keep));
  } else if (impl->cluster != nullptr) {  // until it is known where the bytes of all checkpoints lie
    std::error_code unread;
    for (const auto& entry : std::filesystem::directory_iterator(impl->images->directory(), unread))
      impl->found_images.push_back(entry.path().filename());
  }
  // A directory without a job: its creation or removal was cut off.
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator(impl->directory + "/jobs", error))
    if (!names.contains(entry.path().filename())) {
      PTC_TRY(remove_tree(AT_FDCWD, entry.path()));
    }
  for (const auto& [name, job] : impl->jobs) job->start();
  if (impl->cluster != nullptr) {
    auto look = [store = impl.get()](const MetaEvent&) { store->want_sync(); };
    auto look_at_jobs = [look](const MetaEvent& event) {
      if (event.key.find("/dataset/") == std::string::npos) look(event);  // those have followers of their own
    };
    PTC_TRY(impl->watch, impl->meta->watch("jobs/", look_at_jobs));
    PTC_TRY(impl->drained_watch, impl->meta->watch(drained_key(""), look));
    impl->stale = true;  // something may have changed since it was read
    impl->sync_thread = std::jthread(
        [store = impl.get()](std::stop_token stop) { store->sync_loop(std::move(stop)); });
  }
  return std::unique_ptr<JobStore>(new JobStore(std::move(impl)));
}

Result<> JobStore::Impl::make_job_directory(const std::string& name) {
  const std::string dir = job_dir(name);
  PTC_TRY(make_directory(AT_FDCWD, dir));
  PTC_TRY(make_directory(AT_FDCWD, dir + "/files", 0755));
  PTC_TRY(make_directory(AT_FDCWD, dir + "/files/incoming", 0755));
  PTC_TRY(sync_directory(AT_FDCWD, dir));
  return sync_directory(AT_FDCWD, directory + "/jobs");
}

void JobStore::Impl::sync_loop(std::stop_token stop) {
  constexpr auto kRetry = std::chrono::milliseconds(500);
  while (!stop.stop_requested()) {
    {
      std::unique_lock lock(sync_mutex);
      sync_wanted.wait(lock, stop, [&] { return stale; });
      stale = false;
    }
    if (stop.stop_requested()) return;
    Result<> synced = sync();
    if (synced.has_value()) continue;
    spdlog::warn("what other nodes decided cannot be taken over yet: {}", synced.error().message());
    std::unique_lock lock(sync_mutex);
    sync_wanted.wait_for(lock, stop, kRetry, [] { return false; });
    stale = true;
  }
}

Result<> JobStore::Impl::sync() {
  std::lock_guard change(changes);
  PTC_TRY(auto now_drained, drained_nodes(*meta));
  PTC_TRY(auto entries, meta->list("jobs/"));
  std::set<std::string> names;
  for (const MetaEntry& entry : entries)
    if (std::string rest = entry.key.substr(5); rest.find('/') == std::string::npos) names.insert(rest);
  std::vector<JobRef> known, gone;
  {
    std::lock_guard lock(mutex);
    drained = std::move(now_drained);
    for (const auto& [name, job] : jobs) (names.erase(name) > 0 ? known : gone).push_back(job);
  }
  for (const JobRef& job : gone) {
    spdlog::info("job {} was removed by another node", job->name());
    job->forget();
  }
  if (!gone.empty()) {
    std::lock_guard lock(mutex);
    for (const JobRef& job : gone) jobs.erase(job->name());
  }
  if (!gone.empty() && listener != nullptr) listener->names_changed();
  for (const JobRef& job : gone) {
    PTC_TRY(remove_tree(AT_FDCWD, job_dir(job->name())));
  }
  for (const JobRef& job : known) {
    PTC_TRY(job->sync());
  }
  for (const std::string& name : names) {
    PTC_TRY(make_job_directory(name));
    JobRef job(new Job(name, job_dir(name), services(), listener));
    PTC_TRY(job->load());
    job->start();
    std::lock_guard lock(mutex);
    jobs.emplace(name, job);
    spdlog::info("job {} was created by another node", name);
  }
  remove_found_images();
  return ok();
}

/// What a former life of this node left: nobody can decide on that any more.
void JobStore::Impl::remove_found_images() {
  if (found_images.empty()) return;
  std::set<std::string> used;
  for (const auto& [name, job] : jobs) {  // no other thread changes it meanwhile
    const std::optional<std::vector<ImageId>> known = job->images_in_use();
    if (!known) return;
    for (const ImageId& id : *known) used.insert(id.text);
  }
  for (const std::string& name : found_images)
    if (!used.contains(name)) (void)images->remove({name});
  found_images.clear();
}

/// Each node has an incoming/ of its own.
Result<std::string> JobStore::Impl::user_file_on(const std::string& on, const std::string& name) const {
  if (cluster != nullptr && on != cluster->self())
    return cluster->call(on, "job/holds", name + "\n", std::chrono::seconds(10));
  PTC_TRY(auto file, user_file_in(job_dir(name) + "/files"));
  return file.value_or("");
}

Result<> JobStore::Impl::check_empty_elsewhere(const std::string& name) {
  if (cluster == nullptr) return ok();
  for (const std::string& other : cluster->alive()) {
    if (other == cluster->self()) continue;
    PTC_TRY(auto file, user_file_on(other, name));
    if (!file.empty()) return make_error(Code::kBusy, "job {} holds {} on node {}", name, file, other);
  }
  return ok();
}

void JobStore::nodes_changed() {
  if (impl_->cluster == nullptr) return;
  impl_->want_sync();
  impl_->removed->nodes_changed();
}

Result<std::string> JobStore::answer(std::string_view method, std::string_view request) {
  if (method == "job/changed") {
    PTC_TRY(impl_->sync());
    return std::string();
  }
  if (method == kSpaceMethod) {
    PTC_TRY(auto space, impl_->images->space());
    return json::serialize(json::object{{"free", space.free_bytes}});
  }
  const size_t line_end = request.find('\n');
  if (line_end == std::string_view::npos || !method.starts_with("job/"))
    return invalid_argument("a request to a job names it in its first line");
  const std::string_view name = request.substr(0, line_end);
  if (method == kDataSetChangedMethod) {
    if (impl_->listener != nullptr) impl_->listener->data_set_changed(std::string(name));
    return std::string();
  }
  JobRef job = find(name);
  if (method == "job/uses") {
    PTC_TRY(auto id, checkpoint_asked_of(request.substr(line_end + 1)));
    if (impl_->removed->is_open_here(id)) return std::string("yes");
    if (job == nullptr) {
      const std::lock_guard taken_over(impl_->changes);  // its removal
      return std::string(impl_->removed->is_open_here(id) ? "yes" : "no");
    }
  }
  if (job == nullptr) {  // made a moment ago, on the node that asks
    PTC_TRY(impl_->sync());
    job = find(name);
  }
  if (job == nullptr) return make_error(Code::kUnavailable, "job {} is not known here", name);
  if (method == "job/holds") {
    PTC_TRY(auto file, user_file_in(job->files_dir()));
    return file.value_or("");
  }
  return job->answer(method.substr(4), request.substr(line_end + 1));
}

Result<> JobStore::drain(const std::string& node) {
  PTC_TRY(check_member(impl_->cluster));
  if (impl_->cluster != nullptr) {
    PTC_TRY(impl_->sync());
  }
  PTC_TRY(begin_drain(*impl_->meta, impl_->cluster, jobs(), *impl_->images, node));
  spdlog::info("node {} is being drained", node);
  return impl_->service_changed();
}

Result<> JobStore::cancel_drain(const std::string& node) {
  PTC_TRY(ptc::cancel_drain(*impl_->meta, impl_->cluster, node));
  spdlog::info("node {} is in service again", node);
  return impl_->service_changed();
}

Result<> JobStore::Impl::service_changed() {
  PTC_TRY(sync());
  tell_others(cluster, "");
  return ok();
}

std::vector<std::string> JobStore::drained() const {
  std::lock_guard lock(impl_->mutex);
  return impl_->drained;
}

uint64_t JobStore::bytes_on(std::string_view node) const {
  uint64_t bytes = 0;
  for (const JobRef& job : jobs()) bytes += job->bytes_on(node);
  return bytes;
}

std::vector<std::string> JobStore::uncommitted_on(const std::string& node) const {
  std::vector<std::string> found;
  for (const JobRef& job : jobs()) {
    Result<std::string> file = impl_->user_file_on(node, job->name());
    if (file.has_value() && !file.value().empty())
      found.push_back(fmt::format("{} of job {}", file.value(), job->name()));
  }
  return found;
}

Result<JobRef> JobStore::create_job(const std::string& name) {
  PTC_TRY(check_job_name(name));
  PTC_TRY(check_member(impl_->cluster));
  PTC_TRY(auto job, impl_->create(name));
  tell_others(impl_->cluster, name);
  return job;
}

Result<JobRef> JobStore::Impl::create(const std::string& name) {
  std::lock_guard change(changes);
  if (find(name) != nullptr) return make_error(Code::kAlreadyExists, "job {} exists already", name);
  const std::string dir = job_dir(name);
  PTC_TRY(make_job_directory(name));
  const std::string text = default_layout_text();
  const std::string prefix = "jobs/" + name;
  // Of an earlier job of this name, if its removal was cut off.
  PTC_TRY(auto left, meta->list(prefix + "/"));
  std::vector<std::string> left_keys;
  for (MetaEntry& entry : left) left_keys.push_back(std::move(entry.key));
  PTC_TRY(auto there, meta->get(prefix));
  if (!there) {
    PTC_TRY(delete_keys(left_keys));
  }
  MetaTransaction transaction;
  transaction.compares = {{prefix, 0}};
  transaction.puts = {
      {prefix, json::serialize(json::object{{"created", time_text(now_ns())}})},
      {prefix + "/layout", json::serialize(json::object{{"revision", 1}, {"text", text}})},
      {prefix + "/in_force",
       json::serialize(json::object{{"revision", 1}, {"spec", LayoutSpec().to_json()}})}};
  PTC_TRY(commit_fenced(*meta, cluster, std::move(transaction)));
  JobRef job(new Job(name, dir, services(), listener));
  PTC_TRY(job->load());
  job->start();
  std::lock_guard lock(mutex);
  jobs.emplace(name, job);
  spdlog::info("job {} created", name);
  return job;
}

Result<> JobStore::remove_job(std::string_view name, bool force) {
  PTC_TRY(check_member(impl_->cluster));
  if (impl_->cluster != nullptr) {
    PTC_TRY(impl_->sync());  // what was removed on another node just now is no reason to refuse
    tell_others(impl_->cluster, std::string(name));  // as before a checkpoint is removed
  }
  PTC_TRY(impl_->remove(name, force));
  tell_others(impl_->cluster, std::string(name));
  return ok();
}

Result<> JobStore::Impl::remove(std::string_view name, bool force) {
  std::lock_guard change(changes);
  JobRef job = find(name);
  if (job == nullptr) return make_error(Code::kNotFound, "there is no job '{}'", name);
  if (!force) {
    size_t count = job->checkpoints().size();
    if (count > 0)
      return make_error(Code::kBusy, "job {} holds {} checkpoint{}", name, count, count == 1 ? "" : "s");
    PTC_TRY(auto file, user_file_in(job->files_dir()));
    if (file) return make_error(Code::kBusy, "job {} holds {}", name, *file);
    PTC_TRY(check_empty_elsewhere(std::string(name)));
  }
  PTC_TRY(job->close());
  auto forget = [&]() -> Result<> {
    // Since the check something may have been committed; now nothing can be any more.
    if (!force && !job->checkpoints().empty())
      return make_error(Code::kBusy, "job {} holds a checkpoint", name);
    for (const CheckpointRef& checkpoint : job->checkpoints())
      if (job->is_pinned(checkpoint->name()))
        return make_error(Code::kPermissionDenied,
                          "checkpoint {} of job {} is pinned; ptc pin {}/{} --remove takes that off",
                          checkpoint->name(), name, name, checkpoint->name());
    PTC_TRY(auto entries, meta->list(fmt::format("jobs/{}/", name)));
    std::vector<std::string> keys{fmt::format("jobs/{}", name)};  // without it there is no job
    for (MetaEntry& entry : entries) {
      if (!force && entry.key.starts_with(fmt::format("jobs/{}/dataset/", name)))
        return make_error(Code::kBusy, "job {} holds a data set, which rm -r {}/dataset forgets", name, name);
      keys.push_back(std::move(entry.key));
    }
    return delete_keys(keys);
  };
  Result<> forgotten = forget();
  if (forgotten.has_error()) {
    job->reopen();
    return forgotten;
  }
  job->forget();
  {
    std::lock_guard lock(mutex);
    jobs.erase(jobs.find(name));
  }
  PTC_TRY(remove_tree(AT_FDCWD, job_dir(name)));
  spdlog::info("job {} removed", name);
  return ok();
}

JobRef JobStore::find(std::string_view name) const { return impl_->find(name); }

JobRef JobStore::Impl::find(std::string_view name) const {
  std::lock_guard lock(mutex);
  auto it = jobs.find(name);
  return it == jobs.end() ? nullptr : it->second;
}

std::vector<JobRef> JobStore::jobs() const {
  std::lock_guard lock(impl_->mutex);
  std::vector<JobRef> list;
  for (const auto& [name, job] : impl_->jobs) list.push_back(job);
  return list;
}

const std::string& JobStore::node() const { return impl_->node; }
std::vector<std::string> JobStore::nodes() const {
  return impl_->cluster != nullptr ? impl_->cluster->alive() : std::vector{impl_->node};
}
ImageStore& JobStore::images() { return *impl_->images; }
const std::string& JobStore::directory() const { return impl_->directory; }

}  // namespace ptc
