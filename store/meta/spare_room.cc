#include "store/meta/spare_room.h"

#include <fcntl.h>
#include <unistd.h>

#include "store/base/file.h"

namespace ptc {
namespace {

constexpr off_t kBytes = 1 << 20;  // some hundred pages of SQLite's: a hundred removals

}  // namespace

void SpareRoom::take() {
  if (taken_) return;
  Result<UniqueFd> fd = open_file(AT_FDCWD, path_, O_WRONLY | O_CREAT | O_NOFOLLOW);
  if (fd.has_error()) return;
  taken_ = posix_fallocate(fd.value().get(), 0, kBytes) == 0;
  if (!taken_) unlink(path_.c_str());  // without what little there was
}

bool SpareRoom::give_up() {
  taken_ = false;
  return unlink(path_.c_str()) == 0;
}

}  // namespace ptc
