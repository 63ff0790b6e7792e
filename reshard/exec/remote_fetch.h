// What the images that are being made need of other nodes, and its way here.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <mutex>
#include <span>
#include <stop_token>
#include <string>
#include <utility>
#include <vector>

#include "reshard/exec/fetch_images.h"

namespace ptc {

/// Filled by add(), then run once. Threads: one.
class RemoteFetch {
 public:
  /// `bytes_done` grows by the bytes that come. All arguments outlive this.
  RemoteFetch(Transport& transport, const FetchSources& sources, std::atomic<uint64_t>& bytes_done)
      : transport_(transport), sources_(sources), bytes_done_(bytes_done) {}

  /// `memory` is all of the image, which can be read under `id` where the transfer has a window.
  void add(uint32_t target, const Transfer& transfer, std::span<std::byte> memory, const ImageId& id);

  /// Everything without a window in one fetch; beside it one thread for each node that windows come from,
  /// be it from source images or relayed. The first error, when all have ended.
  Result<> run(std::stop_token stop);

 private:
  using Window = std::pair<uint32_t, uint64_t>;  // target, begin
  struct Batch {
    std::vector<FetchItem> items;
    std::vector<uint32_t> source_of;  // by item: Transfer::source_image
    void add(const FetchItem& item, uint32_t source);
  };
  struct Coming {  // a window that this node relays
    ImageId image;
    int batches = 0;  // that it waits for
  };
  using Lane = std::map<Window, Batch>;  // in the order in which all nodes take them

  Result<> fetch_counted(std::vector<FetchItem>& items, const std::stop_token& stop);
  Result<> fetch(Batch batch, const std::stop_token& stop);
  Result<> fetch_lane(Lane& lane, const std::stop_token& stop);
  Result<> fetch_relayed(Lane& lane, const std::stop_token& stop);

  Transport& transport_;
  const FetchSources& sources_;
  std::atomic<uint64_t>& bytes_done_;
  Batch plain_;
  std::map<std::string, Lane> lanes_;     // by the source images' node
  std::map<uint32_t, Lane> relayed_;      // by the node that relays
  std::mutex mutex_;
  std::map<Window, Coming> coming_;       // guarded by mutex_
};

}  // namespace ptc
