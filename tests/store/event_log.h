// What a watcher was told.
#pragma once

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <string>
#include <vector>

#include "store/meta/meta_client.h"

namespace ptc {

/// Collects events and waits for them.
class EventLog {
 public:
  MetaClient::OnEvent collect() {
    return [this](const MetaEvent& event) {
      std::lock_guard lock(mutex_);
      events_.push_back(event);
      grown_.notify_all();
    };
  }
  /// The events as "key=value@revision" or "-key@revision", once there are `count`; else fewer.
  std::vector<std::string> wait_for(size_t count) {
    std::unique_lock lock(mutex_);
    grown_.wait_for(lock, std::chrono::seconds(10), [&] { return events_.size() >= count; });
    std::vector<std::string> texts;
    for (const MetaEvent& event : events_) {
      texts.push_back((event.value ? event.key + "=" + *event.value : "-" + event.key) + "@" +
                      std::to_string(event.revision));
    }
    return texts;
  }

 private:
  std::mutex mutex_;
  std::condition_variable grown_;
  std::vector<MetaEvent> events_;
};

}  // namespace ptc
