// From when on events are shown, as people write it.
#pragma once

#include <cstdint>
#include <string_view>

#include "store/base/error.h"

namespace ptc::cli {

/// Nanoseconds since the epoch of "90s", "15m", "2h", "7d" (so long ago), "2026-01-31",
/// "2026-01-31T12:00", "2026-01-31 12:00:00.5", the last two with "Z" or "+01:00" behind, else in
/// local time, or "1769860800" (seconds since the epoch). `now_ns`: what ages count from.
Result<int64_t> parse_event_time(std::string_view text, int64_t now_ns);

}  // namespace ptc::cli
