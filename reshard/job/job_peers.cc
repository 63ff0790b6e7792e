// What other nodes ask of a job (job_peers.h), and what it asks them.
#include "reshard/job/job_peers.h"

#include <algorithm>
#include <boost/json/object.hpp>
#include <optional>

#include "reshard/job/job_parts.h"
#include "reshard/job/names.h"

namespace ptc {
namespace {

Result<std::string> text_of(const json::object& object, std::string_view key) {
  const json::value* value = object.if_contains(key);
  if (value == nullptr || !value->is_string())
    return invalid_argument("the request has no text '{}'", key);
  return std::string(value->as_string());
}

/// A name that can be a file below checkpoints/.
Result<std::string> name_of(const json::object& object, std::string_view key) {
  PTC_TRY(auto text, text_of(object, key));
  if (!can_be_file(text))
    return invalid_argument("'{}' cannot be the {} of a checkpoint", text, key);
  return text;
}

}  // namespace

std::vector<std::string> JobPeers::others() const {
  std::vector<std::string> nodes = cluster_.alive();
  std::erase(nodes, cluster_.self());
  return nodes;
}

Result<std::string> JobPeers::ask(const std::string& node, PeerMethod method, std::string_view body,
                                  std::stop_token stop) const {
  auto answer = cluster_.ask(node, method, request_about(job_, body), std::move(stop));
  if (answer.has_error()) return std::move(answer).error().with_context("node " + node);
  return answer;
}

std::vector<Result<std::string>> JobPeers::ask_all(const std::vector<std::string>& nodes,
                                                   PeerMethod method, std::string_view body,
                                                   std::stop_token stop) const {
  const std::string request = request_about(job_, body);
  std::vector<Cluster::Question> questions;
  for (const std::string& node : nodes) questions.push_back({node, request});
  return ask_all(method, questions, std::move(stop), {}, {});
}

std::vector<Result<std::string>> JobPeers::ask_all(const std::vector<std::string>& nodes,
                                                   PeerMethod method,
                                                   const std::vector<std::string>& bodies,
                                                   std::stop_token stop,
                                                   std::chrono::milliseconds at_most,
                                                   AfterAnswer then) const {
  std::vector<std::string> requests;
  for (const std::string& body : bodies) requests.push_back(request_about(job_, body));
  std::vector<Cluster::Question> questions;
  for (size_t i = 0; i < nodes.size(); ++i) questions.push_back({nodes[i], requests[i]});
  if (then)
    then = [this, then](size_t i, const Result<std::string>& answer) {
      std::optional<NextCall> next = then(i, answer);
      if (next) next->body = request_about(job_, next->body);
      return next;
    };
  return ask_all(method, questions, std::move(stop), at_most, std::move(then));
}

std::vector<Result<std::string>> JobPeers::ask_all(PeerMethod method,
                                                   const std::vector<Cluster::Question>& questions,
                                                   std::stop_token stop,
                                                   std::chrono::milliseconds at_most,
                                                   AfterAnswer then) const {
  std::vector<Result<std::string>> answers =
      cluster_.ask_all(method, questions, std::move(stop), at_most, std::move(then));
  for (size_t i = 0; i < answers.size(); ++i)
    if (answers[i].has_error())
      answers[i] = std::move(answers[i]).error().with_context("node " + questions[i].node);
  return answers;
}

Result<std::string> Job::Impl::answer(PeerMethod method, std::string_view request) {
  const PeerRow& row = row_of(method);
  if (row.handler == PeerHandler::kMaker) {
    PTC_TRY(auto part, maker.make_for(request));
    return part.to_text();
  }
  const size_t line_end = std::min(request.find('\n'), request.size());
  const std::string_view rest = request.substr(std::min(line_end + 1, request.size()));
  PTC_TRY(auto value,
          parse_json(request.substr(0, line_end), {.max_bytes = row.max_request_bytes}));
  if (!value.is_object()) return invalid_argument("the request is no JSON object");
  const json::object& object = value.as_object();
  PTC_TRY(auto id, name_of(object, "id"));
  switch (row.handler) {
    case PeerHandler::kTaken:
      return taken.answer(method, object, id, rest);
    case PeerHandler::kCommits:
      return commits.outcome_of(id);
    case PeerHandler::kArrivals:
      return arrivals.answer(object, id);
    case PeerHandler::kVerifier: {
      PTC_TRY(auto stored_file, text_of(object, "stored"));
      return verifier.answer(object, id, stored_file);
    }
    case PeerHandler::kMender: {
      if (method == PeerMethod::kRefresh) {
        PTC_TRY(mender.answer_refresh(id));
        return std::string();
      }
      PTC_TRY(auto stored_file, text_of(object, "stored"));
      return mender.answer(object, id, stored_file);
    }
    case PeerHandler::kShelf: {
      const json::value* epoch = object.if_contains("epoch");
      if (epoch == nullptr || !epoch->is_int64())
        return invalid_argument("the request has no epoch");
      PTC_TRY(sync_about(id));  // an earlier leader's decision may name what is here
      shelf.drop(id, epoch->as_int64());
      if (object.contains("stored")) {
        PTC_TRY(auto stored_file, name_of(object, "stored"));
        if (stored_file.starts_with("stored-")) files.remove_undecided(id, stored_file);
      }
      return std::string();
    }
    case PeerHandler::kRemoved: {
      PTC_TRY(bool open, is_open_here(id));
      return std::string(open ? "yes" : "no");
    }
    case PeerHandler::kFiles: {
      if (method == PeerMethod::kFile) {
        PTC_TRY(auto file, name_of(object, "file"));
        return files.piece(object, {id, file});
      }
      if (object.contains("from")) {
        PTC_TRY(taken.note(object, id));
      }
      PTC_TRY(files.keep(id, object, rest));
      return std::string();
    }
    case PeerHandler::kMaker:
    case PeerHandler::kMeetings:
    case PeerHandler::kFollower:
    case PeerHandler::kStore:
    case PeerHandler::kListener:
      break;  // not of a job
  }
  return invalid_argument("a job does not answer '{}'", row.name);
}

Result<bool> Job::Impl::is_open_here(const std::string& id) {
  bool known = false;
  auto is_open = [&] {
    const JobKnowledge::Snapshot now = knowledge.now();
    const CheckpointRecord* record = now->find_id(id);
    known = known || record != nullptr;
    return record != nullptr && record->checkpoint->in_use();
  };
  bool open = is_open();
  if (known && !open) {
    // Removed, perhaps: once that is known here, nobody opens anything of it any more.
    PTC_TRY(sync_about(id));
    open = is_open();
  }
  return open || services.removed->is_open_here(id);
}

}  // namespace ptc
