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

/// In which order a node takes what it needs of others, as numbers of `senders`, who are in
/// ascending order and do not have it among them. Not all begin with the same: then those would
/// have all to serve, one window of senders after the other, and the rest none.
///
/// `gives`: others take from it, too. Then it begins behind its own name: where each takes from all
/// others, each sender is at any time in the turn of another. Else by a hash of both names, so that
/// it does not matter how the names of old and new nodes lie.
std::vector<size_t> order_of_senders(const std::string& self, bool gives,
                                     const std::vector<std::string>& senders);

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

  /// From all nodes first the windows that others wait for, then the rest, some MiB at a time; and
  /// what is relayed from each node that does. From some nodes at a time, in order_of_senders().
  /// Two streams a node: while one waits for the answer to its next request, the other fills the
  /// link. The first error, when all have ended.
  Result<> run(std::stop_token stop);

 private:
  using Window = std::pair<uint32_t, uint64_t>;  // target, begin
  struct Batch {
    std::vector<FetchItem> items;
    std::vector<ImagePart> parts;   // by item
    std::vector<uint32_t> sources;  // by item: Transfer::source_image
    uint64_t bytes = 0;
  };
  struct Lane {  // what is taken from one node
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
  std::optional<Work> next_window(Lane& lane);
  std::optional<Work> next_other(Lane& lane);
  Result<> fetch_windows(Lane& lane, const std::stop_token& stop);
  Result<> fetch_others(Lane& lane, const std::stop_token& stop);
  std::vector<Lane*> lanes_in_order();
  std::vector<Lane*> relayed_in_order();
  Result<> fetch_relayed(Lane& lane, const std::stop_token& stop);

  Transport& transport_;
  const FetchSources& sources_;
  std::atomic<uint64_t>& bytes_done_;
  const Came came_;
  std::map<std::string, Lane> lanes_;  // by the source images' node
  std::map<uint32_t, Lane> relayed_;   // by the node that relays: windows only
  std::optional<uint32_t> a_target_;   // that is made here
  Mutex mutex_;
  std::map<Window, Coming> coming_ PTC_GUARDED_BY(mutex_);
};

}  // namespace ptc
