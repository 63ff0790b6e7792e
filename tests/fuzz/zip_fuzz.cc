// A zip archive.
#include <algorithm>
#include <cstring>

#include "fuzz.h"
#include "store/base/utf8.h"
#include "store/codec/zip.h"

namespace ptc::fuzz {

void run(std::string_view input) {
  auto read = ZipDirectory::read(read_at(bytes_of(input)), input.size());
  if (!read) return check_error(read.error());
  const ZipDirectory& directory = read.value();
  std::vector<const ZipMember*> members;
  for (const ZipMember& member : directory.members()) members.push_back(&member);
  std::sort(members.begin(), members.end(), [](const ZipMember* a, const ZipMember* b) {
    return a->header_offset < b->header_offset;
  });
  uint64_t end = 0;
  for (const ZipMember* member : members) {
    PTC_CHECK(is_utf8(member->name) && directory.find(member->name) == member);
    PTC_CHECK(member->header_offset >= end && member->data_offset > member->header_offset);
    end = member->data_offset + member->bytes;
    PTC_CHECK(end >= member->bytes && end <= directory.directory_offset());
    PTC_CHECK(!member->stored() || member->bytes == member->unpacked_bytes);
  }
  PTC_CHECK(end <= input.size());

  ZipWriter writer;
  for (const ZipMember* member : members)
    writer.add(member->name, input.substr(member->data_offset, member->bytes));
  const ZipWriter::Layout layout = std::move(writer).finish();
  PTC_CHECK(layout.pieces.size() == 1 && layout.pieces[0].bytes.size() == layout.file_bytes);
  auto again = ZipDirectory::read(read_at(bytes_of(layout.pieces[0].bytes)), layout.file_bytes);
  PTC_CHECK(again.has_value() && again.value().members().size() == members.size());
}

std::vector<std::string> large_inputs() {
  ZipWriter many;
  for (int i = 0; i < 10'000; ++i) many.add(std::to_string(i), "");
  std::string file = std::move(many).finish().pieces[0].bytes;
  std::string same = file;  // all entries of the directory lead to the first member
  for (size_t at = same.find("PK\1\2"); at != std::string::npos; at = same.find("PK\1\2", at + 1))
    std::memset(same.data() + at + 42, 0, 4);
  ZipWriter large;
  large.add("large", std::string(kMegabyte, 'x'));
  std::string inside = std::move(large).finish().pieces[0].bytes;
  return {
      file,
      same,
      inside,
      repeated("", "PK\5\6", kMegabyte / 4),
      repeated("", "PK\3\4", kMegabyte / 4),
      std::string(kMegabyte, '\0'),
  };
}

}  // namespace ptc::fuzz
