#include "store/base/descriptors.h"

#include <sys/resource.h>

#include <algorithm>
#include <climits>

namespace ptc {

size_t descriptor_limit() {
  static const size_t limit = [] {
    rlimit now = {};
    if (::getrlimit(RLIMIT_NOFILE, &now) != 0) return size_t{INT_MAX};
    return static_cast<size_t>(std::min<rlim_t>(now.rlim_cur, INT_MAX));
  }();
  return limit;
}

size_t reserved_descriptors() { return std::min(size_t{8192}, descriptor_limit() / 4); }

size_t descriptors_for_peers() { return std::max(size_t{1}, reserved_descriptors() / 2); }

size_t descriptors_for_images() {
  return std::clamp(descriptor_limit() / 8, size_t{1}, size_t{1024});
}

}  // namespace ptc
