#include "reshard/job/staged_parts.h"

#include <sys/stat.h>

#include <algorithm>
#include <filesystem>
#include <utility>

#include "reshard/job/commits_led.h"
#include "store/base/shell_word.h"

namespace ptc {
namespace {

constexpr auto kSayAgain = std::chrono::seconds(1);  // where the agreement does not answer
constexpr auto kSaidFor = std::chrono::seconds(10);  // what is written meanwhile is not said again
constexpr auto kLookAgain = std::chrono::seconds(10);  // whether a directory is there still
constexpr size_t kMostStaged = 4096;
constexpr std::string_view kStaged = "staged/";

/// 0: there is no such directory.
ino_t directory_at(const std::string& path) {
  struct stat facts {};
  const bool there = ::lstat(path.c_str(), &facts) == 0 && S_ISDIR(facts.st_mode);
  return there ? facts.st_ino : 0;
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
  auto own = std::make_shared<OwnStore>(OwnStore{id, {}});
  if (cluster.shares_bytes() && !id.empty()) {
    PTC_TRY(const auto entries, meta.list(kStaged));
    for (const MetaEntry& entry : entries) {
      const size_t space = entry.value.find(' ');
      if (entry.key.ends_with("/" + cluster.self()) && space != std::string::npos &&
          entry.value.substr(space + 1) != id)
        own->lost.insert(entry.key);
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
         !error && it != end && written_.size() < kMostStaged; it.increment(error))
      if (std::error_code unknown; it->is_directory(unknown) && !it->is_symlink(unknown))
        written_.insert(it->path().filename().string());
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
  const size_t slash = path.find('/');
  if (slash == std::string::npos || !says()) return;
  MutexLock lock(mutex_);
  if (written_.size() >= kMostStaged) return;
  written_.insert(path.substr(0, slash));
  loop_.wake();
}

void StagedParts::committed(const std::string& incoming, int64_t revision) {
  if (!says()) return;
  MutexLock lock(mutex_);
  committed_.insert_or_assign(incoming, revision);
  loop_.wake();
}

Result<std::set<std::string>> StagedParts::nodes_of(std::string_view incoming) const {
  std::set<std::string> nodes;
  if (!says()) return nodes;
  const std::string prefix = prefix_of(place_.name) + std::string(incoming) + "/";
  PTC_TRY(const auto entries, place_.services.meta->list(prefix));
  for (const MetaEntry& entry : entries)
    if (is_of_this_job(entry.value)) nodes.insert(entry.key.substr(prefix.size()));
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

bool StagedParts::say_one(const std::string& incoming) {
  const Time now = std::chrono::steady_clock::now();
  const ino_t directory = directory_at(place_.incoming_dir() + "/" + incoming);
  const auto said = said_.find(incoming);
  MetaTransaction transaction;
  if (directory == 0) {
    if (said == said_.end()) return true;
    transaction.deletes = {key_of(incoming)};
  } else {
    if (said != said_.end() && said->second.directory == directory &&
        now - said->second.when < kSaidFor)
      return true;
    if (said == said_.end() && said_.size() >= kMostStaged) return true;
    transaction.puts = {{key_of(incoming), value()}};
  }
  const Result<int64_t> done = place_.commit(std::move(transaction));
  // Of a job that is gone there is nothing more to say.
  if (done.has_error() && done.error().code() != Code::kNotFound) return false;
  if (directory == 0) said_.erase(said);
  else said_.insert_or_assign(incoming, Said{directory, now});
  return true;
}

bool StagedParts::forget_all_of(const std::string& incoming, int64_t revision) const {
  constexpr size_t kAtOnce = 40;
  const auto entries = place_.services.meta->list(prefix_of(place_.name) + incoming + "/");
  if (entries.has_error()) return false;
  MetaTransaction transaction;
  const auto carry_out = [&] {
    if (transaction.deletes.empty()) return true;
    const Result<int64_t> done = place_.commit(std::exchange(transaction, {}));
    return done.has_value() || done.error().code() == Code::kNotFound;  // the job is gone
  };
  for (const MetaEntry& entry : entries.value()) {
    if (entry.revision > revision) continue;  // of what comes next under this name
    transaction.compares.push_back({entry.key, entry.revision});
    transaction.deletes.push_back(entry.key);
    if (transaction.deletes.size() == kAtOnce && !carry_out()) return false;
  }
  return carry_out();
}

std::optional<StagedParts::Time> StagedParts::say(const std::stop_token& stop) {
  std::set<std::string> written;
  std::map<std::string, int64_t> committed;
  {
    MutexLock lock(mutex_);
    written.swap(written_);
    committed.swap(committed_);
  }
  for (const auto& [incoming, said] : said_) {
    if (directory_at(place_.incoming_dir() + "/" + incoming) == said.directory) continue;
    written.insert(incoming);
    if (const std::string now = name_of(said.directory); !now.empty()) written.insert(now);
  }
  std::set<std::string> later;
  std::map<std::string, int64_t> forgotten_later;
  bool answers = true;  // else the rest is not tried now
  const auto give_up = [&] { return !answers || stop.stop_requested(); };
  for (const auto& [incoming, revision] : committed)
    if (give_up() || !(answers = forget_all_of(incoming, revision)))
      forgotten_later.emplace(incoming, revision);
  for (const std::string& incoming : written)
    if (give_up() || !(answers = say_one(incoming))) later.insert(incoming);
  const bool again = !later.empty() || !forgotten_later.empty();
  {
    MutexLock lock(mutex_);
    written_.merge(later);
    committed_.merge(forgotten_later);
  }
  const Time now = std::chrono::steady_clock::now();
  if (again) return now + kSayAgain;
  if (!said_.empty()) return now + kLookAgain;
  return std::nullopt;
}

}  // namespace ptc
