#include "reshard/job/commit_attempt.h"

#include <fcntl.h>
#include <fmt/ranges.h>
#include <pthread.h>
#include <spdlog/spdlog.h>
#include <sys/stat.h>

#include <algorithm>
#include <boost/json/array.hpp>
#include <boost/json/object.hpp>
#include <boost/json/serialize.hpp>
#include <map>

#include "reshard/intake/tree_rights.h"
#include "reshard/job/names.h"
#include "reshard/job/wanted_states.h"
#include "reshard/move/change.h"
#include "reshard/move/placement.h"
#include "reshard/ptc/model_facts.h"
#include "store/base/file.h"
#include "store/base/mutex.h"
#include "store/base/shell_word.h"
#include "store/base/utf8.h"
#include "store/base/wall_time.h"

namespace ptc {
namespace {

using namespace std::chrono_literals;
constexpr auto kWaitForRelease =
    1200ms;  // the kernel tells of a last close after close() has returned; nodes wait as long
constexpr auto kWaitForNodes = 5s;  // when one comes or goes, not all hear of it at the same moment
constexpr auto kSilence = 30s;      // of a node that lives, and does not answer
constexpr std::chrono::milliseconds kAskedAgain{5}, kLongestWait{200};  // more each time
constexpr auto kDecisionTime = 150ms;  // a rename that has less left is not worth a decision
constexpr auto kHurry = 300ms;         // who has less waits for what is ready, or has just begun
constexpr auto kJustBegun = 50ms;
constexpr auto kKept = 60s;                                // without a mv
static_assert(row_of(PeerMethod::kTake).is_idempotent());  // it is asked again and again
constexpr std::string_view kAway = "away";                 // in the place of a listing

}  // namespace

CommitAttempt::CommitAttempt(CommitsLed& all, std::string id, std::string incoming,
                             std::string name)
    : all_(all),
      id_(std::move(id)),
      incoming_(std::move(incoming)),
      name_(std::move(name)),
      label_("incoming/" + incoming_),
      source_dir_(job_.place.incoming_dir() + "/" + incoming_) {}

CommitAttempt::~CommitAttempt() {
  stop();
  thread_ = {};
  if (step_ == Step::kInDoubt && share_ != nullptr) share_->leave();
  answered();
}

void CommitAttempt::start() {
  activity_ = job_.activities.begin({Activity::Kind::kCommit, name_, label_, ""});
  thread_ = std::jthread([this](std::stop_token) { run(); });
}

std::optional<Result<>> CommitAttempt::wait(Clock::time_point deadline) {
  MutexLock lock(mutex_);
  ++waiting_;
  latest_deadline_ = std::max(latest_deadline_, deadline);
  changed_.notify_all();
  auto answered = [&]() PTC_REQUIRES(mutex_) { return ended_ || step_ == Step::kInDoubt; };
  if (deadline - Clock::now() <= kHurry) {
    changed_.wait_until(
        mutex_, std::min(deadline, started_ + kJustBegun),
        [&]() PTC_REQUIRES(mutex_) { return answered() || step_ != Step::kPreparing; });
    if (step_ == Step::kPreparing) deadline = Clock::now();
  }
  if (deadline == Clock::time_point::max()) changed_.wait(mutex_, answered);
  else changed_.wait_until(mutex_, deadline, answered);
  last_asked_ = Clock::now();
  if (--waiting_ == 0) latest_deadline_ = {};
  if (!answered()) return std::nullopt;
  heard_ = ended_;
  if (error_) return Result<>(*error_);
  return Result<>(ok());
}

bool CommitAttempt::withdraw() {
  MutexLock lock(mutex_);
  if (ended_) return true;
  if (waiting_ > 0 || step_ == Step::kDeciding || step_ == Step::kInDoubt ||
      step_ == Step::kCommitted)
    return false;
  stop_.request_stop();
  return true;
}

void CommitAttempt::stop() { stop_.request_stop(); }

bool CommitAttempt::stopped() const { return stop_.stop_requested(); }

bool CommitAttempt::forgotten() const {
  MutexLock lock(mutex_);
  return waiting_ == 0 && Clock::now() - last_asked_ > kKept;
}

bool CommitAttempt::ended() const {
  MutexLock lock(mutex_);
  return ended_;
}

std::string_view CommitAttempt::outcome() const {
  MutexLock lock(mutex_);
  if (step_ == Step::kCommitted) return ended_ && !is_unheard() ? "committed" : "unheard";
  return step_ == Step::kFailed ? "given up" : "open";
}

std::optional<CommitAttempt::Failure> CommitAttempt::unheard_failure() const {
  MutexLock lock(mutex_);
  if (!ended_ || heard_ || !error_ || stop_.stop_requested()) return std::nullopt;
  return Failure{error_->code(), failed_at_ns_};
}

bool CommitAttempt::unheard_success() const {
  MutexLock lock(mutex_);
  return is_unheard();
}

bool CommitAttempt::is_unheard() const { return ended_ && !heard_ && !error_ && shows_its_name(); }

bool CommitAttempt::shows_its_name() const {
  return shown_ != nullptr && shown_->is_at(source_dir_) && shown_->is_empty();
}

bool CommitAttempt::written_anew() const {
  MutexLock lock(mutex_);
  struct stat there {};
  return hidden_ && !shows_its_name() && lstat(source_dir_.c_str(), &there) == 0;
}

void CommitAttempt::answered() {
  MutexLock lock(mutex_);
  if (shown_ != nullptr) shown_->remove_from(source_dir_);
  shown_.reset();
}

void CommitAttempt::run() {
  ::pthread_setname_np(::pthread_self(), "ptcfs-commit");
  Result<> result = ok();
  try {
    result = prepare();
    if (result.has_value() && !wait_until_asked())
      result = make_error(
          Code::kConflict,
          "the commit of {} is given up: it was written again, or not asked for any more", label_);
    if (result.has_value()) result = hide();
    if (result.has_value()) result = decide();
  } catch (const std::exception& error) {  // no memory
    result = make_error(Code::kNoSpace, "{}", error.what());
  }
  end(std::move(result));
}

void CommitAttempt::end(Result<> result) {
  if (result.has_error() && result.error().code() == Code::kInDoubt) {
    Error error = std::move(result).error().with_context(
        label_ + " is neither committed nor put back until the metadata can be asked again");
    all_.note_refused(incoming_, error);
    {
      MutexLock lock(mutex_);
      step_ = Step::kInDoubt;
      error_ = std::move(error);
      changed_.notify_all();
    }
    job_.doubts.add([weak = weak_from_this()] {
      if (const auto attempt = weak.lock()) attempt->settle_doubt();
    });
    job_.wake();
    return;
  }
  if (result.has_value()) {
    finish();
  } else {
    {
      MutexLock lock(mutex_);
      step_ = Step::kFailed;
    }
    std::optional<ReadRights> rights = rights_elsewhere();
    if (share_ != nullptr) rights = narrowed(rights, rights_of_tree(share_->directory(), "."));
    take_back();
    if (!stop_.stop_requested()) all_.note_refused(incoming_, result.error(), rights);
  }
  const bool elsewhere_too = result.has_error();
  activity_.reset();
  let_go();
  job_.knowledge.update([&](KnownJob& known) {
    if (result.has_value()) ++known.counts.commits_done;
    else if (!stop_.stop_requested()) ++known.counts.commits_refused;
  });
  job_.knowledge.tell();
  {
    MutexLock lock(mutex_);
    error_.reset();
    if (result.has_error()) error_ = std::move(result).error();
    failed_at_ns_ = now_ns();
    last_asked_ = Clock::now();
    ended_ = true;
    changed_.notify_all();
  }
  // Nobody here waits for that; who does not hear it asks, and when this node has ended, they know.
  if (elsewhere_too && !all_.stop_.stop_requested())
    (void)ask_all(
        asked_, PeerMethod::kUntake,
        [&](const std::string&) {
          return json::serialize(json::object{{"id", id_}});
        },
        [](const std::string&, const std::string&) { return ok(); });
}

std::optional<ReadRights> CommitAttempt::rights_elsewhere() {
  std::optional<ReadRights> rights;
  if (stop_.stop_requested()) return rights;
  const std::string request = json::serialize(json::object{{"id", id_}, {"incoming", incoming_}});
  const std::vector<Result<std::string>> answers =
      job_.peers.ask_all(asked_, PeerMethod::kRights, request, stop_.get_token());
  for (size_t i = 0; i < asked_.size(); ++i) {
    const auto of_node = answers[i].has_value()
                             ? rights_from_text(answers[i].value())
                             : Result<std::optional<ReadRights>>(answers[i].error());
    if (of_node.has_value()) {
      rights = narrowed(rights, of_node.value());
      continue;
    }
    // What was refused may name what it has there, and nobody knows what that keeps from whom.
    if (!without_.contains(asked_[i])) rights = narrowed(rights, ReadRights{0, 0, 0400});
  }
  return rights;
}

void CommitAttempt::settle_doubt() {
  auto is_known = [&](const KnownJob& known) {
    return known.damaged_ids.contains(id_) || known.find_id(id_) != nullptr;
  };
  const JobKnowledge::Snapshot known = job_.knowledge.now();
  const bool done = is_known(*known);
  if (const CheckpointRecord* record = known->find_id(id_); record != nullptr)
    record_.meta_revision = record->meta_revision;
  end(done ? Result<>(ok())
           : make_error(Code::kUnavailable, "{} was not committed: it is put back", label_));
}

bool CommitAttempt::wait_until_asked() {
  activity_->begin("ready");
  MutexLock lock(mutex_);
  step_ = Step::kReady;
  changed_.notify_all();
  changed_.wait(mutex_, stop_.get_token(), [&]() PTC_REQUIRES(mutex_) {
    return waiting_ > 0 && latest_deadline_ - Clock::now() >= kDecisionTime;
  });
  if (stop_.stop_requested()) return false;
  step_ = Step::kDeciding;
  return true;
}

Result<> CommitAttempt::prepare() {
  // Not the one of the moment of the decision: when this lease ends, the others put back what they
  // took.
  fence_ = job_.place.services.cluster->fence();
  if (fence_) fences_.push_back(*fence_);
  job_.hashing.leave(incoming_);  // it goes on here, on all threads
  MakeSeal seal;
  if (job_.place.listener != nullptr)
    seal = [this](GivesWay gives_way) {
      return job_.place.listener->seal(job_.place.name, incoming_, std::move(gives_way));
    };
  PTC_TRY(share_, CommitShare::take(job_.place.commit_place(job_.hashing.hashes()), id_, incoming_,
                                    seal, [weak = weak_from_this()] {
                                      const auto attempt = weak.lock();
                                      return attempt == nullptr || attempt->withdraw();
                                    }));
  PTC_TRY(job_.staged.heed_without(incoming_));
  if (share_ == nullptr || !share_->has_files()) {
    PTC_TRY(const bool lost, job_.staged.was_lost(incoming_));
    if (lost) {
      PTC_TRY(check_goes_without_lost(job_.place.services.node));
    }
  }
  PTC_TRY(take_elsewhere());
  if (share_ == nullptr && elsewhere_.empty())
    return make_error(Code::kNotFound, "{} is on no node: No such file or directory", label_);
  PTC_TRY(draft());
  PTC_TRY(adopt());
  PTC_TRY(write_down());
  return make_copies();
}

Result<> CommitAttempt::take_elsewhere() {
  const std::vector<std::string> others = job_.peers.others();
  if (others.empty()) return check_all_answered({});
  Cluster& cluster = *job_.place.services.cluster;
  const std::string request = json::serialize(json::object{{"id", id_},
                                                           {"incoming", incoming_},
                                                           {"from", cluster.self()},
                                                           {"fence", fence_.value().revision}});
  const auto busy_until = Clock::now() + kWaitForRelease;
  std::vector<std::chrono::milliseconds> pauses(others.size(), kAskedAgain);
  std::vector<char> away(others.size(), false);
  // Each by itself, whatever the others say.
  const auto again = [&](size_t i, const Result<std::string>& listing) -> std::optional<NextCall> {
    if (listing.has_value() || stop_.stop_requested()) return std::nullopt;
    const Code code = listing.error().code();
    away[i] = code == Code::kUnavailable && !is_among(cluster.alive(), others[i]);
    const bool may_change =
        Clock::now() < (code == Code::kUnavailable ? started_ + kSilence : busy_until) &&
        (code == Code::kUnavailable || code == Code::kBusy);
    if (away[i] || !may_change) return std::nullopt;
    return NextCall{request, std::exchange(pauses[i], std::min(2 * pauses[i], kLongestWait))};
  };
  std::vector<MetaTransaction::Compare> fences;
  for (const std::string& node : others) fences.push_back(cluster.fence_of(node));
  asked_.insert(asked_.end(), others.begin(), others.end());
  std::vector<Result<std::string>> listings = job_.peers.ask_all(
      others, PeerMethod::kTake, std::vector(others.size(), request), stop_.get_token(), {}, again);
  Result<> result = ok();
  std::set<std::string> answered;
  for (size_t i = 0; i < others.size(); ++i) {
    Result<std::string>& listing = listings[i];
    if (away[i]) listing = std::string(kAway);
    if (listing.has_value() && listing.value() == TakenDirs::kLost) {
      without_.insert(others[i]);  // it has nothing there that an error could speak of
      listing.value().clear();
      if (Result<> goes = check_goes_without_lost(others[i]); goes.has_error())
        listing = std::move(goes).error();
    }
    if (listing.has_value() && listing.value() == kAway) listing.value().clear();
    else answered.insert(others[i]);
    if (listing.has_error()) {
      if (listing.error().code() == Code::kUnavailable) without_.insert(others[i]);
      if (result.has_value()) result = std::move(listing).error();
      continue;
    }
    Elsewhere one{{others[i], ""}, fences[i]};
    one.files.listing = std::move(listing).value();
    if (one.files.listing.empty()) {
      without_.insert(others[i]);
      continue;
    }
    elsewhere_.push_back(std::move(one));
  }
  PTC_TRY(std::move(result));
  return check_all_answered(answered);
}

Result<> CommitAttempt::check_goes_without_lost(const std::string& node) const {
  PTC_TRY(const bool goes, job_.staged.goes_without_lost(incoming_, node));
  return goes ? ok() : Result<>(lost_with_its_store(node, incoming_));
}

Result<> CommitAttempt::check_all_answered(const std::set<std::string>& answered) const {
  if (!job_.staged.says()) return ok();
  const Cluster& cluster = *job_.place.services.cluster;
  const std::vector<Cluster::Seen> seen = cluster.seen();
  // Where nobody is away the agreement need not be asked.
  if (std::all_of(seen.begin(), seen.end(), [&](const Cluster::Seen& one) {
        return one.node == cluster.self() || answered.contains(one.node);
      }))
    return ok();
  PTC_TRY(auto missed, job_.staged.nodes_of(incoming_));
  missed.erase(cluster.self());
  for (const std::string& node : answered) missed.erase(node);
  if (missed.empty()) return ok();
  const bool one = missed.size() == 1;
  return make_error(
      Code::kUnavailable,
      "node{} {} {} away, and {} written something into {}: it is committed when {} back, or "
      "without what is there when you say so (echo {} > {}, and the same mv again)",
      one ? "" : "s", fmt::join(missed, ", "), one ? "is" : "are", one ? "has" : "have", label_,
      one ? "it is" : "they are", fmt::join(missed, " "),
      shell_word("incoming/" + without_file_of(incoming_)));
}

Result<> CommitAttempt::draft() {
  activity_->begin("hashing");
  CommitRequest request;
  request.dir_fd = share_ != nullptr ? share_->directory() : -1;
  request.name = label_;
  request.node = job_.place.services.node;
  request.hashing_begins = [this](uint64_t bytes) { activity_->begin("hashing", bytes); };
  request.bytes_hashed = &activity_->bytes_done();
  {
    const JobKnowledge::Snapshot known = job_.knowledge.now();
    // Before anything is in force for a checkpoint, the layout wanted is what the job was told.
    request.in_force = known->in_force.current ? known->in_force.spec : known->saved.layout.spec;
    request.rules_text = known->rules_text;
    if (const CheckpointRecord* newest = known->latest()) {
      request.known_model = newest->checkpoint->manifest().model;
      for (const TensorInfo& tensor : newest->checkpoint->model().tensors())
        if (tensor.whole_on_dp)
          request.known_whole.emplace(std::pair(tensor.file, tensor.name), tensor.shape_in_files());
    }
  }
  std::vector<FilesElsewhere> files;
  std::vector<std::string> nodes;
  for (const Elsewhere& one : elsewhere_) {
    files.push_back(one.files);
    nodes.push_back(one.files.node);
    fences_.push_back(one.fence);
  }
  const std::string line = json::serialize(json::object{{"id", id_}}) + "\n";
  const auto bodies_of = [&](const std::vector<std::string>& requests) {
    std::vector<std::string> bodies;
    for (const std::string& one : requests) bodies.push_back(line + one);
    return bodies;
  };
  request.hash_elsewhere = [&](const std::vector<std::string>& first,
                               const CommitRequest::NextToHash& next) {
    const auto then = [&](size_t i, const Result<std::string>& answer) -> std::optional<NextCall> {
      const std::optional<std::string> more = next(i, answer);
      if (!more) return std::nullopt;
      return NextCall{line + *more};
    };
    return job_.peers.ask_all(nodes, PeerMethod::kHash, bodies_of(first), stop_.get_token(), {},
                              then);
  };
  request.read_elsewhere = [&](const std::vector<std::string>& asked,
                               const std::vector<std::string>& requests) {
    return job_.peers.ask_all(asked, PeerMethod::kRead, bodies_of(requests), stop_.get_token());
  };
  const auto deadline = started_ + kWaitForRelease;
  auto draft_now = [&] {
    return draft_commit(request, files, *job_.place.services.executor, job_.hashing.hashes(),
                        stop_.get_token());
  };
  Result<CommitDraft> drafted = draft_now();
  while (drafted.has_error() && drafted.error().code() == Code::kBusy && Clock::now() < deadline) {
    std::this_thread::sleep_for(5ms);
    drafted = draft_now();
  }
  PTC_TRY(draft_, std::move(drafted));
  Manifest& manifest = draft_.manifest;
  struct stat owner {};
  owner.st_mode = 0755;
  if (share_ != nullptr && fstat(share_->directory(), &owner) != 0)
    return errno_error(errno, label_);
  manifest.name = name_;
  manifest.id = id_;
  manifest.time_ns = now_ns();
  manifest.uid = owner.st_uid;
  manifest.gid = owner.st_gid;
  manifest.mode = owner.st_mode & 0777;
  return ok();
}

Result<> CommitAttempt::adopt() {
  Manifest& manifest = draft_.manifest;
  images_.resize(manifest.files.size());
  std::map<std::string, std::vector<size_t>> on_node;  // numbers of files
  for (size_t i = 0; i < manifest.files.size(); ++i) on_node[draft_.nodes[i]].push_back(i);
  if (const auto own = on_node.extract(std::string()); !own.empty()) {
    std::vector<std::string> paths;
    for (size_t i : own.mapped()) paths.push_back(draft_.sources[i]);
    PTC_TRY(auto adopted, share_->adopt(paths));
    for (size_t k = 0; k < adopted.size(); ++k) {
      WrittenFile& file = manifest.files[own.mapped()[k]];
      if (adopted[k]->bytes() != file.bytes)
        return make_error(Code::kBusy, "{} was written while it was being committed", paths[k]);
      file.image = adopted[k]->id().text;
      images_[own.mapped()[k]] = std::move(adopted[k]);
    }
  }
  std::vector<std::string> nodes;
  for (const auto& [node, numbers] : on_node) nodes.push_back(node);
  return ask_all(
      nodes, PeerMethod::kAdopt,
      [&](const std::string& node) {
        json::array list;
        for (size_t i : on_node[node])
          list.push_back(json::array{json::value(draft_.sources[i]), manifest.files[i].bytes});
        return json::serialize(json::object{{"id", id_}, {"files", std::move(list)}});
      },
      [&](const std::string& node, const std::string& answer) -> Result<> {
        const std::vector<size_t>& numbers = on_node[node];
        PTC_TRY(auto ids, parse_json(answer, {.max_bytes = size_t{1} << 28}));
        if (!ids.is_array() || ids.as_array().size() != numbers.size())
          return make_error(Code::kCorrupt, "node {} did not take all of its files", node);
        for (size_t k = 0; k < numbers.size(); ++k) {
          if (!ids.as_array()[k].is_string())
            return make_error(Code::kCorrupt, "node {} did not take all of its files", node);
          WrittenFile& file = manifest.files[numbers[k]];
          file.image = std::string(ids.as_array()[k].as_string());
          images_[numbers[k]] =
              std::make_shared<const Image>(ImageId{file.image}, MemoryPlace{node}, file.bytes);
        }
        return ok();
      });
}

Result<> CommitAttempt::write_down() {
  const Manifest& manifest = draft_.manifest;
  std::vector<StoredImage> stored_images;
  for (size_t i = 0; i < manifest.files.size(); ++i) {
    const WrittenFile& file = manifest.files[i];
    const bool as_it_is = file.has_tensors && file.set.empty();
    stored_images.push_back({file.image, images_[i], file.has_tensors ? manifest.owner_of(file) : 0,
                             as_it_is ? file.path : "", as_it_is ? -1 : static_cast<int32_t>(i),
                             draft_.nodes[i].empty() ? job_.place.node_key() : draft_.nodes[i]});
  }
  const std::string manifest_text = manifest.to_text();
  PTC_TRY(auto facts, CheckpointFacts::of(manifest, manifest_text, draft_.headers,
                                          *job_.place.services.results));
  record_.checkpoint = std::make_shared<Checkpoint>(facts, job_.place.services.results,
                                                    &job_.place.services.executor->transport(),
                                                    job_.place.services.catch_up);
  PTC_TRY(auto stored,
          record_.checkpoint->make_stored(manifest.written_spec, std::move(stored_images)));
  record_.lies(stored);
  record_.checkpoint->replace_stored(stored);
  record_.id = id_;
  record_.generation = 1;
  record_.stored = "stored-1.json";  // the id is this commit's alone
  const std::string directory = job_.place.checkpoint_dir(id_);
  const std::string stored_text = stored->to_text();
  record_.files = {{"manifest.json", FileFacts::of(manifest_text)},
                   {"headers.bin", FileFacts::of(draft_.headers)},
                   {record_.stored, FileFacts::of(stored_text)}};
  PTC_TRY(job_.files.make_directory_of(id_));
  PTC_TRY(write_file_atomically(AT_FDCWD, directory + "/manifest.json", manifest_text));
  PTC_TRY(write_file_atomically(AT_FDCWD, directory + "/headers.bin", draft_.headers));
  PTC_TRY(write_file_atomically(AT_FDCWD, directory + "/stored-1.json", stored_text));
  PTC_TRY(sync_directory(AT_FDCWD, job_.place.dir + "/checkpoints"));
  PTC_TRY(sync_directory(AT_FDCWD, job_.place.dir));
  for (const std::string& node : job_.peers.others())
    if (!is_among(asked_, node)) asked_.push_back(node);
  return job_.files.give(id_, {"manifest.json", "headers.bin", "stored-1.json"}, *stored,
                         activity_.get(), fence_);
}

/// The copies that `replicas` asks for.
Result<> CommitAttempt::make_copies() {
  const Checkpoint& checkpoint = *record_.checkpoint;
  const std::shared_ptr<const StoredState> stored = checkpoint.stored();
  Layout as_written = job_.knowledge.now()->saved.layout;
  if (as_written.replicas == 0) return ok();
  if (as_written.spec.sizes.world_size() != stored->spec.sizes.world_size())
    as_written.devices.clear();
  as_written.spec = stored->spec;
  // It is in the host's memory, as what was written is: no device that is full holds up a commit.
  // What shall be in devices is brought there after it.
  as_written.in_devices = false;
  auto make_once = [&](Fences& of_nodes) -> Result<std::shared_ptr<const StoredState>> {
    PTC_TRY(auto wanted, wanted_state(job_.place, checkpoint, as_written,
                                      nodes_in_service(job_.place, *job_.knowledge.now())));
    wanted.nothing_leaves = true;  // what was just written stays where it is until it is decided on
    PTC_TRY(auto change, plan_change(checkpoint, *stored, wanted));
    if (change->nothing()) return std::shared_ptr<const StoredState>();
    activity_->begin("copying",
                     change->transfers.totals.total_bytes - change->transfers.totals.kept_bytes);
    PTC_TRY(auto parts, job_.maker.make_all(record_, *stored, wanted, *change, *activity_, of_nodes,
                                            /*epoch=*/0, fence_));
    auto compose = [&]() -> Result<std::shared_ptr<const StoredState>> {
      PTC_TRY(job_.maker.compare(record_, *stored, *change, parts, /*known=*/false,
                                 activity_->stop_token()));
      PTC_TRY(auto images, job_.maker.compose(checkpoint, *stored, *change, parts));
      return checkpoint.make_stored(stored->spec, std::move(images));
    };
    auto composed = compose();
    if (composed.has_error()) job_.maker.give_up(record_, parts, /*epoch=*/0);
    return composed;
  };
  const auto deadline = Clock::now() + kWaitForNodes;
  for (;;) {
    Fences of_nodes;
    auto made = make_once(of_nodes);
    if (made.has_error() && made.error().code() == Code::kUnavailable && !stop_.stop_requested() &&
        Clock::now() < deadline) {
      std::this_thread::sleep_for(50ms);
      continue;
    }
    PTC_TRY(with_copies_, std::move(made));
    fences_.insert(fences_.end(), of_nodes.begin(), of_nodes.end());
    break;
  }
  if (with_copies_ == nullptr) return ok();
  const std::string stored_text = with_copies_->to_text();
  record_.generation = 2;
  record_.files.erase(record_.stored);
  record_.stored = "stored-2.json";
  record_.files.insert_or_assign(record_.stored, FileFacts::of(stored_text));
  record_.lies(with_copies_);
  record_.checkpoint->replace_stored(with_copies_);
  PTC_TRY(write_file_atomically(AT_FDCWD, job_.place.checkpoint_dir(id_) + "/stored-2.json",
                                stored_text));
  return job_.files.give(id_, {"stored-2.json"}, *with_copies_, activity_.get(), fence_);
}

Result<> CommitAttempt::hide() {
  if (share_ != nullptr) {
    Result<> hidden = share_->hide(CommitShare::Name::kShown);
    MutexLock lock(mutex_);
    shown_ = share_->shown();
    hidden_ = hidden.has_value();
    PTC_TRY(std::move(hidden));
  }
  std::vector<std::string> nodes;
  for (const Elsewhere& one : elsewhere_) nodes.push_back(one.files.node);
  return ask_all(
      nodes, PeerMethod::kHide,
      [&](const std::string&) {
        return json::serialize(json::object{{"id", id_}});
      },
      [](const std::string&, const std::string&) { return ok(); });
}

Result<> CommitAttempt::decide() {
  Result<> decided = decide_once();
  auto conflicts = [&] { return decided.has_error() && decided.error().code() == Code::kConflict; };
  auto exists = [&] { return job_.knowledge.now()->record_of(name_) != nullptr; };
  // It names the layout in force and the last commit, and others change these too.
  constexpr int kTries = 10;
  for (int tries = 1; tries < kTries && conflicts(); ++tries) {
    PTC_TRY(job_.follow());
    if (exists()) break;
    decided = decide_once();
  }
  if (conflicts() && exists())
    return make_error(Code::kAlreadyExists, "checkpoint {} exists already", name_);
  return decided;
}

Result<> CommitAttempt::decide_once() {
  MutexLock change(job_.decisions.mutex());
  InForce next;
  LastSequence sequence;
  bool in_place = false;
  const auto commits = [&](JobUpdate& update) -> Result<bool> {
    update.rests_on(fences_);
    update.no_checkpoint(name_);
    sequence.last = record_.sequence = update.sequence().last + 1;
    next = update.in_force();
    // Written in the layout wanted: it is current at once. If that is another by now, all is
    // brought to it as if the edit had come after this: it holds up no commit.
    in_place = next.revision == update.glance().saved.revision &&
               next.spec == draft_.manifest.written_spec;
    update.put(sequence);
    update.put(name_, record_);
    update.put(draft_.manifest.written_spec);
    if (in_place) {
      next.current = name_;
      update.put(next);
    }
    return true;
  };
  PTC_TRY(const int64_t committed, job_.decisions.update(commits));
  try {
    record_.meta_revision = committed;
    job_.files.confirm(record_);
    job_.knowledge.update([&](KnownJob& known) {
      known.checkpoints[name_] = record_;
      known.sequence = {sequence, committed};
      known.custom_specs[draft_.manifest.written_spec.name()] = draft_.manifest.written_spec;
      if (in_place) known.in_force = {next, committed};
      if (known.saved.layout.in_devices) known.look_anyway = true;  // it is in the host's memory
      known.forget_error(
          printable(fmt::format("commit of incoming/{}", staged_name(incoming_)), 4096) +
          " refused: ");
    });
  } catch (const std::exception& error) {  // no memory: it was decided, and is looked for again
    return make_error(Code::kInDoubt, "{} was committed as {}, but: {}", label_, name_,
                      error.what());
  }
  job_.activities.stop_trims();
  job_.knowledge.tell();
  return ok();
}

void CommitAttempt::finish() {
  {
    MutexLock lock(mutex_);
    step_ = Step::kCommitted;
  }
  if (share_ != nullptr) share_->committed();
  for (const FileVersion& version : draft_.looked_at) job_.hashing.hashes().forget(version.inode);
  all_.remove_files_about(incoming_);
  job_.staged.closed(incoming_ + "/");  // it is gone, or written anew
  if (job_.place.listener != nullptr)
    job_.place.listener->checkpoint_changed(job_.place.name, name_);
  const std::chrono::duration<double> seconds = Clock::now() - started_;
  job_.knowledge.update(
      [&](KnownJob& known) { known.counts.last_commit_seconds = seconds.count(); });
  all_.note_committed(id_);
  spdlog::info("job {}: {} committed as checkpoint {}: {} tensors, {} files, layout {}, {:.3f} s",
               job_.place.name, label_, name_, draft_.manifest.checksums.size(),
               draft_.manifest.files.size(), draft_.manifest.written_spec.name(), seconds.count());
  for (const std::string& what : contradictions(*draft_.manifest.model))
    spdlog::warn("job {}: checkpoint {}: {}", job_.place.name, name_, what);
}

/// Somebody may hold this for a while, and no images with it.
void CommitAttempt::let_go() {
  elsewhere_.clear();
  draft_ = CommitDraft();
  images_.clear();
  record_ = CheckpointRecord();
  with_copies_.reset();
  share_.reset();
}

void CommitAttempt::take_back() {
  if (with_copies_ != nullptr)
    for (const StoredImage& image : with_copies_->images)
      if (image.node == job_.place.node_key()) (void)job_.place.services.images->remove({image.id});
  (void)remove_tree(AT_FDCWD, job_.place.checkpoint_dir(id_));
  share_.reset();
}

Result<> CommitAttempt::ask_all(
    const std::vector<std::string>& nodes, PeerMethod method,
    const std::function<std::string(const std::string& node)>& request,
    const std::function<Result<>(const std::string& node, const std::string& answer)>& take) {
  // What takes back is asked also when all else has been stopped.
  const std::stop_token stop =
      method == PeerMethod::kUntake ? std::stop_token() : stop_.get_token();
  std::vector<std::string> requests;
  for (const std::string& node : nodes) requests.push_back(request(node));
  std::vector<Result<std::string>> answers = job_.peers.ask_all(nodes, method, requests, stop);
  Result<> result = ok();
  for (size_t i = 0; i < nodes.size(); ++i) {
    Result<std::string>& answer = answers[i];
    if (result.has_error()) continue;
    if (answer.has_error()) result = std::move(answer).error();
    else result = take(nodes[i], answer.value());
  }
  return result;
}

}  // namespace ptc
