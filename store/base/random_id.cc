#include "store/base/random_id.h"

#include <sys/random.h>

#include <cerrno>
#include <cstdint>

namespace ptc {

Result<std::string> random_id() {
  uint64_t bits = 0;
  if (getrandom(&bits, sizeof bits, 0) != sizeof bits) return errno_error(errno, "getrandom");
  return fmt::format("{:016x}", bits);
}

}  // namespace ptc
