// How a line of the log looks.
#pragma once

#include <spdlog/formatter.h>
#include <spdlog/logger.h>

#include <memory>

namespace ptc {

enum class LogFormat {
  kText,  // 2026-01-31T12:00:00.123+01:00 info mounted
  kJson,  // {"time":"2026-01-31T12:00:00.123+01:00","level":"info","message":"mounted"}
};

/// One JSON object a line, for programs that gather logs. Threads: as its sink's.
class JsonLines : public spdlog::formatter {
 public:
  void format(const spdlog::details::log_msg& message, spdlog::memory_buf_t& line) override;
  std::unique_ptr<spdlog::formatter> clone() const override {
    return std::make_unique<JsonLines>();
  }
};

/// `timed`: whoever gets the lines knows the time and the level without being told; as text they
/// have neither then.
void set_format(spdlog::logger& logger, LogFormat format, bool timed = false);

}  // namespace ptc
