#include <algorithm>
#include <memory>
#include <span>

#include "store/image/image_store.h"
#include "store/tensor/packed_copy.h"
#include "store/transport/file_runs.h"

namespace ptc {
namespace {

constexpr uint64_t kGatheredAtOnce = 256 << 10;  // a quarter of a core's L2 cache

/// The runs of an item, by its writer where that is worth it.
Result<> copy(const FetchItem& item, std::span<const std::byte> source) {
  const bool without_gaps = bytes_between(item.copy, item.begin, item.end) == item.end - item.begin;
  if (item.writer == nullptr || (item.copy.run_bytes < kLongRun && !without_gaps)) {
    if (item.writer != nullptr) {
      PTC_TRY(item.writer->take_space(item.begin, item.end));
    }
    PTC_TRY(std::byte* const target, item.target_at_begin.host());
    run_strided_copy(item.copy, source.data(), item.begin, item.end, target);
    return ok();
  }
  FileRuns runs(*item.writer);
  if (item.copy.run_bytes >= kLongRun) {
    for_each_run(item.copy, item.begin, item.end,
                 [&](uint64_t at, uint64_t target, uint64_t bytes) {
                   runs.add(target, source.subspan(at, bytes));
                 });
    return runs.finish();
  }
  thread_local const std::unique_ptr<std::byte[]> buffer(new std::byte[kGatheredAtOnce]);
  for (uint64_t begin = item.begin; begin < item.end; begin += kGatheredAtOnce) {
    const uint64_t end = std::min(begin + kGatheredAtOnce, item.end);
    run_strided_copy(item.copy, source.data(), begin, end, buffer.get());
    runs.add(begin, {buffer.get(), end - begin});
    PTC_TRY(runs.finish());
  }
  return ok();
}

class LoopbackTransport final : public Transport {
 public:
  Result<> fetch(std::span<FetchItem> items, std::stop_token stop,
                 std::chrono::milliseconds) override {
    PTC_TRY(check_in_host_memory(items));
    const Image* mapped = nullptr;
    std::span<const std::byte> source;  // of `mapped`; many small items in a row are of one image
    for (FetchItem& item : items) {
      if (stop.stop_requested()) return Error(Code::kCancelled, "cancelled");
      if (item.source != mapped) {
        PTC_TRY(source, item.source->host_bytes());
        mapped = item.source;
      }
      if (item.copy.source_end() > source.size())
        return make_error(Code::kCorrupt, "image {} has {} bytes, {} are needed",
                          item.source->id().text, source.size(), item.copy.source_end());
      PTC_TRY(copy(item, source));
      item.target_at_begin += item.end - item.begin;
      item.begin = item.end;
    }
    return ok();
  }
};

}  // namespace

std::unique_ptr<Transport> make_loopback_transport() {
  return std::make_unique<LoopbackTransport>();
}

}  // namespace ptc
