// A node's part in a commit that another node leads (commit_attempt.h), step by step, as it is
// asked to:
//
//   take    {"id", "incoming", "from", "fence"} → list_files(), or nothing if there is no such
//           directory here
//   hash    {"id"} '\n' request → hash_files()
//   adopt   {"id", "files"} → the images that the files became
//   hide    {"id"}: right before the decision
//   untake  {"id"}: there will be none; all of it goes back, copies that were made here too
//   commit  {"id"} → "open", "committed" or "given up"; asked of the node that leads
//
// The decision is seen in the metadata (sync): then the directory goes. Who leads may fail in the
// middle, and untake may be lost. So this node asks how a commit goes of which it has not heard for
// a while; and where the lease of the node that leads has ended and it has not decided, it never
// will, for its decision names its key under that lease. Until it is hidden, the directory can be
// written again here, too: then the commit finds nothing more on this node, and fails.
#include <fcntl.h>
#include <spdlog/spdlog.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <boost/json/array.hpp>
#include <boost/json/object.hpp>
#include <boost/json/serialize.hpp>

#include "reshard/job/commit_attempt.h"
#include "reshard/job/job_impl.h"
#include "store/base/file.h"

namespace ptc {
namespace {

constexpr auto kUnheard = std::chrono::seconds(5);  // then the one that leads is asked
constexpr auto kAskTime = std::chrono::seconds(2);
constexpr auto kRenameTime =
    std::chrono::seconds(2);  // a mv may wait for it elsewhere for that long

}  // namespace

Result<> Job::Impl::note_commit_elsewhere(const json::object& request, const std::string& id) {
  const json::value* from = request.if_contains("from");
  const json::value* fence = request.if_contains("fence");
  if (services.cluster == nullptr || from == nullptr || !from->is_string() || fence == nullptr ||
      !fence->is_int64())
    return invalid_argument("the request does not say who commits");
  const std::string leader(from->as_string());
  const std::string key = services.cluster->fence_of(leader).key;
  std::lock_guard lock(mutex);
  CommitElsewhere& known = commits_elsewhere[id];
  known.from = leader;
  known.fence = {key, fence->as_int64()};
  known.heard = Clock::now();
  housekeeping.wake();
  return ok();
}

Result<std::string> Job::Impl::answer_first_take(const json::object& request,
                                                 const std::string& id) {
  const json::value* name = request.if_contains("incoming");
  if (name == nullptr || !name->is_string() || name->as_string().empty() ||
      name->as_string().find('/') != json::string::npos || name->as_string()[0] == '.')
    return invalid_argument("the request names no directory of incoming/");
  const std::string incoming(name->as_string());
  const KeyedLock::Held one = takes.hold(incoming);  // it may be asked again before it has answered
  PTC_TRY(note_commit_elsewhere(request, id));
  const auto given_up = [] {
    return make_error(Code::kConflict, "the commit was given up");
  };  // meanwhile
  std::shared_ptr<CommitShare> share;
  std::string leader;
  std::vector<std::string>
      earlier;  // of the same node, which leads one of a directory at a time: decided or given up
  {
    std::lock_guard lock(mutex);
    const auto own = commits_elsewhere.find(id);
    if (own == commits_elsewhere.end()) return given_up();
    share = own->second.share;
    leader = own->second.from;
    for (const auto& [other, known] : commits_elsewhere)
      if (other != id && known.from == own->second.from && known.share != nullptr &&
          known.share->incoming() == incoming)
        earlier.push_back(other);
  }
  for (const std::string& other : earlier) {
    // It may have been decided, and nobody have told this node.
    if (Result<> settled = settle_commit_elsewhere(other, leader, {}); settled.has_error())
      return make_error(Code::kUnavailable,
                        "what became of the commit of incoming/{} before is not known yet: {}",
                        incoming, settled.error().message());
  }
  if (share == nullptr) {
    MakeSeal seal;
    if (listener != nullptr)
      seal = [this, &incoming](GivesWay gives_way) {
        return listener->seal(job->name(), incoming, std::move(gives_way));
      };
    stop_hashing(incoming);
    auto may_give_way = [this, id, since = Clock::now()] {
      if (Clock::now() - since < kRenameTime) return false;
      std::shared_ptr<CommitShare> withdrawn;
      {
        std::lock_guard lock(mutex);
        const auto known = commits_elsewhere.find(id);
        if (known == commits_elsewhere.end()) return true;
        withdrawn = known->second.share;
      }
      // It may be hidden at just this moment.
      if (withdrawn == nullptr) return true;
      if (!withdrawn->withdraw_unless_hidden()) return false;
      std::lock_guard lock(mutex);
      if (const auto known = commits_elsewhere.find(id);
          known != commits_elsewhere.end() && known->second.share == withdrawn)
        known->second.share.reset();
      return true;
    };
    auto taken = CommitShare::take(commit_place(), id, incoming, seal, std::move(may_give_way));
    if (taken.has_error() || taken.value() == nullptr) {
      std::lock_guard lock(mutex);
      commits_elsewhere.erase(id);
      if (taken.has_error()) return std::move(taken).error();
      return std::string();
    }
    share = std::move(taken).value();
    bool wanted = false;
    {
      std::lock_guard lock(mutex);
      const auto known = commits_elsewhere.find(id);
      wanted = known != commits_elsewhere.end();
      if (wanted) known->second.share = share;
    }
    if (!wanted) {
      share->withdraw();
      return given_up();
    }
  }
  Result<std::string> listing = list_files(share->directory());
  if (listing.has_error()) untake(id);
  return listing;
}

Result<std::string> Job::Impl::answer_take(std::string_view method, const json::object& request,
                                           const std::string& id, std::string_view rest) {
  if (method == "commit") return answer_commit(id);
  if (method == "take") return answer_first_take(request, id);
  if (method == "untake") {
    untake(id);
    return std::string();
  }
  std::shared_ptr<CommitShare> share;
  {
    std::lock_guard lock(mutex);
    const auto known = commits_elsewhere.find(id);
    if (known != commits_elsewhere.end()) {
      known->second.heard = Clock::now();
      share = known->second.share;
    }
  }
  if (share == nullptr)
    return make_error(
        Code::kConflict,
        "node {} has nothing of this commit any more, as somebody wrote it again: move "
        "it once more",
        services.node);
  if (method == "hash")
    return hash_files(share->directory(), rest, *services.executor, hashes,
                      commit_stop.get_token());
  if (method == "hide") {
    PTC_TRY(share->hide());
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

std::string Job::Impl::answer_commit(const std::string& id) const {
  std::lock_guard lock(mutex);
  for (const auto& [incoming, attempt] : attempts)
    if (attempt->id() == id) return std::string(attempt->outcome());
  const bool committed =
      std::find(committed_ids.begin(), committed_ids.end(), id) != committed_ids.end();
  return committed ? "committed" : "given up";
}

void Job::Impl::untake(const std::string& id) {
  CommitElsewhere own;
  {
    std::lock_guard lock(mutex);
    auto known = commits_elsewhere.find(id);
    if (known == commits_elsewhere.end()) return;
    own = std::move(known->second);
    commits_elsewhere.erase(known);
  }
  if (own.share != nullptr) {
    spdlog::info("job {}: incoming/{} was not committed by node {}", job->name(),
                 own.share->incoming(), own.from);
    own.share->withdraw();  // somebody may still be at it
    own.share.reset();
  }
  drop_part(id);
  (void)remove_tree(AT_FDCWD, checkpoint_dir(id));
}

Result<std::set<std::string>> Job::Impl::given_up_elsewhere() {
  std::map<std::string, MetaTransaction::Compare> fences;
  {
    std::lock_guard lock(mutex);
    for (const auto& [id, own] : commits_elsewhere) fences.emplace(id, own.fence);
  }
  std::set<std::string> given_up;
  for (const auto& [id, fence] : fences) {
    PTC_TRY(auto entry, services.meta->get(fence.key));
    if (!entry || entry->revision != fence.revision) given_up.insert(id);
  }
  return given_up;
}

void Job::Impl::settle_commits_elsewhere(const std::set<std::string>& given_up,
                                         const std::set<std::string>& decided) {
  std::vector<std::shared_ptr<CommitShare>> committed;
  std::vector<std::string> back;
  {
    std::lock_guard lock(mutex);
    std::erase_if(commits_elsewhere, [&](const auto& one) {
      if (!decided.contains(one.first)) return false;
      if (one.second.share != nullptr) committed.push_back(one.second.share);
      return true;
    });
    for (const auto& [id, own] : commits_elsewhere)
      if (given_up.contains(id)) back.push_back(id);
  }
  for (const auto& share : committed) share->committed();
  for (const std::string& id : back) untake(id);
}

void Job::Impl::look_after_commits_elsewhere(const std::stop_token& stop) {
  std::map<std::string, std::string> unheard;  // id → who leads it
  {
    std::lock_guard lock(mutex);
    for (const auto& [id, own] : commits_elsewhere)
      if (Clock::now() - own.heard > kUnheard) unheard.emplace(id, own.from);
  }
  std::set<std::string> silent;  // nodes
  for (const auto& [id, from] : unheard) {
    if (silent.contains(from) || stop.stop_requested()) continue;
    if (settle_commit_elsewhere(id, from, stop).has_error()) silent.insert(from);
  }
}

Result<> Job::Impl::settle_commit_elsewhere(const std::string& id, const std::string& leader,
                                            const std::stop_token& stop) {
  PTC_TRY(auto outcome,
          ask(leader, "commit", json::serialize(json::object{{"id", id}}), stop, kAskTime));
  if (outcome == "open") return make_error(Code::kBusy, "node {} has not decided yet", leader);
  PTC_TRY(follow());  // what it has decided by now is seen in the metadata
  std::shared_ptr<CommitShare> share;
  {
    std::lock_guard lock(mutex);
    const auto own = commits_elsewhere.find(id);
    if (own == commits_elsewhere.end()) return ok();
    if (outcome == "committed") share = own->second.share;  // and removed since
  }
  if (share != nullptr) share->committed();
  untake(id);
  return ok();
}

}  // namespace ptc
