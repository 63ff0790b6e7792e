// Zip archives as torch.save writes them: members stored as they are, found by the central
// directory. Nothing is unpacked; of the file only the directory and the members' own headers are
// looked at.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "store/base/error.h"

namespace ptc {

/// Fills all of `into` with a file's bytes from `offset` on, or fails. What is asked for lies
/// within the file's length.
using ReadAt = std::function<Result<>(uint64_t offset, std::span<std::byte> into)>;

/// Of bytes in memory, which must outlive it.
ReadAt read_at(std::span<const std::byte> bytes);
/// Of the bytes from `begin` on, as a file of their own.
ReadAt read_from(ReadAt read, uint64_t begin);

struct ZipMember {
  std::string_view name;  // in the directory's own bytes
  uint64_t header_offset = 0;
  uint64_t data_offset = 0;  // where its content begins in the file
  uint64_t bytes = 0;        // of its content as it lies there
  uint64_t unpacked_bytes = 0;
  uint32_t crc32 = 0;   // as the file says; nobody checked
  uint16_t method = 0;  // 0: stored

  bool stored() const { return method == 0; }
};

class ZipDirectory {
 public:
  /// Reads the directory of a file of `file_bytes`. Zip64, data descriptors and a comment at the
  /// end are understood. kInvalidArgument, with the member's name: no end of a directory; a
  /// directory that is not all between the members and its end, or has more or fewer members than
  /// it says; members that overlap, lie outside of the file or below another's name, are encrypted,
  /// or said to be of another size or place in their own header; names that are there twice, or are
  /// no UTF-8; archives in several parts. Compressed members are listed, and nobody unpacks them.
  /// Memory: twice the directory's bytes. Other errors: those of `read`.
  static Result<ZipDirectory> read(const ReadAt& read, uint64_t file_bytes);
  ZipDirectory(ZipDirectory&&) noexcept = default;
  ZipDirectory& operator=(ZipDirectory&&) noexcept = default;

  const std::vector<ZipMember>& members() const { return members_; }  // by name
  const ZipMember* find(std::string_view name) const;
  uint64_t directory_offset() const { return directory_offset_; }

 private:
  ZipDirectory() = default;
  std::vector<char> text_;
  std::vector<ZipMember> members_;
  uint64_t directory_offset_ = 0;
};

/// "compressed (method 8, deflate)": of a member that is not stored, for messages.
std::string zip_method_text(uint16_t method);

/// CRC-32 as in zip archives: of `bytes` behind those of `before`.
uint32_t zip_crc32(std::string_view bytes, uint32_t before = 0);

/// Writes an archive as torch.save does, of members whose bytes may come later: stored, data at
/// multiples of 64, sizes only in the directory, Zip64 where needed. The result is what lies
/// between the members' own bytes.
class ZipWriter {
 public:
  /// Names are UTF-8 of at most 65 535 bytes; no name twice.
  explicit ZipWriter(uint64_t align = 64) : align_(align) {}

  /// A member that is here.
  void add(std::string_view name, std::string_view content);
  /// A member whose `bytes` come from elsewhere. Returns where in the file they belong. torch does
  /// not check the CRC-32; programs that do will take the member for damaged where it is not the
  /// true one.
  uint64_t add_later(std::string_view name, uint64_t bytes, uint32_t crc32);

  /// Bytes of the archive's own, at their place in the file.
  struct Piece {
    uint64_t offset;
    std::string bytes;
  };
  struct Layout {
    std::vector<Piece> pieces;  // by offset; what is not in them are the members that come later
    uint64_t file_bytes = 0;
  };
  Layout finish() &&;

 private:
  void begin_member(std::string_view name, uint64_t bytes, uint32_t crc32);
  void end_member(uint64_t bytes, uint32_t crc32);
  std::string& own() { return layout_.pieces.back().bytes; }
  uint64_t at() const;

  uint64_t align_;
  Layout layout_{{{0, ""}}, 0};
  std::string directory_;
  uint64_t members_ = 0;
};

}  // namespace ptc
