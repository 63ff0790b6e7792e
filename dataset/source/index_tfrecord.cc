#include "dataset/source/indexer.h"
#include "dataset/source/masked_crc.h"

namespace ptc {

Result<ShardFacts> index_tfrecord(int fd, uint64_t bytes, const IndexContext& context) {
  ShardReader shard(fd, 0, bytes, context);
  ShardFacts facts;
  facts.field_names = {"bin"};
  while (shard.left() > 0) {
    const uint64_t at = shard.position();
    if (shard.left() < kTfrecordFrameBytes) {
      return invalid_argument(
          "byte {}: {} bytes are left, too few for a record: the file was cut off", at,
          shard.left());
    }
    PTC_TRY(const auto head, shard.peek(12));
    uint64_t length;
    uint32_t crc;
    std::memcpy(&length, head.data(), sizeof length);
    std::memcpy(&crc, head.data() + 8, sizeof crc);
    if (crc != masked_crc(head.first(8))) {
      return invalid_argument("byte {}: no TFRecord: the checksum of a record's length is wrong",
                              at);
    }
    if (length > shard.left() - kTfrecordFrameBytes) {
      return invalid_argument(
          "byte {}: a record of {} bytes, but only {} follow: the file was cut off", at, length,
          shard.left() - kTfrecordFrameBytes);
    }
    facts.starts.add(at);
    shard.skip(length + kTfrecordFrameBytes - sizeof(uint32_t));
    PTC_TRY(const auto of_data, shard.peek(sizeof(uint32_t)));  // which stands for all of it
    facts.content_crc = crc32c(of_data, facts.content_crc);
    shard.skip(sizeof(uint32_t));
  }
  facts.end = bytes;
  return facts;
}

}  // namespace ptc
