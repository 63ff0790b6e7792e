#include <array>
#include <cstring>

#include "dataset/source/indexer.h"
#include "dataset/source/megatron.h"

namespace ptc {

Result<ShardFacts> index_megatron(int idx_fd, uint64_t idx_bytes, uint64_t bytes,
                                  const IndexContext& context) {
  ShardReader head(idx_fd, 0, idx_bytes, context);
  if (idx_bytes < kMegatronHeadBytes) {
    return invalid_argument("byte 0: the .idx file has {} bytes, too few for its head", idx_bytes);
  }
  PTC_TRY(const auto magic, head.peek(kMegatronMagic.size()));
  if (std::memcmp(magic.data(), kMegatronMagic.data(), magic.size()) != 0) {
    return invalid_argument("byte 0: the .idx file does not begin as one of Megatron's (MMIDIDX)");
  }
  head.skip(magic.size());
  PTC_TRY(const uint64_t version, head.number<uint64_t>());
  if (version != 1) return invalid_argument("byte 9: version {} of .idx files, not 1", version);
  PTC_TRY(const uint8_t dtype, head.number<uint8_t>());
  const uint64_t item = megatron_item_bytes(dtype);
  if (item == 0) return invalid_argument("byte 17: unknown type of tokens {}", dtype);
  PTC_TRY(const uint64_t sequences, head.number<uint64_t>());
  PTC_TRY(const uint64_t documents, head.number<uint64_t>());
  if (sequences >= idx_bytes || documents > idx_bytes ||
      idx_bytes != kMegatronHeadBytes + 12 * sequences + 8 * documents) {
    return invalid_argument(
        "byte 18: {} sequences and {} document bounds do not make an .idx file of {} bytes: it was "
        "cut "
        "off, or has modes, which are not read",
        sequences, documents, idx_bytes);
  }
  if (documents != sequences + 1) {
    return invalid_argument(
        "byte 26: {} document bounds for {} sequences: only data with one sequence a document is "
        "shuffled; make it without --split-sentences",
        documents, sequences);
  }
  const uint64_t lengths_at = kMegatronHeadBytes, places_at = lengths_at + 4 * sequences,
                 documents_at = places_at + 8 * sequences;
  const IndexContext quiet{.stop = context.stop};
  ShardReader lengths(idx_fd, lengths_at, places_at, quiet),
      places(idx_fd, places_at, documents_at, quiet),
      bounds(idx_fd, documents_at, idx_bytes, quiet);
  ShardFacts facts;
  facts.field_names = {"bin"};
  facts.megatron_dtype = dtype;
  for (uint64_t i = 0; i <= sequences; ++i) {
    PTC_TRY(const uint64_t bound, bounds.number<uint64_t>());
    if (bound != i) {
      return invalid_argument(
          "byte {}: document {} begins with sequence {}: only data with one sequence "
          "a document is shuffled",
          documents_at + 8 * i, i, bound);
    }
    if (i == sequences) break;
    PTC_TRY(const int32_t length, lengths.number<int32_t>());
    PTC_TRY(const uint64_t place, places.number<uint64_t>());
    if (place != facts.end) {
      return invalid_argument(
          "byte {}: sequence {} begins at byte {} of the .bin file, but the one before "
          "it ends at {}",
          places_at + 8 * i, i, place, facts.end);
    }
    if (length < 0 || static_cast<uint64_t>(length) * item > bytes - place) {
      return invalid_argument(
          "byte {}: sequence {} has {} tokens from byte {} on, but the .bin file has "
          "{} bytes",
          lengths_at + 4 * i, i, length, place, bytes);
    }
    facts.starts.add(place);
    facts.end += static_cast<uint64_t>(length) * item;
  }
  if (facts.end != bytes) {
    return invalid_argument("byte {}: the .idx file covers {} bytes of the .bin file, which has {}",
                            lengths_at, facts.end, bytes);
  }
  return facts;
}

}  // namespace ptc
