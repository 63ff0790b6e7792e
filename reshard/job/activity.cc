#include "reshard/job/activity.h"

#include <algorithm>
#include <utility>

#include "store/base/mutex.h"

namespace ptc {

Activity::Activity(Activities& all, Subject subject)
    : all_(all), subject_(std::move(subject)), started_(std::chrono::steady_clock::now()) {}

Activity::~Activity() {
  MutexLock lock(all_.mutex_);
  all_.under_way_.remove(this);
}

void Activity::begin(std::string_view phase) {
  MutexLock lock(all_.mutex_);
  phase_ = phase;
}

void Activity::begin(std::string_view phase, uint64_t bytes_total) {
  MutexLock lock(all_.mutex_);
  phase_ = phase;
  bytes_total_ = bytes_total;
  bytes_done_ = 0;
}

std::unique_ptr<Activity> Activities::begin(Activity::Subject subject) {
  std::unique_ptr<Activity> begun(new Activity(*this, std::move(subject)));
  MutexLock lock(mutex_);
  if (stopped_) begun->stop_.request_stop();
  under_way_.push_back(begun.get());
  return begun;
}

Activity::Progress Activity::progress() const {
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - started_;
  return {subject_, phase_, bytes_done_.load(), bytes_total_, seconds.count()};
}

bool Activities::any_reshard() const { return reshard().has_value(); }

std::optional<Activity::Progress> Activities::reshard() const {
  MutexLock lock(mutex_);
  for (const Activity::Kind kind :
       {Activity::Kind::kReshard, Activity::Kind::kPart, Activity::Kind::kTrim})
    for (const Activity* one : under_way_)
      if (one->subject_.kind == kind) return one->progress();
  return std::nullopt;
}

std::vector<Activity::Progress> Activities::commits() const {
  MutexLock lock(mutex_);
  std::vector<Activity::Progress> list;
  for (const Activity* one : under_way_)
    if (one->subject_.kind == Activity::Kind::kCommit) list.push_back(one->progress());
  return list;
}

std::vector<Activity::Progress> Activities::fetches() const {
  MutexLock lock(mutex_);
  std::vector<Activity::Progress> list;
  for (const Activity* one : under_way_)
    if (one->subject_.kind == Activity::Kind::kFetch) list.push_back(one->progress());
  return list;
}

void Activities::stop_all() {
  MutexLock lock(mutex_);
  stopped_ = true;
  for (Activity* one : under_way_) one->stop_.request_stop();
}

void Activities::stop_reshards() {
  MutexLock lock(mutex_);
  for (Activity* one : under_way_)
    if (one->subject_.kind != Activity::Kind::kCommit &&
        one->subject_.kind != Activity::Kind::kFetch)
      one->stop_.request_stop();
}

void Activities::stop_trims() {
  MutexLock lock(mutex_);
  for (Activity* one : under_way_)
    if (one->subject_.kind == Activity::Kind::kTrim) one->stop_.request_stop();
}

void Activities::stop_with(std::string_view checkpoint) {
  MutexLock lock(mutex_);
  for (Activity* one : under_way_)
    if (one->subject_.checkpoint == checkpoint) one->stop_.request_stop();
}

}  // namespace ptc
