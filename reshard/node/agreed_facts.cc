#include "reshard/node/agreed_facts.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <boost/json/object.hpp>
#include <boost/json/serialize.hpp>
#include <set>

#include "reshard/cluster/tombstones.h"
#include "store/base/json.h"

namespace ptc {
namespace {

constexpr size_t kMaxFileBytes = size_t{1} << 32;
constexpr std::string_view kKeysOfJobs = "jobs/";
constexpr uint64_t kSmallFile = 1 << 20;  // is not written anew
constexpr JsonLimits kLine{.max_bytes = 8 << 20};

uint64_t line_bytes(const MetaEntry& entry) { return entry.key.size() + entry.value.size() + 40; }

std::string line_of(const MetaEntry& entry) {
  return json::serialize(json::object{
             {"key", entry.key}, {"value", entry.value}, {"revision", entry.revision}}) +
         "\n";
}

Error set_back(std::string_view what) {
  return make_error(Code::kUnavailable, "it was set back, or is another one: {}", what);
}

}  // namespace

std::string key_of_removal(const MetaEntry& entry) {
  const std::string_view rest =
      std::string_view(entry.key).substr(std::string_view("jobs/").size());
  const size_t slash = rest.find('/');
  if (slash == std::string_view::npos) return removed_job_key(job_id_of(entry.value));
  if (!rest.substr(slash).starts_with("/checkpoints/")) return "";
  auto record = parse_json(entry.value);
  boost::system::error_code bad;
  const json::value* id = record.has_value() ? record.value().find_pointer("/id", bad) : nullptr;
  return id != nullptr && id->is_string()
             ? removed_checkpoint_key(std::string_view(id->get_string()))
             : "";
}

Result<AgreedFacts> AgreedFacts::open(const std::string& path, bool read_only) {
  AgreedFacts facts;
  facts.path_ = path;
  Result<std::string> read = read_text_file(AT_FDCWD, path, kMaxFileBytes);
  if (read.has_error() && read.error().code() == Code::kNotFound) return facts;
  PTC_TRY(std::string text, std::move(read));
  size_t begin = 0;
  for (size_t end; (end = text.find('\n', begin)) != std::string::npos; begin = end + 1) {
    auto line = parse_json(std::string_view(text).substr(begin, end - begin), kLine);
    if (line.has_error() || !line.value().is_object())
      return make_error(Code::kCorrupt, "{}: what was agreed cannot be read at byte {}", path,
                        begin);
    const json::object& object = line.value().get_object();
    boost::system::error_code bad;
    if (const json::value* seen = object.if_contains("seen")) {
      facts.seen_ = seen->to_number<int64_t>(bad);
      if (const json::value* jobs = object.if_contains("jobs"))
        facts.jobs_revision_ = jobs->to_number<int64_t>(bad);
      continue;
    }
    const json::value* key = object.if_contains("key");
    if (key == nullptr || !key->is_string()) continue;
    const json::value* value = object.if_contains("value");
    const json::value* revision = object.if_contains("revision");
    const std::string name(key->get_string());
    if (value != nullptr && value->is_string() && revision != nullptr)
      facts.put({name, std::string(value->get_string()), revision->to_number<int64_t>(bad)});
    else facts.drop(name);
  }
  facts.changes_.clear();
  facts.file_bytes_ = begin;
  if (!read_only && begin != text.size() &&
      ::truncate(path.c_str(), static_cast<off_t>(begin)) != 0)
    return errno_error(errno, path);
  return facts;
}

void AgreedFacts::put(const MetaEntry& entry) {
  auto [known, is_new] = entries_.try_emplace(entry.key, entry);
  if (is_new) {
    jobs_keys_ += entry.key.starts_with(kKeysOfJobs);
  } else {
    live_bytes_ -= line_bytes(known->second);
    known->second = entry;
  }
  live_bytes_ += line_bytes(entry);
  changes_ += line_of(entry);
}

void AgreedFacts::drop(const std::string& key) {
  auto known = entries_.find(key);
  if (known == entries_.end()) return;
  live_bytes_ -= line_bytes(known->second);
  jobs_keys_ -= key.starts_with(kKeysOfJobs);
  entries_.erase(known);
  changes_ += json::serialize(json::object{{"key", key}}) + "\n";
}

Result<> AgreedFacts::check_each(const std::vector<MetaEntry>& jobs) const {
  for (const MetaEntry& entry : jobs) {
    const auto known = entries_.find(entry.key);
    if (known != entries_.end() && entry.revision < known->second.revision)
      return set_back(fmt::format("{} is at revision {}, but was at {}", entry.key, entry.revision,
                                  known->second.revision));
    if (entry.revision <= jobs_revision_ &&
        (known == entries_.end() || known->second.revision != entry.revision))
      return set_back(fmt::format("{} of revision {} was not there at revision {}", entry.key,
                                  entry.revision, jobs_revision_));
  }
  return ok();
}

Result<> AgreedFacts::check(const std::vector<MetaEntry>& jobs,
                            const std::vector<MetaEntry>& removed, bool all_removals) const {
  PTC_TRY(check_each(jobs));
  if (!all_removals) return ok();
  std::set<std::string_view> now_there, tombstones;
  for (const MetaEntry& entry : jobs) now_there.insert(entry.key);
  for (const MetaEntry& entry : removed) tombstones.insert(entry.key);
  for (auto it = entries_.lower_bound("jobs/");
       it != entries_.end() && it->first.starts_with("jobs/"); ++it) {
    if (now_there.contains(it->first)) continue;
    const std::string key = key_of_removal(it->second);
    if (key.empty() || tombstones.contains(key)) continue;
    // Its job may have gone with all that was in it.
    const auto job =
        entries_.find(it->first.substr(0, it->first.find('/', std::string_view("jobs/").size())));
    if (job == entries_.end() || tombstones.contains(key_of_removal(job->second))) continue;
    return set_back(fmt::format("{} is gone, and nothing says that it was removed", it->first));
  }
  return ok();
}

void AgreedFacts::take_changes(const std::vector<MetaEntry>& puts,
                               const std::vector<std::string>& gone) {
  for (const MetaEntry& entry : puts) {
    jobs_revision_ = std::max(jobs_revision_, entry.revision);
    const auto known = entries_.find(entry.key);
    if (known == entries_.end() || known->second.revision != entry.revision) put(entry);
  }
  for (const std::string& key : gone) drop(key);
}

void AgreedFacts::take(std::string_view prefix, const std::vector<MetaEntry>& entries) {
  std::set<std::string_view> now_there;
  int64_t latest = 0;
  for (const MetaEntry& entry : entries) {
    now_there.insert(entry.key);
    latest = std::max(latest, entry.revision);
    const auto known = entries_.find(entry.key);
    if (known == entries_.end() || known->second.revision != entry.revision) put(entry);
  }
  std::vector<std::string> gone;
  for (auto it = entries_.lower_bound(prefix);
       it != entries_.end() && it->first.starts_with(prefix); ++it)
    if (!now_there.contains(it->first)) gone.push_back(it->first);
  for (const std::string& key : gone) drop(key);
  if (prefix == kKeysOfJobs) jobs_revision_ = std::max(jobs_revision_, latest);
}

void AgreedFacts::note(MetaEntry entry) {
  const auto known = entries_.find(entry.key);
  if (known == entries_.end() || known->second.revision < entry.revision) put(entry);
}

void AgreedFacts::set_seen(int64_t revision) {
  if (revision == seen_ && changes_.empty()) return;
  seen_ = revision;
  changes_ += seen_line();
}

std::string AgreedFacts::seen_line() const {
  return json::serialize(json::object{{"seen", seen_}, {"jobs", jobs_revision_}}) + "\n";
}

void AgreedFacts::clear() {
  while (!entries_.empty()) drop(std::string(entries_.begin()->first));
  seen_ = jobs_revision_ = 0;
}

Result<> AgreedFacts::write() {
  if (changes_.empty()) return ok();
  if (file_bytes_ + changes_.size() > kSmallFile && file_bytes_ + changes_.size() > 3 * live_bytes_)
    return write_anew();
  PTC_TRY(auto fd, open_file(AT_FDCWD, path_, O_WRONLY | O_CREAT));
  auto append = [&]() -> Result<> {
    PTC_TRY(write_exactly(fd.get(), std::as_bytes(std::span(changes_)), file_bytes_));
    if (::fdatasync(fd.get()) != 0) return errno_error(errno, path_);
    return ok();
  };
  Result<> appended = append();
  if (appended.has_error()) {  // it is tried again with the next change
    (void)!::ftruncate(fd.get(), static_cast<off_t>(file_bytes_));
    return appended;
  }
  file_bytes_ += changes_.size();
  changes_.clear();
  return ok();
}

Result<> AgreedFacts::write_anew() {
  std::string text;
  for (const auto& [key, entry] : entries_) text += line_of(entry);
  text += seen_line();
  PTC_TRY(write_file_atomically(AT_FDCWD, path_, text));
  file_bytes_ = text.size();
  changes_.clear();
  return ok();
}

}  // namespace ptc
