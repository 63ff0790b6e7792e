#include "fs/kernel/once_only.h"

#include <sys/stat.h>

#include <utility>

#include "fs/tree/real_node.h"

namespace ptc {

OnceOnly::OnceOnly(LiveState* state, NodeTable& table, uint64_t number, Node& directory,
                   std::string name)
    : state_(state), table_(table), directory_(directory), name_(std::move(name)) {
  if (state_ == nullptr) return;
  place_ = state_->begun_request(number);
  again_ = place_ != 0;
  before_ = again_ ? state_->request(place_).identity : now();
  if (!again_) place_ = state_->begin_request(number, before_);
}

OnceOnly::~OnceOnly() {
  if (state_ != nullptr) state_->end_request(place_);
}

uint64_t OnceOnly::now() const {
  const auto found = directory_.lookup(name_);
  if (found) return table_.identity_of(*found.value());
  // Something that cannot be looked at is there all the same.
  return found.error().value == ENOENT ? 0 : 1;
}

bool OnceOnly::is_done() const {
  if (!again_ || before_ == 0) return false;
  const auto found = directory_.lookup(name_);
  if (found) return table_.identity_of(*found.value()) != before_;
  // What cannot be looked at just now (no memory, no descriptor) may be what it was.
  return found.error().value == ENOENT;
}

bool OnceOnly::was_made() const {
  return again_ && before_ == 0 && directory_.lookup(name_).has_value();
}

void OnceOnly::take_back() const {
  if (!again_ || before_ != 0) return;
  const auto found = directory_.lookup(name_);
  // An own name of ptcfs is nobody's to remove.
  const auto* real = found ? dynamic_cast<const RealNode*>(found.value().get()) : nullptr;
  if (real == nullptr || !real->is_plain()) return;
  const auto stat = found.value()->attributes();
  if (!stat) return;
  if (S_ISDIR(stat.value().st_mode)) (void)directory_.remove_directory(name_);
  else if (!S_ISREG(stat.value().st_mode) || stat.value().st_size == 0 || stat.value().st_nlink > 1)
    (void)directory_.unlink(name_);
}

Steps::Steps(LiveState* state, uint64_t number, uint64_t first) : state_(state), step_(first) {
  if (state_ == nullptr) return;
  place_ = state_->begun_request(number);
  again_ = place_ != 0;
  if (again_) step_ = state_->request(place_).identity;
  else place_ = state_->begin_request(number, first);
}

Steps::~Steps() {
  if (state_ != nullptr) state_->end_request(place_);
}

void Steps::set(uint64_t step) {
  step_ = step;
  if (place_ != 0) state_->request(place_).identity = step;
}

}  // namespace ptc
