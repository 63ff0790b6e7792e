#include "reshard/cluster/peer_table.h"

#include <algorithm>
#include <boost/json/object.hpp>
#include <boost/json/serialize.hpp>
#include <optional>
#include <thread>

#include "store/base/fan_out.h"
#include "store/base/json.h"
#include "store/rpc/messages.h"
#include "store/rpc/peers.h"

namespace ptc {

Result<> check_request(const PeerRow& row, size_t bytes) {
  if (bytes <= row.max_request_bytes) return ok();
  return invalid_argument("a request '{}' of {} bytes, more than {}", row.name, bytes,
                          row.max_request_bytes);
}

namespace {

using Answer = Result<std::string>;

/// Who asks waits so long.
Result<std::chrono::milliseconds> time_of(const PeerRow& row, size_t request_bytes,
                                          std::chrono::milliseconds at_most) {
  PTC_TRY(check_request(row, request_bytes));
  const auto time = row.deadline + std::chrono::milliseconds(request_bytes / kBytesInMs);
  return at_most == at_most.zero() ? time : std::min(time, at_most);
}

bool broke(const Answer& answer) { return answer.has_error() && is_broken_off(answer.error()); }

Answer ask_again_where_it_broke(const PeerRow& row, std::chrono::milliseconds time,
                                const std::stop_token& stop, const AskOnce& once) {
  using Clock = std::chrono::steady_clock;
  const Clock::time_point until = Clock::now() + time;
  Answer answer = once(time);
  if (!broke(answer) || !row.is_idempotent() || stop.stop_requested()) return answer;
  const auto left = std::chrono::floor<std::chrono::milliseconds>(until - Clock::now());
  return left > left.zero() ? once(left) : answer;
}

/// Further up there is no connection any more, nor who has not begun.
Answer without_connection(Answer answer) {
  if (!broke(answer) && !(answer.has_error() && is_too_busy(answer.error()))) return answer;
  return Error(answer.error().code(), answer.error().message());
}

}  // namespace

Result<std::string> ask_by(const PeerRow& row, size_t request_bytes,
                           std::chrono::milliseconds at_most, const std::stop_token& stop,
                           const AskOnce& once) {
  PTC_TRY(const auto time, time_of(row, request_bytes, at_most));
  return without_connection(ask_again_where_it_broke(row, time, stop, once));
}

std::vector<Result<std::string>> ask_all_by(const PeerRow& row, size_t count, size_t request_bytes,
                                            std::chrono::milliseconds at_most,
                                            const AskAll& ask_all) {
  if (count == 0) return {};
  const auto time = time_of(row, request_bytes, at_most);
  if (time.has_error()) return std::vector<Answer>(count, time.error());
  AskManner asked{time.value()};
  // A year is for ever, and can be added to now.
  if (at_most > at_most.zero() && at_most < std::chrono::years(1))
    asked.until = AskManner::Clock::now() + at_most;
  std::vector<Answer> answers = ask_all(asked);
  for (Answer& answer : answers) answer = without_connection(std::move(answer));
  return answers;
}

std::chrono::milliseconds AskManner::now() const {
  const auto left = std::chrono::floor<std::chrono::milliseconds>(until - Clock::now());
  return std::min(each, left);
}

std::vector<Result<std::string>> ask_each(const PeerRow& row,
                                          const std::vector<std::string_view>& requests,
                                          const AskManner& manner, const std::stop_token& stop,
                                          const AskOneOnce& once) {
  const auto ask_this = [&](size_t i, std::string_view request) -> Answer {
    const std::chrono::milliseconds own = manner.now();
    if (own <= own.zero()) return not_asked("there was no time left");
    return ask_again_where_it_broke(
        row, own, stop, [&](std::chrono::milliseconds left) { return once(i, request, left); });
  };
  const auto ask = [&](size_t i) -> Answer {
    Answer answer = ask_this(i, requests[i]);
    while (manner.then) {
      const std::optional<NextCall> next = manner.then(i, answer);
      if (!next) break;
      std::this_thread::sleep_for(next->after);
      if (stop.stop_requested()) return Error(Code::kCancelled, "cancelled");
      answer = ask_this(i, next->body);
    }
    return answer;
  };
  return Answers<std::string>(requests.size(), ask, row.at_once()).wait();
}

std::string request_about(const WhichJob& job, std::string_view body) {
  std::string request = json::serialize(json::object{{"job", job.name}, {"job_id", job.id}});
  request += '\n';
  return request.append(body);
}

Result<JobRequest> JobRequest::parse(std::string_view request) {
  const size_t line_end = request.find('\n');
  if (line_end == std::string_view::npos)
    return invalid_argument("a request about a job says in its first line which");
  PTC_TRY(auto line, parse_json(request.substr(0, line_end)));
  if (!line.is_object()) return invalid_argument("the request's first line is no JSON object");
  const json::object& object = line.as_object();
  JobRequest parsed{{json_text(object, "job"), json_text(object, "job_id")},
                    request.substr(line_end + 1)};
  if (parsed.job.name.empty() || parsed.job.id.empty())
    return invalid_argument("the request does not say which job it is about");
  return parsed;
}

}  // namespace ptc
