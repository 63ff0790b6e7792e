// A file that is described, not stored: bytes of its own and arrays, gathered out of images when
// read.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <set>
#include <span>
#include <stop_token>
#include <string>
#include <vector>

#include "reshard/plan/planner.h"
#include "store/base/error.h"
#include "store/image/image_store.h"
#include "store/transport/transport.h"

namespace ptc {

/// Immutable; threads: any. Holds its source images, so it can be read whatever happens to them in
/// the store.
class GatherProgram {
 public:
  /// `sources[i]` is the image that transfers call i; entries that no transfer uses may be null.
  GatherProgram(Literals literals, uint64_t bytes, SharedVector<Transfer> transfers,
                std::vector<ImageRef> sources);

  uint64_t bytes() const { return bytes_; }
  const Literals& literals() const { return literals_; }
  /// By target offset.
  const SharedVector<Transfer>& transfers() const { return transfers_; }
  const std::vector<ImageRef>& sources() const { return sources_; }

  /// Fills `out` with the bytes from `offset` on; all of it lies within bytes(). Touches only the
  /// runs that fall into the window: O(log transfers + runs).
  Result<> read(Transport& transport, uint64_t offset, std::span<std::byte> out,
                std::stop_token stop = {}) const;
  /// For who has other sources to turn to: `silence` is Transport::fetch()'s. After an error
  /// `absent` has the nodes of which not all has come.
  Result<> read(Transport& transport, uint64_t offset, std::span<std::byte> out,
                std::chrono::milliseconds silence, std::set<std::string>& absent) const;

  /// The bytes from `offset` on, as many as `buffer` has, as pieces that follow each other, put
  /// behind those in `pieces`: long runs of images in this host's memory lie where they are, all
  /// else is in `buffer`.
  Result<> read_in_place(Transport& transport, uint64_t offset, std::span<std::byte> buffer,
                         std::vector<std::span<const std::byte>>& pieces,
                         std::stop_token stop = {}) const;

  /// Reads [begin, end) through a buffer that stays in the cache: `visit` gets it window by window,
  /// and must be done with a window when it returns. Its first error is returned.
  Result<> read_in_windows(
      Transport& transport, uint64_t begin, uint64_t end,
      const std::function<Result<>(uint64_t offset, std::span<const std::byte>)>& visit,
      std::stop_token stop = {}) const;

 private:
  Result<std::vector<FetchItem>> items_of(uint64_t offset, std::span<std::byte> out) const;
  /// Literals and padding; then `visit(transfer, from, to)` with each transfer that reaches into
  /// the window.
  template <class Visit>
  Result<> begin_window(uint64_t offset, std::span<std::byte> out, Visit visit) const;

  Literals literals_;
  uint64_t bytes_;
  SharedVector<Transfer> transfers_;  // by target_offset
  std::vector<uint64_t> end_so_far_;  // greatest target_end of transfers 0 … i
  std::vector<ImageRef> sources_;
  uint64_t transferred_bytes_ = 0;  // literals and all transfers; < bytes_: there is padding
};

}  // namespace ptc
