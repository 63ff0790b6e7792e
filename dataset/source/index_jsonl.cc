#include <algorithm>
#include <cstring>

#include "dataset/source/indexer.h"
#include "store/base/crc32c.h"
#include "store/base/json.h"

namespace ptc {

Result<ShardFacts> index_jsonl(int fd, uint64_t bytes, const IndexContext& context) {
  ShardReader shard(fd, 0, bytes, context);
  if (shard.left() >= 3) {
    PTC_TRY(const auto mark, shard.peek(3));
    if (std::memcmp(mark.data(), "\xEF\xBB\xBF", 3) == 0) shard.skip(3);
  }
  ShardFacts facts;
  facts.field_names = {"json"};
  // A line of nothing but spaces is no sample; it goes with the line before it.
  uint64_t line = shard.position();
  bool blank = true, ended = true;
  while (shard.left() > 0) {
    PTC_TRY(const auto some, shard.peek_some());
    const std::string_view text(reinterpret_cast<const char*>(some.data()), some.size());
    facts.content_crc = crc32c(some, facts.content_crc);
    for (size_t at = 0; at < text.size();) {
      const size_t newline = text.find('\n', at);
      const std::string_view part = text.substr(at, newline - at);
      const size_t first = blank ? part.find_first_not_of(" \t\r") : std::string_view::npos;
      if (first != std::string_view::npos) {
        if (std::string_view("{[\"-0123456789tfn").find(part[first]) == std::string_view::npos) {
          return invalid_argument("byte {}: no line of JSON: it begins with {}",
                                  shard.position() + at + first,
                                  ptc::quoted(part.substr(first, 1)));
        }
        facts.starts.add(line);
        blank = false;
      }
      ended = newline != std::string_view::npos;
      if (!ended) break;
      at = newline + 1;
      line = shard.position() + at;
      blank = true;
    }
    shard.skip(text.size());
  }
  facts.end = bytes;
  facts.lacks_newline = !ended && facts.starts.count() > 0;
  return facts;
}

}  // namespace ptc
