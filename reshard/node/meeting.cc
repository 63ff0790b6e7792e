#include "reshard/node/meeting.h"

#include "reshard/cluster/peer_table.h"

namespace ptc {
Result<std::string> answer_meeting(PeerCalls& calls, const std::string& from,
                                   std::string_view address) {
  PTC_TRY(check_request(row_of(PeerMethod::kMeet), address.size()));
  PTC_TRY(calls.meet(from, std::string(address)));
  return std::string();
}

Result<> Meetings::meet(const std::vector<Other>& others, const std::string& own_address) {
  std::vector<const Other*> strangers;
  for (const Other& other : others)
    if (const auto met = met_.find(other.name); met == met_.end() || met->second != other.boot)
      strangers.push_back(&other);
  std::vector<PeerCalls::Place> places;
  for (const Other* one : strangers) places.push_back({one->name, one->address});
  std::vector<Result<>> results = calls_.meet_all(places, own_address);
  const Error* wrong = nullptr;
  size_t count = 0;
  for (size_t i = 0; i < strangers.size(); ++i) {
    if (results[i].has_value()) {
      met_[strangers[i]->name] = strangers[i]->boot;
      continue;
    }
    ++count;
    // A node that is away goes soon; one that refuses this one does not, once it is a member.
    if (strangers[i]->joins)
      results[i] = make_error(Code::kUnavailable, "{}", results[i].error().message());
    const Error& error = results[i].error();
    if (wrong == nullptr ||
        (wrong->code() != Code::kPermissionDenied && error.code() == Code::kPermissionDenied))
      wrong = &error;
  }
  if (wrong == nullptr) return ok();
  return Error(wrong->code(), count == 1
                                  ? wrong->message()
                                  : fmt::format("{} (and {} more)", wrong->message(), count - 1));
}

}  // namespace ptc
