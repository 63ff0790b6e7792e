#include "reshard/intake/rank_views.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <map>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <string_view>

#include "reshard/checkpoint/file_format.h"
#include "store/codec/tensor_path.h"

namespace ptc {
namespace {

constexpr std::string_view kViewDir = "tensors/";

bool may_be_view(const Found& file) {
  return file.node == nullptr && (file.at.empty() || file.at.starts_with("rank/")) &&
         file.path.starts_with(kViewDir) && is_one_array(file.path);
}

/// Where its elements begin; nullopt: they are not in C order, or it is no .npy.
std::optional<uint64_t> elements_begin(int fd, uint64_t file_bytes) {
  constexpr std::string_view kMagic = "\x93NUMPY";
  constexpr uint64_t kShort = 10, kLong = 12, kMostHeader = 4096;
  std::string beginning(std::min(file_bytes, kMostHeader), '\0');
  if (beginning.size() < kLong ||
      !read_exactly(fd, std::as_writable_bytes(std::span(beginning)), 0) ||
      !beginning.starts_with(kMagic))
    return std::nullopt;
  const auto byte = [&](size_t at) { return uint64_t{static_cast<unsigned char>(beginning[at])}; };
  const uint64_t begin =
      byte(6) == 1 ? kShort + byte(8) + (byte(9) << 8)
                   : kLong + byte(8) + (byte(9) << 8) + (byte(10) << 16) + (byte(11) << 24);
  if (begin > beginning.size() ||
      beginning.substr(0, begin).find("'fortran_order': False") == beginning.npos)
    return std::nullopt;
  return begin;
}

struct BytesOfFile {
  int fd;
  uint64_t offset;
};
Result<bool> are_same(BytesOfFile one, BytesOfFile other, uint64_t bytes,
                      const std::stop_token& stop) {
  constexpr uint64_t kAtOnce = 1 << 20;
  std::vector<std::byte> left(std::min(bytes, kAtOnce)), right(left.size());
  for (uint64_t done = 0; done < bytes;) {
    if (stop.stop_requested()) return Error(Code::kCancelled, "shutting down");
    const uint64_t size = std::min(kAtOnce, bytes - done);
    PTC_TRY(read_exactly(one.fd, std::span(left).first(size), one.offset + done));
    PTC_TRY(read_exactly(other.fd, std::span(right).first(size), other.offset + done));
    if (std::memcmp(left.data(), right.data(), size) != 0) return false;
    done += size;
  }
  return true;
}

std::string_view last_name(std::string_view path) { return path.substr(path.rfind('/') + 1); }

/// An array of a rank, where it may be shown as a file of this name.
struct ShownArray {
  const Found* file;
  const TensorEntry* entry;
};
using ShownArrays = std::map<std::pair<std::string, uint64_t>, std::vector<ShownArray>>;

Result<bool> is_view(int dir_fd, const Found& view, const ShownArrays& arrays,
                     const std::stop_token& stop) {
  PTC_TRY(const UniqueFd fd, FileToHash(dir_fd, view.source(), view.version).open());
  const auto begin = elements_begin(fd.get(), view.version.bytes);
  if (!begin) return false;
  const uint64_t bytes = view.version.bytes - *begin;
  const auto found = arrays.find({std::string(last_name(view.path)), bytes});
  if (found == arrays.end()) return false;
  for (const ShownArray& array : found->second) {
    PTC_TRY(const UniqueFd other,
            FileToHash(dir_fd, array.file->source(), array.file->version).open());
    PTC_TRY(const bool same,
            are_same({fd.get(), *begin}, {other.get(), array.entry->offset}, bytes, stop));
    if (same) return true;
  }
  return false;
}

}  // namespace

Result<> leave_out_views(int dir_fd, std::vector<Found>& found, Executor& executor,
                         std::stop_token stop) {
  std::set<uint64_t> ranks;
  for (const Found& file : found)
    if (may_be_view(file)) ranks.insert(file.rank);
  for (const uint64_t rank : ranks) {
    std::vector<const Found*> views;
    std::vector<Found> others;  // read here, and once more when all is known of them
    for (const Found& file : found) {
      if (file.rank != rank || file.node != nullptr) continue;
      if (may_be_view(file)) views.push_back(&file);
      else if (is_named_for_tensors(file.path) || may_be_torch(file.path)) others.push_back(file);
    }
    ShownArrays arrays;
    for (Found& file : others) {
      // What is wrong with it is said later.
      if ((may_be_torch(file.path) ? read_if_torch(dir_fd, file) : read_header(dir_fd, file))
              .has_error())
        continue;
      for (const TensorEntry& tensor : file.tensors)
        if (const auto path = tensor_path(tensor.name); path.has_value())
          arrays[{std::string(last_name(path.value())), tensor.bytes}].push_back({&file, &tensor});
    }
    std::atomic<bool> all = !arrays.empty();
    PTC_TRY(executor.team().parallel_for(
        views.size(),
        [&](size_t i) -> Result<> {
          if (!all) return ok();
          PTC_TRY(const bool same, is_view(dir_fd, *views[i], arrays, stop));
          if (!same) all = false;
          return ok();
        },
        stop));
    if (all)
      std::erase_if(found,
                    [&](const Found& file) { return file.rank == rank && may_be_view(file); });
  }
  return ok();
}

}  // namespace ptc
