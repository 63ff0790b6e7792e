#include "reshard/job/staged_parts.h"

#include <fcntl.h>
#include <spdlog/spdlog.h>
#include <sys/stat.h>

#include <algorithm>
#include <filesystem>
#include <sstream>
#include <utility>

#include "reshard/job/commits_led.h"
#include "store/base/json.h"
#include "store/base/shell_word.h"

namespace ptc {
namespace {

constexpr auto kSayAgain = std::chrono::seconds(1);  // where the agreement does not answer
constexpr auto kSaidFor = std::chrono::seconds(10);  // what is written meanwhile is not said again
constexpr auto kLookAgain = std::chrono::seconds(10);  // whether a directory is there still
constexpr size_t kMostStaged = 4096;
constexpr std::string_view kStaged = "staged/";

/// 0: there is no such directory, or nothing in it.
ino_t directory_at(const std::string& path) {
  struct stat facts {};
  if (::lstat(path.c_str(), &facts) != 0 || !S_ISDIR(facts.st_mode)) return 0;
  std::error_code error;
  const bool is_empty = std::filesystem::is_empty(path, error);
  return is_empty && !error ? 0 : facts.st_ino;
}

/// The name of a directory in incoming/ whose <name>.without this is; empty: it is none.
std::string named_by_without(const std::string& file) {
  const std::string ending = without_file_of("");
  return file.size() > ending.size() && file.ends_with(ending)
             ? file.substr(0, file.size() - ending.size())
             : std::string();
}

struct NamedNodes {
  int64_t changed_ns = 0;
  std::vector<std::string> nodes;
};
/// The stores of members, by node, as far as their keys tell.
std::map<std::string, std::string> stores_of(const std::vector<MetaEntry>& members) {
  std::map<std::string, std::string> stores;
  for (const MetaEntry& member : members)
    stores[member.key.substr(kMemberKeys.size())] = json_text(member.value, "store");
  return stores;
}

/// Whether `value` was put by another store than the node has now; false where one is not known.
bool is_of_former_store(std::string_view value, const std::string& now) {
  const size_t space = value.find(' ');
  return space != value.npos && !now.empty() && value.substr(space + 1) != now;
}

/// nullopt: there is no such file, or it cannot be read.
std::optional<NamedNodes> read_without(const std::string& path) {
  constexpr size_t kMostBytes = 1 << 16;
  NamedNodes named;
  struct stat facts {};
  if (::lstat(path.c_str(), &facts) != 0) return std::nullopt;
  named.changed_ns = facts.st_ctim.tv_sec * 1'000'000'000 + facts.st_ctim.tv_nsec;
  const auto text = read_text_file(AT_FDCWD, path, kMostBytes, FileKind::kOwn);
  if (text.has_error()) return std::nullopt;
  std::istringstream words(text.value());
  for (std::string node; words >> node;) named.nodes.push_back(node);
  return named;
}

}  // namespace

Error lost_with_its_store(const std::string& node, const std::string& incoming) {
  return make_error(
      Code::kConflict,
      "node {} had written something into incoming/{}, and has lost it with its store: write it "
      "again there, or say that it is committed without (echo {} > {}, and the same mv again)",
      node, incoming, node, shell_word("incoming/" + without_file_of(incoming)));
}

std::string StagedParts::prefix_of(std::string_view job) {
  return std::string(kStaged) + std::string(job) + "/";
}

Result<> StagedParts::add_keys(MetaClient& meta, std::string_view job,
                               std::vector<std::string>& keys) {
  PTC_TRY(const auto entries, meta.list(prefix_of(job)));
  for (const MetaEntry& entry : entries) keys.push_back(entry.key);
  return ok();
}

Result<std::shared_ptr<const OwnStore>> StagedParts::own_store(MetaClient& meta,
                                                               const Cluster& cluster,
                                                               const std::string& id) {
  auto own = std::make_shared<OwnStore>(OwnStore{id, {}, {}});
  if (cluster.shares_bytes() && !id.empty()) {
    PTC_TRY(const auto entries, meta.list(kStaged));
    for (const MetaEntry& entry : entries) {
      const size_t space = entry.value.find(' ');
      if (!entry.key.ends_with("/" + cluster.self()) || space == std::string::npos) continue;
      (entry.value.substr(space + 1) == id ? own->said : own->lost).insert(entry.key);
    }
  }
  return std::shared_ptr<const OwnStore>(std::move(own));
}

std::string StagedParts::key_of(std::string_view incoming) const {
  return prefix_of(place_.name) + std::string(incoming) + "/" + place_.services.cluster->self();
}

void StagedParts::start(StepPool& pool) {
  if (!says()) return;
  {
    MutexLock lock(mutex_);
    std::error_code error;
    for (std::filesystem::directory_iterator it(place_.incoming_dir(), error), end;
         !error && it != end; it.increment(error)) {
      const std::string name = it->path().filename().string(), named = named_by_without(name);
      std::error_code unknown;
      if (it->is_symlink(unknown)) continue;
      // What had been said when it was written nobody knows any more.
      if (const auto without = named.empty() ? std::nullopt : read_without(it->path()))
        without_[named].changed_ns = without->changed_ns;
      else if (it->is_directory(unknown) && written_.size() < kMostStaged) written_.insert(name);
    }
  }
  if (const OwnStore* own = place_.services.own_store.get(); own != nullptr) {
    const std::string before = prefix_of(place_.name),
                      behind = "/" + place_.services.cluster->self();
    for (auto key = own->said.lower_bound(before);
         key != own->said.end() && key->starts_with(before); ++key) {
      const std::string name =
          key->substr(before.size(), key->size() - before.size() - behind.size());
      said_.try_emplace(name);  // the loop looks whether there is such a directory
    }
  }
  loop_.start(pool, [this](const std::stop_token& stop) { return say(stop); });
}

void StagedParts::stop() {
  loop_.stop();
  for (const auto& [incoming, said] : std::exchange(said_, {})) {
    if (directory_at(place_.incoming_dir() + "/" + incoming) != 0) continue;
    MetaTransaction transaction;
    transaction.deletes = {key_of(incoming)};
    if (place_.commit(std::move(transaction)).has_error()) return;  // nor will the others go
  }
}

void StagedParts::closed(const std::string& path) {
  if (!says()) return;
  const size_t slash = path.find('/');
  const std::string name = path.substr(0, slash);
  // Without a slash it is a file of incoming/ itself, and one behind it alone is what was moved in.
  const bool below = slash != std::string::npos, is_all = !below || slash + 1 == path.size();
  const std::string named = is_all ? named_by_without(name) : std::string();
  if (!below && named.empty()) return;
  MutexLock lock(mutex_);
  if (!named.empty() && to_heed_.size() < kMostStaged) to_heed_.insert(named);
  if (below && written_.size() < kMostStaged) written_.insert(name);
  loop_.wake();
}

Result<std::vector<MetaEntry>> StagedParts::keys_of(std::string_view incoming) const {
  const std::string prefix = prefix_of(place_.name) + std::string(incoming) + "/";
  PTC_TRY(auto entries, place_.services.meta->list(prefix));
  std::erase_if(entries, [&](const MetaEntry& entry) { return !is_of_this_job(entry.value); });
  for (MetaEntry& entry : entries) entry.key.erase(0, prefix.size());
  return entries;
}

Result<> StagedParts::heed_without(const std::string& incoming) {
  if (!says()) return ok();
  const auto named = read_without(place_.incoming_dir() + "/" + without_file_of(incoming));
  if (!named) return ok();
  MutexLock heeding(heeding_);
  {
    MutexLock lock(mutex_);
    const auto known = without_.find(incoming);
    if (known != without_.end() && known->second.changed_ns == named->changed_ns) return ok();
  }
  Without heeded{named->changed_ns, {}};
  PTC_TRY(const auto entries, keys_of(incoming));
  const std::vector<std::string> alive = place_.services.cluster->alive();
  PTC_TRY(const auto members, place_.services.meta->list(kMemberKeys));
  std::map<std::string, std::string> stores = stores_of(members);
  for (const MetaEntry& entry : entries) {
    const std::string& node = entry.key;
    if (!is_among(named->nodes, node)) continue;
    if (is_among(alive, node)) {
      // It answers for itself. And what it has it may add to under this very key, which is then not
      // put again: of that nothing is forgotten, should it be lost one day.
      if (is_of_former_store(entry.value, stores[node])) heeded.revisions[node] = entry.revision;
      continue;
    }
    const std::string key = prefix_of(place_.name) + incoming + "/" + node;
    const auto done = place_.commit({.compares = {{key, entry.revision}}, .deletes = {key}});
    if (done.has_error() && done.error().code() != Code::kConflict) return std::move(done).error();
    if (done.has_value())
      spdlog::warn("job {}: what node {} has written into incoming/{} is gone on without",
                   place_.name, node, incoming);
  }
  MutexLock lock(mutex_);
  if (without_.size() >= kMostStaged) without_.clear();  // they say nothing more then
  without_[incoming] = std::move(heeded);
  return ok();
}

Result<bool> StagedParts::goes_without_lost(const std::string& incoming, const std::string& node) {
  const auto named = read_without(place_.incoming_dir() + "/" + without_file_of(incoming));
  if (!named) return false;
  int64_t revision = 0;
  {
    MutexLock lock(mutex_);
    const auto known = without_.find(incoming);
    if (known == without_.end() || known->second.changed_ns != named->changed_ns) return false;
    const auto said = known->second.revisions.find(node);
    if (said == known->second.revisions.end()) return false;
    revision = said->second;
  }
  const std::string key = prefix_of(place_.name) + incoming + "/" + node;
  const auto done = place_.commit({.compares = {{key, revision}}, .deletes = {key}});
  if (done.has_error() && done.error().code() == Code::kConflict) return false;  // it wrote since
  PTC_TRY(done);
  spdlog::warn("job {}: what node {} had written into incoming/{}, and lost, is gone on without",
               place_.name, node, incoming);
  return true;
}

Result<std::set<std::string>> StagedParts::nodes_of(std::string_view incoming) const {
  std::set<std::string> nodes;
  if (!says()) return nodes;
  PTC_TRY(const auto entries, keys_of(incoming));
  for (const MetaEntry& entry : entries) nodes.insert(entry.key);
  return nodes;
}

Result<bool> StagedParts::was_lost(std::string_view incoming) const {
  const std::string key = key_of(incoming);
  const OwnStore* own = place_.services.own_store.get();
  if (own == nullptr || !own->lost.contains(key)) return false;
  PTC_TRY(const auto said, place_.services.meta->get(key));
  return said && is_of_this_job(said->value) && said->value != value();  // it stands still
}

std::string StagedParts::value() const {
  const OwnStore* own = place_.services.own_store.get();
  return own == nullptr || own->id.empty() ? place_.id : place_.id + " " + own->id;
}

bool StagedParts::is_of_this_job(std::string_view value) const {
  return value.substr(0, value.find(' ')) == place_.id;
}

std::string StagedParts::name_of(ino_t directory) const {
  std::error_code error;
  for (std::filesystem::directory_iterator it(place_.incoming_dir(), error), end;
       !error && it != end; it.increment(error))
    if (directory_at(it->path()) == directory) return it->path().filename().string();
  return {};
}

int64_t StagedParts::as_member() const {
  const auto fence = place_.services.cluster->fence();
  return fence ? fence->revision : 0;
}

bool StagedParts::say_one(const std::string& incoming) {
  const Time now = std::chrono::steady_clock::now();
  const int64_t member = as_member();
  const ino_t directory = directory_at(place_.incoming_dir() + "/" + incoming);
  const auto said = said_.find(incoming);
  MetaTransaction transaction;
  if (directory == 0) {
    if (said == said_.end()) return true;
    transaction.deletes = {key_of(incoming)};
  } else {
    if (said != said_.end() && said->second.directory == directory &&
        said->second.as_member == member && now - said->second.when < kSaidFor)
      return true;
    if (said == said_.end() && said_.size() >= kMostStaged) return true;
    transaction.puts = {{key_of(incoming), value()}};
  }
  const Result<int64_t> done = place_.commit(std::move(transaction));
  // Of a job that is gone there is nothing more to say.
  if (done.has_error() && done.error().code() != Code::kNotFound) return false;
  if (directory == 0) said_.erase(said);
  else said_.insert_or_assign(incoming, Said{directory, member, now});
  return true;
}

std::optional<StagedParts::Time> StagedParts::say(const std::stop_token& stop) {
  std::set<std::string> written, to_heed;
  {
    MutexLock lock(mutex_);
    written.swap(written_);
    to_heed.swap(to_heed_);
  }
  for (const auto& [incoming, said] : said_) {
    if (directory_at(place_.incoming_dir() + "/" + incoming) == said.directory &&
        said.directory != 0)
      continue;
    written.insert(incoming);
    if (said.directory == 0) continue;
    if (const std::string now = name_of(said.directory); !now.empty()) written.insert(now);
  }
  std::set<std::string> later, heed_later;
  bool answers = true;  // else the rest is not tried now
  const auto give_up = [&] { return !answers || stop.stop_requested(); };
  for (const std::string& incoming : to_heed)
    if (give_up() || !(answers = heed_without(incoming).has_value())) heed_later.insert(incoming);
  for (const std::string& incoming : written)
    if (give_up() || !(answers = say_one(incoming))) later.insert(incoming);
  const bool again = !later.empty() || !heed_later.empty();
  {
    MutexLock lock(mutex_);
    written_.merge(later);
    to_heed_.merge(heed_later);
  }
  const Time now = std::chrono::steady_clock::now();
  if (again) return now + kSayAgain;
  if (!said_.empty()) return now + kLookAgain;
  return std::nullopt;
}

}  // namespace ptc
