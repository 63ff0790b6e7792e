// A node's part in a commit that another node leads: what it has of incoming/<name> goes the same way as
// there (job_commit.cc), step by step, as it is asked to:
//
//   take    {"id", "incoming", "from", "fence"} → list_files(), or nothing if there is no such directory here
//   hash    {"id"} '\n' request → hash_files()
//   adopt   {"id", "files"} → the images that the files became
//   untake  {"id"}: back to incoming/
//
// The decision is seen in the metadata (sync): then the directory goes. If the lease of the node that leads has
// ended and it has not decided, it never will, for its decision names its key under that lease: then all is put back.
#include <fcntl.h>
#include <spdlog/spdlog.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <boost/json/array.hpp>
#include <boost/json/object.hpp>
#include <boost/json/serialize.hpp>

#include "reshard/job/job_impl.h"
#include "store/base/file.h"

namespace ptc {

void Job::Impl::put_back(const std::string& id, const std::string& incoming) {
  const std::string taken_dir = fmt::format("{}/committing/{}", dir, id);
  const std::string from = taken_dir + "/" + incoming;
  const std::string source = job->files_dir() + "/incoming/" + incoming;
  // Somebody may have made the name anew; then it comes back under another.
  if (renameat2(AT_FDCWD, from.c_str(), AT_FDCWD, source.c_str(), RENAME_NOREPLACE) != 0 &&
      rename(from.c_str(), fmt::format("{}/incoming/recovered-{}", job->files_dir(), id).c_str()) != 0)
    spdlog::error("job {}: incoming/{} could not be put back ({}); it is in {}", job->name(), incoming,
                  errno_error(errno, "rename").message(), from);
  else
    rmdir(taken_dir.c_str());
}

Result<bool> Job::Impl::take_directory(const std::string& id, const std::string& incoming) {
  const std::string source = job->files_dir() + "/incoming/" + incoming;
  struct stat st{};
  if (lstat(source.c_str(), &st) != 0) {
    if (errno == ENOENT) return false;
    return errno_error(errno, "incoming/" + incoming);
  }
  if (!S_ISDIR(st.st_mode))
    return invalid_argument("incoming/{} is no directory: a checkpoint is incoming/<name>/rank/<r>/…",
                            incoming);
  stop_hashing(incoming);  // the commit goes on where that was, on all threads
  const std::string taken_dir = fmt::format("{}/committing/{}", dir, id);
  PTC_TRY(make_directory(AT_FDCWD, dir + "/committing"));
  PTC_TRY(make_directory(AT_FDCWD, taken_dir));
  if (rename(source.c_str(), (taken_dir + "/" + incoming).c_str()) != 0) {
    Error error = errno_error(errno, "incoming/" + incoming);
    rmdir(taken_dir.c_str());
    return error;
  }
  return true;
}

Result<std::string> Job::Impl::answer_take(std::string_view method, const json::object& request,
                                           const std::string& id, std::string_view rest) {
  if (method == "take") {
    const json::value* name = request.if_contains("incoming");
    const json::value* from = request.if_contains("from");
    const json::value* fence = request.if_contains("fence");
    if (name == nullptr || !name->is_string() || name->as_string().empty() ||
        name->as_string().find('/') != json::string::npos || name->as_string()[0] == '.' ||
        from == nullptr || !from->is_string() || fence == nullptr || !fence->is_int64())
      return invalid_argument("the request names no directory of incoming/");
    const std::string incoming(name->as_string()), leader(from->as_string());
    {
      std::lock_guard lock(mutex);
      taken[id] = {incoming, leader, {services.cluster->fence_of(leader).key, fence->as_int64()}, {}};
    }
    Result<bool> there = take_directory(id, incoming);
    Result<std::string> listing = std::string();
    if (there.has_error()) listing = std::move(there).error();
    else if (there.value()) {
      auto fd = open_file(AT_FDCWD, fmt::format("{}/committing/{}/{}", dir, id, incoming),
                          O_RDONLY | O_DIRECTORY | O_NOFOLLOW);
      listing = fd.has_error() ? Result<std::string>(std::move(fd).error())
                               : list_files(fd.value().get());
      if (listing.has_error()) put_back(id, incoming);
    }
    if (listing.has_error() || !there.value()) {
      std::lock_guard lock(mutex);
      taken.erase(id);
    }
    return listing;
  }
  Taken own;
  {
    std::lock_guard lock(mutex);
    auto known = taken.find(id);
    if (known == taken.end()) {
      if (method == "untake") return std::string();
      return make_error(Code::kConflict, "this node has nothing of commit {} any more", id);
    }
    own = known->second;
  }
  if (method == "untake") {
    untake(id);
    return std::string();
  }
  PTC_TRY(auto fd, open_file(AT_FDCWD, fmt::format("{}/committing/{}/{}", dir, id, own.incoming),
                             O_RDONLY | O_DIRECTORY | O_NOFOLLOW));
  if (method == "hash")
    return hash_files(fd.get(), rest, *services.executor, hashes, commit_stop.get_token());
  const json::value* files = request.if_contains("files");
  if (files == nullptr || !files->is_array()) return invalid_argument("the request has no files");
  json::array ids;
  for (const json::value& file : files->as_array()) {
    if (!file.is_array() || file.as_array().size() != 2 || !file.as_array()[0].is_string())
      return invalid_argument("the request has no files");
    const std::string path(file.as_array()[0].as_string());
    PTC_TRY(auto image, services.images->adopt(fd.get(), path));
    {
      std::lock_guard lock(mutex);
      taken[id].images.push_back(image->id().text);
    }
    PTC_TRY(bool busy, open_for_writing(fd.get(), path));
    boost::system::error_code bad;
    if (busy || image->bytes() != file.as_array()[1].to_number<uint64_t>(bad))
      return make_error(Code::kBusy, "{} was written while it was being committed", path);
    ids.push_back(json::value(image->id().text));
  }
  PTC_TRY(services.images->sync());
  return json::serialize(ids);
}

void Job::Impl::untake(const std::string& id) {
  Taken own;
  {
    std::lock_guard lock(mutex);
    auto known = taken.find(id);
    if (known == taken.end()) return;
    own = std::move(known->second);
    taken.erase(known);
  }
  for (const std::string& image : own.images) (void)services.images->remove({image});
  put_back(id, own.incoming);
  (void)remove_tree(AT_FDCWD, checkpoint_dir(id));
  spdlog::info("job {}: incoming/{} was not committed by node {}, and is put back", job->name(),
               own.incoming, own.from);
}

/// Commits that can never be decided any more. To be asked before the metadata are read that would say that one has
/// been decided.
Result<std::set<std::string>> Job::Impl::given_up_elsewhere() {
  std::map<std::string, MetaTransaction::Compare> fences;
  {
    std::lock_guard lock(mutex);
    for (const auto& [id, own] : taken) fences.emplace(id, own.fence);
  }
  std::set<std::string> given_up;
  for (const auto& [id, fence] : fences) {
    PTC_TRY(auto entry, services.meta->get(fence.key));
    if (!entry || entry->revision != fence.revision) given_up.insert(id);
  }
  return given_up;
}

void Job::Impl::settle_taken(const std::set<std::string>& given_up) {
  std::vector<std::string> done, back;
  {
    std::lock_guard lock(mutex);
    for (const auto& [id, own] : taken) {
      const bool committed = std::any_of(checkpoints.begin(), checkpoints.end(),
                                         [&](const auto& known) { return known.second.id == id; });
      if (committed) done.push_back(id);
      else if (given_up.contains(id)) back.push_back(id);
    }
  }
  for (const std::string& id : back) untake(id);
  for (const std::string& id : done) {
    Taken own;
    {
      std::lock_guard lock(mutex);
      own = std::move(taken[id]);
      taken.erase(id);
    }
    for (const std::string& image : own.images)
      (void)chmod(fmt::format("{}/{}", services.images->directory(), image).c_str(), 0400);
    (void)remove_tree(AT_FDCWD, fmt::format("{}/committing/{}", dir, id));
  }
}

}  // namespace ptc
