// Large results of pure functions, shared by all who ask for the same while somebody still has it:
// what a checkpoint is, where its bytes lie, the files of a layout, the plan of a change. Jobs of
// one node ask again when other nodes come or go; where many nodes live in one process (tests/sim),
// each of them asks.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>

#include "store/base/error.h"
#include "store/base/mutex.h"

namespace ptc {

/// What a result depends on: a kind, then texts and numbers in order. Equal keys are of equal
/// inputs but for 2⁻⁶² (store/tensor/checksum.h).
class ResultKey {
 public:
  explicit ResultKey(std::string_view kind) { add(kind); }
  ResultKey& add(std::string_view text);  // of a long one, its checksum
  ResultKey& add(uint64_t number);
  /// 32 hexadecimal digits, and the length.
  std::string digest() const;

 private:
  std::string all_;
};

/// Threads: any. Two that ask for the same at the same time may both make it.
class SharedResults {
 public:
  /// So many of the last are kept although nobody has them any more.
  explicit SharedResults(size_t kept = 0) : kept_(kept) {}

  /// `make` gives a Result<std::shared_ptr<const T>>; with one key always of the same T. An error
  /// is not kept.
  template <class T, class Make>
  Result<std::shared_ptr<const T>> get(const ResultKey& key, Make&& make) {
    const std::string digest = key.digest();
    if (std::shared_ptr<const void> known = find(digest))
      return std::static_pointer_cast<const T>(std::move(known));
    Result<std::shared_ptr<const T>> made = make();
    if (made.has_error()) return made;
    return std::static_pointer_cast<const T>(add(digest, made.value()));
  }

  /// nullptr: nobody has it.
  template <class T>
  std::shared_ptr<const T> known(const ResultKey& key) const {
    return std::static_pointer_cast<const T>(find(key.digest()));
  }

 private:
  std::shared_ptr<const void> find(const std::string& digest) const;
  /// Returns what another thread has added meanwhile, if one has.
  std::shared_ptr<const void> add(const std::string& digest, std::shared_ptr<const void> made);

  const size_t kept_;
  mutable SharedMutex mutex_;
  std::unordered_map<std::string, std::weak_ptr<const void>> results_ PTC_GUARDED_BY(mutex_);
  std::deque<std::shared_ptr<const void>> last_ PTC_GUARDED_BY(mutex_);
  size_t clean_at_ PTC_GUARDED_BY(mutex_) = 64;  // results; those that are gone are forgotten then
};

}  // namespace ptc
