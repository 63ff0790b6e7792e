#include "store/base/fan_out.h"

#include <pthread.h>

#include <algorithm>

namespace ptc {

FanOut::FanOut(size_t count, std::function<void(size_t)> body, size_t most_threads)
    : count_(count), body_(std::move(body)) {
  try {
    while (threads_.size() < std::min(count_, most_threads))
      threads_.emplace_back([this] {
        ::pthread_setname_np(::pthread_self(), "ptcfs-ask");
        work();
      });
  } catch (const std::exception&) {  // fewer, then
  }
}

void FanOut::finish() {
  work();
  threads_.clear();
}

void FanOut::work() {
  for (size_t i; (i = next_++) < count_;) body_(i);
}

Error not_asked(const char* why) {
  return make_error(Code::kUnavailable, "it could not be asked: {}", why);
}

}  // namespace ptc
