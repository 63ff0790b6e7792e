#include "reshard/job/file_hash.h"

#include <fcntl.h>

#include <algorithm>

#include "store/base/file.h"
#include "store/tensor/strided_copy.h"

namespace ptc {
namespace {

// A buffer that stays in the second-level cache between the read and the hash.
constexpr uint64_t kBufferBytes = 512 << 10;
constexpr uint64_t kTaskBytes = 16 << 20;

std::vector<std::byte>& thread_buffer(uint64_t bytes) {
  thread_local std::vector<std::byte> buffer;
  if (buffer.size() < bytes) buffer.resize(bytes);
  return buffer;
}

// What identifies the checksum of a piece beside the file and the array.
std::string piece_key(const ArrayToHash& array, const Piece& piece) {
  return array.global_shape.to_string() + piece.global.to_string() + piece.local_offset.to_string() +
         array.part.local_shape.to_string();
}

bool is_whole(const ArrayToHash& array) {
  return array.part == SubTensor::whole(array.global_shape);
}

// Units that a task takes a range of: bytes of an array that is not cut, else rows of it.
struct Units {
  uint64_t count = 0;
  uint64_t per_buffer = 1;
  uint64_t per_task = 1;
};

Units units_of(const ArrayToHash& array) {
  if (is_whole(array)) return {array.entry.bytes, kBufferBytes, kTaskBytes};
  const uint64_t rows = array.part.local_shape.empty() ? 1 : array.part.local_shape[0];
  const uint64_t row_bytes = rows == 0 ? 0 : array.entry.bytes / rows;
  // Rows of 4- and 6-bit types may begin within a byte.
  if (rows == 0 || row_bytes == 0 || dtype_bits(array.entry.dtype) < 8) return {rows, rows, rows};
  return {rows, std::max<uint64_t>(1, kBufferBytes / row_bytes),
          std::max<uint64_t>(1, kTaskBytes / row_bytes)};
}

Error cancelled() { return Error(Code::kCancelled, "cancelled"); }

Result<> hash_bytes(const ArrayToHash& array, uint64_t begin, uint64_t end, Checksum& sum,
                    const std::stop_token& stop) {
  auto& buffer = thread_buffer(std::min(kBufferBytes, end - begin));
  for (uint64_t at = begin; at < end; at += kBufferBytes) {
    if (stop.stop_requested()) return cancelled();
    std::span window(buffer.data(), std::min(kBufferBytes, end - at));
    PTC_TRY(read_exactly(array.fd, window, array.entry.offset + at));
    sum += checksum_of_run(window, at);
  }
  return ok();
}

// Rows [begin, end) of a local array that is cut.
Result<> hash_rows(const ArrayToHash& array, const Units& units, uint64_t begin, uint64_t end,
                   std::vector<Checksum>& sums, const std::stop_token& stop) {
  const bool scalar = array.part.local_shape.empty();
  const uint64_t row_bytes = units.count == 0 ? 0 : array.entry.bytes / units.count;
  for (uint64_t at = begin; at < end; at += units.per_buffer) {
    if (stop.stop_requested()) return cancelled();
    const uint64_t to = std::min(end, at + units.per_buffer);
    const bool all = at == 0 && to == units.count;
    const uint64_t bytes = all ? array.entry.bytes : (to - at) * row_bytes;
    std::span window(thread_buffer(bytes).data(), bytes);
    PTC_TRY(read_exactly(array.fd, window, array.entry.offset + (all ? 0 : at * row_bytes)));
    SubTensor rows;
    rows.local_shape = array.part.local_shape;
    if (!scalar) rows.local_shape[0] = to - at;
    for (size_t p = 0; p < array.part.pieces.size(); ++p) {
      Piece piece = array.part.pieces[p];
      if (!scalar) {
        uint64_t first = std::max(at, piece.local_offset[0]);
        uint64_t last = std::min(to, piece.local_offset[0] + piece.global.extent[0]);
        if (first >= last) continue;
        piece.global.offset[0] += first - piece.local_offset[0];
        piece.global.extent[0] = last - first;
        piece.local_offset[0] = first - at;
      }
      rows.pieces.assign(1, piece);
      PTC_TRY(auto sum, checksum_of_sub_tensor(rows, array.global_shape, array.entry.dtype, window));
      sums[p] += sum;
    }
  }
  return ok();
}

Result<> hash_units(const ArrayToHash& array, const Units& units, uint64_t begin, uint64_t end,
                    std::vector<Checksum>& sums, const std::stop_token& stop) {
  if (is_whole(array)) return hash_bytes(array, begin, end, sums.front(), stop);
  return hash_rows(array, units, begin, end, sums, stop);
}

// The checksums of all pieces, if every one of them is known.
std::optional<std::vector<Checksum>> known(const ArrayToHash& array, const HashCache& hashes) {
  std::vector<Checksum> sums;
  for (const Piece& piece : array.part.pieces) {
    auto sum = hashes.find(array.version, array.number, piece_key(array, piece));
    if (!sum) return std::nullopt;
    sums.push_back(*sum);
  }
  return sums;
}

void remember(const ArrayToHash& array, const std::vector<Checksum>& sums, HashCache& hashes) {
  for (size_t p = 0; p < sums.size(); ++p)
    hashes.put(array.version, array.number, piece_key(array, array.part.pieces[p]), sums[p]);
}

}  // namespace

std::optional<Checksum> HashCache::find(const FileVersion& file, uint32_t array,
                                        const std::string& key) const {
  std::lock_guard lock(mutex_);
  auto it = files_.find(file.inode);
  if (it == files_.end() || it->second.version != file) return std::nullopt;
  auto sum = it->second.sums.find(fmt::format("{} {}", array, key));
  if (sum == it->second.sums.end()) return std::nullopt;
  return sum->second;
}

void HashCache::put(const FileVersion& file, uint32_t array, const std::string& key,
                    const Checksum& sum) {
  std::lock_guard lock(mutex_);
  Entry& entry = files_[file.inode];
  if (entry.version != file) entry = {file, {}};
  entry.sums[fmt::format("{} {}", array, key)] = sum;
}

void HashCache::forget(const FileVersion& file) {
  std::lock_guard lock(mutex_);
  files_.erase(file.inode);
}

Result<std::vector<std::vector<Checksum>>> hash_arrays(const std::vector<ArrayToHash>& arrays,
                                                       Executor& executor, HashCache& hashes,
                                                       std::stop_token stop) {
  struct Task {
    size_t array;
    uint64_t begin, end;
  };
  std::vector<std::vector<Checksum>> sums(arrays.size());
  std::vector<Units> units(arrays.size());
  std::vector<Task> tasks;
  std::vector<bool> fresh(arrays.size());
  for (size_t i = 0; i < arrays.size(); ++i) {
    if (auto sum = known(arrays[i], hashes)) {
      sums[i] = *std::move(sum);
      continue;
    }
    fresh[i] = true;
    sums[i].resize(arrays[i].part.pieces.size());
    units[i] = units_of(arrays[i]);
    for (uint64_t begin = 0; begin < units[i].count; begin += units[i].per_task)
      tasks.push_back({i, begin, std::min(units[i].count, begin + units[i].per_task)});
  }
  std::vector<std::vector<Checksum>> task_sums(tasks.size());
  PTC_TRY(executor.team().parallel_for(
      tasks.size(),
      [&](size_t t) -> Result<> {
        const Task& task = tasks[t];
        task_sums[t].resize(sums[task.array].size());
        return hash_units(arrays[task.array], units[task.array], task.begin, task.end, task_sums[t],
                          stop);
      },
      stop));
  for (size_t t = 0; t < tasks.size(); ++t)
    for (size_t p = 0; p < task_sums[t].size(); ++p) sums[tasks[t].array][p] += task_sums[t][p];
  for (size_t i = 0; i < arrays.size(); ++i)
    if (fresh[i]) remember(arrays[i], sums[i], hashes);
  return sums;
}

Result<> hash_array(const ArrayToHash& array, HashCache& hashes, std::stop_token stop) {
  if (known(array, hashes)) return ok();
  std::vector<Checksum> sums(array.part.pieces.size());
  Units units = units_of(array);
  PTC_TRY(hash_units(array, units, 0, units.count, sums, stop));
  remember(array, sums, hashes);
  return ok();
}

Result<Checksum> hash_file(int dir_fd, const std::string& path, const FileVersion& version,
                           HashCache& hashes, std::stop_token stop) {
  if (auto sum = hashes.find(version, 0, "file")) return *sum;
  PTC_TRY(auto fd, open_file(dir_fd, path, O_RDONLY | O_NOFOLLOW));
  ArrayToHash array;
  array.fd = fd.get();
  Checksum sum;
  PTC_TRY(hash_bytes(array, 0, version.bytes, sum, stop));
  hashes.put(version, 0, "file", sum);
  return sum;
}

Result<std::vector<FoundPadding>> find_padding(int fd, const TensorEntry& entry,
                                               const SubTensor& part) {
  std::vector<FoundPadding> found;
  std::vector<Box> uncovered{Box::whole(part.local_shape)};
  for (const Piece& piece : part.pieces) {
    std::vector<Box> left;
    for (const Box& box : uncovered)
      for (Box& rest : subtract(box, {piece.local_offset, piece.global.extent}))
        left.push_back(std::move(rest));
    uncovered.swap(left);
  }
  for (Box& box : uncovered) {
    if (box.empty()) continue;
    PTC_TRY(auto copy, make_strided_copy({entry.offset, part.local_shape}, box.offset,
                                         {0, box.extent}, Dims(box.extent.size()), box.extent,
                                         dtype_bits(entry.dtype)));
    Checksum sum;
    bool zeros = true;
    Result<> read = ok();
    for_each_run(copy, [&](uint64_t from, uint64_t to, uint64_t bytes) {
      for (uint64_t at = 0; at < bytes && read.has_value(); at += kBufferBytes) {
        std::span window(thread_buffer(kBufferBytes).data(), std::min(kBufferBytes, bytes - at));
        read = read_exactly(fd, window, from + at);
        sum += checksum_of_run(window, to + at);
        zeros = zeros && std::all_of(window.begin(), window.end(),
                                     [](std::byte b) { return b == std::byte{0}; });
      }
    });
    if (read.has_error()) return std::move(read).error();
    if (!zeros) found.push_back({std::move(box), sum});
  }
  return found;
}

}  // namespace ptc
