#include "reshard/job/plan_relays.h"

#include <boost/json/object.hpp>
#include <boost/json/serialize.hpp>

namespace ptc {
namespace {

using Clock = std::chrono::steady_clock;
constexpr auto kAnswerTime = std::chrono::seconds(1);
constexpr auto kPatience = std::chrono::seconds(5);

}  // namespace

Job::Impl::PlanRelays::PlanRelays(Job::Impl& job, const PlanName& plan, const ChangePlan& change)
    : job_(job), plan_(plan), change_(change) {
  std::lock_guard lock(job_.mutex);
  std::erase_if(job_.arrivals, [](const auto& other) { return other.second.ended; });
  job_.arrivals[plan_.id] = {plan_.digest, {}, false};
}

Job::Impl::PlanRelays::~PlanRelays() {
  std::lock_guard lock(job_.mutex);
  const auto ours = job_.arrivals.find(plan_.id);
  if (ours != job_.arrivals.end() && ours->second.digest == plan_.digest) ours->second.ended = true;
  job_.changed.notify_all();
}

uint32_t Job::Impl::PlanRelays::node_of(uint32_t target) const {
  return change_.targets[target].layout.node;
}

Result<ImageRef> Job::Impl::PlanRelays::wait_for(uint32_t target, uint64_t window,
                                                 std::stop_token stop) {
  const ImageLayout& layout = change_.targets[target].layout;
  const std::string& node = change_.nodes[layout.node];
  const std::string request = json::serialize(json::object{
      {"id", plan_.id}, {"plan", plan_.digest}, {"target", target}, {"window", window}});
  for (const Clock::time_point asked = Clock::now();;) {
    Result<std::string> image = job_.ask(node, "arrived", request, stop);
    // Of a node that has just answered, whether or not it still counts as alive here.
    if (image.has_value())
      return ImageRef(std::make_shared<const Image>(ImageId{image.value()}, node, layout.bytes));
    if (image.error().code() != Code::kBusy || Clock::now() - asked > kPatience)
      return std::move(image).error();
  }
}

void Job::Impl::PlanRelays::arrived(uint32_t target, uint64_t window, const ImageId& image) {
  std::lock_guard lock(job_.mutex);
  Arrivals& ours = job_.arrivals[plan_.id];
  if (ours.digest != plan_.digest) return;  // a later plan for the checkpoint has begun
  ours.windows.emplace(std::pair(target, window), image.text);
  job_.changed.notify_all();
}

Result<std::string> Job::Impl::answer_arrived(const json::object& request, const std::string& id) {
  std::string digest;
  std::pair<uint32_t, uint64_t> window;
  try {
    digest = std::string(request.at("plan").as_string());
    window = {request.at("target").to_number<uint32_t>(),
              request.at("window").to_number<uint64_t>()};
  } catch (const std::exception& error) {
    return invalid_argument("the question what of a plan has arrived is damaged: {}", error.what());
  }
  std::string image;
  bool ended = false;
  std::unique_lock lock(mutex);
  changed.wait_for(lock, kAnswerTime, [&] {
    const auto known = arrivals.find(id);
    if (known != arrivals.end() && known->second.digest == digest) {
      const auto there = known->second.windows.find(window);
      if (there != known->second.windows.end()) image = there->second;
      ended = known->second.ended;
    }
    return !image.empty() || ended || stopping;
  });
  if (!image.empty()) return image;
  if (ended || stopping)
    return make_error(Code::kUnavailable, "this node does not make it any more");
  return make_error(Code::kBusy, "it has not arrived yet");
}

}  // namespace ptc
