// What the images that are being made need of other nodes, and its way here.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <optional>
#include <span>
#include <stop_token>
#include <string>
#include <utility>
#include <vector>

#include "reshard/exec/fetch_images.h"
#include "reshard/exec/incoming_sums.h"
#include "store/base/mutex.h"

namespace ptc {

/// Filled by add(), then run once. Threads: one.
class RemoteFetch {
 public:
  /// They have come, each of one transfer. Threads: any.
  using Came = std::function<void(std::span<const ImagePart> parts)>;
  /// `bytes_done` grows by the bytes that come. All arguments outlive this.
  RemoteFetch(Transport& transport, const FetchSources& sources, std::atomic<uint64_t>& bytes_done,
              Came came)
      : transport_(transport), sources_(sources), bytes_done_(bytes_done), came_(std::move(came)) {}

  /// Of the image of the plan's target `target`: `item` is what comes of the transfer. Where the
  /// transfer has a window, the image can be read under `id`.
  void add(size_t image, uint32_t target, const Transfer& transfer, const FetchItem& item,
           const ImageId& id);

  /// From each node first the windows that others wait for, then the rest, some MiB at a time; and
  /// what is relayed from each node that does. Two streams a node: while one waits for the answer
  /// to its next request, the other fills the link. The first error, when all have ended.
  Result<> run(std::stop_token stop);

 private:
  using Window = std::pair<uint32_t, uint64_t>;  // target, begin
  struct Batch {
    std::vector<FetchItem> items;
    std::vector<ImagePart> parts;   // by item
    std::vector<uint32_t> sources;  // by item: Transfer::source_image
    uint64_t bytes = 0;
  };
  struct Lane {  // what is taken from one node, in this order
    std::map<Window, Batch> windows;
    std::deque<Batch> others;
    // What is left, and what was found out; guarded by mutex_.
    std::map<uint32_t, ImageRef> instead;  // of source images that failed
    bool relays = true;
  };
  struct Work {
    std::optional<Window> window;
    Batch batch;
  };
  struct Coming {  // a window that this node relays
    ImageId image;
    int batches = 0;  // that it waits for
  };

  Result<> fetch_counted(std::vector<FetchItem>& items, const std::stop_token& stop);
  Result<> fetch(Lane& lane, Batch batch, const std::stop_token& stop);
  std::optional<Work> next(Lane& lane);
  Result<> fetch_lane(Lane& lane, const std::stop_token& stop);
  Result<> fetch_relayed(Lane& lane, const std::stop_token& stop);

  Transport& transport_;
  const FetchSources& sources_;
  std::atomic<uint64_t>& bytes_done_;
  const Came came_;
  std::map<std::string, Lane> lanes_;  // by the source images' node
  std::map<uint32_t, Lane> relayed_;   // by the node that relays: windows only
  Mutex mutex_;
  std::map<Window, Coming> coming_ PTC_GUARDED_BY(mutex_);
};

}  // namespace ptc
