#include "store/transport/transport.h"

namespace ptc {

Result<> check_in_host_memory(std::span<const FetchItem> items) {
  for (const FetchItem& item : items)
    if (auto target = item.target_at_begin.host(); target.has_error())
      return std::move(target).error().with_context("fetching image " + item.source->id().text);
  return ok();
}

}  // namespace ptc
