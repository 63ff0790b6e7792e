#include "tools/log_limit.h"

#include <fmt/format.h>

#include <algorithm>
#include <cctype>

#include "store/base/utf8.h"

namespace ptc {
namespace {

constexpr size_t kMostKinds = 1024;
constexpr size_t kMostBytes = 8 << 10;  // of a line

/// Of a line without its digits and what stands in quotes.
size_t kind_of(std::string_view text) {
  std::string kind;
  kind.reserve(text.size());
  bool quoted = false;
  for (char c : text) {
    if (c == '\'') quoted = !quoted;
    else if (!quoted && std::isdigit(static_cast<unsigned char>(c)) == 0) kind += c;
  }
  return std::hash<std::string>()(kind);
}

}  // namespace

LimitedSink::LimitedSink(spdlog::sink_ptr to, Limit one_kind, Limit all)
    : to_(std::move(to)),
      one_kind_(one_kind),
      all_(all),
      bucket_{all.burst, spdlog::log_clock::now()} {}

bool LimitedSink::Bucket::take(const Limit& limit, Time now) {
  const double seconds = std::chrono::duration<double>(now - since).count();
  left = std::min(limit.burst, left + std::max(seconds, 0.0) * limit.per_second);
  since = now;
  if (left < 1) {
    ++left_out;
    return false;
  }
  left -= 1;
  return true;
}

void LimitedSink::say_left_out(Bucket& bucket, const spdlog::details::log_msg& like) {
  if (bucket.left_out == 0) return;
  const std::string text =
      fmt::format("{} more such lines were left out", std::exchange(bucket.left_out, 0));
  spdlog::details::log_msg message(like.time, like.source, like.logger_name, like.level, text);
  to_->log(message);
}

/// Names that users gave are in lines: no byte of theirs may look like a line of its own, or move a
/// terminal.
void LimitedSink::sink_it_(const spdlog::details::log_msg& given) {
  const std::string text = printable({given.payload.data(), given.payload.size()}, kMostBytes);
  spdlog::details::log_msg message = given;
  message.payload = text;
  if (kinds_.size() >= kMostKinds) kinds_.clear();
  Bucket& kind =
      kinds_.try_emplace(kind_of(text), Bucket{one_kind_.burst, message.time}).first->second;
  if (!kind.take(one_kind_, message.time)) return;
  if (!bucket_.take(all_, message.time)) {
    ++kind.left_out;
    --bucket_.left_out;
    return;
  }
  to_->log(message);
  say_left_out(kind, message);
}

}  // namespace ptc
