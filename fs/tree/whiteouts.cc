#include "fs/tree/whiteouts.h"

#include <algorithm>
#include <utility>

#include "store/base/mutex.h"

namespace ptc {

Whiteouts::~Whiteouts() {
  for (const auto& [path, hidden] : paths_) give_back(hidden);
}

void Whiteouts::give_back(const Hidden& hidden) const {
  if (hidden.kept != 0) state_->give_back_whiteout(hidden.kept);
}

void Whiteouts::keep_in(LiveState* state, std::string_view key) {
  if (state == nullptr) return;
  MutexLock lock(mutex_);
  state_ = state;
  owner_ = state->identity(key, 0);
  for (const LiveState::Place place : state->left_whiteouts(owner_)) {
    const KeptWhiteout& written = state->whiteout(place);
    const size_t bytes = std::min<size_t>(written.path_bytes, sizeof written.path);
    const bool is_new =
        paths_.try_emplace(std::string(written.path, bytes), Hidden{written.expires != 0, place})
            .second;
    if (!is_new) state->give_back_whiteout(place);
    // This clock is the same for all processes.
    const std::chrono::steady_clock::time_point when{std::chrono::nanoseconds(written.hidden_ns)};
    if (written.expires != 0) last_hidden_ = std::max(last_hidden_, when);
  }
  some_ = !paths_.empty();
}

Whiteouts::Hidden& Whiteouts::add(std::string path, bool expires) {
  const auto [place, is_new] = paths_.try_emplace(std::move(path));
  Hidden& hidden = place->second;
  hidden.expires = expires;
  if (state_ == nullptr || place->first.size() > sizeof KeptWhiteout::path) return hidden;
  if (hidden.kept == 0) hidden.kept = state_->take_whiteout();
  if (hidden.kept == 0) return hidden;
  KeptWhiteout& written = state_->whiteout(hidden.kept);
  place->first.copy(written.path, sizeof written.path);
  written.path_bytes = static_cast<uint32_t>(place->first.size());
  written.expires = expires ? 1 : 0;
  written.hidden_ns = std::chrono::duration_cast<std::chrono::nanoseconds>(
                          std::chrono::steady_clock::now().time_since_epoch())
                          .count();
  written.owner.store(owner_, std::memory_order_release);
  return hidden;
}

void Whiteouts::expire() const {
  if (paths_.empty() || std::chrono::steady_clock::now() - last_hidden_ < kRestoreAfter) return;
  const auto goes = [this](const auto& path) {
    if (path.second.expires) give_back(path.second);
    return path.second.expires;
  };
  if (std::erase_if(paths_, goes) != 0) {
    ::clock_gettime(CLOCK_REALTIME, &restored_);
    some_ = !paths_.empty();
  }
}

void Whiteouts::hide(std::string path) {
  MutexLock lock(mutex_);
  expire();
  add(std::move(path), true);
  some_ = true;
  last_hidden_ = std::chrono::steady_clock::now();
}

void Whiteouts::hide_until_shown(std::string path) {
  MutexLock lock(mutex_);
  add(std::move(path), false);
  some_ = true;
}

void Whiteouts::show(const std::string& path) {
  MutexLock lock(mutex_);
  if (const auto found = paths_.find(path); found != paths_.end()) {
    give_back(found->second);
    paths_.erase(found);
  }
  some_ = !paths_.empty();
}

bool Whiteouts::hidden(const std::string& path) const {
  if (!some_) return false;
  MutexLock lock(mutex_);
  expire();
  return paths_.contains(path);
}

timespec Whiteouts::restored() const {
  MutexLock lock(mutex_);
  expire();
  return restored_;
}

std::chrono::duration<double> Whiteouts::none_comes_back_for() const {
  if (!some_) return kForever;
  MutexLock lock(mutex_);
  expire();
  const bool can = std::any_of(paths_.begin(), paths_.end(),
                               [](const auto& path) { return path.second.expires; });
  if (!can) return kForever;
  return kRestoreAfter - (std::chrono::steady_clock::now() - last_hidden_);
}

bool Whiteouts::any() const {
  if (!some_) return false;
  MutexLock lock(mutex_);
  expire();
  return !paths_.empty();
}

}  // namespace ptc
