#include "dataset/source/tar_reader.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cstring>

#include "store/base/crc32c.h"
#include "store/base/json.h"

namespace ptc {
namespace {

constexpr uint64_t kTarBlock = 512;
constexpr uint64_t kMaxTarHeaderBytes = 1 << 20;  // of a long name or of pax records
constexpr uint64_t kMaxTarSize = uint64_t{1} << 62;

uint64_t padded(uint64_t bytes) { return (bytes + kTarBlock - 1) / kTarBlock * kTarBlock; }

std::string_view text_field(std::string_view block, size_t at, size_t size) {
  const std::string_view field = block.substr(at, size);
  return field.substr(0, field.find('\0'));
}

/// Octal digits, or GNU's binary number with the top bit set.
std::optional<uint64_t> number_field(std::string_view block, size_t at, size_t size) {
  std::string_view field = block.substr(at, size);
  uint64_t number = 0;
  if (static_cast<unsigned char>(field[0]) >= 0x80) {
    if (static_cast<unsigned char>(field[0]) != 0x80) return std::nullopt;  // negative, or enormous
    for (char c : field.substr(1)) {
      if (number >> 54 != 0) return std::nullopt;
      number = number << 8 | static_cast<unsigned char>(c);
    }
    return number;
  }
  field = field.substr(0, field.find('\0'));
  const size_t first = field.find_first_not_of(' ');
  field.remove_prefix(std::min(first, field.size()));
  field = field.substr(0, field.find(' '));
  const char* const end = field.data() + field.size();
  if (field.empty()) return number;
  const auto [stop, error] = std::from_chars(field.data(), end, number, 8);
  if (error != std::errc() || stop != end) return std::nullopt;
  return number;
}

bool checksum_holds(std::string_view block) {
  uint64_t as_unsigned = 0;
  int64_t as_signed = 0;  // as some old programs computed it
  for (size_t i = 0; i < block.size(); ++i) {
    const char c = i >= 148 && i < 156 ? ' ' : block[i];
    as_unsigned += static_cast<unsigned char>(c);
    as_signed += static_cast<signed char>(c);
  }
  const auto stored = number_field(block, 148, 8);
  return stored && (*stored == as_unsigned || static_cast<int64_t>(*stored) == as_signed);
}

bool is_zero(std::span<const std::byte> bytes) {
  return std::all_of(bytes.begin(), bytes.end(), [](std::byte b) { return b == std::byte{0}; });
}

}  // namespace

struct TarReader::Header {
  uint64_t at;
  char type;
  uint64_t size;
  std::string name;
};

Result<std::optional<TarReader::Header>> TarReader::header() {
  const uint64_t at = shard_.position();
  if (shard_.left() == 0 && end_ == End::kBytes) return std::optional<Header>();
  if (shard_.left() < kTarBlock) {
    return invalid_argument(
        "byte {}: the archive ends without its end mark, two blocks of zeros: it was cut off; copy "
        "or "
        "write it again",
        at);
  }
  PTC_TRY(const auto raw, shard_.peek(kTarBlock));
  const std::string_view block(reinterpret_cast<const char*>(raw.data()), raw.size());
  headers_crc_ = crc32c(raw, headers_crc_);
  if (is_zero(raw)) {
    PTC_TRY(after_end());
    return std::optional<Header>();
  }
  if (!checksum_holds(block)) {
    return invalid_argument("byte {}: no tar header: its checksum is wrong", at);
  }
  const auto size = number_field(block, 124, 12);
  if (!size || *size > kMaxTarSize) {
    return invalid_argument("byte {}: a member's size is no number", at);
  }
  Header header{.at = at, .type = block[156], .size = *size, .name = {}};
  // The prefix belongs to POSIX headers only: GNU has other things there.
  const bool posix = block.substr(257, 6) == std::string_view("ustar\0", 6);
  const std::string_view prefix = posix ? text_field(block, 345, 155) : std::string_view();
  if (!prefix.empty()) header.name = std::string(prefix) + '/';
  header.name += text_field(block, 0, 100);
  shard_.skip(kTarBlock);
  return std::optional<Header>(std::move(header));
}

/// What follows an end mark must be zeros to the end: else another archive was appended, and
/// readers stop here.
Result<> TarReader::after_end() {
  while (shard_.left() > 0) {
    PTC_TRY(const auto rest, shard_.peek_some());
    const auto zeros =
        std::find_if(rest.begin(), rest.end(), [](std::byte b) { return b != std::byte{0}; }) -
        rest.begin();
    shard_.skip(static_cast<uint64_t>(zeros));
    if (static_cast<size_t>(zeros) == rest.size()) continue;
    return invalid_argument(
        "byte {}: more follows the archive's end mark, which readers of tar do not see; join "
        "archives with "
        "tar --concatenate",
        shard_.position());
  }
  return ok();
}

Result<std::string> TarReader::payload(const Header& header, std::string_view what) {
  if (header.size > kMaxTarHeaderBytes || padded(header.size) > shard_.left()) {
    return invalid_argument("byte {}: {} of {} bytes, with {} left in the archive", header.at, what,
                            header.size, shard_.left());
  }
  PTC_TRY(const auto raw, shard_.peek(header.size));
  std::string text(reinterpret_cast<const char*>(raw.data()), raw.size());
  shard_.skip(padded(header.size));
  return text;
}

/// Records "<length> <key>=<value>\n", the length of all of it.
Result<> TarReader::pax(const Header& header, bool global) {
  PTC_TRY(const std::string text, payload(header, "pax header"));
  for (std::string_view rest = text; !rest.empty();) {
    uint64_t length = 0;
    const auto [stop, error] = std::from_chars(rest.data(), rest.data() + rest.size(), length);
    const size_t space = static_cast<size_t>(stop - rest.data());
    const bool fits = error == std::errc() && length <= rest.size() && length > space + 2 &&
                      rest[space] == ' ' && rest[length - 1] == '\n';
    const size_t equals = fits ? rest.find('=', space) : std::string_view::npos;
    if (equals == std::string_view::npos || equals >= length) {
      return invalid_argument("byte {}: a pax header that is none", header.at);
    }
    const std::string_view key = rest.substr(space + 1, equals - space - 1);
    const std::string_view value = rest.substr(equals + 1, length - equals - 2);
    if (key.starts_with("GNU.sparse.")) {
      return invalid_argument("byte {}: a sparse member; make the archive without --sparse",
                              header.at);
    }
    if (global && (key == "path" || key == "size")) {
      return invalid_argument("byte {}: a global pax header sets {} of all members", header.at,
                              ptc::quoted(key));
    }
    if (key == "path") {
      if (value.empty() || value.find('\0') != std::string_view::npos) {
        return invalid_argument("byte {}: a pax header with a name that is none", header.at);
      }
      long_name_ = value;
    }
    if (key == "size") {
      uint64_t size = 0;
      const char* const end = value.data() + value.size();
      const auto parsed = std::from_chars(value.data(), end, size);
      if (parsed.ec != std::errc() || parsed.ptr != end || size > kMaxTarSize) {
        return invalid_argument("byte {}: a pax header with a size that is no number", header.at);
      }
      long_size_ = size;
    }
    rest.remove_prefix(length);
  }
  return ok();
}

Result<std::optional<TarMember>> TarReader::next() {
  std::optional<uint64_t> begin;
  long_name_.clear();
  long_size_.reset();
  while (true) {
    PTC_TRY(auto found, header());
    if (!found) {
      if (begin) return invalid_argument("byte {}: a long name, and no member that has it", *begin);
      return std::optional<TarMember>();
    }
    Header& header = *found;
    if (!begin) begin = header.at;
    if (header.type == 'L') {
      PTC_TRY(long_name_, payload(header, "long name"));
      long_name_.resize(std::min(long_name_.find('\0'), long_name_.size()));
    } else if (header.type == 'K') {
      PTC_TRY(payload(header, "long link name"));
    } else if (header.type == 'x' || header.type == 'g') {
      PTC_TRY(pax(header, header.type == 'g'));
    } else {
      TarMember member{.name = long_name_.empty() ? std::move(header.name) : std::move(long_name_),
                       .begin = *begin,
                       .data = shard_.position(),
                       .size = long_size_.value_or(header.size)};
      const bool folder = header.type == '5' || (header.type == '\0' && member.name.ends_with('/'));
      member.regular = !folder && (header.type == '0' || header.type == '\0' || header.type == '7');
      if (header.type == '1') {
        return invalid_argument(
            "byte {}: {} is a hard link, which readers of WebDataset leave out; make the archive "
            "with "
            "--hard-dereference",
            header.at, ptc::quoted(member.name));
      }
      if (header.type == 'S') {
        return invalid_argument("byte {}: {} is a sparse member; make the archive without --sparse",
                                header.at, ptc::quoted(member.name));
      }
      if (!member.regular && !folder && (header.type < '2' || header.type > '6')) {
        return invalid_argument("byte {}: {} is a member of unknown type {}", header.at,
                                ptc::quoted(member.name), ptc::quoted({&header.type, 1}));
      }
      if (!member.regular) member.size = 0;
      if (member.size > shard_.left() || padded(member.size) > shard_.left()) {
        return invalid_argument(
            "byte {}: {} has {} bytes, but only {} follow: the archive was cut off", header.at,
            ptc::quoted(member.name), member.size, shard_.left());
      }
      shard_.skip(padded(member.size));
      members_end_ = shard_.position();
      return std::optional<TarMember>(std::move(member));
    }
  }
}

std::optional<SampleName> sample_name(std::string_view member) {
  const std::string_view top = member.substr(0, member.find('/'));
  if (top.starts_with("__") && top.size() >= 4 && top.ends_with("__")) return std::nullopt;
  const size_t base = member.rfind('/') + 1;  // 0 without a slash
  size_t dot = member.find('.', base);
  if (base > 0 && dot == base) {
    // "d/._x.jpg", as macOS adds to archives: there WebDataset's pattern lets a key end with the
    // slash, if no dot is in the directory's name.
    const size_t above = member.substr(0, base - 1).rfind('/') + 1;
    if (member.substr(above, base - above).find('.') == std::string_view::npos &&
        dot + 1 < member.size())
      return SampleName{member.substr(0, base), member.substr(dot + 1)};
  }
  if (dot == std::string_view::npos || dot == base || dot + 1 == member.size()) return std::nullopt;
  return SampleName{member.substr(0, dot), member.substr(dot + 1)};
}

}  // namespace ptc
