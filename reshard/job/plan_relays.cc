#include "reshard/job/plan_relays.h"

#include <boost/json/object.hpp>
#include <boost/json/serialize.hpp>
#include <chrono>
#include <span>

#include "store/base/json.h"
#include "store/base/mutex.h"
#include "store/tensor/checksum.h"

namespace ptc {
namespace {

using Clock = std::chrono::steady_clock;
constexpr auto kAnswerTime = std::chrono::seconds(1);
constexpr auto kPatience = std::chrono::seconds(5);
static_assert(row_of(PeerMethod::kArrived).is_idempotent());  // it is asked until it has

}  // namespace

void Arrivals::begin(const PlanName& plan) {
  MutexLock lock(mutex_);
  std::erase_if(plans_, [](const auto& other) { return other.second.ended; });
  plans_[plan.id] = {plan.digest, {}, false};
}

void Arrivals::end(const PlanName& plan) {
  MutexLock lock(mutex_);
  const auto ours = plans_.find(plan.id);
  if (ours != plans_.end() && ours->second.digest == plan.digest) ours->second.ended = true;
  changed_.notify_all();
}

void Arrivals::arrived(const PlanName& plan, uint32_t target, uint64_t window,
                       const ImageId& image) {
  MutexLock lock(mutex_);
  OfPlan& ours = plans_[plan.id];
  if (ours.digest != plan.digest) return;  // a later plan for the checkpoint has begun
  ours.windows.emplace(std::pair(target, window), image.text);
  changed_.notify_all();
}

void Arrivals::stop() {
  MutexLock lock(mutex_);
  stopped_ = true;
  changed_.notify_all();
}

Result<std::string> Arrivals::answer(const json::object& request, const std::string& id) {
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
  MutexLock lock(mutex_);
  changed_.wait_for(mutex_, kAnswerTime, [&]() PTC_REQUIRES(mutex_) {
    const auto known = plans_.find(id);
    if (known != plans_.end() && known->second.digest == digest) {
      const auto there = known->second.windows.find(window);
      if (there != known->second.windows.end()) image = there->second;
      ended = known->second.ended;
    }
    return !image.empty() || ended || stopped_;
  });
  if (!image.empty()) return image;
  if (ended || stopped_)
    return make_error(Code::kUnavailable, "this node does not make it any more");
  return make_error(Code::kBusy, "it has not arrived yet");
}

PlanName name_among_relays(const PlanName& plan, const StoredState& stored) {
  std::string within_reach;
  for (const StoredImage& image : stored.images) within_reach += image.image != nullptr ? '1' : '0';
  const auto sum = checksum_of_run(std::as_bytes(std::span(within_reach)), 0);
  return {plan.id, plan.digest + "-" + sum.to_hex()};
}

PlanRelays::PlanRelays(Arrivals& arrivals, const JobPeers& peers, const PlanName& plan,
                       const ChangePlan& change)
    : arrivals_(arrivals), peers_(peers), plan_(plan), change_(change) {
  arrivals_.begin(plan_);
}

PlanRelays::~PlanRelays() { arrivals_.end(plan_); }

uint32_t PlanRelays::node_of(uint32_t target) const { return change_.targets[target].layout.node; }

Result<ImageRef> PlanRelays::wait_for(uint32_t target, uint64_t window, std::stop_token stop) {
  const ImageLayout& layout = change_.targets[target].layout;
  const std::string& node = change_.nodes[layout.node];
  const std::string request = json::serialize(json::object{
      {"id", plan_.id}, {"plan", plan_.digest}, {"target", target}, {"window", window}});
  for (const Clock::time_point asked = Clock::now();;) {
    Result<std::string> image = peers_.ask(node, PeerMethod::kArrived, request, stop);
    // Of a node that has just answered, whether or not it still counts as alive here.
    if (image.has_value())
      return ImageRef(
          std::make_shared<const Image>(ImageId{image.value()}, MemoryPlace{node}, layout.bytes));
    if (image.error().code() != Code::kBusy || Clock::now() - asked > kPatience)
      return std::move(image).error();
  }
}

void PlanRelays::arrived(uint32_t target, uint64_t window, const ImageId& image) {
  arrivals_.arrived(plan_, target, window, image);
}

}  // namespace ptc
