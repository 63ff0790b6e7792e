// mv incoming/<name> checkpoints/: from a directory of files to a checkpoint, all or nothing.
//
// 1. The directory is renamed to committing/<id>/<name>: nobody reaches it by a path any more.
// 2. draft_commit() makes sense of it. If it does not, it is renamed back.
// 3. Its files are linked as images, the manifest is written beside the job.
// 4. One metadata transaction makes it a checkpoint: the point of no return.
// 5. The directory goes.
// A crash before 4 is taken back at the next start (the directory is renamed back, images without an
// owner go), a crash after it is finished (the directory goes). Where a disk that fails leaves open
// whether 4 was done (MetaClient::in_doubt), the next start decides, and all stays until then.
#include <fcntl.h>
#include <spdlog/spdlog.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include <boost/json/object.hpp>
#include <boost/json/serialize.hpp>
#include <cerrno>
#include <map>

#include "reshard/job/job_impl.h"
#include "store/base/file.h"
#include "store/base/json.h"
#include "store/base/utf8.h"

namespace ptc {
namespace {

constexpr auto kWaitForRelease = std::chrono::milliseconds(1000);
constexpr auto kWaitForNodes = std::chrono::seconds(5);

Result<> check_name(std::string_view name) {
  if (name.empty() || name[0] == '.' || name.size() > 255 || name.find('/') != std::string_view::npos)
    return invalid_argument("'{}' is no name for a checkpoint", name);
  if (!is_utf8(name))
    return invalid_argument("the name of the checkpoint, {}, is not UTF-8, and could not be written in "
                            "meta.json: rename it", quoted(name));
  return ok();
}

/// Where the reason of a refusal is told: incoming/<name>.error, of a name that leaves room for it.
std::string error_file_of(const std::string& incoming) {
  constexpr size_t kMaxName = 255;
  constexpr std::string_view kEnding = ".error";
  return incoming.substr(0, kMaxName - kEnding.size()) + std::string(kEnding);
}

}  // namespace

Result<std::string> random_id() {
  uint64_t bits = 0;
  if (getrandom(&bits, sizeof bits, 0) != sizeof bits) return errno_error(errno, "getrandom");
  return fmt::format("{:016x}", bits);
}

void Job::Impl::write_error_file(const std::string& incoming, const std::string& text) {
  // The directory is the user's: nothing here may follow what they put there.
  const std::string directory = job->files_dir() + "/incoming";
  const std::string name = error_file_of(incoming), temporary = "." + incoming.substr(0, 200) + ".error-new";
  auto write = [&]() -> Result<> {
    PTC_TRY(auto dir_fd, open_file(AT_FDCWD, directory, O_RDONLY | O_DIRECTORY | O_NOFOLLOW));
    unlinkat(dir_fd.get(), temporary.c_str(), 0);
    PTC_TRY(auto fd, open_file(dir_fd.get(), temporary, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW));
    const std::string line = text + "\n";
    PTC_TRY(write_exactly(fd.get(), std::as_bytes(std::span(line)), 0));
    struct stat owner{};
    if (fstatat(dir_fd.get(), incoming.c_str(), &owner, AT_SYMLINK_NOFOLLOW) == 0 && geteuid() == 0 &&
        fchown(fd.get(), owner.st_uid, owner.st_gid) != 0)
      return errno_error(errno, "chown of " + name);
    if (fchmod(fd.get(), 0644) != 0) return errno_error(errno, "chmod of " + name);
    if (renameat(dir_fd.get(), temporary.c_str(), dir_fd.get(), name.c_str()) != 0)
      return errno_error(errno, name);
    return ok();
  };
  Result<> written = write();
  if (written.has_error())
    spdlog::warn("job {}: the reason of a refusal could not be written: {}", job->name(),
                 written.error().message());
}

void Job::Impl::note_refused(const std::string& incoming, const Error& error) {
  write_error_file(incoming, error.message());
  set_error(fmt::format("commit of incoming/{} refused: {}", incoming, error.message()));
  spdlog::info("job {}: commit of incoming/{} refused: {}", job->name(), incoming, error.message());
}

Result<> Job::Impl::commit(const std::string& incoming, const std::string& name) {
  {
    std::lock_guard lock(mutex);
    if (closed) return make_error(Code::kNotFound, "job {} is being removed", job->name());
    ++commits_in_flight;  // keeps the job from being removed meanwhile
  }
  Result<> result = take_and_commit(incoming, name);
  if (result.has_error()) note_refused(incoming, result.error());
  std::lock_guard lock(mutex);
  --commits_in_flight;
  ++(result.has_error() ? counts.commits_refused : counts.commits_done);
  changed.notify_all();
  return result;
}

Result<> Job::Impl::take_and_commit(const std::string& incoming, const std::string& name) {
  PTC_TRY(check_member(services.cluster));
  PTC_TRY(check_name(name));
  if (job->find_checkpoint(name) != nullptr)
    return make_error(Code::kAlreadyExists, "checkpoint {} exists already", name);
  const std::string label = "incoming/" + incoming;
  PTC_TRY(auto id, random_id());
  const std::string taken_dir = fmt::format("{}/committing/{}", dir, id);
  PTC_TRY(bool here, take_directory(id, incoming));
  auto commit_all = [&]() -> Result<> {
    std::vector<TakenElsewhere> elsewhere;
    Fences own;
    if (services.cluster != nullptr) {
      // Not the one of the moment of the decision: when this lease ends, the others put back what they took.
      own.push_back(services.cluster->fence());
      PTC_TRY(elsewhere, take_elsewhere(id, incoming, own.front()));
    }
    if (!here && elsewhere.empty())
      return make_error(Code::kNotFound, "{} is on no node: No such file or directory", label);
    UniqueFd taken_fd;
    if (here) {
      PTC_TRY(taken_fd, open_file(AT_FDCWD, taken_dir + "/" + incoming,
                                  O_RDONLY | O_DIRECTORY | O_NOFOLLOW));
    }
    return commit_taken(here ? taken_fd.get() : -1, elsewhere, std::move(own), label, id, name);
  };
  Result<> result = commit_all();
  if (result.has_error() && services.meta->in_doubt()) {
    return std::move(result).error().with_context(
        label + " is neither committed nor put back before ptcfs is started again");
  }
  if (result.has_error()) {
    if (services.cluster != nullptr)
      for (const std::string& node : other_nodes())
        (void)ask(node, "untake", json::serialize(json::object{{"id", id}}));
    (void)remove_tree(AT_FDCWD, checkpoint_dir(id));
    if (here) put_back(id, incoming);
    return std::move(result).error();
  }
  (void)remove_tree(AT_FDCWD, taken_dir);
  unlink(fmt::format("{}/incoming/{}", job->files_dir(), error_file_of(incoming)).c_str());
  return ok();
}

/// Takes incoming/<incoming> on all other nodes; those that have none are not in the result.
Result<std::vector<Job::Impl::TakenElsewhere>> Job::Impl::take_elsewhere(const std::string& id,
                                                                         const std::string& incoming,
                                                                         const MetaTransaction::Compare& own) {
  const std::string request = json::serialize(json::object{
      {"id", id}, {"incoming", incoming}, {"from", services.cluster->self()}, {"fence", own.revision}});
  const auto deadline = std::chrono::steady_clock::now() + kWaitForRelease;
  std::vector<TakenElsewhere> elsewhere;
  for (const std::string& node : other_nodes()) {
    TakenElsewhere one{{node, "", {}}, services.cluster->fence_of(node)};
    Result<std::string> listing = ask(node, "take", request);
    while (listing.has_error() && listing.error().code() == Code::kBusy &&
           std::chrono::steady_clock::now() < deadline) {
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
      listing = ask(node, "take", request);
    }
    PTC_TRY(one.files.listing, std::move(listing));
    if (one.files.listing.empty()) continue;
    one.files.hash = [this, node, id](const std::string& files) {
      return ask(node, "hash", json::serialize(json::object{{"id", id}}) + "\n" + files);
    };
    elsewhere.push_back(std::move(one));
  }
  return elsewhere;
}

/// The copies that `replicas` asks for, made before the checkpoint is decided on; null: there are none
/// to make.
Result<std::shared_ptr<const StoredState>> Job::Impl::make_copies(
    const CheckpointRecord& record, std::vector<MetaTransaction::Compare>& fences) {
  const Checkpoint& checkpoint = *record.checkpoint;
  std::shared_ptr<const StoredState> stored = checkpoint.stored();
  Layout as_written;
  {
    std::lock_guard lock(mutex);
    as_written = layout;
  }
  if (as_written.replicas == 0) return std::shared_ptr<const StoredState>();
  if (as_written.spec.sizes.world_size() != stored->spec.sizes.world_size()) as_written.devices.clear();
  as_written.spec = stored->spec;
  auto make_once = [&](Fences& of_nodes) -> Result<std::shared_ptr<const StoredState>> {
    PTC_TRY(auto wanted, wanted_state(checkpoint, as_written, nodes_in_service()));
    wanted.nothing_leaves = true;  // what was just written stays where it is until it is decided on
    PTC_TRY(auto change, plan_change(checkpoint, *stored, wanted));
    if (change->nothing()) return std::shared_ptr<const StoredState>();
    std::atomic<uint64_t> done = 0;
    PTC_TRY(auto parts, make_parts(record, wanted, *change, done, commit_stop.get_token(), of_nodes));
    Result<std::vector<StoredImage>> images = compose(checkpoint, *stored, *change, parts);
    if (images.has_value()) return checkpoint.make_stored(stored->spec, std::move(images).value());
    give_up(record, parts);
    return std::move(images).error();
  };
  const auto deadline = std::chrono::steady_clock::now() + kWaitForNodes;
  for (;;) {
    Fences of_nodes;
    Result<std::shared_ptr<const StoredState>> made = make_once(of_nodes);
    // When a node comes or goes, not all hear of it at the same moment, and one may be counted on that is gone.
    if (made.has_error() && made.error().code() == Code::kUnavailable && !commit_stop.stop_requested() &&
        std::chrono::steady_clock::now() < deadline) {
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
      continue;
    }
    fences.insert(fences.end(), of_nodes.begin(), of_nodes.end());
    return made;
  }
}

Result<> Job::Impl::commit_taken(int taken_fd, const std::vector<TakenElsewhere>& elsewhere, Fences fences,
                                 const std::string& label, const std::string& id,
                                 const std::string& name) {
  auto start = std::chrono::steady_clock::now();
  CommitRequest request;
  request.dir_fd = taken_fd;
  request.name = label;
  {
    std::lock_guard lock(mutex);
    // Before anything is in force for a checkpoint, the layout wanted is what the job was told.
    request.in_force = in_force.current ? in_force.spec : layout.spec;
    request.rules_text = rules_text;
    if (const CheckpointRecord* newest = latest()) {
      request.known_facts = newest->checkpoint->model().facts();
      request.known_family = newest->checkpoint->model().rules().family();
    }
  }
  // The kernel tells of a last close a moment after close() has returned.
  auto deadline = start + kWaitForRelease;
  const std::stop_token stop = commit_stop.get_token();
  std::vector<FilesElsewhere> files_elsewhere;
  for (const TakenElsewhere& one : elsewhere) {
    files_elsewhere.push_back(one.files);
    fences.push_back(one.fence);
  }
  Result<CommitDraft> drafted =
      draft_commit(request, files_elsewhere, *services.executor, hashes, stop);
  while (drafted.has_error() && drafted.error().code() == Code::kBusy &&
         std::chrono::steady_clock::now() < deadline) {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
    drafted = draft_commit(request, files_elsewhere, *services.executor, hashes, stop);
  }
  if (drafted.has_error()) return std::move(drafted).error();
  CommitDraft& draft = drafted.value();
  Manifest& manifest = draft.manifest;
  struct stat owner{};
  owner.st_mode = 0755;
  if (taken_fd >= 0 && fstat(taken_fd, &owner) != 0) return errno_error(errno, label);
  manifest.name = name;
  manifest.id = id;
  manifest.time_ns = now_ns();
  manifest.uid = owner.st_uid;
  manifest.gid = owner.st_gid;
  manifest.mode = owner.st_mode & 0777;

  std::vector<ImageRef> images;
  auto take_back = [&] {
    for (const ImageRef& image : images)
      if (image != nullptr) (void)services.images->remove(image->id());
  };
  auto take = [&]() -> Result<> {
    images.resize(manifest.files.size());
    std::map<std::string, std::vector<size_t>> on_node;
    for (size_t i = 0; i < manifest.files.size(); ++i) {
      if (!draft.nodes[i].empty()) {
        on_node[draft.nodes[i]].push_back(i);
        continue;
      }
      PTC_TRY(images[i], services.images->adopt(taken_fd, draft.sources[i]));
      manifest.files[i].image = images[i]->id().text;
    }
    PTC_TRY(services.images->sync());
    // Somebody may have held a directory open and written while it was being read.
    for (size_t i = 0; i < manifest.files.size(); ++i) {
      if (!draft.nodes[i].empty()) continue;
      struct stat now{};
      if (fstat(images[i]->fd(), &now) != 0) return errno_error(errno, draft.sources[i]);
      PTC_TRY(bool busy, open_for_writing(taken_fd, draft.sources[i]));
      if (busy || static_cast<uint64_t>(now.st_size) != draft.versions[i].bytes ||
          now.st_mtim.tv_sec * 1'000'000'000 + now.st_mtim.tv_nsec != draft.versions[i].mtime_ns)
        return make_error(Code::kBusy, "{} was written while it was being committed", draft.sources[i]);
    }
    for (const auto& [node, numbers] : on_node) {
      json::array list;
      for (size_t i : numbers)
        list.push_back(json::array{json::value(draft.sources[i]), manifest.files[i].bytes});
      PTC_TRY(auto answer, ask(node, "adopt", json::serialize(json::object{
                                                  {"id", id}, {"files", std::move(list)}})));
      PTC_TRY(auto ids, parse_json(answer, {.max_bytes = size_t{1} << 28}));
      if (!ids.is_array() || ids.as_array().size() != numbers.size())
        return make_error(Code::kCorrupt, "node {} did not take all of its files", node);
      for (size_t k = 0; k < numbers.size(); ++k) {
        if (!ids.as_array()[k].is_string())
          return make_error(Code::kCorrupt, "node {} did not take all of its files", node);
        WrittenFile& file = manifest.files[numbers[k]];
        file.image = std::string(ids.as_array()[k].as_string());
        images[numbers[k]] = std::make_shared<const Image>(ImageId{file.image}, node, file.bytes);
      }
    }
    return ok();
  };
  auto finish = [&]() -> Result<> {
    PTC_TRY(take());
    std::vector<StoredImage> stored_images;
    const std::string node = node_key(services);
    for (size_t i = 0; i < manifest.files.size(); ++i) {
      const WrittenFile& file = manifest.files[i];
      const bool as_it_is = file.has_tensors && file.set.empty();
      stored_images.push_back({file.image, images[i], file.has_tensors ? manifest.owner_of(file) : 0,
                               as_it_is ? file.path : "", as_it_is ? -1 : static_cast<int32_t>(i),
                               draft.nodes[i].empty() ? node : draft.nodes[i]});
    }
    const std::string manifest_text = manifest.to_text();
    PTC_TRY(auto facts, CheckpointFacts::of(manifest, manifest_text, draft.headers, *services.results));
    auto checkpoint = std::make_shared<Checkpoint>(facts, services.results, &services.executor->transport());
    PTC_TRY(auto stored, checkpoint->make_stored(manifest.written_spec, std::move(stored_images)));
    checkpoint->replace_stored(stored);

    CheckpointRecord record;
    record.checkpoint = checkpoint;
    record.id = id;
    record.generation = 1;
    record.stored = "stored-1.json";  // the id is this commit's alone
    PTC_TRY(make_directory(AT_FDCWD, dir + "/checkpoints"));
    PTC_TRY(make_directory(AT_FDCWD, checkpoint_dir(id)));
    PTC_TRY(write_file_atomically(AT_FDCWD, checkpoint_dir(id) + "/manifest.json", manifest_text));
    PTC_TRY(write_file_atomically(AT_FDCWD, checkpoint_dir(id) + "/headers.bin", draft.headers));
    PTC_TRY(write_file_atomically(AT_FDCWD, checkpoint_dir(id) + "/stored-1.json", stored->to_text()));
    PTC_TRY(sync_directory(AT_FDCWD, dir + "/checkpoints"));
    PTC_TRY(sync_directory(AT_FDCWD, dir));
    if (services.cluster != nullptr) {
      PTC_TRY(give_files(id, {"manifest.json", "headers.bin", "stored-1.json"}, *stored));
      PTC_TRY(auto with_copies, make_copies(record, fences));
      if (with_copies != nullptr) {
        record.generation = 2;
        record.stored = "stored-2.json";
        checkpoint->replace_stored(with_copies);
        PTC_TRY(write_file_atomically(AT_FDCWD, checkpoint_dir(id) + "/stored-2.json",
                                      with_copies->to_text()));
        PTC_TRY(give_files(id, {"stored-2.json"}, *with_copies));
      }
    }

    auto decide = [&]() -> Result<> {
      std::lock_guard change(changes);
      MetaTransaction transaction;
      InForce next;
      bool in_place = false;
      {
        std::lock_guard lock(mutex);
        const CheckpointRecord* newest = latest();
        record.sequence = newest == nullptr ? 1 : newest->sequence + 1;
        // Written in the layout wanted: it is current at once.
        in_place = in_force.revision == revision && in_force.spec == manifest.written_spec;
        next = in_force;
        transaction.compares = fences;
        transaction.compares.push_back({meta_key("checkpoints/" + name), 0});
        transaction.compares.push_back({meta_key("in_force"), in_force.meta_revision});
      }
      transaction.puts.emplace_back(meta_key("checkpoints/" + name), record_text(record));
      const std::string spec_name = manifest.written_spec.name();
      if (spec_name.find('+') != std::string::npos)
        transaction.puts.emplace_back(meta_key("specs/" + spec_name),
                                      json::serialize(manifest.written_spec.to_json()));
      if (in_place) {
        next.current = name;
        transaction.puts.emplace_back(meta_key("in_force"), in_force_text(next));
      }
      PTC_TRY(int64_t committed, commit_fenced(transaction));
      record.meta_revision = next.meta_revision = committed;
      std::lock_guard lock(mutex);
      checkpoints[name] = record;
      custom_specs[spec_name] = manifest.written_spec;
      if (in_place) in_force = next;
      forget_error(printable("commit of " + label, 4096));
      changed.notify_all();
      return ok();
    };
    Result<> decided = decide();
    auto conflicts = [&] { return decided.has_error() && decided.error().code() == Code::kConflict; };
    // It names the layout in force, which may have changed meanwhile.
    for (int again = 0; again < 3 && conflicts() && services.cluster != nullptr; ++again) {
      PTC_TRY(sync());
      if (job->find_checkpoint(name) != nullptr) break;
      decided = decide();
    }
    if (conflicts() && (services.cluster == nullptr || job->find_checkpoint(name) != nullptr))
      return make_error(Code::kAlreadyExists, "checkpoint {} exists already", name);
    return decided;
  };
  Result<> finished = finish();
  if (finished.has_error()) {
    if (!services.meta->in_doubt()) take_back();
    return std::move(finished).error();
  }
  for (const FileVersion& version : draft.looked_at) hashes.forget(version);
  for (const ImageRef& image : images)
    if (image->is_here()) fchmod(image->fd(), 0400);  // theirs until now
  if (listener != nullptr) listener->checkpoint_changed(job->name(), name);
  std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
  {
    std::lock_guard lock(mutex);
    counts.last_commit_seconds = seconds.count();
  }
  spdlog::info("job {}: {} committed as checkpoint {}: {} tensors, {} files, layout {}, {:.3f} s",
               job->name(), label, name, manifest.checksums.size(), manifest.files.size(),
               manifest.written_spec.name(), seconds.count());
  return ok();
}

void Job::Impl::stop_hashing(const std::string& incoming) {
  std::lock_guard lock(mutex);
  std::erase_if(to_hash, [&](const std::string& path) { return path.starts_with(incoming + "/"); });
  if (hashing == incoming) hash_stop.request_stop();
}

void Job::Impl::hash_loop(std::stop_token stop) {
  while (!stop.stop_requested()) {
    std::string path;
    LayoutSpec spec;
    CheckpointRef previous;
    std::stop_source stop_one;
    {
      std::unique_lock lock(mutex);
      hashing.clear();
      changed.wait(lock, stop, [&] { return !to_hash.empty(); });
      if (stop.stop_requested()) return;
      path = std::move(to_hash.front());
      to_hash.pop_front();
      hashing = path.substr(0, path.find('/'));
      hash_stop = std::stop_source();
      stop_one = hash_stop;
      spec = in_force.current ? in_force.spec : layout.spec;
      if (const CheckpointRecord* newest = latest()) previous = newest->checkpoint;
    }
    // <name>/rank/<r>/<path>
    size_t name_end = path.find('/');
    if (name_end == std::string::npos || path.compare(name_end, 6, "/rank/") != 0) continue;
    size_t rank_begin = name_end + 6, rank_end = path.find('/', rank_begin);
    if (rank_end == std::string::npos) continue;
    errno = 0;
    char* end = nullptr;
    uint64_t rank = std::strtoull(path.c_str() + rank_begin, &end, 10);
    if (errno != 0 || end != path.c_str() + rank_end) continue;
    const std::string root = fmt::format("{}/incoming/{}", job->files_dir(), path.substr(0, name_end));
    Result<UniqueFd> root_fd = open_file(AT_FDCWD, root, O_RDONLY | O_DIRECTORY | O_NOFOLLOW);
    if (root_fd.has_error()) continue;
    struct stat st{};
    if (fstatat(root_fd.value().get(), "layout.json", &st, 0) == 0) {
      Result<std::string> text =
          read_text_file(root_fd.value().get(), "layout.json", 1 << 20, FileKind::kOwn);
      if (text.has_error()) continue;
      Result<Layout> own = Layout::parse(text.value());
      if (own.has_error()) continue;
      spec = own.value().spec;
    }
    std::stop_callback stop_with_job(stop, [&] { stop_one.request_stop(); });
    try {
      hash_closed_file(root_fd.value().get(), path.substr(rank_end + 1), rank, spec,
                       previous ? &previous->model() : nullptr, hashes, stop_one.get_token());
    } catch (const std::exception& error) {  // no memory: the commit will hash it, or say so
      spdlog::warn("job {}: hashing {}: {}", job->name(), path, error.what());
    }
  }
}

}  // namespace ptc
