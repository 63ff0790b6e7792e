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

/// The string is the runs of all items, one behind the other. Long runs are received into the
/// target memory; others, and all that has a writer, into a buffer, and scattered when they are
/// good. Threads: one.
class Landing {
 public:
  /// Of those items that have bytes to come; the others are finished at once. All targets are in
  /// the host's memory.
  explicit Landing(std::vector<FetchItem*> items);

  uint64_t bytes_left() const { return bytes_left_; }
  /// What to ask of the node; at most so many items, and their number of bytes.
  struct Asked {
    FetchRequest request;
    uint64_t bytes = 0;
  };
  Asked ask(size_t max_items) const;

  /// Where the next `bytes` ≤ bytes_left() go. Until accept() they count as not received.
  std::span<const iovec> place(uint64_t bytes);
  /// They came and are good: scatters, and moves `begin` of the items. Errors: of writing to a
  /// file.
  Result<> accept();

 private:
  struct Cut {  // of one item: the next bytes of its string, and where the window ends that they
                // fill
    FetchItem* item;
    uint64_t target_end, bytes;
    size_t buffered;  // where they are in buffer_; kDirect
  };

  std::vector<FetchItem*> items_;
  size_t first_ = 0;  // the first that is not finished
  uint64_t bytes_left_ = 0;
  std::vector<std::byte> buffer_;
  std::vector<iovec> pieces_;
  std::vector<Cut> cuts_;
};

}  // namespace ptc
