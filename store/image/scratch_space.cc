#include "store/image/scratch_space.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <unistd.h>

#include <cerrno>
#include <string>

namespace ptc {
namespace {

constexpr uint64_t kRoom = 2 << 20;  // a file of about the same size is mapped already

}  // namespace

ScratchFile::~ScratchFile() { unmap(); }

void ScratchFile::unmap() {
  if (memory_ != nullptr) ::munmap(memory_, mapped_bytes_);
  memory_ = nullptr;
}

bool ScratchFile::unshared() const {
  // The kernel grants a write lease exactly then (our own descriptor does not count).
  if (::fcntl(fd_.get(), F_SETLEASE, F_WRLCK) != 0) return false;
  ::fcntl(fd_.get(), F_SETLEASE, F_UNLCK);
  return true;
}

Result<> ScratchFile::resize(uint64_t bytes) {
  if (bytes == bytes_) return ok();
  bytes_ = 0;
  if (::ftruncate(fd_.get(), static_cast<off_t>(bytes)) != 0)
    return errno_error(errno, "resizing a file of scratch memory");
  // A full tmpfs must show here and not as a SIGBUS of whoever writes the mapping.
  int reason = ::posix_fallocate(fd_.get(), 0, static_cast<off_t>(bytes));
  if (reason != 0) return errno_error(reason, "allocating scratch memory");
  if (bytes > mapped_bytes_) {
    unmap();
    mapped_bytes_ = (bytes + kRoom - 1) / kRoom * kRoom;
    void* memory = ::mmap(nullptr, mapped_bytes_, PROT_READ | PROT_WRITE, MAP_SHARED, fd_.get(), 0);
    if (memory == MAP_FAILED) return errno_error(errno, "mapping scratch memory");
    memory_ = static_cast<std::byte*>(memory);
  }
  bytes_ = bytes;
  return ok();
}

Result<std::unique_ptr<ScratchSpace>> ScratchSpace::open(uint64_t limit_bytes) {
  UniqueFd context(::fsopen("tmpfs", FSOPEN_CLOEXEC));
  if (!context.valid()) return errno_error(errno, "opening a tmpfs");
  auto set = [&](const char* key, const std::string& value) {
    return ::fsconfig(context.get(), FSCONFIG_SET_STRING, key, value.c_str(), 0) == 0;
  };
  if (!set("size", std::to_string(limit_bytes)) || !set("mode", "0700"))
    return errno_error(errno, "configuring a tmpfs");
  (void)set("huge", "within_size");  // a kernel without huge pages is only slower
  if (::fsconfig(context.get(), FSCONFIG_CMD_CREATE, nullptr, nullptr, 0) != 0)
    return errno_error(errno, "making a tmpfs");
  UniqueFd top(::fsmount(context.get(), FSMOUNT_CLOEXEC, MOUNT_ATTR_NOSUID | MOUNT_ATTR_NOEXEC));
  if (!top.valid()) return errno_error(errno, "mounting a tmpfs");
  return std::unique_ptr<ScratchSpace>(new ScratchSpace(std::move(top)));
}

Result<std::unique_ptr<ScratchFile>> ScratchSpace::create(uint64_t bytes) {
  PTC_TRY(auto fd, open_file(top_.get(), ".", O_TMPFILE | O_RDWR, 0600));
  std::unique_ptr<ScratchFile> file(new ScratchFile(std::move(fd)));
  PTC_TRY(file->resize(bytes));
  return file;
}

}  // namespace ptc
