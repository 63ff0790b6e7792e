// What time it is, as it is written down.
#pragma once

#include <cstdint>
#include <string>

namespace ptc {

/// Nanoseconds since the epoch.
int64_t now_ns();
/// As people and scripts read them: "2024-05-01T12:00:00.000Z".
std::string time_text(int64_t time_ns);

}  // namespace ptc
