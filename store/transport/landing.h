// The receiving side of a fetch: the string of bytes that comes over the wire, put where each item
// wants it.
#pragma once

#include <sys/uio.h>

#include <cstdint>
#include <span>
#include <vector>

#include "store/rpc/messages.h"
#include "store/transport/transport.h"

namespace ptc {

/// The string is the runs of all items, one behind the other. Threads: one.
class WantedString {
 public:
  /// Of those items that have bytes to come; the others are finished at once.
  explicit WantedString(std::vector<FetchItem*> items);

  uint64_t bytes_left() const { return bytes_left_; }
  /// What to ask of the node; at most so many items, and their number of bytes.
  struct Asked {
    FetchRequest request;
    uint64_t bytes = 0;
  };
  Asked ask(size_t max_items) const;

 protected:
  struct Cut {  // of one item: the next bytes of its string, and where the window ends that they
                // fill
    FetchItem* item;
    uint64_t target_end, bytes;
    size_t buffered;  // where they are in the buffer, if they are
  };
  /// The next `bytes` ≤ bytes_left(), a cut of each item that they are of; buffered is 0.
  std::vector<Cut> next_cuts(uint64_t bytes) const;
  /// It is there: moves `begin` of the item, whose turn it is.
  void finish(const Cut& cut);

 private:
  std::vector<FetchItem*> items_;
  size_t first_ = 0;  // the first that is not finished
  uint64_t bytes_left_ = 0;
};

/// Long runs are received into the target memory; others, and all that has a writer, into a buffer,
/// and scattered when they are good. All targets are in the host's memory.
class Landing final : public WantedString {
 public:
  using WantedString::WantedString;

  /// Where the next `bytes` ≤ bytes_left() go. Until accept() they count as not received.
  std::span<const iovec> place(uint64_t bytes);
  /// They came and are good: scatters, and moves `begin` of the items. Errors: of writing to a
  /// file.
  Result<> accept();

 private:
  std::vector<std::byte> buffer_;
  std::vector<iovec> pieces_;
  std::vector<Cut> cuts_;
};

}  // namespace ptc
