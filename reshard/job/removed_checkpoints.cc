#include "reshard/job/removed_checkpoints.h"

#include <algorithm>
#include <boost/json/object.hpp>
#include <boost/json/serialize.hpp>
#include <chrono>

#include "store/base/json.h"

namespace ptc {
namespace {

constexpr std::chrono::seconds kAgain(1);  // where somebody reads, or does not answer
constexpr std::chrono::seconds kCallTime(30);

}  // namespace

Result<std::string> ask_whether_open(Cluster& cluster, const std::string& node, const std::string& job,
                                     const std::string& id, std::stop_token stop) {
  return cluster.call(node, "job/uses", job + "\n" + json::serialize(json::object{{"id", id}}),
                      kCallTime, std::move(stop));
}

Result<std::string> checkpoint_asked_of(std::string_view request) {
  PTC_TRY(auto value, parse_json(request));
  const json::value* id = value.is_object() ? value.as_object().if_contains("id") : nullptr;
  if (id == nullptr || !id->is_string()) return invalid_argument("the request names no checkpoint");
  return std::string(id->as_string());
}

RemovedCheckpoints::RemovedCheckpoints(Cluster* cluster) : cluster_(cluster) {
  if (cluster_ != nullptr) thread_ = std::jthread([this](std::stop_token stop) { ask_loop(std::move(stop)); });
}

void RemovedCheckpoints::keep(const std::string& job, const std::string& id, std::vector<ImageRef> images) {
  if (cluster_ == nullptr || images.empty()) return;
  std::lock_guard lock(mutex_);
  kept_.push_back({job, id, std::move(images)});
  came_.notify_all();
}

void RemovedCheckpoints::note(const std::string& id, std::weak_ptr<const void> files) {
  std::lock_guard lock(mutex_);
  std::erase_if(noted_, [](const auto& one) { return one.second.expired(); });
  if (!files.expired()) noted_.emplace_back(id, std::move(files));
}

bool RemovedCheckpoints::is_open_here(std::string_view id) {
  std::lock_guard lock(mutex_);
  return std::any_of(noted_.begin(), noted_.end(),
                     [&](const auto& one) { return one.first == id && !one.second.expired(); });
}

bool RemovedCheckpoints::is_open_elsewhere(const std::string& job, const std::string& id,
                                           const std::stop_token& stop) {
  const std::vector<std::string> nodes = cluster_->alive();
  return std::any_of(nodes.begin(), nodes.end(), [&](const std::string& node) {
    if (node == cluster_->self()) return false;
    Result<std::string> answer = ask_whether_open(*cluster_, node, job, id, stop);
    return answer.has_error() || answer.value() == "yes";
  });
}

void RemovedCheckpoints::ask_loop(std::stop_token stop) {
  std::unique_lock lock(mutex_);
  while (!stop.stop_requested()) {
    if (asked_ == kept_.size()) {
      auto more = [&] { return asked_ < kept_.size(); };
      if (kept_.empty()) came_.wait(lock, stop, more);
      else if (!came_.wait_for(lock, stop, kAgain, more)) asked_ = 0;
      continue;
    }
    // Only this thread takes out; what others add comes behind.
    const std::string job = kept_[asked_].job, id = kept_[asked_].id;
    lock.unlock();
    const bool open = is_open_elsewhere(job, id, stop);
    lock.lock();
    if (open) {
      ++asked_;
      continue;
    }
    std::vector<ImageRef> images = std::move(kept_[asked_].images);
    kept_.erase(kept_.begin() + static_cast<std::ptrdiff_t>(asked_));
    lock.unlock();
    images.clear();  // takes a while where it is much
    lock.lock();
  }
}

}  // namespace ptc
