#include "store/codec/zip.h"

#include <cstring>
#include <random>

#include "expect_error.h"

namespace ptc {
namespace {

using namespace std::string_literals;

Result<ZipDirectory> read(const std::string& file) {
  return ZipDirectory::read(read_at(std::as_bytes(std::span(file))), file.size());
}

/// A file with the members' bytes in their places.
std::string file_of(ZipWriter::Layout layout,
                    const std::vector<std::pair<uint64_t, std::string>>& later = {}) {
  std::string file(layout.file_bytes, '\0');
  for (const ZipWriter::Piece& piece : layout.pieces)
    file.replace(piece.offset, piece.bytes.size(), piece.bytes);
  for (const auto& [offset, bytes] : later) file.replace(offset, bytes.size(), bytes);
  return file;
}

std::string archive() {
  ZipWriter writer;
  writer.add("a/data.pkl", "N.");
  writer.add("a/byteorder", "little");
  writer.add("a/data/0", std::string(100, 'x'));
  writer.add("a/version", "3\n");
  return file_of(std::move(writer).finish());
}

template <class Number>
void patch(std::string& file, size_t at, Number value) {
  std::memcpy(file.data() + at, &value, sizeof value);
}
size_t central(const std::string& file, int which) {
  size_t at = file.find("PK\1\2");
  while (which-- > 0) at = file.find("PK\1\2", at + 1);
  return at;
}

TEST(Zip, ReadsWhatItWrites) {
  const std::string file = archive();
  auto directory = read(file);
  ASSERT_TRUE(is_ok(directory));
  ASSERT_EQ(directory.value().members().size(), 4u);
  const ZipMember* member = directory.value().find("a/data/0");
  ASSERT_NE(member, nullptr);
  EXPECT_TRUE(member->stored());
  EXPECT_EQ(member->data_offset % 64, 0u);
  EXPECT_EQ(file.substr(member->data_offset, member->bytes), std::string(100, 'x'));
  EXPECT_EQ(member->crc32, zip_crc32(std::string(100, 'x')));
  EXPECT_EQ(zip_crc32("123456789"), 0xCBF43926u);
  EXPECT_EQ(zip_crc32("6789", zip_crc32("12345")), 0xCBF43926u);
  EXPECT_EQ(directory.value().find("a/data/1"), nullptr);
}

TEST(Zip, MembersThatComeLaterHaveTheirPlaces) {
  for (const uint64_t seed : {1, 2, 3, 4, 5}) {
    std::mt19937_64 random(seed);
    ZipWriter writer;
    std::vector<std::pair<uint64_t, std::string>> later;
    for (int i = 0; i < 50; ++i) {
      const std::string bytes(random() % 3 == 0 ? 0 : random() % 500,
                              static_cast<char>('a' + i % 26));
      const std::string name = "x/data/" + std::to_string(i);
      if (random() % 2 == 0) writer.add(name, bytes);
      else later.emplace_back(writer.add_later(name, bytes.size(), zip_crc32(bytes)), bytes);
    }
    const std::string file = file_of(std::move(writer).finish(), later);
    auto directory = read(file);
    ASSERT_TRUE(is_ok(directory));
    EXPECT_EQ(directory.value().members().size(), 50u);
    for (const ZipMember& member : directory.value().members()) {
      EXPECT_EQ(member.data_offset % 64, 0u);
      EXPECT_EQ(zip_crc32(std::string_view(file).substr(member.data_offset, member.bytes)),
                member.crc32)
          << member.name;
    }
  }
}

TEST(Zip, ManyGigabytesAndManyMembersAreZip64) {
  ZipWriter writer;
  const uint64_t huge = uint64_t{5} << 30;
  std::vector<uint64_t> places;
  for (int i = 0; i < 3; ++i)
    places.push_back(writer.add_later("data/" + std::to_string(i), huge, 7));
  for (int i = 3; i < 70'000; ++i)
    places.push_back(writer.add_later("data/" + std::to_string(i), 1, 7));
  const ZipWriter::Layout layout = std::move(writer).finish();
  uint64_t bytes_read = 0;
  auto read_pieces = [&](uint64_t offset, std::span<std::byte> into) -> Result<> {
    bytes_read += into.size();
    std::memset(into.data(), 0, into.size());
    auto piece =
        std::upper_bound(layout.pieces.begin(), layout.pieces.end(), offset,
                         [](uint64_t at, const ZipWriter::Piece& p) { return at < p.offset; });
    if (piece != layout.pieces.begin()) --piece;
    for (; piece != layout.pieces.end() && piece->offset < offset + into.size(); ++piece) {
      const uint64_t begin = std::max(offset, piece->offset),
                     end = std::min(offset + into.size(), piece->offset + piece->bytes.size());
      if (begin < end)
        std::memcpy(into.data() + (begin - offset), piece->bytes.data() + (begin - piece->offset),
                    end - begin);
    }
    return ok();
  };
  auto directory = ZipDirectory::read(read_pieces, layout.file_bytes);
  ASSERT_TRUE(is_ok(directory));
  ASSERT_EQ(directory.value().members().size(), 70'000u);
  for (int i : {0, 1, 2, 3, 69'999}) {
    const ZipMember* member = directory.value().find("data/" + std::to_string(i));
    ASSERT_NE(member, nullptr);
    EXPECT_EQ(member->data_offset, places[i]);
    EXPECT_EQ(member->bytes, i < 3 ? huge : 1u);
  }
  EXPECT_LT(bytes_read, 10u << 20);  // of 15 GiB
}

TEST(Zip, ACommentAtTheEndIsNoHarm) {
  std::string file = archive();
  const size_t end = file.rfind("PK\5\6");
  patch(file, end + 20, uint16_t{12});
  file += "PK\5\6comment."s;
  EXPECT_TRUE(is_ok(read(file)));
}

TEST(Zip, RefusesWhatIsDamaged) {
  const std::string good = archive();
  ASSERT_TRUE(is_ok(read(good)));
  const size_t end = good.rfind("PK\5\6"), end64 = good.rfind("PK\6\6"),
               locator = good.rfind("PK\6\7");
  auto expect = [&](std::string_view part, auto&& change) {
    std::string file = good;
    change(file);
    EXPECT_TRUE(has_error(read(file), Code::kInvalidArgument, part));
  };
  expect("no end of a zip directory", [](std::string& f) { f = ""; });
  expect("no end of a zip directory", [](std::string& f) { f = "PK\5\6"; });
  expect("no end of a zip directory", [](std::string& f) { f.pop_back(); });
  expect("no end of a zip directory", [](std::string& f) { f.resize(f.size() / 2); });
  expect("no end of a zip directory", [](std::string& f) { f = std::string(200'000, 'x'); });
  expect("in several", [&](std::string& f) { patch(f, end + 4, uint16_t{1}); });
  expect("in several", [&](std::string& f) { patch(f, end + 8, uint16_t{3}); });
  expect("contradicts", [&](std::string& f) { patch(f, end + 8, uint32_t{0x00030003}); });
  expect("contradicts", [&](std::string& f) { patch(f, end64 + 40, uint64_t{1} << 60); });
  expect("where it should be", [&](std::string& f) { patch(f, locator + 8, uint64_t{1} << 60); });
  expect("where it should be", [&](std::string& f) { patch(f, end64 + 4, uint64_t{1} << 60); });
  expect("in several", [&](std::string& f) { patch(f, locator + 16, uint32_t{2}); });
  auto both = [&](std::string& f, size_t old_at, size_t new_at, uint64_t value) {
    patch(f, end + old_at, static_cast<uint32_t>(value));
    patch(f, end64 + new_at, value);
  };
  expect("does not end at byte", [&](std::string& f) { both(f, 16, 48, 10); });
  expect("does not end at byte", [&](std::string& f) { both(f, 12, 40, 10); });
  auto members = [&](std::string& f, uint64_t value) {
    patch(f, end + 8, static_cast<uint16_t>(value)),
        patch(f, end + 10, static_cast<uint16_t>(value));
    patch(f, end64 + 24, value), patch(f, end64 + 32, value);
  };
  expect("too few for 60000 members", [&](std::string& f) { members(f, 60'000); });
  expect("too few for 5 members", [&](std::string& f) { members(f, 5); });
  expect("belong to none of its 3 members", [&](std::string& f) { members(f, 3); });
  expect("damaged at its member number 2", [&](std::string& f) { f[central(f, 1)] = 'x'; });
  expect("damaged at its member number 1",
         [&](std::string& f) { patch(f, central(f, 0) + 28, uint16_t{60'000}); });
  expect("not UTF-8", [&](std::string& f) { f[central(f, 0) + 46] = '\xff'; });
  expect("'a/data.pkl': it is encrypted", [&](std::string& f) { f[central(f, 0) + 8] |= 1; });
  expect("'a/data.pkl': it is encrypted", [&](std::string& f) { f[6] |= 1; });
  expect("'a/data.pkl': it is in another part",
         [&](std::string& f) { patch(f, central(f, 0) + 34, uint16_t{3}); });
  expect("'a/data/0': it is stored in 99 bytes",
         [&](std::string& f) { patch(f, central(f, 2) + 20, uint32_t{99}); });
  expect("'a/data/0': its 100000 bytes from", [&](std::string& f) {
    patch(f, central(f, 2) + 20, uint32_t{100'000}),
        patch(f, central(f, 2) + 24, uint32_t{100'000});
  });
  expect("lie outside", [&](std::string& f) {
    patch(f, central(f, 2) + 20, UINT32_MAX), patch(f, central(f, 2) + 24, UINT32_MAX);
  });
  expect("'a/byteorder' begins inside of 'a/data.pkl'", [&](std::string& f) {
    patch(f, central(f, 0) + 20, uint32_t{30}), patch(f, central(f, 0) + 24, uint32_t{30});
  });
  expect("there is no member at byte 5",
         [&](std::string& f) { patch(f, central(f, 0) + 42, uint32_t{5}); });
  expect("'a/data.pkl': it lies outside",
         [&](std::string& f) { patch(f, central(f, 0) + 42, uint32_t{1'000'000}); });
  expect("something else than the directory", [&](std::string& f) { f[central(f, 0) + 46] = 'b'; });
  expect("something else than the directory", [&](std::string& f) { f[central(f, 0) + 10] = 8; });
  expect("another size than the directory", [&](std::string& f) {
    f[6] = 0;
    patch(f, 18, uint32_t{77});
  });
  expect("is there twice", [&](std::string& f) {
    ZipWriter writer;
    writer.add("a", "1"), writer.add("a", "2");
    f = file_of(std::move(writer).finish());
  });
}

TEST(Zip, CompressedMembersAreListed) {
  std::string file = archive();
  patch(file, central(file, 1) + 10, uint16_t{8});
  patch(file, central(file, 1) + 24, uint32_t{4'000'000'000});
  const size_t own = file.find("PK\3\4", 4);
  patch(file, own + 8, uint16_t{8});
  auto directory = read(file);
  ASSERT_TRUE(is_ok(directory));
  EXPECT_FALSE(directory.value().find("a/byteorder")->stored());
  EXPECT_EQ(zip_method_text(8), "compressed (method 8, deflate)");
  EXPECT_EQ(zip_method_text(77), "compressed (method 77)");
}

TEST(Zip, AFailedReadIsPassedOn) {
  EXPECT_TRUE(has_error(ZipDirectory::read(
                            [](uint64_t, std::span<std::byte>) -> Result<> {
                              return make_error(Code::kUnavailable, "gone");
                            },
                            1000),
                        Code::kUnavailable, "gone"));
}

}  // namespace
}  // namespace ptc
