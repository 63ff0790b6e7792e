#include "store/image/image_store.h"

#include <dirent.h>
#include <fcntl.h>
#include <linux/magic.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <set>

#include "store/base/mutex.h"
#include "store/base/size_text.h"

namespace ptc {
namespace {

constexpr size_t kIdDigits = 16;
constexpr std::string_view kPartSuffix = ".part", kDraftSuffix = ".draft";
constexpr uint64_t kSpaceSlack = 64 << 10;  // for the file system's own records

bool is_image_id(std::string_view text) {
  return text.size() == kIdDigits &&
         text.find_first_not_of("0123456789abcdef") == std::string_view::npos;
}

Result<ImageId> new_id() {
  uint64_t random = 0;
  if (::getrandom(&random, sizeof random, 0) != sizeof random)
    return errno_error(errno, "getrandom");
  return ImageId{fmt::format("{:016x}", random)};
}

std::string part_name(const ImageId& id) { return id.text + std::string(kPartSuffix); }
std::string draft_name(const ImageId& id) { return id.text + std::string(kDraftSuffix); }

/// Gives these bytes of a file space: a full file system must show here and not
/// as a SIGBUS of whoever uses a mapping (of a hole in a tmpfs, reading takes a page, too).
Result<> allocate_space(int fd, uint64_t begin, uint64_t bytes, const std::string& what) {
  if (bytes == 0) return ok();
  int reason = 0;
  do {
    reason = ::posix_fallocate(fd, static_cast<off_t>(begin), static_cast<off_t>(bytes));
  } while (reason == EINTR);
  if (reason != 0)
    return errno_error(reason, fmt::format("allocating {} for {}", format_size(bytes), what));
  return ok();
}

bool is_in_memory(int fd) {
  struct statfs info {};
  return ::fstatfs(fd, &info) == 0 && info.f_type == TMPFS_MAGIC;
}

uint64_t used_bytes(int fd) {
  struct statvfs info {};
  if (::fstatvfs(fd, &info) != 0) return 0;
  return uint64_t{info.f_blocks - info.f_bfree} * info.f_frsize;
}

/// The file at this path was opened as `info` says; it keeps its times. In memory it loses what it
/// has behind its end, which would count for pages that it lacks.
Result<> fill_holes(int fd, const std::string& path, const struct stat& info,
                    const std::string& name) {
  const auto bytes = static_cast<uint64_t>(info.st_size);
  const auto has_all = [&](const struct stat& of) {
    return static_cast<uint64_t>(of.st_blocks) * 512 >= bytes;
  };
  const bool may_have_more = info.st_blocks > 0 && is_in_memory(fd);
  if (has_all(info) && !may_have_more) return ok();
  Result<UniqueFd> writable = open_file(AT_FDCWD, path, O_WRONLY);
  if (writable.has_error() && has_all(info) && ::lseek(fd, 0, SEEK_HOLE) >= info.st_size)
    return ok();  // not even its owner may write it
  PTC_TRY(const UniqueFd file, std::move(writable));
  struct stat now = info;
  if (may_have_more && (::ftruncate(file.get(), info.st_size) != 0 || ::fstat(file.get(), &now)))
    return errno_error(errno, "size of " + name);
  if (!has_all(now)) {
    PTC_TRY(allocate_space(file.get(), 0, bytes, name + ", a file with holes"));
  }
  const timespec times[2] = {info.st_atim, info.st_mtim};
  if (::futimens(file.get(), times) != 0) return errno_error(errno, "times of " + name);
  return ok();
}

}  // namespace

Image::~Image() {
  if (mapping_ != nullptr) ::munmap(const_cast<std::byte*>(mapping_), bytes_);
}

Result<FileInUse> Image::use_file() const {
  if (!is_here()) return make_error(Code::kUnavailable, "image {} is on node {}", id_.text, node());
  if (file_ == nullptr)
    return make_error(Code::kUnavailable, "image {} is in the memory of {}, and in no file",
                      id_.text, place_.memory.to_string());
  return file_->use();
}

Result<ConstMemoryPointer> Image::map() const {
  if (device_ != nullptr)
    return ConstMemoryPointer(place_.memory, bytes_ > 0 ? device_->memory.begin().address() : 0);
  MutexLock lock(mutex_);
  PTC_TRY(const FileInUse file, use_file());
  struct stat info {};
  if (::fstat(file.fd(), &info) != 0) return errno_error(errno, "fstat of image " + id_.text);
  if (static_cast<uint64_t>(info.st_size) != bytes_) {
    return make_error(Code::kCorrupt,
                      "image {} has {} bytes instead of {}: its file was changed from outside; "
                      "take the image from another copy",
                      id_.text, info.st_size, bytes_);
  }
  if (mapping_ == nullptr && bytes_ > 0) {
    void* mapping = ::mmap(nullptr, bytes_, PROT_READ, MAP_SHARED, file.fd(), 0);
    if (mapping == MAP_FAILED) return errno_error(errno, "mapping image " + id_.text);
    ::madvise(mapping, bytes_, MADV_HUGEPAGE);  // a hint; refused by some file systems
    mapping_ = static_cast<const std::byte*>(mapping);
  }
  return in_host_memory(mapping_);
}

Result<std::span<const std::byte>> Image::host_bytes() const {
  PTC_TRY(const ConstMemoryPointer mapped, map());
  PTC_TRY(const std::byte* const begin, mapped.host());
  return std::span(begin, bytes_);
}

Result<> Image::read(uint64_t offset, std::span<std::byte> out) const {
  PTC_TRY(const ConstMemoryPointer mapped, map());
  PTC_CHECK(offset <= bytes_ && out.size() <= bytes_ - offset);
  if (device_ != nullptr) {
    StridedCopy copy;
    copy.run_bytes = bytes_;
    return device_->devices->read(mapped, copy, offset, offset + out.size(), out.data());
  }
  PTC_TRY(const std::byte* const begin, mapped.host());
  std::copy_n(begin + offset, out.size(), out.begin());
  return ok();
}

Result<ImageMender> ImageMender::open(const Image& image) {
  // By its descriptor: it may have no name any more. An image is nobody's to write, its owner's
  // neither.
  PTC_TRY(const FileInUse file, image.use_file());
  const std::string name = "image " + image.id().text,
                    path = fmt::format("/proc/self/fd/{}", file.fd());
  struct stat info {};
  if (::fstat(file.fd(), &info) != 0) return errno_error(errno, "fstat of " + name);
  Result<UniqueFd> fd = open_file(AT_FDCWD, path, O_RDWR);
  if (fd.has_error() && fd.error().code() == Code::kPermissionDenied) {
    if (::fchmod(file.fd(), 0600) != 0) return errno_error(errno, "chmod of " + name);
    fd = open_file(AT_FDCWD, path, O_RDWR);
    if (::fchmod(file.fd(), info.st_mode & 07777) != 0)
      return errno_error(errno, "chmod of " + name);
  }
  if (fd.has_error()) return std::move(fd).error();
  return ImageMender(std::move(fd).value(), image.bytes(), name);
}

Result<> ImageMender::write(uint64_t offset, std::span<const std::byte> right) {
  constexpr size_t kBlock = 4096;
  std::byte held[kBlock];
  for (size_t at = 0; at < right.size(); at += kBlock) {
    const std::span<const std::byte> block = right.subspan(at, std::min(kBlock, right.size() - at));
    const ssize_t got = ::pread(fd_.get(), held, block.size(), static_cast<off_t>(offset + at));
    if (got < 0) return errno_error(errno, "reading " + name_);
    if (static_cast<size_t>(got) == block.size() && std::equal(block.begin(), block.end(), held))
      continue;
    PTC_TRY(write_exactly(fd_.get(), block, offset + at));
  }
  return ok();
}

Result<> ImageMender::finish() {
  struct stat info {};
  if (::fstat(fd_.get(), &info) != 0) return errno_error(errno, "fstat of " + name_);
  if (static_cast<uint64_t>(info.st_size) > bytes_ &&
      ::ftruncate(fd_.get(), static_cast<off_t>(bytes_)) != 0)
    return errno_error(errno, "size of " + name_);
  if (::fsync(fd_.get()) != 0) return errno_error(errno, "fsync of " + name_);
  return ok();
}

ImageWriter::ImageWriter(ImageWriter&& other) noexcept
    : store_(std::exchange(other.store_, nullptr)),
      id_(std::move(other.id_)),
      file_(std::move(other.file_)),
      device_(std::move(other.device_)),
      inode_(std::exchange(other.inode_, nullptr)),
      size_(std::exchange(other.size_, 0)),
      mapping_(std::exchange(other.mapping_, nullptr)) {}

ImageWriter::~ImageWriter() {
  if (inode_ != nullptr) ::munmap(inode_, 1);
  if (mapping_ != nullptr) ::munmap(mapping_, size_);
  if (store_ != nullptr && device_ == nullptr) (void)store_->remove_name(id_, part_name(id_));
}

Result<> ImageWriter::hold_inode(int fd) {
  if (size_ == 0) return ok();
  void* page = ::mmap(nullptr, 1, PROT_READ, MAP_SHARED, fd, 0);
  if (page == MAP_FAILED) return errno_error(errno, "mapping image " + id_.text);
  inode_ = page;
  return ok();
}

Result<> ImageWriter::write(uint64_t offset, std::span<const std::byte> bytes) {
  return write(offset, std::span(&bytes, 1));
}

Result<> ImageWriter::write(uint64_t offset, std::span<const std::span<const std::byte>> pieces) {
  if (device_ != nullptr) {
    for (const std::span<const std::byte> piece : pieces) {
      PTC_TRY(device_->devices->write(device_->memory.begin() + offset, piece));
      offset += piece.size();
    }
    return ok();
  }
  PTC_TRY(const FileInUse file, file_->use());
  auto written = write_exactly(file.fd(), pieces, offset);
  if (!written) return std::move(written).error().with_context("image " + id_.text);
  return ok();
}

Result<MemoryPointer> ImageWriter::map() {
  if (device_ != nullptr)
    return MemoryPointer(device_->memory.begin().memory(),
                         size_ > 0 ? device_->memory.begin().address() : 0);
  if (mapping_ == nullptr && size_ > 0) {
    PTC_TRY(const FileInUse file, file_->use());
    void* mapping = ::mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_SHARED, file.fd(), 0);
    if (mapping == MAP_FAILED) return errno_error(errno, "mapping image " + id_.text);
    ::madvise(mapping, size_, MADV_HUGEPAGE);  // a hint; refused by some file systems
    mapping_ = static_cast<std::byte*>(mapping);
  }
  return in_host_memory(mapping_);
}

Result<std::span<std::byte>> ImageWriter::host_bytes() {
  PTC_TRY(const MemoryPointer mapped, map());
  PTC_TRY(std::byte* const begin, mapped.host());
  return std::span(begin, size_);
}

Result<> ImageWriter::take_space(uint64_t begin, uint64_t end) {
  if (device_ != nullptr) return ok();
  PTC_TRY(const FileInUse file, file_->use());
  return store_->allocate(file.fd(), begin, end, id_);
}

Result<std::unique_ptr<ImageStore>> ImageStore::open(const std::string& dir,
                                                     const ImageStoreOptions& options) {
  PTC_TRY(make_directory(AT_FDCWD, dir));
  PTC_TRY(auto fd, open_file(AT_FDCWD, dir, O_RDONLY | O_DIRECTORY));
  std::shared_ptr<MemoryReserve> reserve;
  LazyFiles::Gone gone;
  if (!options.reserve.is_off() && is_in_memory(fd.get())) {
    PTC_TRY(UniqueFd own, open_file(fd.get(), ".", O_RDONLY | O_DIRECTORY));
    auto used = [directory = std::make_shared<UniqueFd>(std::move(own))] {
      return used_bytes(directory->get());
    };
    reserve = std::make_shared<MemoryReserve>(options.reserve, std::move(used));
    gone = [reserve](uint64_t bytes) { reserve->gone(bytes); };
  }
  auto files = std::make_shared<LazyFiles>(std::move(fd), dir, options.most_open, std::move(gone));
  auto store = std::unique_ptr<ImageStore>(
      new ImageStore(dir, std::move(reserve), std::move(files), options.devices));
  PTC_TRY(store->find_drafts());
  return store;
}

Result<std::vector<std::string>> ImageStore::file_names() const {
  PTC_TRY(auto fd, open_file(directory_fd(), ".", O_RDONLY | O_DIRECTORY));
  std::unique_ptr<DIR, int (*)(DIR*)> stream(::fdopendir(fd.get()), &::closedir);
  if (!stream) return errno_error(errno, "reading directory " + dir_);
  fd.release();  // now the stream's
  std::vector<std::string> names;
  errno = 0;
  while (dirent* entry = ::readdir(stream.get())) {
    if (is_image_id(std::string_view(entry->d_name).substr(0, kIdDigits)))
      names.emplace_back(entry->d_name);
    errno = 0;
  }
  if (errno != 0) return errno_error(errno, "reading directory " + dir_);
  return names;
}

Result<> ImageStore::find_drafts() {
  PTC_TRY(auto names, file_names());
  MutexLock lock(mutex_);
  for (const std::string& name : names) {
    const std::string_view rest = std::string_view(name).substr(kIdDigits);
    if (rest == kDraftSuffix) drafts_.insert(name.substr(0, kIdDigits));
    const bool is_left =
        rest == kRemovedSuffix || rest == std::string(kPartSuffix) + std::string(kRemovedSuffix);
    if ((rest == kPartSuffix || is_left) && ::unlinkat(directory_fd(), name.c_str(), 0) != 0 &&
        errno != ENOENT)
      return errno_error(errno, fmt::format("removing {} from {}", name, dir_));
  }
  return ok();
}

Result<> ImageStore::mark_draft(const ImageId& id) {
  PTC_TRY(open_file(directory_fd(), draft_name(id), O_WRONLY | O_CREAT));
  MutexLock lock(mutex_);
  drafts_.insert(id.text);
  return ok();
}

Result<> ImageStore::make_read_only(const ImageId& id) {
  if (::fchmodat(directory_fd(), id.text.c_str(), 0400, 0) != 0 && errno != ENOENT)
    return errno_error(errno, fmt::format("image {} can still be written by its owner", id.text));
  return ok();
}

Result<> ImageStore::confirm(const ImageId& id) {
  if (!is_draft(id)) return ok();
  PTC_TRY(make_read_only(id));
  {
    MutexLock lock(mutex_);
    drafts_.erase(id.text);
  }
  ::unlinkat(directory_fd(), draft_name(id).c_str(), 0);  // else it is confirmed at the next start
  return ok();
}

bool ImageStore::is_draft(const ImageId& id) const {
  MutexLock lock(mutex_);
  return drafts_.contains(id.text);
}

std::vector<ImageId> ImageStore::drafts() const {
  MutexLock lock(mutex_);
  std::vector<ImageId> list;
  for (const std::string& id : drafts_) list.push_back({id});
  return list;
}

Result<std::vector<ImageId>> ImageStore::list() const {
  PTC_TRY(auto names, file_names());
  std::vector<ImageId> ids;
  for (std::string& name : names)
    if (is_image_id(name)) ids.push_back({std::move(name)});
  MutexLock lock(mutex_);
  for (const auto& [id, image] : in_devices_) ids.push_back({id});
  return ids;
}

Result<ImageWriter> ImageStore::create_in_device(uint64_t bytes, NodeMemory memory) {
  const std::shared_ptr<const Devices> devices =
      devices_ != nullptr ? devices_ : std::make_shared<const Devices>();
  PTC_TRY(Device* const device, devices->at(memory));
  ImageWriter writer;
  PTC_TRY(writer.id_, new_id());
  auto allocated = device->allocate(bytes);
  if (allocated.has_error())
    return std::move(allocated).error().with_context("an image of " + format_size(bytes));
  PTC_TRY(devices->zero(allocated.value().begin(), bytes));
  writer.device_ =
      std::make_shared<const DeviceBytes>(DeviceBytes{devices, std::move(allocated).value()});
  writer.store_ = this;
  writer.size_ = bytes;
  return writer;
}

Result<ImageWriter> ImageStore::create(uint64_t bytes, TakeSpace when, NodeMemory memory) {
  if (!memory.is_host()) return create_in_device(bytes, memory);
  PTC_TRY(auto free_space, space());
  if (bytes > free_space.free_bytes || free_space.free_bytes - bytes < kSpaceSlack) {
    return make_error(Code::kNoSpace,
                      "an image of {} does not fit into the {} that are free in {}; "
                      "remove checkpoints or give the store more room",
                      format_size(bytes), format_size(free_space.free_bytes), dir_);
  }
  ImageWriter writer;
  PTC_TRY(writer.id_, new_id());
  std::string name = part_name(writer.id_);
  PTC_TRY(auto fd, open_file(directory_fd(), name, O_RDWR | O_CREAT | O_EXCL, 0600));
  writer.store_ = this;  // from here on the destructor removes the file
  writer.size_ = bytes;
  if (when == TakeSpace::kNow) {
    PTC_TRY(allocate(fd.get(), 0, bytes, writer.id_));
  } else if (::ftruncate(fd.get(), static_cast<off_t>(bytes)) != 0) {
    return errno_error(errno, "size of image " + writer.id_.text);
  }
  PTC_TRY(writer.hold_inode(fd.get()));
  PTC_TRY(writer.file_, LazyFile::find(files_, name, LazyFile::Access::kWrite));
  writer.file_->open_as(std::move(fd));
  return writer;
}

Result<> ImageStore::allocate(int fd, uint64_t begin, uint64_t end, const ImageId& id) {
  int reason = take_space(fd, 0, begin, end);
  if (reason == EOPNOTSUPP) return allocate_space(fd, begin, end - begin, "image " + id.text);
  if (reason == 0) return ok();
  return errno_error(reason,
                     fmt::format("allocating {} for image {}", format_size(end - begin), id.text));
}

int ImageStore::take_space(int fd, int mode, uint64_t begin, uint64_t end) {
  // What the kernel keeps for one processor others do not get: a thread that has moved since the
  // reserve gave has lost little.
  constexpr uint64_t kAtOnce = 32 << 20;
  bool gives = reserve_ != nullptr && reserve_->held() > 0;
  uint64_t had = begin;  // as far as it surely has its space: where it has no hole
  if (gives) {
    struct stat info = {};  // pages without bytes are holes for lseek(2)
    if (::fstat(fd, &info) == 0 && info.st_blocks * 512 >= info.st_size)
      had = std::clamp(static_cast<uint64_t>(info.st_blocks) * 512, begin, end);
    const auto left = space();
    gives = left && left.value().free_bytes >= end - had;
  }
  for (uint64_t bytes = 0; begin < end; begin += bytes) {
    bytes = end - begin;
    if (gives && begin < had) {
      bytes = had - begin;
    } else if (gives) {
      bytes = std::min(bytes, kAtOnce);
      reserve_->give(bytes);
    }
    while (::fallocate(fd, mode, static_cast<off_t>(begin), static_cast<off_t>(bytes)) != 0)
      if (errno != EINTR) return errno;
  }
  return 0;
}

Result<ImageRef> ImageStore::show(const ImageWriter& writer) {
  ImageRef image;
  if (writer.device_ != nullptr) {
    image = std::make_shared<const Image>(writer.id_, writer.device_, writer.size_);
  } else {
    PTC_TRY(auto file, LazyFile::find(files_, part_name(writer.id_)));
    image = std::make_shared<const Image>(writer.id_, std::move(file), writer.size_);
  }
  MutexLock lock(mutex_);
  open_[writer.id_.text] = image;
  return image;
}

Result<ImageRef> ImageStore::publish(ImageWriter writer) {
  const std::string& name = writer.id_.text;
  uint64_t bytes = writer.size_;
  if (writer.device_ != nullptr) {
    MutexLock lock(mutex_);
    ImageRef image = find_open(writer.id_);
    if (image == nullptr) image = std::make_shared<const Image>(writer.id_, writer.device_, bytes);
    open_[name] = in_devices_[name] = image;
    drafts_.insert(name);
    writer.store_ = nullptr;
    return image;
  }
  {
    PTC_TRY(const FileInUse file, writer.file_->use());
    if (::fchmod(file.fd(), 0400) != 0) return errno_error(errno, "chmod of image " + name);
    if (::fsync(file.fd()) != 0) return errno_error(errno, "fsync of image " + name);
  }
  PTC_TRY(mark_draft(writer.id_));
  const ImageRef shown = [&] {
    MutexLock lock(mutex_);
    return find_open(writer.id_);
  }();
  if (shown != nullptr) {
    PTC_TRY(shown->file_->rename(name));
  } else if (::renameat(directory_fd(), part_name(writer.id_).c_str(), directory_fd(),
                        name.c_str()) != 0) {
    return errno_error(errno, "publishing image " + name);
  }
  writer.store_ = nullptr;
  return open(writer.id_, bytes);
}

Result<ImageRef> ImageStore::adopt(int dir_fd, const std::string& path) {
  PTC_TRY(auto id, new_id());
  // Opened first and linked by its descriptor: the directories on the way may be somebody else's,
  // who could put another file there meanwhile. Not blocking: the file may turn out to be a pipe.
  PTC_TRY(auto fd, open_file(dir_fd, path, O_RDONLY | O_NOFOLLOW | O_NONBLOCK));
  struct stat info {};
  if (::fstat(fd.get(), &info) != 0) return errno_error(errno, "fstat of " + path);
  if (!S_ISREG(info.st_mode)) return invalid_argument("{} is not a regular file", path);
  const std::string by_fd = fmt::format("/proc/self/fd/{}", fd.get());
  PTC_TRY(fill_holes(fd.get(), by_fd, info, path));
  if (::fsync(fd.get()) != 0) return errno_error(errno, "fsync of " + path);
  PTC_TRY(mark_draft(id));
  if (::linkat(AT_FDCWD, by_fd.c_str(), directory_fd(), id.text.c_str(), AT_SYMLINK_FOLLOW) != 0) {
    int reason = errno;
    (void)confirm(id);
    if (reason == EXDEV) {
      return invalid_argument(
          "{} is on another file system than the image directory {}, so it cannot be linked there; "
          "keep both on one file system",
          path, dir_);
    }
    return errno_error(reason, fmt::format("linking {} into {}", path, dir_));
  }
  auto image = open(id, static_cast<uint64_t>(info.st_size));
  if (!image) (void)remove(id);
  return image;
}

Result<ImageRef> ImageStore::open(const ImageId& id, uint64_t expected_bytes) {
  PTC_TRY(auto image, open(id));
  if (image->bytes() != expected_bytes) {
    return make_error(Code::kCorrupt,
                      "image {} in {} has {} bytes instead of {}; take it from another copy",
                      id.text, dir_, image->bytes(), expected_bytes);
  }
  return image;
}

Result<ImageRef> ImageStore::open(const ImageId& id) {
  if (!is_image_id(id.text)) return invalid_argument("'{}' is not an image id", id.text);
  MutexLock lock(mutex_);
  ImageRef image = find_open(id);
  if (image == nullptr && losing_names_.contains(id.text))
    return make_error(Code::kNotFound, "image {} in {} was removed", id.text, dir_);
  if (image == nullptr) {
    PTC_TRY(auto file, LazyFile::find(files_, id.text));
    const uint64_t bytes = file->bytes();
    image = std::make_shared<const Image>(id, std::move(file), bytes);
  }
  // Entries of images that nobody holds go when the map would grow for them.
  if (static_cast<float>(open_.size() + 1) >
      static_cast<float>(open_.bucket_count()) * open_.max_load_factor())
    std::erase_if(open_, [](const auto& entry) { return entry.second.expired(); });
  open_[id.text] = image;
  return image;
}

Result<> ImageStore::remove(const ImageId& id) {
  if (!is_image_id(id.text)) return invalid_argument("'{}' is not an image id", id.text);
  ImageRef in_device;  // let go of without the mutex
  {
    MutexLock lock(mutex_);
    if (auto found = in_devices_.extract(id.text)) {
      in_device = std::move(found.mapped());
      drafts_.erase(id.text);
    } else if (ImageRef held = find_open(id); held != nullptr && held->device_ != nullptr) {
      in_device = std::move(held);  // removed before, and its holders have it yet
    }
  }
  if (in_device != nullptr) return ok();
  PTC_TRY(remove_name(id, id.text));
  (void)confirm(id);  // the mark goes last
  return ok();
}

Result<> ImageStore::remove_name(const ImageId& id, const std::string& name) {
  ImageRef held;
  {
    MutexLock lock(mutex_);
    held = find_open(id);
    losing_names_.insert(id.text);  // until it is gone, nobody begins to hold it
  }
  Result<> removed = ok();
  if (held != nullptr) {
    removed = held->file_->remove();
  } else {
    struct stat info {};
    if (reserve_ != nullptr)
      (void)::fstatat(directory_fd(), name.c_str(), &info, AT_SYMLINK_NOFOLLOW);
    if (::unlinkat(directory_fd(), name.c_str(), 0) == 0) {
      if (reserve_ != nullptr && info.st_nlink == 1)
        reserve_->gone(static_cast<uint64_t>(info.st_blocks) * 512);
    } else if (errno != ENOENT) {
      removed = errno_error(errno, fmt::format("removing {} from {}", name, dir_));
    }
  }
  MutexLock lock(mutex_);
  losing_names_.erase(losing_names_.find(id.text));
  return removed;
}

ImageRef ImageStore::find_open(const ImageId& id) const {
  const auto found = open_.find(id.text);
  return found != open_.end() ? found->second.lock() : nullptr;
}

Result<> ImageStore::sync() {
  if (::fsync(directory_fd()) != 0) return errno_error(errno, "fsync of directory " + dir_);
  return ok();
}

Result<ImageStore::Space> ImageStore::space() const {
  struct statvfs info {};
  if (::fstatvfs(directory_fd(), &info) != 0) return errno_error(errno, "statvfs of " + dir_);
  return Space{uint64_t{info.f_blocks} * info.f_frsize, uint64_t{info.f_bavail} * info.f_frsize};
}

}  // namespace ptc
