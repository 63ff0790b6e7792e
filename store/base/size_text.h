// Sizes as people write them: "64G", "1.5 GiB".
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "store/base/error.h"

namespace ptc {

/// "64G", "512M", "1.5T", "4096": powers of 1024, as mount(8) reads size=.
Result<uint64_t> parse_size(std::string_view text);

/// "1.5 GiB", "312 B".
std::string format_size(uint64_t bytes);

}  // namespace ptc
