#include "reshard/job/removed_checkpoints.h"

#include <algorithm>
#include <boost/json/object.hpp>
#include <boost/json/serialize.hpp>
#include <chrono>
#include <functional>
#include <utility>

#include "reshard/checkpoint/checkpoint.h"
#include "reshard/move/placement.h"
#include "store/base/json.h"
#include "store/base/mutex.h"
#include "store/base/wall_time.h"

namespace ptc {
namespace {

constexpr std::chrono::seconds kAgain(1);        // where somebody reads, or does not answer
constexpr std::chrono::milliseconds kSoon(200);  // those that one node asks have answered
constexpr std::chrono::seconds kSilent(10);      // one that asks for all, before each does so
constexpr size_t kFew = 8;                       // nodes, each of which asks the others

std::string survey_request(const WhichJob& job, const std::string& id) {
  return request_about(job, json::serialize(json::object{{"id", id}}));
}

}  // namespace

std::vector<Result<std::string>> ask_whether_open(Cluster& cluster,
                                                  const std::vector<std::string>& nodes,
                                                  const WhichJob& job, const std::string& id,
                                                  std::stop_token stop) {
  const std::string request = survey_request(job, id);
  std::vector<Cluster::Question> questions;
  for (const std::string& node : nodes) questions.push_back({node, request});
  return cluster.ask_all(PeerMethod::kUses, questions, std::move(stop));
}

Result<std::string> checkpoint_asked_of(std::string_view request) {
  PTC_TRY(auto value, parse_json(request));
  const json::value* id = value.is_object() ? value.as_object().if_contains("id") : nullptr;
  if (id == nullptr || !id->is_string()) return invalid_argument("the request names no checkpoint");
  return std::string(id->as_string());
}

RemovedCheckpoints::RemovedCheckpoints(Cluster& cluster, StepPool& pool,
                                       std::chrono::milliseconds gone)
    : cluster_(cluster), gone_(gone) {
  loop_.start(pool, [this](const std::stop_token& stop) { return look_after(stop); });
}

void RemovedCheckpoints::keep(const WhichJob& job, const std::string& id,
                              std::vector<ImageRef> images) {
  if (images.empty()) return;
  Kept kept{.job = job, .id = id, .images = std::move(images), .asked = {}};
  const Clock::time_point now = Clock::now();
  for (const std::string& node : cluster_.alive()) kept.asked.emplace(node, now);
  // And who went a moment ago, and comes back with its files still open.
  const int64_t wall_now = now_ns();
  for (const Cluster::Seen& seen : cluster_.seen()) {
    const std::chrono::nanoseconds away(
        seen.there ? 0 : std::max<int64_t>(0, wall_now - seen.since_ns));
    if (away < gone_) kept.asked.emplace(seen.node, now - away);
  }
  kept.asked.erase(cluster_.self());
  if (kept.asked.empty()) return;
  MutexLock lock(mutex_);
  new_.push_back(std::move(kept));
  loop_.wake();
}

void RemovedCheckpoints::note(const std::string& id,
                              const std::shared_ptr<const Checkpoint>& checkpoint) {
  MutexLock lock(mutex_);
  std::erase_if(noted_, [](const Noted& one) { return one.files.expired(); });
  noted_.push_back({id, checkpoint, checkpoint->remote_files()});
}

bool RemovedCheckpoints::is_open_here(std::string_view id) {
  MutexLock lock(mutex_);
  return std::any_of(noted_.begin(), noted_.end(),
                     [&](const Noted& one) { return one.id == id && !one.files.expired(); });
}

void RemovedCheckpoints::nodes_changed() {
  MutexLock lock(mutex_);
  nodes_changed_ = true;
  loop_.wake();
}

void RemovedCheckpoints::look_for_copies() {
  std::vector<Noted> noted;
  {
    MutexLock lock(mutex_);
    noted = noted_;
  }
  const std::vector<std::string> alive = cluster_.alive();
  for (const Noted& one : noted) {
    const std::shared_ptr<RemoteFiles> files = one.files.lock();
    const std::shared_ptr<const Checkpoint> checkpoint = one.checkpoint.lock();
    if (files == nullptr || checkpoint == nullptr || !checkpoint->removed()) continue;
    std::shared_ptr<const StoredState> before;
    {
      MutexLock lock(files->mutex);
      before = files->stored;
    }
    std::vector<StoredImage> images = before->images;
    bool fewer = false;
    for (StoredImage& image : images) {
      if (image.image == nullptr || image.image->is_here() || is_among(alive, image.node)) continue;
      image.image = nullptr;
      fewer = true;
    }
    if (!fewer) continue;
    Result<std::shared_ptr<const StoredState>> left =
        checkpoint->make_stored(before->spec, std::move(images));
    if (left.has_error()) continue;
    MutexLock lock(files->mutex);
    files->stored = std::move(left).value();
    files->replaced.notify_all();
  }
}

RemovedCheckpoints::Answers RemovedCheckpoints::ask_each(const std::vector<std::string>& nodes,
                                                         const WhichJob& job, const std::string& id,
                                                         const std::stop_token& stop) {
  std::vector<Result<std::string>> said = ask_whether_open(cluster_, nodes, job, id, stop);
  Answers answers;
  for (size_t i = 0; i < nodes.size(); ++i) answers.emplace_back(nodes[i], std::move(said[i]));
  return answers;
}

void RemovedCheckpoints::Pause::begin() {
  length = std::clamp<Clock::duration>(2 * length, kSoon, kAgain);
  until = Clock::now() + length;
}

void RemovedCheckpoints::ask(Kept& kept, const std::stop_token& stop) {
  kept.pause.begin();
  const std::vector<std::string> alive = cluster_.alive();
  const bool one_asks = kept.asked.size() > kFew && hear_who_asks_all(kept, alive, stop);
  const Clock::time_point now = Clock::now();
  for (auto& [node, there] : kept.asked)
    if (std::binary_search(alive.begin(), alive.end(), node)) there = now;
  if (!one_asks || kept.asked.size() <= kFew) {
    std::vector<std::string> nodes;
    for (const auto& [node, there] : kept.asked) nodes.push_back(node);
    for (const auto& [node, answer] : ask_each(nodes, kept.job, kept.id, stop)) {
      if (answer.has_error()) continue;
      if (answer.value() == "no") kept.asked.erase(node);
      else kept.asked[node] = Clock::now();
    }
  }
  if (stop.stop_requested()) return;
  std::erase_if(kept.asked, [&](const auto& one) { return Clock::now() - one.second > gone_; });
}

/// false: that one says nothing.
bool RemovedCheckpoints::hear_who_asks_all(Kept& kept, const std::vector<std::string>& alive,
                                           const std::stop_token& stop) {
  // The same on each node that sees it among the others, whoever else comes and goes; and another
  // for the next checkpoint.
  const auto weight = [&](const std::string& node) {
    return std::hash<std::string>{}(node + ' ' + kept.id);
  };
  const auto who = std::max_element(
      alive.begin(), alive.end(),
      [&](const std::string& a, const std::string& b) { return weight(a) < weight(b); });
  if (who == alive.end()) return false;
  std::optional<std::set<std::string>> without;
  if (*who == cluster_.self()) {
    without = surveyed(kept.job, kept.id);
  } else {
    const Result<std::string> answer =
        cluster_.ask(*who, PeerMethod::kWithout, survey_request(kept.job, kept.id), stop);
    Result<json::value> said = json::value();
    if (answer.has_value() && !answer.value().empty()) said = parse_json(answer.value());
    if (answer.has_error() || said.has_error()) {
      // Many ask it at the same time: it may be well, and come to the others first.
      if (kept.unheard_since == Clock::time_point()) kept.unheard_since = Clock::now();
      return Clock::now() - kept.unheard_since < kSilent;
    }
    if (said.value().is_array()) {
      without.emplace();
      for (const json::value& node : said.value().get_array())
        if (node.is_string()) without->emplace(node.get_string());
    }
  }
  kept.unheard_since = {};
  if (without)
    std::erase_if(kept.asked, [&](const auto& one) { return without->contains(one.first); });
  return true;
}

/// nullopt: they are being asked for the first time.
std::optional<std::set<std::string>> RemovedCheckpoints::surveyed(const WhichJob& job,
                                                                  const std::string& id) {
  MutexLock lock(mutex_);
  const auto [known, is_new] = surveys_.try_emplace(id);
  Survey& survey = known->second;
  survey.job = job;
  survey.wanted = Clock::now();
  if (!survey.ended && survey.pause.until <= Clock::now()) loop_.wake();
  if (!survey.begun) return std::nullopt;
  return survey.without;
}

Result<std::string> RemovedCheckpoints::answer_without(std::string_view request) {
  PTC_TRY(auto about, JobRequest::parse(request));
  PTC_TRY(auto id, checkpoint_asked_of(about.body));
  const auto without = surveyed(about.job, id);
  if (!without) return std::string();
  return json::serialize(json::array(without->begin(), without->end()));
}

/// When the next is due.
std::optional<StepPool::Time> RemovedCheckpoints::survey(const std::stop_token& stop) {
  std::map<std::string, Survey> due;
  {
    MutexLock lock(mutex_);
    const Clock::time_point now = Clock::now();
    std::erase_if(surveys_, [&](const auto& one) { return now - one.second.wanted > gone_; });
    for (const auto& [id, one] : surveys_)
      if (!one.ended && one.pause.until <= now) due.emplace(id, one);
  }
  std::vector<std::string> others = cluster_.alive();
  std::erase(others, cluster_.self());
  for (auto& [id, one] : due) {
    std::vector<std::string> left;
    std::set_difference(others.begin(), others.end(), one.without.begin(), one.without.end(),
                        std::back_inserter(left));
    for (auto& [node, answer] : ask_each(left, one.job, id, stop))
      if (answer.has_value() && answer.value() == "no") one.without.insert(std::move(node));
    if (stop.stop_requested()) return std::nullopt;
    MutexLock lock(mutex_);
    Survey& known = surveys_[id];
    known.begun = true;
    known.pause.begin();
    known.ended = std::all_of(left.begin(), left.end(),
                              [&](const std::string& node) { return one.without.contains(node); });
    known.without = std::move(one.without);
  }
  MutexLock lock(mutex_);
  std::optional<StepPool::Time> next;
  for (const auto& [id, one] : surveys_) {
    const Clock::time_point then = one.ended ? one.wanted + gone_ : one.pause.until;
    next = std::min(next.value_or(then), then);
  }
  return next;
}

std::optional<StepPool::Time> RemovedCheckpoints::look_after(const std::stop_token& stop) {
  bool changed = false;
  {
    MutexLock lock(mutex_);
    for (Kept& one : new_) kept_.push_back(std::move(one));
    new_.clear();
    changed = std::exchange(nodes_changed_, false);
  }
  if (changed) look_for_copies();
  std::optional<StepPool::Time> next = survey(stop);
  for (Kept& one : kept_)
    if (one.pause.until <= Clock::now()) ask(one, stop);
  std::erase_if(kept_, [](const Kept& one) { return one.asked.empty(); });
  for (const Kept& one : kept_) next = std::min(next.value_or(one.pause.until), one.pause.until);
  return next;
}

}  // namespace ptc
