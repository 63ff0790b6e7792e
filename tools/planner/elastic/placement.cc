#include "tools/planner/elastic/placement.h"

#include <algorithm>
#include <numeric>
#include <utility>

namespace ptc::planner {

Placement::Placement(const std::vector<NodeOfCluster>& nodes) {
  for (const NodeOfCluster& node : nodes) {
    nodes_.push_back({std::vector<bool>(node.gpus), node.gpus});
    largest_ = std::max(largest_, node.gpus);
  }
}

uint32_t Placement::gpus() const {
  uint32_t sum = 0;
  for (const Node& node : nodes_)
    if (!node.is_down) sum += static_cast<uint32_t>(node.is_taken.size());
  return sum;
}

const std::vector<OnNode>& Placement::of(uint32_t job) const {
  static const std::vector<OnNode> kNothing;
  const auto found = taken_.find(job);
  return found == taken_.end() ? kNothing : found->second;
}

void Placement::release(uint32_t job) {
  const auto found = taken_.find(job);
  if (found == taken_.end()) return;
  for (const OnNode& on : found->second) {
    for (const uint32_t gpu : on.gpus) nodes_[on.node].is_taken[gpu] = false;
    nodes_[on.node].free += static_cast<uint32_t>(on.gpus.size());
  }
  taken_.erase(found);
}

OnNode Placement::take(uint32_t node, uint32_t gpus) {
  OnNode on{node, {}};
  for (uint32_t gpu = 0; on.gpus.size() < gpus; ++gpu) {
    if (nodes_[node].is_taken[gpu]) continue;
    nodes_[node].is_taken[gpu] = true;
    on.gpus.push_back(gpu);
  }
  nodes_[node].free -= gpus;
  return on;
}

bool Placement::place(uint32_t job, uint32_t gpus, const std::vector<OnNode>* near, uint32_t each) {
  const auto has_room = [&](uint32_t node, uint32_t wanted) {
    return !nodes_[node].is_down && nodes_[node].free >= wanted;
  };
  std::vector<uint32_t> chosen;
  if (each == 0) each = std::min(gpus, largest_);
  if (gpus <= largest_) {
    std::optional<uint32_t> best;
    if (near != nullptr && near->size() == 1 && has_room(near->front().node, gpus))
      best = near->front().node;
    for (uint32_t node = 0; !best && node < nodes_.size(); ++node)
      if (has_room(node, gpus)) best = node;
    if (!best) return false;
    if (near == nullptr || near->size() != 1 || *best != near->front().node)
      for (uint32_t node = 0; node < nodes_.size(); ++node)
        if (has_room(node, gpus) && nodes_[node].free < nodes_[*best].free) best = node;
    chosen.push_back(*best);
  } else {
    const auto is_fit = [&](uint32_t node) {
      return (each < largest_ || nodes_[node].is_taken.size() == largest_) && has_room(node, each);
    };
    const size_t wanted = gpus / each;
    std::vector<uint32_t> tightest_first(nodes_.size());
    std::iota(tightest_first.begin(), tightest_first.end(), 0u);
    std::stable_sort(tightest_first.begin(), tightest_first.end(),
                     [&](uint32_t a, uint32_t b) { return nodes_[a].free < nodes_[b].free; });
    if (near != nullptr)
      for (const OnNode& on : *near)
        if (chosen.size() < wanted && is_fit(on.node)) chosen.push_back(on.node);
    for (const uint32_t node : tightest_first)
      if (chosen.size() < wanted && is_fit(node) &&
          std::find(chosen.begin(), chosen.end(), node) == chosen.end())
        chosen.push_back(node);
    if (chosen.size() < wanted || gpus % each != 0) return false;
    std::sort(chosen.begin(), chosen.end());
  }
  std::vector<OnNode> places;
  for (const uint32_t node : chosen) places.push_back(take(node, each));
  taken_[job] = std::move(places);
  return true;
}

bool Placement::take(uint32_t job, std::vector<OnNode> places) {
  const auto is_its_own = [&](uint32_t node, uint32_t gpu) {
    const std::vector<OnNode>& own = of(job);
    return std::any_of(own.begin(), own.end(), [&](const OnNode& on) {
      return on.node == node && std::find(on.gpus.begin(), on.gpus.end(), gpu) != on.gpus.end();
    });
  };
  for (const OnNode& on : places) {
    if (on.node >= nodes_.size() || nodes_[on.node].is_down) return false;
    const std::vector<bool>& is_taken = nodes_[on.node].is_taken;
    for (const uint32_t gpu : on.gpus)
      if (gpu >= is_taken.size() || (is_taken[gpu] && !is_its_own(on.node, gpu))) return false;
  }
  release(job);
  for (const OnNode& on : places) {
    for (const uint32_t gpu : on.gpus) nodes_[on.node].is_taken[gpu] = true;
    nodes_[on.node].free -= static_cast<uint32_t>(on.gpus.size());
  }
  taken_[job] = std::move(places);
  return true;
}

void Placement::carry_out(std::span<Wish> wishes) {
  std::vector<Wish*> changing, placed;
  for (Wish& wish : wishes) {
    if (wish.point) placed.push_back(&wish);
    if (wish.point != wish.now) changing.push_back(&wish);
  }
  if (changing.empty()) return;
  const Places before = taken_;
  for (const Wish* wish : changing) release(wish->job);
  std::erase_if(changing, [](const Wish* wish) { return !wish->point; });
  if (!place_all(std::move(changing), before)) {
    for (const Wish* wish : placed) release(wish->job);
    place_what_has_room(std::move(placed), before);
  }
  keep_numbers(before);
}

namespace {

const CurvePoint& point_of(const Wish& wish) { return wish.curve->points[*wish.point]; }
uint32_t gpus_of(const Wish& wish) { return point_of(wish).gpus; }

void largest_first(std::vector<Wish*>& wishes) {
  std::stable_sort(wishes.begin(), wishes.end(),
                   [](const Wish* a, const Wish* b) { return gpus_of(*a) > gpus_of(*b); });
}

const std::vector<OnNode>* places_of(const std::map<uint32_t, std::vector<OnNode>>& places,
                                     uint32_t job) {
  const auto found = places.find(job);
  return found == places.end() ? nullptr : &found->second;
}

}  // namespace

bool Placement::place_all(std::vector<Wish*> wishes, const Places& before) {
  largest_first(wishes);
  return std::all_of(wishes.begin(), wishes.end(), [&](const Wish* wish) {
    return place(wish->job, gpus_of(*wish), places_of(before, wish->job), point_of(*wish).each);
  });
}

void Placement::place_what_has_room(std::vector<Wish*> wishes, const Places& before) {
  largest_first(wishes);
  for (Wish* wish : wishes)
    while (wish->point &&
           !place(wish->job, gpus_of(*wish), places_of(before, wish->job), point_of(*wish).each)) {
      if (*wish->point == 0) wish->point.reset();
      else --*wish->point;
    }
}

/// Who has as many of a node as before keeps the same ones, and the others of that node get the
/// rest.
void Placement::keep_numbers(const Places& before) {
  const auto as_before = [&](uint32_t job, const OnNode& on) -> const OnNode* {
    const std::vector<OnNode>* places = places_of(before, job);
    if (places == nullptr) return nullptr;
    for (const OnNode& old : *places)
      if (old.node == on.node && old.gpus.size() == on.gpus.size()) return &old;
    return nullptr;
  };
  for (Node& node : nodes_) node.is_taken.assign(node.is_taken.size(), false);
  for (auto& [job, places] : taken_)
    for (OnNode& on : places) {
      const OnNode* old = as_before(job, on);
      if (old == nullptr) continue;
      on.gpus = old->gpus;
      for (const uint32_t gpu : on.gpus) nodes_[on.node].is_taken[gpu] = true;
    }
  for (auto& [job, places] : taken_)
    for (OnNode& on : places) {
      if (as_before(job, on) != nullptr) continue;
      const auto count = static_cast<uint32_t>(on.gpus.size());
      nodes_[on.node].free += count;
      on = take(on.node, count);
    }
}

bool same_nodes(const std::vector<OnNode>& a, const std::vector<OnNode>& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(), [](const OnNode& x, const OnNode& y) {
    return x.node == y.node && x.gpus.size() == y.gpus.size();
  });
}

std::vector<uint32_t> Placement::fail(uint32_t node) {
  nodes_[node].is_down = true;
  std::vector<uint32_t> lost;
  for (const auto& [job, places] : taken_)
    if (std::any_of(places.begin(), places.end(),
                    [&](const OnNode& on) { return on.node == node; }))
      lost.push_back(job);
  for (const uint32_t job : lost) release(job);
  return lost;
}

}  // namespace ptc::planner
