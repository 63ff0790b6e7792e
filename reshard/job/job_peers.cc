// What other nodes ask of a job (job_peers.h), and what it asks them.
#include "reshard/job/job_peers.h"

#include <fcntl.h>
#include <spdlog/spdlog.h>

#include <boost/json/array.hpp>
#include <boost/json/object.hpp>
#include <boost/json/serialize.hpp>

#include "reshard/job/job_parts.h"
#include "store/base/fan_out.h"
#include "store/base/file.h"

namespace ptc {
namespace {

constexpr std::chrono::milliseconds kUsualTime = std::chrono::seconds(30);
constexpr std::chrono::milliseconds kPartTime =
    std::chrono::hours(12);  // a node that lives is waited for

bool is_long(std::string_view method) {
  return method == "part" || method == "hash" || method == "adopt" || method == "examine" ||
         method == "mend" || method == "refresh";
}

bool is_name(std::string_view text) {
  return !text.empty() && text[0] != '.' && text.find('/') == std::string_view::npos;
}

Result<std::string> text_of(const json::object& object, std::string_view key) {
  const json::value* value = object.if_contains(key);
  if (value == nullptr || !value->is_string())
    return invalid_argument("the request has no text '{}'", key);
  return std::string(value->as_string());
}

/// A name that can be a file below checkpoints/.
Result<std::string> name_of(const json::object& object, std::string_view key) {
  PTC_TRY(auto text, text_of(object, key));
  if (!is_name(text)) return invalid_argument("'{}' cannot be the {} of a checkpoint", text, key);
  return text;
}

}  // namespace

std::vector<std::string> JobPeers::others() const {
  if (cluster_ == nullptr) return {};
  std::vector<std::string> nodes = cluster_->alive();
  std::erase(nodes, cluster_->self());
  return nodes;
}

Result<std::string> JobPeers::ask(const std::string& node, std::string_view method,
                                  std::string body, std::stop_token stop,
                                  std::chrono::milliseconds time) const {
  if (cluster_ == nullptr) return make_error(Code::kUnavailable, "there is no node '{}'", node);
  if (time == time.zero()) time = is_long(method) ? kPartTime : kUsualTime;
  auto answer = cluster_->call(node, fmt::format("job/{}", method), job_ + "\n" + std::move(body),
                               time, std::move(stop));
  if (answer.has_error()) return std::move(answer).error().with_context("node " + node);
  return answer;
}

Result<std::string> Job::Impl::answer(std::string_view method, std::string_view request) {
  if (method == "part") {
    PTC_TRY(auto part, maker.make_for(request));
    return part.to_text();
  }
  const size_t line_end = std::min(request.find('\n'), request.size());
  PTC_TRY(auto value, parse_json(request.substr(0, line_end)));
  if (!value.is_object()) return invalid_argument("the request is no JSON object");
  const json::object& object = value.as_object();
  PTC_TRY(auto id, name_of(object, "id"));
  if (method == "take" || method == "hash" || method == "adopt" || method == "hide" ||
      method == "untake")
    return taken.answer(method, object, id, request.substr(std::min(line_end + 1, request.size())));
  if (method == "commit") return commits.outcome_of(id);
  if (method == "arrived") return arrivals.answer(object, id);
  if (method == "examine") {
    PTC_TRY(auto stored_file, text_of(object, "stored"));
    return verifier.answer(object, id, stored_file);
  }
  if (method == "mend") {
    PTC_TRY(auto stored_file, text_of(object, "stored"));
    return mender.answer(object, id, stored_file);
  }
  if (method == "refresh") {
    PTC_TRY(mender.answer_refresh(id));
    return std::string();
  }
  if (method == "uses") {
    bool known = false;
    auto is_open = [&] {
      const JobKnowledge::Snapshot now = knowledge.now();
      const CheckpointRecord* record = now->find_id(id);
      known = known || record != nullptr;
      return record != nullptr && record->checkpoint->in_use();
    };
    bool open = is_open();
    if (known && !open) {
      PTC_TRY(sync_about(
          id));  // removed, perhaps: once that is known here, nobody opens anything of it any more
      open = is_open();
    }
    return std::string(open || services.removed->is_open_here(id) ? "yes" : "no");
  }
  if (method == "file") {
    PTC_TRY(auto file, name_of(object, "file"));
    return files.read_own(id, file);
  }
  if (method == "drop") {
    const json::value* epoch = object.if_contains("epoch");
    if (epoch == nullptr || !epoch->is_int64()) return invalid_argument("the request has no epoch");
    PTC_TRY(sync_about(id));  // an earlier leader's decision may name what is here
    shelf.drop(id, epoch->as_int64());
    return std::string();
  }
  if (method == "files") {
    if (object.contains("from")) {
      PTC_TRY(taken.note(object, id));
    }
    PTC_TRY(files.keep(id, object, request.substr(std::min(line_end + 1, request.size()))));
    return std::string();
  }
  return invalid_argument("a job does not know '{}'", method);
}

}  // namespace ptc
