#include "store/transport/transport.h"

namespace ptc {
namespace {

class LoopbackTransport final : public Transport {
 public:
  Result<> fetch(std::span<FetchItem> items, std::stop_token stop) override {
    for (FetchItem& item : items) {
      if (stop.stop_requested()) return Error(Code::kCancelled, "cancelled");
      PTC_TRY(auto source, item.source->map());
      if (item.copy.source_end() > source.size())
        return make_error(Code::kCorrupt, "image {} has {} bytes, {} are needed",
                          item.source->id().text, source.size(), item.copy.source_end());
      run_strided_copy(item.copy, source.data(), item.begin, item.end, item.target_at_begin);
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
