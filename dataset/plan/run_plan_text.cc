// A plan as text: for the metadata, and for people.
#include <boost/json/serialize.hpp>

#include "dataset/plan/run_plan.h"
#include "store/base/json.h"

namespace ptc {
namespace {

constexpr std::string_view kPlanFormat = "ptc-run/1";
constexpr size_t kMaxPlanBytes = 1 << 20;

json::object segment_json(const Segment& segment) {
  json::object object{{"generation", segment.generation}, {"from", segment.from},
                      {"batch", segment.batch},           {"dp", segment.dp},
                      {"tail", tail_name(segment.tail)},  {"assign", segment.assign.name()},
                      {"epochs", segment.epochs}};
  if (segment.repeats != 0) object["repeats"] = segment.repeats;
  return object;
}

json::object run_json(const Run& run) {
  return {{"version", kOrderVersion},
          {"samples", run.samples},
          {"fingerprint", fmt::format("{:016x}", run.fingerprint)},
          {"seed", run.seed},
          {"shuffle", run.shuffle.name()}};
}

Error damaged(std::string_view what) {
  return make_error(Code::kCorrupt, "the plan of the data set's run is damaged: {}", what);
}

Result<uint64_t> needed(const json::object& object, std::string_view key, uint64_t min,
                        uint64_t max) {
  PTC_TRY(const auto value, json_uint(object, key, max));
  if (!value || *value < min) return damaged(key);
  return *value;
}

std::string_view word_of(const json::object& object, std::string_view key) {
  const json::value* value = object.if_contains(key);
  return value != nullptr && value->is_string() ? std::string_view(value->get_string())
                                                : std::string_view();
}

Result<Segment> segment_from(const json::object& object, uint64_t samples) {
  Segment segment;
  // Its order.json: what was checked then must hold now.
  OrderSpec order;
  order.uneven = true;
  PTC_TRY(segment.generation, needed(object, "generation", 1, UINT64_MAX - 1));
  PTC_TRY(segment.from, needed(object, "from", 0, UINT64_MAX));
  PTC_TRY(order.batch, needed(object, "batch", 1, kMaxBatch));
  PTC_TRY(segment.dp, needed(object, "dp", 1, kMaxBatch));
  PTC_TRY(order.epochs, needed(object, "epochs", 1, kMaxEpochs));
  PTC_TRY(const auto repeats, json_uint(object, "repeats"));
  PTC_TRY(order.assign, Assign::parse(word_of(object, "assign")));
  const std::string_view tail = word_of(object, "tail");
  for (Tail value : {Tail::kShort, Tail::kDrop, Tail::kPad}) {
    if (tail_name(value) == tail) order.tail = value;
  }
  if (tail_name(order.tail) != tail) return damaged("tail");
  PTC_TRY(order.check(segment.dp, samples));
  segment.batch = order.batch;
  segment.tail = order.tail;
  segment.assign = order.assign;
  segment.epochs = order.epochs;
  segment.repeats = repeats.value_or(0);
  if (segment.from > order.epochs * samples) return damaged("from");
  return segment;
}

}  // namespace

std::string RunPlan::to_text() const {
  json::object object = run_json(run_);
  object["format"] = kPlanFormat;
  object["next"] = next_generation_;
  json::array list;
  for (const Segment& segment : segments_) list.push_back(segment_json(segment));
  object["segments"] = std::move(list);
  return json::serialize(object);
}

Result<RunPlan> RunPlan::from_text(std::string_view text) {
  PTC_TRY(const json::value value, parse_json(text, {.max_bytes = kMaxPlanBytes}));
  if (!value.is_object()) return damaged("no object");
  const json::object& object = value.get_object();
  if (word_of(object, "format") != kPlanFormat || word_of(object, "version") != kOrderVersion) {
    return invalid_argument(
        "the data set's run was begun by another version of ptcfs ({}, order {}); this one knows "
        "{}, {}",
        quoted(word_of(object, "format")), quoted(word_of(object, "version")), kPlanFormat,
        kOrderVersion);
  }
  RunPlan plan;
  PTC_TRY(plan.run_.samples, needed(object, "samples", 1, kMaxSamples));
  PTC_TRY(plan.run_.seed, needed(object, "seed", 0, UINT64_MAX));
  PTC_TRY(plan.run_.shuffle, Shuffle::parse(word_of(object, "shuffle")));
  PTC_TRY(plan.next_generation_, needed(object, "next", 1, UINT64_MAX));
  const std::string fingerprint(word_of(object, "fingerprint"));
  char* end = nullptr;
  plan.run_.fingerprint = std::strtoull(fingerprint.c_str(), &end, 16);
  if (fingerprint.size() != 16 || *end != '\0') return damaged("fingerprint");
  const json::value* list = object.if_contains("segments");
  if (list == nullptr || !list->is_array() || list->get_array().empty()) return damaged("segments");
  for (const json::value& item : list->get_array()) {
    if (!item.is_object()) return damaged("segments");
    PTC_TRY(Segment segment, segment_from(item.get_object(), plan.run_.samples));
    const bool follows = plan.segments_.empty() ? segment.from == 0
                                                : segment.from > plan.last().from &&
                                                      segment.generation > plan.last().generation;
    if (!follows || segment.generation >= plan.next_generation_)
      return damaged("order of segments");
    plan.segments_.push_back(segment);
  }
  return plan;
}

std::string RunPlan::to_plan_json(uint64_t consumed) const {
  json::object object = run_json(run_);
  object["consumed"] = consumed;
  object["end"] = end();
  if (const auto next = generation(last()).step_at(consumed)) {
    object["next"] = json::object{
        {"generation", last().generation}, {"epoch", next->first}, {"batch", next->second}};
  }
  json::array list, dropped, padded;
  uint64_t listed = 0, left_out = 0;
  for (size_t i = 0; i < segments_.size(); ++i) {
    const Generation cuts = generation(segments_[i]);
    json::object shown = segment_json(segments_[i]);
    if (shown.erase("repeats") != 0) {
      const uint64_t from = segments_[i].from;
      shown["repeated"] = json::object{{"from", from}, {"to", from + segments_[i].repeats}};
    }
    list.push_back(std::move(shown));
    const bool is_last = i + 1 == segments_.size();
    const uint64_t until = is_last ? cuts.end() : segments_[i + 1].from;
    auto add = [&](uint64_t epoch, uint64_t count, auto positions, json::array& to) {
      if (count == 0) return;
      if (listed + count > kMaxListedIds) {
        left_out += count;
        return;
      }
      listed += count;
      const std::vector<uint64_t> ids = cuts.ids(positions());
      to.push_back(json::object{{"epoch", epoch}, {"ids", json::array(ids.begin(), ids.end())}});
    };
    // An epoch that a later segment goes on with has its end there.
    const uint64_t last_epoch = std::min(consumed, cuts.end() - 1) / run_.samples;
    for (uint64_t epoch = cuts.first_epoch(); epoch < cuts.end_epoch() && epoch <= last_epoch;
         ++epoch) {
      if ((epoch + 1) * run_.samples > until) break;
      add(
          epoch, cuts.dropped_count(epoch), [&] { return cuts.dropped(epoch); }, dropped);
      add(
          epoch, cuts.padding_count(epoch), [&] { return cuts.padding(epoch); }, padded);
    }
  }
  object["segments"] = std::move(list);
  if (!dropped.empty()) object["dropped"] = std::move(dropped);
  if (!padded.empty()) object["padded"] = std::move(padded);
  if (left_out != 0) object["ids_left_out"] = left_out;
  return pretty_json(object);
}

}  // namespace ptc
