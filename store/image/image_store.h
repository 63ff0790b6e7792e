// Image files: immutable byte strings that the kernel can be handed. One directory of them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "store/base/descriptors.h"
#include "store/base/error.h"
#include "store/base/file.h"
#include "store/base/memory_place.h"
#include "store/base/mutex.h"
#include "store/device/devices.h"
#include "store/image/lazy_file.h"
#include "store/image/memory_reserve.h"

namespace ptc {

/// 16 hexadecimal digits, never used twice.
struct ImageId {
  std::string text;
  friend bool operator==(const ImageId&, const ImageId&) = default;
};

/// Bytes of an image in a device's memory, given back when nobody holds them any more.
struct DeviceBytes {
  std::shared_ptr<const Devices> devices;  // outlives the memory
  DeviceMemory memory;
};

/// An image that exists, here or on another node. The bytes of one that is here stay readable
/// through this object even after the image was removed from the store, and go when the last holder
/// lets go; at rest it takes no descriptor. One that is on another node is a name, and one in a
/// device's memory has no host bytes; a transport reads them. Threads: any.
class Image {
 public:
  Image(ImageId id, std::unique_ptr<LazyFile> file, uint64_t bytes)
      : id_(std::move(id)), file_(std::move(file)), bytes_(bytes) {}
  Image(ImageId id, std::shared_ptr<const DeviceBytes> device, uint64_t bytes)
      : id_(std::move(id)),
        place_{"", device->memory.begin().memory()},
        device_(std::move(device)),
        bytes_(bytes) {}
  Image(ImageId id, MemoryPlace place, uint64_t bytes)
      : id_(std::move(id)), place_(std::move(place)), bytes_(bytes) {}
  ~Image();

  const ImageId& id() const { return id_; }
  uint64_t bytes() const { return bytes_; }
  /// Where its bytes are.
  const MemoryPlace& place() const { return place_; }
  /// The node that holds it; empty: this one.
  const std::string& node() const { return place_.node; }
  /// On this node, in whichever memory.
  bool is_here() const { return place_.node.empty(); }
  /// In the host's memory of this node: it has a file, and host_bytes().
  bool has_host_bytes() const { return file_ != nullptr; }
  /// Its file, read-only; for passthrough, sendfile and pread. kUnavailable: it has none.
  Result<FileInUse> use_file() const;
  /// The first byte of the whole image in memory, mapped when first asked for, until the object
  /// goes: that takes no descriptor. Each call uses the file, to see that it is whole. Empty image:
  /// null, in its memory. Of one in a device's memory, an address there. kUnavailable of an image
  /// on another node, or in a memory that is not here.
  Result<ConstMemoryPointer> map() const;
  /// The same for the processor, which reads the host's memory alone.
  Result<std::span<const std::byte>> host_bytes() const;
  /// Bytes from `offset` on, all of them the image's, of one that is here, in whichever memory.
  Result<> read(uint64_t offset, std::span<std::byte> out) const;
  /// nullptr: its bytes are not in the memory of a device of this node. They outlive the image for
  /// who holds this.
  const std::shared_ptr<const DeviceBytes>& device() const { return device_; }

 private:
  friend class ImageStore;

  const ImageId id_;
  const MemoryPlace place_ = {};
  const std::unique_ptr<LazyFile> file_;  // null: no host bytes
  const std::shared_ptr<const DeviceBytes> device_;
  const uint64_t bytes_;
  mutable Mutex mutex_;
  mutable const std::byte* mapping_ PTC_GUARDED_BY(mutex_) = nullptr;
};
using ImageRef = std::shared_ptr<const Image>;

/// An image being written: of its full size from the start, filled with zeros. Removed again unless
/// published. Between two writes it may have no descriptor either.
///
/// What comes from memory is written by pwrite: the kernel then need not clear the fresh pages that
/// are filled at once, which saves a pass over memory. What comes in small runs, or from a socket,
/// goes into the mapping. In a device's memory it has its space from the start, and what is written
/// goes there by a lane. Threads: any, for bytes that do not overlap.
class ImageWriter {
 public:
  ImageWriter(ImageWriter&&) noexcept;
  ImageWriter& operator=(ImageWriter&&) = delete;
  ~ImageWriter();

  /// Pieces that follow each other from `offset` on; best as many as the cache holds. All of it
  /// lies within the image.
  Result<> write(uint64_t offset, std::span<const std::span<const std::byte>> pieces);
  Result<> write(uint64_t offset, std::span<const std::byte> bytes);
  /// The first byte of the whole image as memory that can be written, until it is published. A page
  /// that has no space yet may only be touched after take_space(). Empty image: null.
  Result<MemoryPointer> map();
  /// The same for the processor.
  Result<std::span<std::byte>> host_bytes();
  /// Of an image that was created without: for these bytes, which write() then finds, and those
  /// that map() gives.
  Result<> take_space(uint64_t begin, uint64_t end);
  const ImageId& id() const { return id_; }

 private:
  friend class ImageStore;
  ImageWriter() = default;
  Result<> hold_inode(int fd);
  class ImageStore* store_ = nullptr;
  ImageId id_;
  std::unique_ptr<LazyFile> file_;             // or
  std::shared_ptr<const DeviceBytes> device_;  // one of them is null
  /// A page of it, never touched: the kernel keeps the file in memory, and with it what went wrong
  /// when bytes were written behind our back, so that an fsync() tells it though the descriptor was
  /// opened later.
  void* inode_ = nullptr;
  uint64_t size_ = 0;
  std::byte* mapping_ = nullptr;
};

/// Puts bytes of an image right that are known to be wrong, in its very file: nobody was promised
/// the wrong ones, and all who have it open or mapped, the kernel for them, see the right ones.
/// Threads: one.
class ImageMender {
 public:
  /// Of one that is here.
  static Result<ImageMender> open(const Image& image);
  /// Writes what of it differs; bytes that the file has no more, in ascending order.
  Result<> write(uint64_t offset, std::span<const std::byte> right);
  /// Takes away what the file has too much, and makes all of it durable.
  Result<> finish();

 private:
  ImageMender(UniqueFd fd, uint64_t bytes, std::string name)
      : fd_(std::move(fd)), bytes_(bytes), name_(std::move(name)) {}
  UniqueFd fd_;
  uint64_t bytes_;
  std::string name_;
};

struct ImageStoreOptions {
  /// So many images that nobody uses have their files open.
  size_t most_open = descriptors_for_images();
  /// Of memory for images that come; used where the directory is one of a tmpfs.
  MemoryReserveOptions reserve = {};
  /// Of this node, in whose memory images may be; null: none.
  std::shared_ptr<const Devices> devices = nullptr;
};

/// A directory of images (`<dir>/<id>`; unfinished ones `<dir>/<id>.part`; `<dir>/<id>.removed`,
/// see LazyFile). An image is a draft, with a mark of its own (`<dir>/<id>.draft`), from before it
/// has its name until confirm(). Threads: any. Crash: open() removes `.part` and `.removed` files.
/// What becomes of a draft that is found then, the owner of the metadata knows; an image without
/// the mark was decided on once, and is never rubbish because nothing names it. Images in devices'
/// memories have neither file nor mark on disk: the store holds them until they are removed, and
/// they end with the process.
class ImageStore {
 public:
  /// Creates `dir` if need be. No other process has it open.
  static Result<std::unique_ptr<ImageStore>> open(const std::string& dir,
                                                  const ImageStoreOptions& options = {});

  /// kNoSpace before anything is written when the file system has less than `bytes` free. Taking
  /// the space of a large image takes a while: `kLater`, whoever fills it does that bit by bit, and
  /// all of it before it is published.
  enum class TakeSpace { kNow, kLater };
  /// In a device's memory: kNoSpace says how much is free there, kInvalidArgument that the device
  /// is not here.
  Result<ImageWriter> create(uint64_t bytes, TakeSpace when = TakeSpace::kNow,
                             NodeMemory memory = {});
  /// Makes the image readable under its id before it is whole, as long as the result is held: for
  /// those who know which bytes are there already.
  Result<ImageRef> show(const ImageWriter& writer);
  /// Makes the bytes durable and read-only, and visible under the id (the name lasts after sync()).
  Result<ImageRef> publish(ImageWriter writer);

  /// Links the file `path` under `dir_fd` (same file system) as a new image, without a copy; the
  /// old name stays until the caller removes it. Nobody may write the file any more. Its holes are
  /// filled; kNoSpace when they cannot be.
  Result<ImageRef> adopt(int dir_fd, const std::string& path);

  /// kNotFound when there is none. The same object while anybody holds it. kCorrupt when its size
  /// is not `expected_bytes`.
  Result<ImageRef> open(const ImageId& id, uint64_t expected_bytes);
  Result<ImageRef> open(const ImageId& id);  // of whatever size

  /// Takes the name away; holders keep reading, and as long as there is one open() finds it: other
  /// nodes read it by its id. Not there: ok.
  Result<> remove(const ImageId& id);
  /// From now on not even its owner may write the file. Not there: ok.
  Result<> make_read_only(const ImageId& id);
  /// A decision names it, and by what lies beside it a start will know that: it is a draft no more,
  /// and read-only. An error: its owner may write it, and the mark stays, so that a start, or who
  /// comes upon it again, does it then; for what was decided cannot be refused any more.
  Result<> confirm(const ImageId& id);
  bool is_draft(const ImageId& id) const;
  /// Those that are drafts, and all that have a name, drafts among them.
  std::vector<ImageId> drafts() const;
  Result<std::vector<ImageId>> list() const;

  /// Makes all published and adopted names durable: fsync of the directory.
  Result<> sync();

  struct Space {
    uint64_t total_bytes, free_bytes;
  };
  Result<Space> space() const;
  /// Files of this file system are about to be written by others: from incoming/.
  void expect_writing() {
    if (reserve_ != nullptr) reserve_->writing();
  }
  /// fallocate(2) of one of them, which takes what the reserve has first. The errno, or 0.
  int take_space(int fd, int mode, uint64_t begin, uint64_t end);
  /// Null: there are none.
  const std::shared_ptr<const Devices>& devices() const { return devices_; }
  /// Null: there is none.
  MemoryReserve* reserve() const { return reserve_.get(); }
  const std::string& directory() const { return dir_; }
  /// Descriptors of images, with those in use.
  size_t open_files() const { return files_->open_files(); }

 private:
  friend class ImageWriter;

  ImageStore(std::string dir, std::shared_ptr<MemoryReserve> reserve, LazyFilesRef files,
             std::shared_ptr<const Devices> devices)
      : dir_(std::move(dir)),
        reserve_(std::move(reserve)),
        files_(std::move(files)),
        devices_(std::move(devices)) {}
  Result<ImageWriter> create_in_device(uint64_t bytes, NodeMemory memory);
  /// Takes space for these bytes of a file of an image.
  Result<> allocate(int fd, uint64_t begin, uint64_t end, const ImageId& id);
  int directory_fd() const { return files_->directory(); }
  Result<std::vector<std::string>> file_names() const;
  Result<> find_drafts();
  Result<> mark_draft(const ImageId& id);
  /// Takes the file's name, whether the image is held or not.
  Result<> remove_name(const ImageId& id, const std::string& name);
  ImageRef find_open(const ImageId& id) const PTC_REQUIRES(mutex_);  // null: nobody holds it

  const std::string dir_;
  const std::shared_ptr<MemoryReserve> reserve_;  // null: none
  const LazyFilesRef files_;
  const std::shared_ptr<const Devices> devices_;  // null: none
  mutable Mutex mutex_;
  std::unordered_map<std::string, std::weak_ptr<const Image>> open_ PTC_GUARDED_BY(mutex_);
  std::unordered_multiset<std::string> losing_names_
      PTC_GUARDED_BY(mutex_);  // remove_name() is at them
  std::unordered_set<std::string> drafts_ PTC_GUARDED_BY(mutex_);
  std::unordered_map<std::string, ImageRef> in_devices_ PTC_GUARDED_BY(mutex_);  // until removed
};

}  // namespace ptc
