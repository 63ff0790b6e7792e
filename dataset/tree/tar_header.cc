#include "dataset/tree/tar_header.h"

#include <fmt/format.h>

#include <algorithm>

namespace ptc {
namespace {

constexpr size_t kTarNameBytes = 100;

void put(std::string& block, size_t at, std::string_view text) {
  std::copy(text.begin(), text.end(), block.begin() + static_cast<ptrdiff_t>(at));
}

void put_checksum(std::string& block) {
  put(block, 148, "        ");
  uint32_t sum = 0;
  for (const char c : block) sum += static_cast<unsigned char>(c);
  put(block, 148, fmt::format("{:06o}", sum));
  block[154] = '\0';
}

std::string ustar_block(std::string_view name, uint64_t bytes, char type) {
  std::string block(kTarBlockBytes, '\0');
  put(block, 0, name.substr(0, 100));
  put(block, 100, "0000644");
  put(block, 108, "0000000");
  put(block, 116, "0000000");
  if (bytes < uint64_t{1} << 33) {
    put(block, 124, fmt::format("{:011o}", bytes));
  } else {
    block[124] = '\x80';
    for (size_t i = 0; i < 8; ++i) block[135 - i] = static_cast<char>(bytes >> (8 * i));
  }
  put(block, 136, "00000000000");
  block[156] = type;
  put(block, 257, std::string_view("ustar\00000", 8));
  put_checksum(block);
  return block;
}

}  // namespace

void add_to_key(std::string& header, std::string_view field, std::string_view suffix) {
  std::string name = header.substr(0, std::min<size_t>(kTarNameBytes, header.find('\0')));
  const std::string ending = fmt::format(".{}", field);
  if (!name.ends_with(ending) || name.size() + suffix.size() > kTarNameBytes) return;
  name.insert(name.size() - ending.size(), suffix);
  put(header, 0, name);
  put_checksum(header);
}

std::string tar_header(std::string_view name, uint64_t bytes) {
  std::string header;
  if (name.size() > 100) {
    header = ustar_block("././@LongLink", name.size() + 1, 'L');
    header += name;
    header.append(2 * kTarBlockBytes - header.size(), '\0');
  }
  return header + ustar_block(name, bytes, '0');
}

}  // namespace ptc
