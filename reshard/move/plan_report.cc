#include "reshard/move/plan_report.h"

#include <algorithm>
#include <boost/json/array.hpp>
#include <boost/json/object.hpp>
#include <boost/json/serialize.hpp>
#include <map>
#include <tuple>

#include "store/base/json.h"

namespace ptc {
namespace {

constexpr uint32_t kMostBlocks = 64;

std::string_view kind_name(PlanPicture::Kind kind) {
  switch (kind) {
    case PlanPicture::Kind::kKept:
      return "kept";
    case PlanPicture::Kind::kLocal:
      return "local";
    case PlanPicture::Kind::kMoved:
      return "moved";
  }
  return "";
}

/// Which block of a side a state is in.
class Blocks {
 public:
  explicit Blocks(const LayoutSpec& spec) : spec_(spec), states_(state_count(spec)) {
    const bool by_stage = states_ > kMostBlocks && spec.sizes.pp > 1;
    units_ = by_stage ? spec.sizes.pp : states_;
    states_per_unit_ = by_stage ? states_ / spec.sizes.pp : 1;
    units_per_block_ = (units_ + kMostBlocks - 1) / kMostBlocks;
    unit_name_ = by_stage ? "stage" : "state";
  }

  uint32_t of_state(uint32_t state) const {
    const StateCoords coords = state_at(spec_, state);
    return (states_per_unit_ > 1 ? coords.pp : state) / units_per_block_;
  }

  std::vector<PlanPicture::Block> blocks() const {
    const uint32_t count = (units_ + units_per_block_ - 1) / units_per_block_;
    std::vector<PlanPicture::Block> result(count);
    if (states_ <= kMostBlocks) {
      const std::vector<std::string> ranks = ranks_of_states();
      for (uint32_t state = 0; state < states_; ++state)
        result[state] = {ranks[state], coords_text(state_at(spec_, state))};
      return result;
    }
    for (uint32_t block = 0; block < count; ++block) {
      const uint32_t first = block * units_per_block_;
      const uint32_t last = std::min(first + units_per_block_, units_) - 1;
      result[block].label = first == last ? fmt::format("{} {}", unit_name_, first)
                                          : fmt::format("{}s {}–{}", unit_name_, first, last);
      if (states_per_unit_ > 1)
        result[block].detail = fmt::format("{} states", (last - first + 1) * states_per_unit_);
    }
    return result;
  }

 private:
  /// "rank 3", "ranks 0, 4", "ranks 0, 4 … 28".
  std::vector<std::string> ranks_of_states() const {
    struct Ranks {
      uint64_t count = 0, first = 0, second = 0, last = 0;
    };
    std::vector<Ranks> of(states_);
    for (uint64_t rank = 0; rank < spec_.sizes.world_size(); ++rank) {
      Ranks& ranks = of[state_index(spec_, state_of(spec_, spec_.coords(rank)))];
      if (ranks.count == 0) ranks.first = rank;
      if (ranks.count == 1) ranks.second = rank;
      ranks.last = rank;
      ++ranks.count;
    }
    std::vector<std::string> texts;
    for (const Ranks& ranks : of) {
      if (ranks.count == 1) texts.push_back(fmt::format("rank {}", ranks.first));
      else
        texts.push_back(fmt::format("ranks {}, {}{}", ranks.first, ranks.second,
                                    ranks.count == 2   ? ""
                                    : ranks.count == 3 ? fmt::format(", {}", ranks.last)
                                                       : fmt::format(" … {}", ranks.last)));
    }
    return texts;
  }

  std::string coords_text(const StateCoords& coords) const {
    std::string text;
    auto add = [&](std::string_view name, uint32_t size, uint32_t value) {
      if (size > 1) text += fmt::format("{}{} {}", text.empty() ? "" : ", ", name, value);
    };
    add("tp", spec_.sizes.tp, coords.tp);
    add("pp", spec_.sizes.pp, coords.pp);
    add("ep", spec_.sizes.ep, coords.ep);
    add("etp", spec_.sizes.etp, coords.etp);
    add(spec_.dp_text(), spec_.dp_parts(), coords.dp);
    return text;
  }

  const LayoutSpec& spec_;
  uint32_t states_, units_, states_per_unit_, units_per_block_;
  std::string_view unit_name_;
};

}  // namespace

PlanPicture picture_of(const StoredState& stored, const LayoutSpec& to, const ChangePlan& plan) {
  using Kind = PlanPicture::Kind;
  const Blocks from_blocks(stored.spec), to_blocks(to);
  PlanPicture picture;
  picture.from = stored.spec.name();
  picture.to = to.name();
  picture.sources = from_blocks.blocks();
  picture.targets = to_blocks.blocks();
  auto source_block = [&](size_t image) {
    return from_blocks.of_state(stored.images[image].state);
  };
  for (size_t i = 0; i < stored.images.size(); ++i)
    picture.sources[source_block(i)].bytes += stored.layouts()[i].bytes;

  std::map<std::tuple<uint32_t, uint32_t, Kind>, uint64_t> flows;
  if (plan.same_states) {
    for (size_t i = 0; i < stored.images.size(); ++i) {
      const uint32_t target = to_blocks.of_state(stored.images[i].state);
      picture.targets[target].bytes += stored.layouts()[i].bytes;
      flows[{source_block(i), target, Kind::kKept}] += stored.layouts()[i].bytes;
    }
  }
  for (size_t i = 0; i < plan.targets.size(); ++i) {
    const ImageLayout& layout = plan.targets[i].layout;
    const uint32_t target = to_blocks.of_state(plan.targets[i].owner);
    picture.targets[target].bytes += layout.bytes;
    const ImagePlan& image = plan.transfers.images[i];
    if (image.kept) flows[{source_block(*image.kept), target, Kind::kKept}] += layout.bytes;
    plan.transfers.for_each_source(i, [&](uint32_t source, uint64_t bytes) {
      if (source >= stored.images.size()) return;  // came for another file
      const bool local = stored.layouts()[source].node == layout.node;
      flows[{source_block(source), target, local ? Kind::kLocal : Kind::kMoved}] += bytes;
    });
  }
  for (const auto& [ends, bytes] : flows)
    picture.flows.push_back({std::get<0>(ends), std::get<1>(ends), std::get<2>(ends), bytes});
  const TransferPlan::Totals& totals = plan.transfers.totals;
  picture.kept_bytes = totals.kept_bytes;
  picture.local_bytes = totals.local_bytes;
  picture.moved_bytes = totals.moved_bytes;
  picture.minimum_bytes = totals.minimum_bytes;
  picture.kept_files = totals.kept_images;
  picture.written_files = totals.written_images;
  return picture;
}

PlanReport::PlanReport(std::string job, std::string node, const Checkpoint& checkpoint,
                       const StoredState& stored, const LayoutSpec& to, const ChangePlan& plan)
    : nodes_(plan.nodes),
      totals_(plan.transfers.totals),
      pairs_(plan.transfers.pairs),
      picture_(picture_of(stored, to, plan)) {
  for (std::string& name : nodes_)
    if (name.empty()) name = node;
  picture_.job = std::move(job);
  picture_.checkpoint = checkpoint.name();
}

std::string PlanTexts::to_text() const {
  return json::serialize(json::object{{"json", json}, {"svg", svg}});
}

Result<PlanTexts> PlanTexts::from_text(std::string_view text) {
  PTC_TRY(auto value, parse_json(text, {.max_bytes = size_t{1} << 28}));
  const json::object* object = value.if_object();
  const json::value* plan = object != nullptr ? object->if_contains("json") : nullptr;
  const json::value* picture = object != nullptr ? object->if_contains("svg") : nullptr;
  if (plan == nullptr || !plan->is_string() || picture == nullptr || !picture->is_string())
    return make_error(Code::kCorrupt, "a stored plan is damaged");
  return PlanTexts{std::string(plan->as_string()), std::string(picture->as_string())};
}

PlanTexts PlanReport::texts(std::string_view state, double seconds) const {
  json::array pairs;
  for (const TransferPlan::Pair& pair : pairs_)
    pairs.push_back(json::object{{"source", nodes_[pair.source_node]},
                                 {"target", nodes_[pair.target_node]},
                                 {"bytes", pair.bytes}});
  json::array flows;
  for (const PlanPicture::Flow& flow : picture_.flows)
    flows.push_back(json::object{{"source", picture_.sources[flow.source].label},
                                 {"target", picture_.targets[flow.target].label},
                                 {"kind", kind_name(flow.kind)},
                                 {"bytes", flow.bytes}});
  PlanTexts texts;
  texts.json = pretty_json(json::object{
      {"format", "ptc-plan/1"},
      {"job", picture_.job},
      {"checkpoint", picture_.checkpoint},
      {"from", picture_.from},
      {"to", picture_.to},
      {"state", state},
      {"bytes", json::object{{"total", totals_.total_bytes},
                             {"kept", totals_.kept_bytes},
                             {"local", totals_.local_bytes},
                             {"moved", totals_.moved_bytes},
                             {"minimum", totals_.minimum_bytes}}},
      {"files", json::object{{"kept", totals_.kept_images}, {"written", totals_.written_images}}},
      {"pairs", std::move(pairs)},
      {"flows", std::move(flows)},
      {"seconds", seconds}});
  PlanPicture picture = picture_;
  picture.remark = state == "done" ? fmt::format("done in {:.2f} s", seconds) : std::string(state);
  texts.svg = plan_svg(picture);
  return texts;
}

std::string plan_file_of(const std::string& stored_file) {
  const size_t dash = stored_file.find('-'), second = stored_file.find('-', dash + 1);
  if (dash == std::string::npos || second == std::string::npos) return "";
  return "plan" + stored_file.substr(dash);
}

}  // namespace ptc
