#include "store/codec/zip.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "store/base/bytes.h"
#include "store/base/json.h"
#include "store/base/utf8.h"

namespace ptc {
namespace {

constexpr uint32_t kLocal = 0x04034b50, kCentral = 0x02014b50, kDescriptor = 0x08074b50,
                   kEnd = 0x06054b50, kEnd64 = 0x06064b50, kLocator = 0x07064b50;
constexpr uint64_t kLocalBytes = 30, kCentralBytes = 46, kEndBytes = 22, kEnd64Bytes = 56,
                   kLocatorBytes = 20;
constexpr uint64_t kMostCommentBytes = UINT16_MAX;
constexpr uint64_t kMostDirectoryBytes = 256 << 20;
constexpr uint16_t kZip64Extra = 1;
constexpr uint16_t kEncrypted = 1, kSizesFollow = 1 << 3, kUtf8 = 1 << 11;
constexpr uint16_t kVersion = 20, kVersion64 = 45;

std::span<std::byte> writable(std::vector<char>& text) {
  return std::as_writable_bytes(std::span(text));
}
std::string_view view(const std::vector<char>& text) { return {text.data(), text.size()}; }

struct End {
  uint64_t members = 0, directory_bytes = 0, directory_offset = 0;
  uint64_t end_of_directory = 0;  // where what describes it begins
};

/// Takes over a field of the old form where the new one says more; false where they contradict.
bool widen(uint64_t narrow, uint64_t none, uint64_t wide, uint64_t& out) {
  out = wide;
  return narrow == none || narrow == wide;
}

Result<End> find_end(const ReadAt& read, uint64_t file_bytes) {
  auto missing = [] {
    return invalid_argument(
        "no end of a zip directory is found; it was cut short, or is no zip archive");
  };
  if (file_bytes < kEndBytes) return missing();
  // Nearly all archives have no comment: look for those first.
  std::vector<char> tail;
  uint64_t begin = 0;
  size_t at = std::string_view::npos;
  for (const uint64_t comment : {uint64_t{0}, kMostCommentBytes}) {
    const uint64_t bytes = std::min(file_bytes, kEndBytes + kLocatorBytes + comment);
    begin = file_bytes - bytes;
    tail.resize(bytes);
    PTC_TRY(read(begin, writable(tail)));
    for (at = bytes - kEndBytes;; --at) {
      ByteReader reader(view(tail).substr(at));
      if (reader.number<uint32_t>() == kEnd &&
          ByteReader(view(tail).substr(at + kEndBytes - 2)).number<uint16_t>() ==
              bytes - at - kEndBytes)
        break;
      if (at == 0 || (comment == 0 && at + kEndBytes == bytes)) {
        at = std::string_view::npos;
        break;
      }
    }
    if (at != std::string_view::npos || bytes == file_bytes) break;
  }
  if (at == std::string_view::npos) return missing();

  ByteReader reader(view(tail).substr(at + 4));
  const uint16_t disk = reader.number<uint16_t>(), directory_disk = reader.number<uint16_t>();
  const uint16_t members_here = reader.number<uint16_t>(), members = reader.number<uint16_t>();
  const uint32_t bytes = reader.number<uint32_t>(), offset = reader.number<uint32_t>();
  const Error parts = invalid_argument("the zip archive is in several parts, of which this is one");
  if ((disk != 0 && disk != UINT16_MAX) || (directory_disk != 0 && directory_disk != UINT16_MAX))
    return parts;
  if (members_here != members) return parts;
  End end{members, bytes, offset, begin + at};
  if (at < kLocatorBytes) return end;
  ByteReader locator(view(tail).substr(at - kLocatorBytes, kLocatorBytes));
  if (locator.number<uint32_t>() != kLocator) return end;

  const uint32_t end64_disk = locator.number<uint32_t>();
  const uint64_t end64_offset = locator.number<uint64_t>(), disks = locator.number<uint32_t>();
  const uint64_t locator_offset = begin + at - kLocatorBytes;
  if (end64_disk != 0 || disks > 1) return parts;
  const Error wrong = invalid_argument(
      "the Zip64 end of the directory is not where it should be, or contradicts the other");
  if (locator_offset < kEnd64Bytes || end64_offset > locator_offset - kEnd64Bytes) return wrong;
  std::vector<char> record(kEnd64Bytes);
  PTC_TRY(read(end64_offset, writable(record)));
  ByteReader end64(view(record));
  if (end64.number<uint32_t>() != kEnd64 ||
      end64.number<uint64_t>() != locator_offset - end64_offset - 12)
    return wrong;
  end64.number<uint32_t>();  // versions
  if (end64.number<uint32_t>() != 0 || end64.number<uint32_t>() != 0) return parts;
  const uint64_t members64_here = end64.number<uint64_t>(), members64 = end64.number<uint64_t>();
  const uint64_t bytes64 = end64.number<uint64_t>(), offset64 = end64.number<uint64_t>();
  if (members64_here != members64) return parts;
  if (!widen(members, UINT16_MAX, members64, end.members) ||
      !widen(bytes, UINT32_MAX, bytes64, end.directory_bytes) ||
      !widen(offset, UINT32_MAX, offset64, end.directory_offset))
    return wrong;
  end.end_of_directory = end64_offset;
  return end;
}

/// Fills the fields that are too large for their place from the extra field of Zip64.
Result<> widen_member(std::string_view extra, uint32_t unpacked, uint32_t bytes, uint32_t offset,
                      ZipMember& member) {
  member.unpacked_bytes = unpacked;
  member.bytes = bytes;
  member.header_offset = offset;
  const bool wide = unpacked == UINT32_MAX || bytes == UINT32_MAX || offset == UINT32_MAX;
  for (ByteReader reader(extra); wide && reader.left() >= 4;) {
    const uint16_t id = reader.number<uint16_t>(), size = reader.number<uint16_t>();
    if (size > reader.left()) break;
    if (id != kZip64Extra) {
      for (uint16_t i = 0; i < size; ++i) reader.number<uint8_t>();
      continue;
    }
    uint16_t left = size;
    for (auto [narrow, field] :
         {std::pair(unpacked, &member.unpacked_bytes), std::pair(bytes, &member.bytes),
          std::pair(offset, &member.header_offset)}) {
      if (narrow != UINT32_MAX) continue;
      if (left < 8) return invalid_argument("its Zip64 field is too short");
      *field = reader.number<uint64_t>();
      left -= 8;
    }
    return ok();
  }
  return ok();  // 0xFFFFFFFF may be meant; what cannot be is found out by its place
}

Result<> read_local_header(const ReadAt& read, uint64_t end, std::vector<char>& buffer,
                           ZipMember& member) {
  const uint64_t want = kLocalBytes + member.name.size();
  if (member.header_offset > end || end - member.header_offset < want)
    return invalid_argument("it lies outside of the file");
  buffer.resize(want);
  PTC_TRY(read(member.header_offset, writable(buffer)));
  ByteReader header(view(buffer));
  if (header.number<uint32_t>() != kLocal)
    return invalid_argument("there is no member at byte {}", member.header_offset);
  header.number<uint16_t>();
  const uint16_t flags = header.number<uint16_t>(), method = header.number<uint16_t>();
  header.number<uint32_t>();  // time
  header.number<uint32_t>();  // CRC
  const uint32_t bytes = header.number<uint32_t>(), unpacked = header.number<uint32_t>();
  const uint64_t name_bytes = header.number<uint16_t>(), extra_bytes = header.number<uint16_t>();
  if (flags & kEncrypted) return invalid_argument("it is encrypted");
  if (method != member.method || name_bytes != member.name.size() ||
      view(buffer).substr(kLocalBytes) != member.name)
    return invalid_argument("its own header, at byte {}, says something else than the directory",
                            member.header_offset);
  if (!(flags & kSizesFollow) && ((bytes != UINT32_MAX && bytes != member.bytes) ||
                                  (unpacked != UINT32_MAX && unpacked != member.unpacked_bytes)))
    return invalid_argument("its own header, at byte {}, says another size than the directory",
                            member.header_offset);
  member.data_offset = member.header_offset + want + extra_bytes;
  if (member.data_offset > end || end - member.data_offset < member.bytes)
    return invalid_argument(
        "its {} bytes from byte {} on lie outside of the file, or in its directory", member.bytes,
        member.data_offset);
  return ok();
}

template <class Number>
void put(std::string& out, Number number) {
  out.append(reinterpret_cast<const char*>(&number), sizeof number);
}
uint32_t narrow(uint64_t value) {
  return static_cast<uint32_t>(std::min<uint64_t>(value, UINT32_MAX));
}

constexpr std::array<uint32_t, 256> crc_table() {
  std::array<uint32_t, 256> table{};
  for (uint32_t i = 0; i < 256; ++i) {
    uint32_t value = i;
    for (int bit = 0; bit < 8; ++bit) value = value & 1 ? 0xEDB88320u ^ value >> 1 : value >> 1;
    table[i] = value;
  }
  return table;
}
constexpr std::array<uint32_t, 256> kCrcTable = crc_table();

}  // namespace

ReadAt read_at(std::span<const std::byte> bytes) {
  return [bytes](uint64_t offset, std::span<std::byte> into) -> Result<> {
    if (offset > bytes.size() || bytes.size() - offset < into.size())
      return invalid_argument("the file ends before byte {}", offset + into.size());
    if (!into.empty()) std::memcpy(into.data(), bytes.data() + offset, into.size());
    return ok();
  };
}

ReadAt read_from(ReadAt read, uint64_t begin) {
  return [read = std::move(read), begin](uint64_t offset, std::span<std::byte> into) {
    return read(begin + offset, into);
  };
}

Result<ZipDirectory> ZipDirectory::read(const ReadAt& read, uint64_t file_bytes) {
  PTC_TRY(auto end, find_end(read, file_bytes));
  if (end.directory_offset > end.end_of_directory ||
      end.end_of_directory - end.directory_offset != end.directory_bytes)
    return invalid_argument(
        "the zip directory, {} bytes from byte {} on, does not end at byte {}, where its end is "
        "described",
        end.directory_bytes, end.directory_offset, end.end_of_directory);
  if (end.directory_bytes > kMostDirectoryBytes)
    return invalid_argument("the zip directory has {} bytes; those of at most {} are read",
                            end.directory_bytes, kMostDirectoryBytes);
  if (end.members > end.directory_bytes / kCentralBytes)
    return invalid_argument("the zip directory has {} bytes, too few for {} members",
                            end.directory_bytes, end.members);

  ZipDirectory directory;
  directory.directory_offset_ = end.directory_offset;
  directory.text_.resize(end.directory_bytes);
  PTC_TRY(read(end.directory_offset, writable(directory.text_)));
  directory.members_.reserve(end.members);
  std::string_view rest = view(directory.text_);
  std::vector<char> buffer;
  for (uint64_t i = 0; i < end.members; ++i) {
    ByteReader entry(rest);
    const uint32_t signature = entry.number<uint32_t>();
    entry.number<uint32_t>();  // versions
    const uint16_t flags = entry.number<uint16_t>(), method = entry.number<uint16_t>();
    entry.number<uint32_t>();  // time
    const uint32_t crc32 = entry.number<uint32_t>(), bytes = entry.number<uint32_t>(),
                   unpacked = entry.number<uint32_t>();
    const size_t name_bytes = entry.number<uint16_t>(), extra_bytes = entry.number<uint16_t>(),
                 comment_bytes = entry.number<uint16_t>();
    const uint16_t disk = entry.number<uint16_t>();
    entry.number<uint16_t>(), entry.number<uint32_t>();  // attributes
    const uint32_t offset = entry.number<uint32_t>();
    const size_t all = kCentralBytes + name_bytes + extra_bytes + comment_bytes;
    if (!entry.good() || signature != kCentral || rest.size() < all)
      return invalid_argument("the zip directory is damaged at its member number {}", i + 1);
    ZipMember member{
        .name = rest.substr(kCentralBytes, name_bytes), .crc32 = crc32, .method = method};
    if (!is_utf8(member.name))
      return invalid_argument("the name {} in the zip archive is not UTF-8", quoted(member.name));
    auto checked = [&]() -> Result<> {
      if (flags & kEncrypted) return invalid_argument("it is encrypted");
      if (disk != 0 && disk != UINT16_MAX)
        return invalid_argument("it is in another part of an archive in several");
      PTC_TRY(widen_member(rest.substr(kCentralBytes + name_bytes, extra_bytes), unpacked, bytes,
                           offset, member));
      if (member.stored() && member.bytes != member.unpacked_bytes)
        return invalid_argument("it is stored in {} bytes, but should have {}", member.bytes,
                                member.unpacked_bytes);
      return read_local_header(read, end.directory_offset, buffer, member);
    }();
    if (!checked)
      return std::move(checked).error().with_context(
          fmt::format("zip member {}", quoted(member.name)));
    directory.members_.push_back(member);
    rest.remove_prefix(all);
  }
  if (!rest.empty())
    return invalid_argument("{} bytes of the zip directory belong to none of its {} members",
                            rest.size(), end.members);

  std::vector<ZipMember>& members = directory.members_;
  std::sort(members.begin(), members.end(), [](const ZipMember& a, const ZipMember& b) {
    return a.header_offset < b.header_offset;
  });
  for (size_t i = 1; i < members.size(); ++i) {
    if (members[i].header_offset < members[i - 1].data_offset + members[i - 1].bytes)
      return invalid_argument("zip member {} begins inside of {}", quoted(members[i].name),
                              quoted(members[i - 1].name));
  }
  std::sort(members.begin(), members.end(),
            [](const ZipMember& a, const ZipMember& b) { return a.name < b.name; });
  for (size_t i = 1; i < members.size(); ++i) {
    if (members[i].name == members[i - 1].name)
      return invalid_argument("zip member {} is there twice", quoted(members[i].name));
  }
  return directory;
}

const ZipMember* ZipDirectory::find(std::string_view name) const {
  const auto found = std::lower_bound(
      members_.begin(), members_.end(), name,
      [](const ZipMember& member, std::string_view key) { return member.name < key; });
  return found != members_.end() && found->name == name ? &*found : nullptr;
}

std::string zip_method_text(uint16_t method) {
  const std::string_view name = method == 8    ? ", deflate"
                                : method == 9  ? ", deflate64"
                                : method == 12 ? ", bzip2"
                                : method == 14 ? ", LZMA"
                                : method == 93 ? ", zstd"
                                               : "";
  return fmt::format("compressed (method {}{})", method, name);
}

uint32_t zip_crc32(std::string_view bytes, uint32_t before) {
  uint32_t crc = ~before;
  for (const char c : bytes)
    crc = kCrcTable[(crc ^ static_cast<unsigned char>(c)) & 0xFF] ^ crc >> 8;
  return ~crc;
}

uint64_t ZipWriter::at() const {
  return layout_.pieces.back().offset + layout_.pieces.back().bytes.size();
}

void ZipWriter::begin_member(std::string_view name, uint64_t bytes, uint32_t crc32) {
  PTC_CHECK(name.size() <= UINT16_MAX);
  const uint64_t offset = at();
  std::string extra;  // Zip64 first, then what pads
  if (bytes >= UINT32_MAX) {
    put(extra, kZip64Extra);
    put(extra, uint16_t{16});
    put(extra, bytes);
    put(extra, bytes);
  }
  const uint64_t unpadded = offset + kLocalBytes + name.size() + extra.size() + 4;
  const uint64_t padding = (align_ - unpadded % align_) % align_;
  put(extra, uint16_t{'F' | 'B' << 8});
  put(extra, static_cast<uint16_t>(padding));
  extra.append(padding, 'Z');

  const uint32_t size = bytes >= UINT32_MAX ? UINT32_MAX : 0;
  std::string& out = own();
  put(out, kLocal);
  put(out, bytes >= UINT32_MAX ? kVersion64 : kVersion);
  put(out, static_cast<uint16_t>(kSizesFollow | kUtf8));
  put(out, uint16_t{0});
  put(out, uint32_t{0});  // time
  put(out, uint32_t{0});
  put(out, size);
  put(out, size);
  put(out, static_cast<uint16_t>(name.size()));
  put(out, static_cast<uint16_t>(extra.size()));
  out.append(name).append(extra);

  std::string wide;
  if (bytes >= UINT32_MAX) put(wide, bytes), put(wide, bytes);
  if (offset >= UINT32_MAX) put(wide, offset);
  put(directory_, kCentral);
  put(directory_, wide.empty() ? kVersion : kVersion64);
  put(directory_, wide.empty() ? kVersion : kVersion64);
  put(directory_, static_cast<uint16_t>(kSizesFollow | kUtf8));
  put(directory_, uint16_t{0});
  put(directory_, uint32_t{0});
  put(directory_, crc32);
  put(directory_, narrow(bytes));
  put(directory_, narrow(bytes));
  put(directory_, static_cast<uint16_t>(name.size()));
  put(directory_, static_cast<uint16_t>(wide.empty() ? 0 : 4 + wide.size()));
  put(directory_, uint16_t{0});
  put(directory_, uint16_t{0});
  put(directory_, uint16_t{0});
  put(directory_, uint32_t{0});
  put(directory_, narrow(offset));
  directory_.append(name);
  if (!wide.empty()) {
    put(directory_, kZip64Extra);
    put(directory_, static_cast<uint16_t>(wide.size()));
    directory_ += wide;
  }
  ++members_;
}

void ZipWriter::end_member(uint64_t bytes, uint32_t crc32) {
  std::string& out = own();
  put(out, kDescriptor);
  put(out, crc32);
  if (bytes >= UINT32_MAX) put(out, bytes), put(out, bytes);
  else put(out, narrow(bytes)), put(out, narrow(bytes));
}

void ZipWriter::add(std::string_view name, std::string_view content) {
  const uint32_t crc32 = zip_crc32(content);
  begin_member(name, content.size(), crc32);
  own().append(content);
  end_member(content.size(), crc32);
}

uint64_t ZipWriter::add_later(std::string_view name, uint64_t bytes, uint32_t crc32) {
  begin_member(name, bytes, crc32);
  const uint64_t offset = at();
  if (bytes > 0) layout_.pieces.push_back({offset + bytes, ""});
  end_member(bytes, crc32);
  return offset;
}

ZipWriter::Layout ZipWriter::finish() && {
  const uint64_t offset = at();
  std::string& out = own();
  out += directory_;
  const uint64_t end64 = offset + directory_.size();
  put(out, kEnd64);
  put(out, uint64_t{kEnd64Bytes - 12});
  put(out, kVersion64);
  put(out, kVersion64);
  put(out, uint32_t{0});
  put(out, uint32_t{0});
  put(out, members_);
  put(out, members_);
  put(out, static_cast<uint64_t>(directory_.size()));
  put(out, offset);
  put(out, kLocator);
  put(out, uint32_t{0});
  put(out, end64);
  put(out, uint32_t{1});
  put(out, kEnd);
  put(out, uint16_t{0});
  put(out, uint16_t{0});
  put(out, static_cast<uint16_t>(std::min<uint64_t>(members_, UINT16_MAX)));
  put(out, static_cast<uint16_t>(std::min<uint64_t>(members_, UINT16_MAX)));
  put(out, narrow(directory_.size()));
  put(out, narrow(offset));
  put(out, uint16_t{0});
  layout_.file_bytes = at();
  return std::move(layout_);
}

}  // namespace ptc
