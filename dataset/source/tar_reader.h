// The members of a tar: ustar, with GNU's long names and pax headers. And WebDataset's way to name
// samples.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "dataset/source/shard_reader.h"

namespace ptc {

struct TarMember {
  std::string name;    // any bytes but NUL
  uint64_t begin = 0;  // of its first header, with those that carry a long name
  uint64_t data = 0, size = 0;
  bool regular = false;  // else a directory, a symbolic link or a device
};

/// Errors are kInvalidArgument, "byte 1024: …". Refused: what WebDataset's readers would lose
/// without a word, so hard links, sparse members, volumes, and an archive without an end.
class TarReader {
 public:
  enum class End { kMark, kBytes };  // the two blocks of zeros, or the reader's end

  TarReader(ShardReader& shard, End end) : shard_(shard), end_(end) {}

  /// nullopt at the end; members_end() is then where the last one ends.
  Result<std::optional<TarMember>> next();
  uint64_t members_end() const { return members_end_; }
  /// Of all headers so far: names, sizes and times of the members.
  uint32_t headers_crc() const { return headers_crc_; }

 private:
  struct Header;
  Result<std::optional<Header>> header();
  Result<std::string> payload(const Header& header, std::string_view what);
  Result<> pax(const Header& header, bool global);
  Result<> after_end();

  ShardReader& shard_;
  End end_;
  uint64_t members_end_ = 0;
  uint32_t headers_crc_ = 0;
  std::string long_name_;  // of the next member; empty: none
  std::optional<uint64_t> long_size_;
};

/// The key of the sample that a member belongs to, and which of its fields it is: "a/b.seg.png" →
/// "a/b", "seg.png".
struct SampleName {
  std::string_view key, field;
};
/// nullopt where WebDataset takes the member for no sample: no dot, nothing before or behind it,
/// "__name__", "__name__/x.y". A key that ends with '/' is that of what macOS adds ("d/._x.jpg"),
/// and may come again and again.
std::optional<SampleName> sample_name(std::string_view member);

}  // namespace ptc
