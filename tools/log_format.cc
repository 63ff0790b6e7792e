#include "tools/log_format.h"

#include <spdlog/pattern_formatter.h>

#include <boost/json/serialize.hpp>
#include <boost/json/string.hpp>
#include <string_view>

namespace ptc {
namespace {

constexpr const char* kTime = "%Y-%m-%dT%H:%M:%S.%e%z";

void append(std::string_view text, spdlog::memory_buf_t& line) {
  line.append(text.data(), text.data() + text.size());
}
void append(const spdlog::memory_buf_t& text, spdlog::memory_buf_t& line) {
  line.append(text.data(), text.data() + text.size());
}

}  // namespace

void JsonLines::format(const spdlog::details::log_msg& message, spdlog::memory_buf_t& line) {
  spdlog::memory_buf_t time;
  spdlog::pattern_formatter(kTime, spdlog::pattern_time_type::local, "").format(message, time);
  const auto level = spdlog::level::to_string_view(message.level);
  const boost::json::string text(message.payload.data(), message.payload.size());
  append(R"({"time":")", line);
  append(time, line);
  append(R"(","level":")", line);
  append(std::string_view(level.data(), level.size()), line);
  append(R"(","message":)", line);
  append(boost::json::serialize(text), line);
  append("}\n", line);
}

void set_format(spdlog::logger& logger, LogFormat format, bool timed) {
  if (format == LogFormat::kJson) {
    logger.set_formatter(std::make_unique<JsonLines>());
  } else {
    logger.set_pattern(timed ? "%v" : std::string(kTime) + " %l %v");
  }
}

}  // namespace ptc
