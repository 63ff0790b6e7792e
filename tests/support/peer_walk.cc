#include "tests/support/peer_walk.h"

#include <fmt/format.h>

namespace ptc::testing {
namespace {

/// As much of it as says that it was answered by whom it should.
std::string request_of(PeerMethod method) {
  switch (method) {
    case PeerMethod::kFile:
      return R"({"id": "0123", "file": "manifest.json", "offset": 0, "most": 9, "sum": true})";
    case PeerMethod::kFiles:
      return R"({"id": "0123", "files": [["stored-1.json", 2, ""]]})"
             "\n{}";
    case PeerMethod::kDrop:
      return R"({"id": "0123", "epoch": 1})";
    case PeerMethod::kArrived:
      return R"({"id": "0123", "plan": "4567", "target": 0, "window": 0})";
    case PeerMethod::kExamine:
      return R"({"id": "0123", "stored": "stored-1.json"})";
    case PeerMethod::kMend:
      return R"({"id": "0123", "stored": "stored-1.json", "anywhere": [], "damaged": []})";
    case PeerMethod::kTake:
      return R"({"id": "4567", "incoming": "base", "from": "w0", "fence": 1})";
    case PeerMethod::kAdopt:
      return R"({"id": "4567", "files": []})";
    case PeerMethod::kRead:
    case PeerMethod::kHash:
      return R"({"id": "4567"})"
             "\n{}";
    case PeerMethod::kHide:
    case PeerMethod::kUntake:
    case PeerMethod::kCommit:
      return R"({"id": "4567"})";
    case PeerMethod::kRights:
      return R"({"id": "4567", "incoming": "base"})";
    case PeerMethod::kWithout:
      return request_about({"job", "0123"}, R"({"id": "0123"})");
    case PeerMethod::kUses:
    case PeerMethod::kRefresh:
      return R"({"id": "0123"})";
    case PeerMethod::kPart:
    case PeerMethod::kMeet:
    case PeerMethod::kChanged:
    case PeerMethod::kSpace:
    case PeerMethod::kNumbers:
    case PeerMethod::kDataSetChanged:
    case PeerMethod::kHolds:
      break;
  }
  return "";
}

}  // namespace

std::vector<std::string> answers_to_all(const AskPeer& ask, const WhichJob& job) {
  std::vector<std::string> lines;
  for (const PeerRow& row : kPeerTable) {
    if (row.handler == PeerHandler::kMeetings) continue;
    std::string request = request_of(row.method);
    if (row.about == PeerAbout::kJob) request = request_about(job, request);
    const auto once = [&]() -> std::string {
      const Result<std::string> answer = ask(row, request);
      if (answer.has_error()) return std::string(code_name(answer.error().code()));
      // What is free, and what was sent, changes.
      const bool changes = row.handler == PeerHandler::kStore || row.method == PeerMethod::kWithout;
      return changes ? "answered" : fmt::format("'{}'", answer.value());
    };
    std::string line = fmt::format("{}: {}", row.name, once());
    if (row.is_idempotent())
      if (const std::string again = fmt::format("{}: {}", row.name, once()); again != line)
        line += ", then " + again;
    lines.push_back(std::move(line));
  }
  return lines;
}

std::vector<std::string> expected_answers(bool is_there) {
  std::vector<std::string> lines{
      "job/changed: ''",
      "store/space: answered",
      "store/numbers: answered",
      "job/without: answered",
      "job/data_set_changed: ''",
      "job/holds: answered",
      "job/uses: 'no'",
      "job/file: not found",
      "job/files: ''",
      "job/part: invalid argument",
      "job/drop: ''",
      "job/arrived: busy",
      "job/examine: busy",
      "job/mend: busy",
      "job/refresh: ''",
      "job/take: ''",
      "job/read: conflict",
      "job/hash: conflict",
      "job/adopt: conflict",
      "job/hide: conflict",
      "job/untake: ''",
      "job/rights: not found",
      "job/commit: 'given up'",
  };
  constexpr size_t kOfNode = 4;
  if (!is_there)
    for (size_t i = kOfNode; i < lines.size(); ++i)
      if (lines[i] != "job/uses: 'no'")  // what is open outlives its job
        lines[i] = lines[i].substr(0, lines[i].find(':')) + ": not found";
  return lines;
}

}  // namespace ptc::testing
