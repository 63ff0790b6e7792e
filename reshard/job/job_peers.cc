// What other nodes ask of a job (job_peers.h), and what it asks them.
#include "reshard/job/job_peers.h"

#include <fcntl.h>
#include <spdlog/spdlog.h>

#include <boost/json/array.hpp>
#include <boost/json/object.hpp>
#include <boost/json/serialize.hpp>

#include "reshard/job/job_impl.h"
#include "store/base/fan_out.h"
#include "store/base/file.h"

namespace ptc {
namespace {

constexpr std::chrono::milliseconds kCallTime = std::chrono::seconds(30);
constexpr std::chrono::milliseconds kPartTime =
    std::chrono::hours(12);  // a node that lives is waited for
constexpr std::chrono::milliseconds kGiveTime = std::chrono::seconds(3);
constexpr size_t kGivenInMs = 20'000;  // bytes
constexpr size_t kMaxFileBytes = size_t{1} << 32;

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
  if (time == time.zero()) time = is_long(method) ? kPartTime : kCallTime;
  auto answer = cluster_->call(node, fmt::format("job/{}", method), job_ + "\n" + std::move(body),
                               time, std::move(stop));
  if (answer.has_error()) return std::move(answer).error().with_context("node " + node);
  return answer;
}

Result<std::string> Job::Impl::checkpoint_file(const std::string& id, const std::string& file,
                                               size_t limit) {
  const std::string path = checkpoint_dir(id) + "/" + file;
  Result<std::string> here = read_text_file(AT_FDCWD, path, limit);
  if (here.has_value() || services.cluster == nullptr || here.error().code() != Code::kNotFound)
    return here;
  std::optional<Error> silent;  // a node that may have it
  for (const std::string& node : peers.others()) {
    Result<std::string> there =
        peers.ask(node, "file", json::serialize(json::object{{"id", id}, {"file", file}}));
    if (there.has_error()) {
      if (there.error().code() != Code::kNotFound)
        silent = make_error(Code::kUnavailable, "{}", there.error().message());
      continue;
    }
    auto keep = [&]() -> Result<> {
      PTC_TRY(make_checkpoint_dir(id));
      return write_file_atomically(AT_FDCWD, path, there.value());
    };
    // Without room for it this node asks again when it needs it.
    if (Result<> kept = keep(); kept.has_error() && kept.error().code() != Code::kNoSpace)
      return std::move(kept).error();
    return there;
  }
  if (silent) return *std::move(silent);
  return make_error(Code::kNotFound, "no node that is there has {}", file);
}

Result<> Job::Impl::give_files(const std::string& id, const std::vector<std::string>& files,
                               const StoredState& stored,
                               const std::optional<MetaTransaction::Compare>& decides) {
  json::array list;
  std::string contents;
  for (const std::string& file : files) {
    PTC_TRY(auto content, read_text_file(AT_FDCWD, checkpoint_dir(id) + "/" + file, kMaxFileBytes));
    list.push_back(json::array{json::value(file), content.size()});
    contents += content;
  }
  json::object request{{"id", id}, {"files", std::move(list)}};
  if (decides) {
    request["from"] = services.cluster->self();
    request["fence"] = decides->revision;
  }
  const std::string body = json::serialize(request) + "\n" + contents;
  const std::chrono::milliseconds time =
      kGiveTime + std::chrono::milliseconds(contents.size() / kGivenInMs);
  const std::vector<std::string> others = peers.others();
  Answers<std::string> answers(
      others.size(), [&](size_t i) { return peers.ask(others[i], "files", body, {}, time); });
  bool given_to_any = others.empty();
  for (const Result<std::string>& given : answers.wait()) {
    // A node that does not answer now asks for them itself when it is there again.
    if (given.has_error()) spdlog::warn("job {}: {}", job->name(), given.error().message());
    else given_to_any = true;
  }
  const bool all_here =
      std::all_of(stored.images.begin(), stored.images.end(),
                  [&](const StoredImage& image) { return image.node == services.cluster->self(); });
  if (given_to_any || all_here) return ok();
  return make_error(
      Code::kUnavailable,
      "no other node answers, and where bytes lie that they hold must not be known to "
      "node {} alone",
      services.cluster->self());
}

bool Job::Impl::is_used_elsewhere(const std::string& id, const std::stop_token& stop) {
  if (services.cluster == nullptr) return false;
  const std::vector<std::string> others = peers.others();
  return std::any_of(others.begin(), others.end(), [&](const std::string& node) {
    Result<std::string> answer = ask_whether_open(*services.cluster, node, job->name(), id, stop);
    return answer.has_error() || answer.value() == "yes";
  });
}

void Job::Impl::drop_undecided_parts() {
  std::map<std::string, int64_t> parts = shelf.epochs();  // by id
  if (parts.empty()) return;
  {
    const JobKnowledge::Snapshot known = knowledge.now();
    std::erase_if(parts, [&](const auto& part) {  // a commit decides without leading
      return known->find_id(part.first) == nullptr;
    });
  }
  if (parts.empty()) return;
  Result<std::optional<MetaEntry>> leader = services.meta->get(leader_key());
  if (leader.has_error()) return;
  if (leader.value())
    std::erase_if(parts, [&](const auto& part) { return part.second == leader.value()->revision; });
  // Who asked for the rest leads no more: what it has not decided by now it never will.
  if (parts.empty()) return;
  const Result<Followed> followed = follow();
  if (followed.has_error()) return;
  for (const auto& [id, epoch] : parts)
    if (!followed.value().without.contains(id)) shelf.drop(id, epoch);
}

Result<std::string> Job::Impl::answer(std::string_view method, std::string_view request) {
  if (method == "part") {
    PTC_TRY(auto part, make_part_for(request));
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
  if (method == "commit") return commit_outcome(id);
  if (method == "arrived") return arrivals.answer(object, id);
  if (method == "examine") {
    PTC_TRY(auto stored_file, text_of(object, "stored"));
    return answer_examine(object, id, stored_file);
  }
  if (method == "mend") {
    PTC_TRY(auto stored_file, text_of(object, "stored"));
    return answer_mend(object, id, stored_file);
  }
  if (method == "refresh") {
    PTC_TRY(answer_refresh(id));
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
    return read_text_file(AT_FDCWD, checkpoint_dir(id) + "/" + file, kMaxFileBytes);
  }
  if (method == "drop") {
    const json::value* epoch = object.if_contains("epoch");
    if (epoch == nullptr || !epoch->is_int64()) return invalid_argument("the request has no epoch");
    PTC_TRY(sync_about(id));  // an earlier leader's decision may name what is here
    shelf.drop(id, epoch->as_int64());
    return std::string();
  }
  if (method == "files") {
    std::string_view rest = request.substr(std::min(line_end + 1, request.size()));
    const json::value* files = object.if_contains("files");
    if (files == nullptr || !files->is_array()) return invalid_argument("the request has no files");
    if (object.contains("from")) {
      PTC_TRY(taken.note(object, id));
    }
    PTC_TRY(make_checkpoint_dir(id));
    for (const json::value& file : files->as_array()) {
      const json::array* pair = file.if_array();
      if (pair == nullptr || pair->size() != 2 || !(*pair)[0].is_string() ||
          !is_name(std::string_view((*pair)[0].as_string())))
        return invalid_argument("the request names a file that cannot be one");
      boost::system::error_code bad;
      const auto bytes = (*pair)[1].to_number<uint64_t>(bad);
      if (bad || bytes > rest.size()) return invalid_argument("the request is cut short");
      PTC_TRY(write_file_atomically(AT_FDCWD,
                                    checkpoint_dir(id) + "/" + std::string((*pair)[0].as_string()),
                                    rest.substr(0, bytes)));
      rest.remove_prefix(bytes);
    }
    PTC_TRY(sync_directory(AT_FDCWD, place.dir + "/checkpoints"));
    return std::string();
  }
  return invalid_argument("a job does not know '{}'", method);
}

}  // namespace ptc
