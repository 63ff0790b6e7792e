#include "reshard/intake/file_hash.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <deque>
#include <functional>
#include <memory>
#include <optional>

#include "reshard/intake/uncovered_boxes.h"
#include "store/base/file.h"
#include "store/base/json.h"
#include "store/base/mutex.h"
#include "store/tensor/mapped_copy.h"
#include "store/tensor/strided_copy.h"

namespace ptc {
namespace {

// A buffer that stays in the second-level cache between the read and the hash.
constexpr uint64_t kBufferBytes = 128 << 10;
constexpr uint64_t kTaskBytes = 4 << 20;
constexpr uint64_t kLeastMapped = 256
                                  << 10;  // of a smaller file, the copy takes less than the mapping

std::vector<std::byte>& thread_buffer(uint64_t bytes) {
  thread_local std::vector<std::byte> buffer;
  if (buffer.size() < bytes) buffer.resize(bytes);
  return buffer;
}

// What identifies the checksum of a piece beside the file and the array.
std::string piece_key(const ArrayToHash& array, const Piece& piece) {
  const SubTensor& part = array.part;
  return array.global_shape.to_string() + piece.global.to_string() +
         piece.local_offset.to_string() + part.local_shape.to_string() +
         (part.flat ? fmt::format("{}{}", part.flat->begin, part.flat->of.to_string()) : "");
}

Error cancelled() { return Error(Code::kCancelled, "cancelled"); }

// Where the bytes of each piece lie in the tensor (source) and in the local array (target).
Result<std::vector<StridedCopy>> places_of(const ArrayToHash& array) {
  std::vector<StridedCopy> places;
  for (const Piece& piece : array.part.pieces) {
    PTC_TRY(auto place, make_strided_copy({0, array.global_shape}, piece.global.offset,
                                          array_at(array.part, 0), piece.local_offset,
                                          piece.global.extent, dtype_bits(array.entry.dtype)));
    places.push_back(place);
  }
  return places;
}

/// A file in memory while this lives.
class MappedFile {
 public:
  /// Nothing, where the file has holes: to read one through a mapping takes a page of the store.
  MappedFile(int fd, uint64_t bytes) {
    struct stat info = {};
    if (bytes == 0 || ::fstat(fd, &info) != 0 || info.st_blocks * 512 < info.st_size) return;
    void* memory = ::mmap(nullptr, bytes, PROT_READ, MAP_SHARED, fd, 0);
    if (memory == MAP_FAILED) return;
    ::madvise(memory, bytes, MADV_HUGEPAGE);  // a hint; refused by some file systems
    bytes_ = std::span(static_cast<const std::byte*>(memory), bytes);
  }
  ~MappedFile() {
    if (!bytes_.empty()) ::munmap(const_cast<std::byte*>(bytes_.data()), bytes_.size());
  }
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  bool mapped() const { return !bytes_.empty(); }
  Result<std::span<const std::byte>> window(uint64_t offset, uint64_t bytes) const {
    if (bytes > bytes_.size() || offset > bytes_.size() - bytes)
      return make_error(Code::kCorrupt, "a file ends at byte {} instead of {}", bytes_.size(),
                        offset + bytes);
    return bytes_.subspan(offset, bytes);
  }

 private:
  std::span<const std::byte> bytes_;
};

/// A file from when its first task reads it until its last one is done. Threads: any, after the
/// tasks were counted.
class FileOfTasks {
 public:
  explicit FileOfTasks(FileToHashRef file) : file_(std::move(file)) {}
  const FileToHashRef& file() const { return file_; }
  void add_tasks(size_t count) { tasks_left_ += count; }

  Result<> open() {
    MutexLock lock(mutex_);
    if (opened_) return ok();
    PTC_TRY(fd_, file_->open());
    if (file_->version().bytes >= kLeastMapped) mapped_.emplace(fd_.get(), file_->version().bytes);
    if (mapped_ && mapped_->mapped()) fd_.reset();
    opened_ = true;
    return ok();
  }
  /// Of one that is open.
  int fd() const { return fd_.get(); }
  const MappedFile* mapped() const { return mapped_ ? &*mapped_ : nullptr; }

  void task_done() {
    if (--tasks_left_ > 0) return;
    mapped_.reset();
    fd_.reset();
  }

 private:
  const FileToHashRef file_;
  std::atomic<size_t> tasks_left_{0};
  Mutex mutex_;
  bool opened_ PTC_GUARDED_BY(mutex_) = false;  // as the next two are until it is set
  UniqueFd fd_;
  std::optional<MappedFile> mapped_;  // a small one is not
};

/// `add(run, logical, sum)`: the checksum of a run of the window.
template <class Add>
void add_window(const std::vector<StridedCopy>& places, std::span<const std::byte> window,
                uint64_t at, std::vector<Checksum>& sums, const Add& add) {
  for (size_t p = 0; p < places.size(); ++p)
    for_each_run(places[p], at, at + window.size(),
                 [&](uint64_t logical, uint64_t local, uint64_t bytes) {
                   add(window.subspan(local - at, bytes), logical, sums[p]);
                 });
}

// Bytes [begin, end) of the local array, added to the sums of the pieces they belong to.
Result<> hash_bytes(const ArrayToHash& array, const std::vector<StridedCopy>& places,
                    uint64_t begin, uint64_t end, int fd, const MappedFile* mapped,
                    std::vector<Checksum>& sums, const std::stop_token& stop) {
  if (mapped != nullptr && mapped->mapped()) {
    for (uint64_t at = begin; at < end; at += kTaskBytes) {
      if (stop.stop_requested()) return cancelled();
      PTC_TRY(auto window, mapped->window(array.entry.offset + at, std::min(kTaskBytes, end - at)));
      bool there = true;
      add_window(places, window, at, sums,
                 [&](std::span<const std::byte> run, uint64_t logical, Checksum& sum) {
                   there = add_mapped_checksum(run, logical, sum) && there;
                 });
      if (!there)
        return make_error(Code::kCorrupt, "a file is shorter than it was, or its memory is lost");
    }
    return ok();
  }
  auto& buffer = thread_buffer(std::min(kBufferBytes, end - begin));
  for (uint64_t at = begin; at < end; at += kBufferBytes) {
    if (stop.stop_requested()) return cancelled();
    const std::span window(buffer.data(), std::min(kBufferBytes, end - at));
    PTC_TRY(read_exactly(fd, window, array.entry.offset + at));
    add_window(places, window, at, sums,
               [](std::span<const std::byte> run, uint64_t logical, Checksum& sum) {
                 sum += checksum_of_run(run, logical);
               });
  }
  return ok();
}

/// The unit of work, and of what is remembered: hashing that was broken off goes on behind the
/// last.
struct Task {
  size_t array;
  uint64_t begin, end;  // bytes of the local array
};

void add_tasks(std::vector<Task>& tasks, size_t array, uint64_t bytes) {
  for (uint64_t begin = 0; begin < bytes; begin += kTaskBytes)
    tasks.push_back({array, begin, std::min(bytes, begin + kTaskBytes)});
}

/// One checksum per piece, of what the task has of it. `hash` adds its bytes, unless they are
/// known.
Result<std::vector<Checksum>> hash_task(
    const ArrayToHash& array, const Task& task, HashCache& hashes,
    const std::function<Result<>(std::vector<Checksum>&)>& hash) {
  const FileVersion& version = array.file->version();
  // Of some formats another file says which array has which number, and where it lies.
  const std::string array_key =
      fmt::format("{} {}", array.entry.offset, dtype_name(array.entry.dtype));
  std::vector<std::string> keys;
  std::vector<Checksum> sums;
  for (const Piece& piece : array.part.pieces) {
    keys.push_back(fmt::format("{} {} {}", task.begin, array_key, piece_key(array, piece)));
    if (auto sum = hashes.find(version, keys.back())) sums.push_back(*sum);
  }
  if (sums.size() == keys.size()) return sums;
  sums.assign(keys.size(), Checksum());
  PTC_TRY(hash(sums));
  hashes.count(task.end - task.begin);
  for (size_t p = 0; p < keys.size(); ++p)
    hashes.put(version, array.file->ticket(), keys[p], sums[p]);
  return sums;
}

}  // namespace

Result<UniqueFd> FileToHash::open() const {
  PTC_TRY(auto fd, open_file(dir_fd_, path_, O_RDONLY | O_NOFOLLOW | O_NONBLOCK));
  struct stat st {};
  if (::fstat(fd.get(), &st) != 0) return errno_error(errno, path_);
  const FileVersion now = version_of(st);
  // Its names may have become more or fewer.
  if (now.device != version_.device || now.inode != version_.inode || now.bytes != version_.bytes ||
      now.mtime_ns != version_.mtime_ns)
    return make_error(Code::kBusy, "{} was written while it was being committed", path_);
  return fd;
}

HashCache::Ticket HashCache::begin(const FileVersion& file) {
  MutexLock lock(mutex_);
  const auto known = files_.find(file.inode);
  if (known != files_.end() && known->second.version == file) return known->second.ticket;
  if (known != files_.end()) drop(known);
  const Ticket ticket = ++last_ticket_;
  files_.emplace(file.inode, Entry{file, ticket, {}});
  by_age_.emplace(ticket, file.inode);
  make_room(ticket);
  return ticket;
}

void HashCache::drop(Files::iterator file) {
  sums_ -= file->second.sums.size();
  by_age_.erase(file->second.ticket);
  files_.erase(file);
}

void HashCache::make_room(Ticket beside) {
  while ((files_.size() > kMostFiles || sums_ > kMostSums) && by_age_.begin()->first != beside)
    drop(files_.find(by_age_.begin()->second));
}

size_t HashCache::files() const {
  MutexLock lock(mutex_);
  return files_.size();
}

std::optional<Checksum> HashCache::find(const FileVersion& file, const std::string& key) const {
  MutexLock lock(mutex_);
  auto it = files_.find(file.inode);
  if (it == files_.end() || it->second.version != file) return std::nullopt;
  auto sum = it->second.sums.find(key);
  if (sum == it->second.sums.end()) return std::nullopt;
  return sum->second;
}

void HashCache::put(const FileVersion& file, Ticket ticket, const std::string& key,
                    const Checksum& sum) {
  MutexLock lock(mutex_);
  const auto it = files_.find(file.inode);
  if (it == files_.end() || it->second.ticket != ticket) return;
  sums_ += it->second.sums.insert_or_assign(key, sum).second ? 1 : 0;
  make_room(ticket);
}

void HashCache::renew(const FileVersion& before, const FileVersion& now) {
  MutexLock lock(mutex_);
  auto it = files_.find(before.inode);
  if (it != files_.end() && it->second.version == before) it->second.version = now;
}

void HashCache::forget(uint64_t inode) {
  MutexLock lock(mutex_);
  if (const auto known = files_.find(inode); known != files_.end()) drop(known);
}

Result<std::vector<std::vector<Checksum>>> hash_arrays(const std::vector<ArrayToHash>& arrays,
                                                       Executor& executor, HashCache& hashes,
                                                       std::stop_token stop,
                                                       std::atomic<uint64_t>* done) {
  std::vector<std::vector<Checksum>> sums(arrays.size());
  std::vector<std::vector<StridedCopy>> places(arrays.size());
  std::vector<Task> tasks;
  std::deque<FileOfTasks> files;
  std::vector<FileOfTasks*> file_of(arrays.size());
  for (size_t i = 0; i < arrays.size(); ++i) {
    if (files.empty() || files.back().file() != arrays[i].file) files.emplace_back(arrays[i].file);
    file_of[i] = &files.back();
    sums[i].resize(arrays[i].part.pieces.size());
    PTC_TRY(places[i], places_of(arrays[i]));
    const size_t before = tasks.size();
    add_tasks(tasks, i, arrays[i].entry.bytes);
    files.back().add_tasks(tasks.size() - before);
  }
  std::vector<std::vector<Checksum>> task_sums(tasks.size());
  PTC_TRY(executor.team().parallel_for(
      tasks.size(),
      [&](size_t t) -> Result<> {
        const Task& task = tasks[t];
        const size_t i = task.array;
        FileOfTasks& file = *file_of[i];
        PTC_TRY(task_sums[t],
                hash_task(arrays[i], task, hashes, [&](std::vector<Checksum>& into) -> Result<> {
                  PTC_TRY(file.open());
                  return hash_bytes(arrays[i], places[i], task.begin, task.end, file.fd(),
                                    file.mapped(), into, stop);
                }));
        file.task_done();
        if (done != nullptr) *done += task.end - task.begin;
        return ok();
      },
      stop));
  for (size_t t = 0; t < tasks.size(); ++t)
    for (size_t p = 0; p < task_sums[t].size(); ++p) sums[tasks[t].array][p] += task_sums[t][p];
  return sums;
}

Result<> hash_array(const ArrayToHash& array, int fd, HashCache& hashes, std::stop_token stop) {
  PTC_TRY(const auto places, places_of(array));
  std::vector<Task> tasks;
  add_tasks(tasks, 0, array.entry.bytes);
  for (const Task& task : tasks) {
    PTC_TRY(hash_task(array, task, hashes, [&](std::vector<Checksum>& into) {
      return hash_bytes(array, places, task.begin, task.end, fd, nullptr, into, stop);
    }));
  }
  return ok();
}

Result<Checksum> hash_file(const FileToHash& file, FileState state, HashCache& hashes,
                           std::stop_token stop) {
  const FileVersion& version = file.version();
  if (auto sum = hashes.find(version, "file")) return *sum;
  PTC_TRY(auto fd, file.open());
  const ArrayToHash array;
  StridedCopy whole;
  whole.run_bytes = version.bytes;
  std::optional<MappedFile> mapped;
  if (state == FileState::kSealed && version.bytes >= kLeastMapped)
    mapped.emplace(fd.get(), version.bytes);
  std::vector<Checksum> sums(1);
  PTC_TRY(hash_bytes(array, {whole}, 0, version.bytes, fd.get(), mapped ? &*mapped : nullptr, sums,
                     stop));
  hashes.count(version.bytes);
  hashes.put(version, file.ticket(), "file", sums[0]);
  return sums[0];
}

Result<std::vector<FoundPadding>> find_padding(const FileToHash& file, const TensorEntry& entry,
                                               const SubTensor& part) {
  std::vector<FoundPadding> found;
  auto uncovered = uncovered_boxes(part);
  if (uncovered.has_error())
    return std::move(uncovered).error().with_context("tensor " + ptc::quoted(entry.name));
  UniqueFd fd;
  for (Box& box : uncovered.value()) {
    if (box.empty()) continue;
    if (!fd.valid()) {
      PTC_TRY(fd, file.open());
    }
    PTC_TRY(auto copy,
            make_strided_copy({entry.offset, part.local_shape}, box.offset, {0, box.extent},
                              Dims(box.extent.size()), box.extent, dtype_bits(entry.dtype)));
    Checksum sum;
    bool zeros = true;
    Result<> read = ok();
    for_each_run(copy, [&](uint64_t from, uint64_t to, uint64_t bytes) {
      for (uint64_t at = 0; at < bytes && read.has_value(); at += kBufferBytes) {
        std::span window(thread_buffer(kBufferBytes).data(), std::min(kBufferBytes, bytes - at));
        read = read_exactly(fd.get(), window, from + at);
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
