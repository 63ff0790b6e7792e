#include "reshard/job/removed_checkpoints.h"

#include <algorithm>
#include <boost/json/object.hpp>
#include <boost/json/serialize.hpp>
#include <chrono>
#include <utility>

#include "reshard/checkpoint/checkpoint.h"
#include "reshard/move/placement.h"
#include "store/base/json.h"
#include "store/base/mutex.h"

namespace ptc {
namespace {

constexpr std::chrono::seconds kAgain(1);  // where somebody reads, or does not answer
constexpr std::chrono::seconds kGone(60);  // a node that may come back with its files still open

}  // namespace

Result<std::string> ask_whether_open(Cluster& cluster, const std::string& node, const WhichJob& job,
                                     const std::string& id, std::stop_token stop) {
  return cluster.ask(node, PeerMethod::kUses,
                     request_about(job, json::serialize(json::object{{"id", id}})),
                     std::move(stop));
}

Result<std::string> checkpoint_asked_of(std::string_view request) {
  PTC_TRY(auto value, parse_json(request));
  const json::value* id = value.is_object() ? value.as_object().if_contains("id") : nullptr;
  if (id == nullptr || !id->is_string()) return invalid_argument("the request names no checkpoint");
  return std::string(id->as_string());
}

RemovedCheckpoints::RemovedCheckpoints(Cluster& cluster, StepPool& pool) : cluster_(cluster) {
  loop_.start(pool, [this](const std::stop_token& stop) { return look_after(stop); });
}

void RemovedCheckpoints::keep(const WhichJob& job, const std::string& id,
                              std::vector<ImageRef> images) {
  if (images.empty()) return;
  Kept kept{job, id, std::move(images), {}};
  for (const std::string& node : cluster_.alive())
    if (node != cluster_.self()) kept.asked.emplace(node, Clock::now());
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

void RemovedCheckpoints::ask(Kept& kept, const std::stop_token& stop) {
  const std::vector<std::string> alive = cluster_.alive();
  for (auto node = kept.asked.begin(); node != kept.asked.end() && !stop.stop_requested();) {
    Result<std::string> answer = ask_whether_open(cluster_, node->first, kept.job, kept.id, stop);
    const bool there =
        answer.has_value() || std::find(alive.begin(), alive.end(), node->first) != alive.end();
    if (there) node->second = Clock::now();
    const bool done =
        answer.has_value() ? answer.value() == "no" : Clock::now() - node->second > kGone;
    node = done ? kept.asked.erase(node) : std::next(node);
  }
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
  for (Kept& one : kept_) ask(one, stop);
  std::erase_if(kept_, [](const Kept& one) { return one.asked.empty(); });
  if (kept_.empty()) return std::nullopt;
  return Clock::now() + kAgain;
}

}  // namespace ptc
