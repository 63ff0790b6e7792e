#include "reshard/cluster/peer_table.h"

#include <algorithm>
#include <boost/json/object.hpp>
#include <boost/json/serialize.hpp>
#include <numeric>

#include "store/base/json.h"
#include "store/rpc/peers.h"

namespace ptc {

Result<> check_request(const PeerRow& row, size_t bytes) {
  if (bytes <= row.max_request_bytes) return ok();
  return invalid_argument("a request '{}' of {} bytes, more than {}", row.name, bytes,
                          row.max_request_bytes);
}

Result<std::string> ask_by(const PeerRow& row, size_t request_bytes,
                           std::chrono::milliseconds at_most, const std::stop_token& stop,
                           const AskOnce& once) {
  const auto ask_one = [&](const std::vector<size_t>&, std::chrono::milliseconds time) {
    return std::vector{once(time)};
  };
  return std::move(ask_all_by(row, 1, request_bytes, at_most, stop, ask_one).front());
}

std::vector<Result<std::string>> ask_all_by(const PeerRow& row, size_t count, size_t request_bytes,
                                            std::chrono::milliseconds at_most,
                                            const std::stop_token& stop, const AskAllOnce& once) {
  using Clock = std::chrono::steady_clock;
  if (count == 0) return {};
  if (const Result<> fits = check_request(row, request_bytes); fits.has_error())
    return std::vector<Result<std::string>>(count, fits.error());
  auto time = row.deadline + std::chrono::milliseconds(request_bytes / kBytesInMs);
  if (at_most != at_most.zero()) time = std::min(time, at_most);
  const Clock::time_point until = Clock::now() + time;
  std::vector<size_t> which(count);
  std::iota(which.begin(), which.end(), size_t{0});
  std::vector<Result<std::string>> answers = once(which, time);
  const auto broke = [&](size_t i) {
    return answers[i].has_error() && is_broken_off(answers[i].error());
  };
  std::erase_if(which, [&](size_t i) { return !broke(i); });
  const auto left = std::chrono::floor<std::chrono::milliseconds>(until - Clock::now());
  if (!which.empty() && row.is_idempotent() && !stop.stop_requested() && left > left.zero()) {
    std::vector<Result<std::string>> again = once(which, left);
    for (size_t k = 0; k < which.size(); ++k) answers[which[k]] = std::move(again[k]);
  }
  // Further up there is no connection any more.
  for (size_t i : which)
    if (broke(i)) answers[i] = Error(answers[i].error().code(), answers[i].error().message());
  return answers;
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
