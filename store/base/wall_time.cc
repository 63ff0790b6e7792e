#include "store/base/wall_time.h"

#include <fmt/format.h>

#include <chrono>
#include <ctime>

namespace ptc {

int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::system_clock::now().time_since_epoch())
      .count();
}

std::string time_text(int64_t time_ns) {
  std::time_t seconds = time_ns / 1'000'000'000;
  std::tm tm{};
  gmtime_r(&seconds, &tm);
  return fmt::format("{:04}-{:02}-{:02}T{:02}:{:02}:{:02}.{:03}Z", tm.tm_year + 1900, tm.tm_mon + 1,
                     tm.tm_mday, tm.tm_hour, tm.tm_min, tm.tm_sec, time_ns / 1'000'000 % 1000);
}

}  // namespace ptc
