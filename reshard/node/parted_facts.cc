#include "reshard/node/parted_facts.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <map>
#include <ranges>
#include <set>
#include <string_view>

#include "reshard/cluster/tombstones.h"

namespace ptc {
namespace {

constexpr std::string_view kJobs = "jobs/", kCheckpoint = "checkpoints/";
/// What follows from the rest, or tells of it alone.
constexpr std::string_view kNoChange[] = {"looked_over/", "sequence", "specs/"};

auto below(const AgreedFacts& facts, std::string_view prefix) {
  const auto begin = facts.entries().lower_bound(prefix);
  auto end = begin;
  while (end != facts.entries().end() && end->first.starts_with(prefix)) ++end;
  return std::ranges::subrange(begin, end) | std::views::values;
}

/// "jobs/<job>/<what>"; what: "" of the job itself.
struct JobKey {
  std::string job, what;
  explicit JobKey(std::string_view key) {
    key.remove_prefix(kJobs.size());
    job = key.substr(0, key.find('/'));
    if (job.size() < key.size()) what = key.substr(job.size() + 1);
  }
};

/// It is a job or a checkpoint, and nothing `there` says that it was removed. (That is said until
/// all stores have carried it out, and the one that knows it has not.)
bool is_missed(const AgreedFacts& known, const MetaEntry& entry, const AgreedFacts& there) {
  const std::string removal = key_of_removal(entry);
  if (removal.empty() || there.entries().contains(removal)) return false;
  // Its job may have gone with all that was in it.
  const auto job = known.entries().find(std::string(kJobs) + JobKey(entry.key).job);
  return job != known.entries().end() && !there.entries().contains(key_of_removal(job->second));
}

/// What is there, by the tombstone that would be of it.
std::map<std::string, JobKey> by_removal(const AgreedFacts& facts) {
  std::map<std::string, JobKey> found;
  for (const MetaEntry& entry : below(facts, kJobs))
    if (const std::string removal = key_of_removal(entry); !removal.empty())
      found.emplace(removal, JobKey(entry.key));
  return found;
}

/// The first of `known` that is not so in the eyes of `other`, who has seen later ones.
int64_t first_unseen(const AgreedFacts& known, const AgreedFacts& other) {
  int64_t first = kNoneShared;
  for (const MetaEntry& entry : below(known, kJobs)) {
    const auto is = other.entries().find(entry.key);
    const bool differs =
        is == other.entries().end()
            ? entry.revision <= other.seen() && is_missed(known, entry, other)
            : entry.revision <= other.jobs_seen() &&
                  (is->second.revision < entry.revision ||
                   (is->second.revision == entry.revision && is->second.value != entry.value));
    if (differs) first = std::min(first, entry.revision);
  }
  const std::map<std::string, JobKey> there = by_removal(other);
  for (const MetaEntry& tombstone : below(known, kTombstones))
    if (tombstone.revision <= other.jobs_seen() && there.contains(tombstone.key))
      first = std::min(first, tombstone.revision);
  return first;
}

struct OfJob {
  bool itself = false, another = false;  // that has its name
  std::set<std::string> checkpoints, changes, removals;
};

void describe(const std::string& name, const OfJob& job, std::vector<std::string>& words) {
  if (job.itself) {
    std::string text = "job " + name;
    if (const size_t count = job.checkpoints.size(); count > 0)
      text += fmt::format(" with {} checkpoint{}", count, count == 1 ? "" : "s");
    words.push_back(text + (job.another ? ", in whose place is another" : ""));
    return;
  }
  for (const std::string& checkpoint : job.checkpoints)
    words.push_back(fmt::format("checkpoint {} of job {}", checkpoint, name));
  for (const std::string& removed : job.removals)
    words.push_back(removed.empty()
                        ? fmt::format("that job {} was removed", name)
                        : fmt::format("that checkpoint {} of job {} was removed", removed, name));
  if (!job.changes.empty())
    words.push_back(fmt::format("changes of job {} ({})", name, fmt::join(job.changes, ", ")));
}

}  // namespace

int64_t parted_at(const AgreedFacts& one, const AgreedFacts& other) {
  const int64_t first = std::min(first_unseen(one, other), first_unseen(other, one));
  return first == kNoneShared ? 0 : first;
}

std::vector<std::string> left_out(const AgreedFacts& known, const AgreedFacts& chosen,
                                  int64_t since) {
  std::map<std::string, OfJob> jobs;
  for (const MetaEntry& entry : below(known, kJobs)) {
    const auto is = chosen.entries().find(entry.key);
    const bool there = is != chosen.entries().end();
    if (there && is->second.value == entry.value) continue;
    const JobKey key(entry.key);
    const std::string removal = key_of_removal(entry);
    const bool is_thing = !removal.empty();
    if (is_thing && !(there && key_of_removal(is->second) == removal)) {
      if (!is_missed(known, entry, chosen)) continue;
      OfJob& job = jobs[key.job];
      if (key.what.empty()) job.itself = true, job.another = there;
      else job.checkpoints.insert(key.what.substr(kCheckpoint.size()));
    } else if (entry.revision >= since && chosen.entries().contains(std::string(kJobs) + key.job) &&
               std::none_of(std::begin(kNoChange), std::end(kNoChange),
                            [&](std::string_view no) { return key.what.starts_with(no); })) {
      jobs[key.job].changes.insert(key.what);
    }
  }
  const std::map<std::string, JobKey> there = by_removal(chosen);
  for (const MetaEntry& tombstone : below(known, kTombstones))
    if (const auto is = there.find(tombstone.key); is != there.end()) {
      const std::string& what = is->second.what;
      jobs[is->second.job].removals.insert(what.empty() ? "" : what.substr(kCheckpoint.size()));
    }
  std::vector<std::string> words;
  for (const auto& [name, job] : jobs) describe(name, job, words);
  return words;
}

}  // namespace ptc
