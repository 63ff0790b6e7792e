#include "reshard/job/taken_dirs.h"

#include <fcntl.h>
#include <spdlog/spdlog.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <boost/json/array.hpp>
#include <boost/json/object.hpp>
#include <boost/json/serialize.hpp>

#include "reshard/intake/tree_rights.h"
#include "reshard/job/names.h"
#include "reshard/job/staged_parts.h"
#include "store/base/file.h"
#include "store/base/json.h"
#include "store/base/mutex.h"

namespace ptc {
namespace {

constexpr auto kUnheard = std::chrono::seconds(5);  // then the one that leads is asked
constexpr std::chrono::milliseconds kAskAgain{200}, kAskAfter{2000};  // whether it was told
constexpr auto kShownTime = std::chrono::seconds(60);
constexpr auto kRenameTime =
    std::chrono::seconds(2);  // a mv may wait for it elsewhere for that long

Result<std::string> incoming_of(const json::object& request) {
  const json::value* name = request.if_contains("incoming");
  if (name == nullptr || !name->is_string() || !can_be_file(std::string_view(name->as_string())))
    return invalid_argument("the request names no directory of incoming/");
  return std::string(name->as_string());
}

}  // namespace

Result<> TakenDirs::note(const json::object& request, const std::string& id) {
  const json::value* from = request.if_contains("from");
  const json::value* fence = request.if_contains("fence");
  if (from == nullptr || !from->is_string() || fence == nullptr || !fence->is_int64())
    return invalid_argument("the request does not say who commits");
  const std::string leader(from->as_string());
  const std::string key = place_.services.cluster->fence_of(leader).key;
  {
    MutexLock lock(mutex_);
    Taken& known = taken_[id];
    known.from = leader;
    known.fence = {key, fence->as_int64()};
    known.heard = Clock::now();
  }
  rest_.wake();
  return ok();
}

/// The directory was put back, or not taken, if there is no `share`.
Result<std::string> TakenDirs::rights(const json::object& request, const CommitShare* share) const {
  PTC_TRY(const auto incoming, incoming_of(request));
  if (share != nullptr) return rights_text(rights_of_tree(share->directory(), "."));
  const std::string directory = place_.incoming_dir();
  PTC_TRY(const auto dir_fd, open_file(AT_FDCWD, directory, O_RDONLY | O_DIRECTORY | O_NOFOLLOW));
  struct stat facts = {};  // it may be called otherwise by now
  if (::fstatat(dir_fd.get(), incoming.c_str(), &facts, AT_SYMLINK_NOFOLLOW) != 0)
    return errno_error(errno, "incoming/" + incoming);
  return rights_text(rights_of_tree(dir_fd.get(), incoming));
}

Result<> TakenDirs::wait_until_back(const std::string& incoming) {
  MutexLock lock(mutex_);
  const auto is_back = [&]() PTC_REQUIRES(mutex_) {
    return stopped_ || !going_back_.contains(incoming);
  };
  if (!changed_.wait_until(mutex_, Clock::now() + kRenameTime, is_back))
    return make_error(Code::kUnavailable, "incoming/{} is being put back", incoming);
  return ok();
}

Result<std::string> TakenDirs::take(const json::object& request, const std::string& id) {
  PTC_TRY(const auto incoming, incoming_of(request));
  const KeyedLock::Held one =
      takes_.hold(incoming);  // it may be asked again before it has answered
  PTC_TRY(note(request, id));
  const auto given_up = [] {
    return make_error(Code::kConflict, "the commit was given up");
  };  // meanwhile
  std::shared_ptr<CommitShare> share;
  std::string leader;
  std::vector<std::string>
      earlier;  // of the same node, which leads one of a directory at a time: decided or given up
  std::vector<std::pair<std::string, std::shared_ptr<CommitShare>>> others;  // by node
  {
    MutexLock lock(mutex_);
    const auto own = taken_.find(id);
    if (own == taken_.end()) return given_up();
    share = own->second.share;
    leader = own->second.from;
    for (const auto& [other, known] : taken_) {
      if (other == id || known.share == nullptr || known.share->incoming() != incoming) continue;
      if (known.from == own->second.from) earlier.push_back(other);
      else others.emplace_back(known.from, known.share);
    }
  }
  for (const auto& [node, other] : others)
    if (other->shown() != nullptr)
      return make_error(Code::kBusy, "incoming/{} is being committed by node {}", incoming, node);
  for (const std::string& other : earlier) {
    // It may have been decided, and nobody have told this node.
    if (Result<> settled = find_out(other, leader, {}); settled.has_error())
      return make_error(Code::kUnavailable,
                        "what became of the commit of incoming/{} before is not known yet: {}",
                        incoming, settled.error().message());
  }
  // What is none of these any more may be about to be put back by another thread: until then its
  // files have other names, those of images.
  PTC_TRY(wait_until_back(incoming));
  forget_shown(incoming);
  if (share == nullptr) {
    MakeSeal seal;
    if (place_.listener != nullptr)
      seal = [this, &incoming](GivesWay gives_way) {
        return place_.listener->seal(place_.name, incoming, std::move(gives_way));
      };
    hashing_.leave(incoming);
    auto may_give_way = [this, id, since = Clock::now()] {
      if (Clock::now() - since < kRenameTime) return false;
      std::shared_ptr<CommitShare> withdrawn;
      {
        MutexLock lock(mutex_);
        const auto known = taken_.find(id);
        if (known == taken_.end()) return true;
        withdrawn = known->second.share;
      }
      // It may be hidden at just this moment.
      if (withdrawn == nullptr) return true;
      if (!withdrawn->withdraw_unless_hidden()) return false;
      MutexLock lock(mutex_);
      if (const auto known = taken_.find(id);
          known != taken_.end() && known->second.share == withdrawn)
        known->second.share.reset();
      return true;
    };
    auto taken = CommitShare::take(place_.commit_place(hashing_.hashes()), id, incoming, seal,
                                   std::move(may_give_way));
    if (taken.has_error() || taken.value() == nullptr) {
      MutexLock lock(mutex_);
      taken_.erase(id);
    }
    if (taken.has_error()) return std::move(taken).error();
    if (taken.value() == nullptr) {
      PTC_TRY(const bool lost, rest_.was_lost(incoming));
      return std::string(lost ? kLost : "");
    }
    share = std::move(taken).value();
    bool wanted = false;
    {
      MutexLock lock(mutex_);
      const auto known = taken_.find(id);
      wanted = known != taken_.end();
      if (wanted) known->second.share = share;
    }
    if (!wanted) {
      share->withdraw();
      return given_up();
    }
  }
  Result<std::string> listing = list_files(share->directory());
  if (listing.has_error()) untake(id);
  if (listing.has_value() && !share->has_files()) {
    // The directory was made again, and what had been in it was not.
    const Result<bool> lost = rest_.was_lost(incoming);
    if (lost.has_error() || lost.value()) untake(id);
    if (lost.has_error()) return lost.error();
    if (lost.value()) return std::string(kLost);
  }
  return listing;
}

Result<std::string> TakenDirs::answer(PeerMethod method, const json::object& request,
                                      const std::string& id, std::string_view rest) {
  if (method == PeerMethod::kTake) return take(request, id);
  if (method == PeerMethod::kUntake) {
    untake(id);
    return std::string();
  }
  std::shared_ptr<CommitShare> share;
  {
    MutexLock lock(mutex_);
    const auto known = taken_.find(id);
    if (known != taken_.end()) {
      known->second.heard = Clock::now();
      share = known->second.share;
    }
  }
  if (method == PeerMethod::kRights) return rights(request, share.get());
  if (share == nullptr)
    return make_error(
        Code::kConflict,
        "node {} has nothing of this commit any more, as somebody wrote it again: move "
        "it once more",
        place_.services.node);
  if (method == PeerMethod::kRead)
    return read_parts(share->directory(), share->listed(), rest, *place_.services.executor,
                      stop_.get_token());
  if (method == PeerMethod::kHash)
    return hash_files(share->directory(), share->to_hash(), rest, *place_.services.executor,
                      hashing_.hashes(), stop_.get_token());
  if (method == PeerMethod::kHide) {
    PTC_TRY(share->hide(CommitShare::Name::kShown));
    return std::string();
  }
  const json::value* files = request.if_contains("files");
  if (files == nullptr || !files->is_array()) return invalid_argument("the request has no files");
  std::vector<std::string> paths;
  std::vector<uint64_t> bytes;
  for (const json::value& file : files->as_array()) {
    boost::system::error_code bad;
    if (!file.is_array() || file.as_array().size() != 2 || !file.as_array()[0].is_string())
      return invalid_argument("the request has no files");
    paths.emplace_back(file.as_array()[0].as_string());
    bytes.push_back(file.as_array()[1].to_number<uint64_t>(bad));
  }
  PTC_TRY(auto images, share->adopt(paths));
  json::array ids;
  for (size_t i = 0; i < images.size(); ++i) {
    if (images[i]->bytes() != bytes[i])
      return make_error(Code::kBusy, "{} was written while it was being committed", paths[i]);
    ids.push_back(json::value(images[i]->id().text));
  }
  return json::serialize(ids);
}

void TakenDirs::untake(const std::string& id) {
  Taken own;
  {
    MutexLock lock(mutex_);
    auto known = taken_.find(id);
    if (known == taken_.end()) return;
    own = std::move(known->second);
    taken_.erase(known);
    if (own.share != nullptr) going_back_.insert(own.share->incoming());
  }
  if (own.share != nullptr) {
    const std::string incoming = own.share->incoming();
    spdlog::info("job {}: incoming/{} was not committed by node {}", place_.name, incoming,
                 own.from);
    own.share->withdraw();  // somebody may still be at it
    own.share.reset();
    MutexLock lock(mutex_);
    going_back_.erase(going_back_.find(incoming));
    changed_.notify_all();
  }
  rest_.drop(id);
  (void)remove_tree(AT_FDCWD, place_.checkpoint_dir(id));
}

Result<std::set<std::string>> TakenDirs::given_up() const {
  std::map<std::string, MetaTransaction::Compare> fences;
  {
    MutexLock lock(mutex_);
    for (const auto& [id, own] : taken_) fences.emplace(id, own.fence);
  }
  std::set<std::string> given_up;
  for (const auto& [id, fence] : fences) {
    PTC_TRY(auto entry, place_.services.meta->get(fence.key));
    if (!entry || entry->revision != fence.revision) given_up.insert(id);
  }
  return given_up;
}

void TakenDirs::settle(const std::set<std::string>& given_up,
                       const std::set<std::string>& decided) {
  std::vector<std::pair<std::string, Taken>> committed_ones;
  std::vector<std::string> back;
  {
    MutexLock lock(mutex_);
    for (const auto& one : taken_) {
      if (decided.contains(one.first)) committed_ones.push_back(one);
      else if (given_up.contains(one.first)) back.push_back(one.first);
    }
  }
  for (const auto& [id, own] : committed_ones) committed(id, own);
  {
    MutexLock lock(mutex_);
    for (const auto& [id, own] : committed_ones) taken_.erase(id);
  }
  for (const std::string& id : back) untake(id);
}

/// It is among those that are shown before it is no more among those that were taken.
void TakenDirs::committed(const std::string& id, const Taken& own) {
  if (own.share == nullptr) return;
  own.share->committed();
  rest_.gave(own.share->incoming());
  const std::shared_ptr<ShownName> name = own.share->shown();
  if (name == nullptr) return;
  const std::string& incoming = own.share->incoming();
  {
    MutexLock lock(mutex_);
    const auto known = shown_.find(incoming);
    if (known != shown_.end() && known->second.id == id) return;
  }
  forget_shown(incoming);
  {
    MutexLock lock(mutex_);
    const Clock::time_point now = Clock::now();
    shown_.insert_or_assign(incoming, Shown{id, own.from, name, now, now});
    changed_.notify_all();
  }
  rest_.wake();
}

void TakenDirs::forget_shown(const std::string& incoming, const std::string& id) {
  std::shared_ptr<ShownName> name;
  {
    MutexLock lock(mutex_);
    const auto known = shown_.find(incoming);
    if (known == shown_.end() || (!id.empty() && known->second.id != id)) return;
    name = std::move(known->second.name);
    shown_.erase(known);
  }
  name->remove_from(place_.commit_place(hashing_.hashes()).incoming_dir() + "/" + incoming);
}

void TakenDirs::look_after_shown(const std::stop_token& stop) {
  std::vector<std::pair<std::string, Shown>> due;
  const Clock::time_point now = Clock::now();
  {
    MutexLock lock(mutex_);
    for (auto& [incoming, one] : shown_) {
      if (one.ask_at > now) continue;
      one.ask_at = now + (now - one.since < kAskAgain ? kAskAgain : kAskAfter);
      due.emplace_back(incoming, one);
    }
  }
  for (const auto& [incoming, one] : due) {
    const Result<std::string> outcome = peers_.ask(
        one.from, PeerMethod::kCommit, json::serialize(json::object{{"id", one.id}}), stop);
    if (stop.stop_requested()) return;
    const bool over = outcome.has_value() && outcome.value() != "open" &&
                      outcome.value() != "unheard";  // it was told, or nobody will be any more
    if (over || now - one.since > kShownTime) forget_shown(incoming, one.id);
  }
}

TakenDirs::Clock::time_point TakenDirs::next_look() const {
  MutexLock lock(mutex_);
  auto next = Clock::time_point::max();
  for (const auto& [incoming, one] : shown_) next = std::min(next, one.ask_at);
  return next;
}

std::optional<Result<>> TakenDirs::hear(
    const std::string& incoming, const std::string& name, Clock::time_point deadline,
    const std::function<std::string(const std::string& id)>& checkpoint_of) {
  const std::string at = place_.commit_place(hashing_.hashes()).incoming_dir() + "/" + incoming;
  for (;;) {
    std::optional<Shown> decided;
    std::shared_ptr<CommitShare> open;
    const auto going_on = [&] {
      return Error(Code::kUnavailable,
                   fmt::format("incoming/{} is being committed by another node: the same mv again "
                               "hears how that ended",
                               incoming),
                   EAGAIN);
    };
    {
      MutexLock lock(mutex_);
      const auto is_back = [&]() PTC_REQUIRES(mutex_) {
        return stopped_ || !going_back_.contains(incoming);
      };
      if (!changed_.wait_until(mutex_, std::min(deadline, Clock::now() + kShownTime), is_back))
        return going_on();
      if (const auto known = shown_.find(incoming); known != shown_.end()) decided = known->second;
      for (const auto& [id, own] : taken_)
        if (own.share != nullptr && own.share->incoming() == incoming) open = own.share;
    }
    if (!decided && open != nullptr && open->shown() != nullptr) {
      const auto is_over = [&]() PTC_REQUIRES(mutex_) {
        return stopped_ || shown_.contains(incoming) ||
               std::none_of(taken_.begin(), taken_.end(),
                            [&](const auto& one) { return one.second.share == open; });
      };
      MutexLock lock(mutex_);
      const auto until = std::min(deadline, Clock::now() + kShownTime);
      if (changed_.wait_until(mutex_, until, is_over) && !stopped_) continue;
      return going_on();
    }
    if (!decided) return std::nullopt;
    const std::string made = checkpoint_of(decided->id);
    const bool is_still = !made.empty() && decided->name->is_at(at) && decided->name->is_empty();
    if (is_still && made != name)
      return make_error(Code::kNotFound, "incoming/{} is checkpoint {} by now", incoming, made);
    forget_shown(incoming, decided->id);
    if (is_still) return Result<>(ok());
  }
}

void TakenDirs::look_after(const std::stop_token& stop) {
  look_after_shown(stop);
  std::map<std::string, std::string> unheard;  // id → who leads it
  {
    MutexLock lock(mutex_);
    for (const auto& [id, own] : taken_)
      if (Clock::now() - own.heard > kUnheard) unheard.emplace(id, own.from);
  }
  std::set<std::string> silent;  // nodes
  for (const auto& [id, from] : unheard) {
    if (silent.contains(from) || stop.stop_requested()) continue;
    if (find_out(id, from, stop).has_error()) silent.insert(from);
  }
}

Result<> TakenDirs::find_out(const std::string& id, const std::string& leader,
                             const std::stop_token& stop) {
  PTC_TRY(auto outcome,
          peers_.ask(leader, PeerMethod::kCommit, json::serialize(json::object{{"id", id}}), stop));
  if (outcome == "open") return make_error(Code::kBusy, "node {} has not decided yet", leader);
  PTC_TRY(rest_.follow());  // what it has decided by now is seen in the metadata
  Taken decided;
  {
    MutexLock lock(mutex_);
    const auto own = taken_.find(id);
    if (own == taken_.end()) return ok();
    if (outcome != "given up") decided = own->second;  // and removed since
  }
  committed(id, decided);
  untake(id);
  return ok();
}

bool TakenDirs::holds(const std::string& id) const {
  MutexLock lock(mutex_);
  return taken_.contains(id);
}

bool TakenDirs::any() const {
  MutexLock lock(mutex_);
  return !taken_.empty() || !shown_.empty();
}

void TakenDirs::stop() {
  stop_.request_stop();
  std::vector<std::string> shown;
  {
    MutexLock lock(mutex_);
    stopped_ = true;
    changed_.notify_all();
    for (const auto& [id, own] : taken_)
      if (own.share != nullptr) own.share->leave();
    for (const auto& [incoming, one] : shown_) shown.push_back(incoming);
  }
  for (const std::string& incoming : shown) forget_shown(incoming);
}

}  // namespace ptc
