#include "reshard/job/mender.h"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <boost/json/array.hpp>
#include <boost/json/object.hpp>
#include <boost/json/serialize.hpp>
#include <chrono>
#include <thread>
#include <unordered_map>

#include "reshard/checkpoint/examine.h"
#include "reshard/exec/gather.h"
#include "reshard/exec/image_sums.h"
#include "reshard/job/scrub.h"
#include "reshard/move/placement.h"
#include "store/base/fan_out.h"
#include "store/base/json.h"
#include "store/base/mutex.h"
#include "store/base/wall_time.h"

namespace ptc {
namespace {

constexpr uint64_t kWindowBytes = 1 << 20;
constexpr int kTries = 50;
constexpr size_t kMostForgotten = 50;  // keys of a transaction
constexpr auto kPauseBetweenTries = std::chrono::milliseconds(100);

struct Range {
  uint64_t begin, end;
};

class RightSums {
 public:
  explicit RightSums(const std::vector<ImageContent::Sum>& sums) {
    for (const ImageContent::Sum& sum : sums) sums_[sum.tensor].emplace(sum.box, sum.sum);
  }
  const Checksum* find(uint32_t tensor, const Box& box) const {
    const auto of_tensor = sums_.find(tensor);
    if (of_tensor == sums_.end()) return nullptr;
    const auto sum = of_tensor->second.find(box);
    return sum == of_tensor->second.end() ? nullptr : &sum->second;
  }

 private:
  std::unordered_map<uint32_t, std::unordered_map<Box, Checksum, BoxHash>> sums_;
};

/// The bytes of an image that are to be written over, ascending and apart from each other.
std::vector<Range> ranges_of(const ImageLayout& layout, const ImageSums& sums,
                             const DamagedImage& damaged, const RightSums& right) {
  if (damaged.all) return {{0, layout.bytes}};
  std::vector<Range> ranges;
  sums.for_each([&](uint32_t tensor, const Box& box, uint64_t begin, uint64_t end,
                    const Checksum&) {  // by begin
    if (right.find(tensor, box) == nullptr) return;
    if (!ranges.empty() && begin <= ranges.back().end)
      ranges.back().end = std::max(ranges.back().end, end);
    else ranges.push_back({begin, end});
  });
  return ranges;
}

/// What the others hold of an image.
Result<GatherProgram> held_by_others(const StoredState& others, const StoredImage& image,
                                     const ImageLayout& layout, bool has_tensors) {
  if (has_tensors) {
    ImageLayout here = layout;
    here.node = others.here;
    PTC_TRY(auto transfers, others.index().plan_image(here));
    return GatherProgram(layout.literals, layout.bytes, std::move(transfers), others.image_refs());
  }
  const int64_t other = others.find_other(image.written);
  if (other < 0 || others.images[other].image == nullptr)
    return make_error(Code::kCorrupt, "nobody else has it");
  Transfer all;
  all.copy.run_bytes = layout.bytes;
  std::vector<Transfer> transfers;
  if (layout.bytes > 0) transfers.push_back(all);
  return GatherProgram("", layout.bytes, std::move(transfers), {others.images[other].image});
}

}  // namespace

Result<> Mender::mend_image(const Checkpoint& checkpoint, const StoredState& stored,
                            const StoredState& others, const DamagedImage& bad) const {
  const StoredImage& image = stored.images[bad.image];
  const ImageLayout& described = stored.layouts()[bad.image];
  const WrittenFile* file =
      image.written >= 0 ? &checkpoint.manifest().files[image.written] : nullptr;
  const bool has_tensors = file == nullptr || file->has_tensors;
  if (image.image == nullptr) return make_error(Code::kCorrupt, "its file is gone or cut short");
  PTC_TRY(auto source, held_by_others(others, image, described, has_tensors));
  std::vector<std::pair<uint32_t, Box>> cells;
  for (const ImageContent::Sum& sum : bad.right) cells.emplace_back(sum.tensor, sum.box);
  const CommonCuts cuts(std::move(cells));
  PTC_TRY(auto sums, ImageSums::make(described, {checkpoint.tensor_facts(), cuts}));
  const RightSums right(bad.right);
  const std::vector<Range> ranges = ranges_of(described, sums, bad, right);
  std::vector<std::byte> buffer(kWindowBytes);
  auto read_others = [&](auto&& visit) -> Result<> {
    for (const Range& range : ranges)
      for (uint64_t at = range.begin; at < range.end; at += kWindowBytes) {
        const std::span window = std::span(buffer).first(std::min(kWindowBytes, range.end - at));
        PTC_TRY(source.read(place_.services.executor->transport(), at, window));
        PTC_TRY(visit(at, std::span<const std::byte>(window)));
      }
    return ok();
  };

  Checksum whole;
  PTC_TRY(read_others([&](uint64_t at, std::span<const std::byte> window) -> Result<> {
    if (has_tensors) sums.add(at, window);
    else whole += checksum_of_run(window, at);
    return ok();
  }));
  bool good = has_tensors || whole == file->checksum;
  sums.for_each([&](uint32_t tensor, const Box& box, uint64_t, uint64_t, const Checksum& sum) {
    const Checksum* wanted = right.find(tensor, box);
    good = good && (wanted != nullptr ? sum == *wanted : !bad.all);
  });
  if (!good)
    return make_error(Code::kCorrupt, "what others hold of it is not right, or not within reach");

  PTC_TRY(auto mender, ImageMender::open(*image.image));
  PTC_TRY(read_others(
      [&](uint64_t at, std::span<const std::byte> window) { return mender.write(at, window); }));
  PTC_TRY(mender.finish());
  PTC_TRY(auto now, verifier_.read_image(checkpoint, stored, bad.image, cuts, nullptr));
  good = now.problem.empty() && (has_tensors || now.whole == file->checksum);
  for (const ImageContent::Sum& sum : now.sums) {
    const Checksum* wanted = right.find(sum.tensor, sum.box);
    good = good && (wanted == nullptr || *wanted == sum.sum);
  }
  return good ? ok()
              : Result<>(make_error(Code::kCorrupt, "it does not hold what is written to it"));
}

std::vector<uint32_t> Mender::mend_own(const Checkpoint& checkpoint, const StoredState& stored,
                                       const std::vector<uint32_t>& damaged_anywhere,
                                       const std::vector<DamagedImage>& bad) const {
  std::vector<uint32_t> mended;
  Result<std::shared_ptr<const StoredState>> others =
      checkpoint.make_stored(stored.spec, images_without(stored, damaged_anywhere));
  for (const DamagedImage& one : bad) {
    const std::string& id = stored.images[one.image].id;
    Result<> done = others.has_error() ? Result<>(others.error())
                                       : mend_image(checkpoint, stored, *others.value(), one);
    if (done.has_value()) {
      mended.push_back(one.image);
      continue;
    }
    spdlog::warn("job {}: checkpoint {}: image {} cannot be mended: {}", place_.name,
                 checkpoint.name(), id, done.error().message());
    place_.services.images->withdraw({id});
  }
  return mended;
}

Result<std::string> Mender::answer(const json::object& request, const std::string& id,
                                   const std::string& stored_file) const {
  PTC_TRY(auto record, verifier_.find_stored(id, stored_file));
  const StoredState& stored = *record.where;
  std::vector<uint32_t> anywhere;
  const json::value* numbers = request.if_contains("anywhere");
  const json::value* images = request.if_contains("damaged");
  if (numbers == nullptr || !numbers->is_array() || images == nullptr)
    return invalid_argument("the request does not say which images are damaged");
  for (const json::value& number : numbers->get_array()) {
    boost::system::error_code bad;
    anywhere.push_back(number.to_number<uint32_t>(bad));
    if (bad) return invalid_argument("the request names an image by no number");
  }
  std::sort(anywhere.begin(), anywhere.end());
  PTC_TRY(auto bad, damaged_images_from(*images));
  for (const DamagedImage& one : bad)
    if (one.image >= stored.images.size() || stored.images[one.image].node != place_.node_key() ||
        !std::binary_search(anywhere.begin(), anywhere.end(), one.image))
      return invalid_argument("the request names an image that is not on this node");
  json::array mended;
  for (const uint32_t image : mend_own(*record.checkpoint, stored, anywhere, bad))
    mended.push_back(image);
  return json::serialize(mended);
}

/// Those of the damaged images, ascending, that could not be mended where they are.
std::vector<uint32_t> Mender::mend(const CheckpointRecord& record, const StoredState& stored,
                                   const Findings& found) const {
  std::map<std::string, std::vector<DamagedImage>> by_node;
  for (const DamagedImage& one : found.damaged)
    by_node[stored.images[one.image].node].push_back(one);
  std::vector<std::pair<std::string, std::string>> requests;  // by node
  std::vector<uint32_t> mended;
  for (const auto& [node, bad] : by_node) {
    if (node == place_.node_key()) continue;
    json::object request{{"id", record.id}, {"stored", record.stored}, {"damaged", to_json(bad)}};
    request["anywhere"] = json::array(found.replaceable.begin(), found.replaceable.end());
    requests.emplace_back(node, json::serialize(request));
  }
  Answers<std::string> answers(
      requests.size(),
      [&](size_t i) {
        return peers_.ask(requests[i].first, PeerMethod::kMend, requests[i].second);
      },
      kAtWorkAtOnce);
  if (const auto own = by_node.find(place_.node_key()); own != by_node.end())
    mended = mend_own(*record.checkpoint, stored, found.replaceable, own->second);
  for (const Result<std::string>& text : answers.wait()) {
    Result<json::value> list =
        text.has_value() ? parse_json(text.value()) : Result<json::value>(text.error());
    if (list.has_error() || !list.value().is_array()) {
      spdlog::warn("job {}: {}", place_.name,
                   list.has_error() ? list.error().message() : "no list of images");
      continue;
    }
    for (const json::value& number : list.value().get_array())
      if (number.is_int64()) mended.push_back(static_cast<uint32_t>(number.get_int64()));
  }
  std::vector<uint32_t> left;
  for (const uint32_t image : found.replaceable)
    if (std::find(mended.begin(), mended.end(), image) == mended.end()) left.push_back(image);
  return left;
}

Result<> Mender::note_mended(const std::string& name, const std::string& id) {
  for (int tries = 1;; ++tries) {
    const Result<bool> decided = decisions_.count_mending(name, id);
    if (decided.has_value() && !decided.value()) return ok();  // it was removed
    {
      MutexLock lock(mutex_);
      if (decided.has_value()) {
        to_refresh_.insert(name);
        not_said_.erase(name);
        return ok();
      }
      not_said_.emplace(name, id);  // nobody would find the damage any more
    }
    if (decided.error().code() != Code::kConflict || tries >= kTries) return decided.error();
    PTC_TRY(sync_about_(id));
  }
}

Result<Findings> Mender::repair(const std::string& name, std::stop_token stop) {
  const KeyedLock::Held one = repairing_.hold(name);
  for (int tries = 1;; ++tries) {
    PTC_TRY(auto record, verifier_.find(name));
    Result<Findings> examined = verifier_.examine(record, nullptr, stop);
    if (examined.has_error() && examined.error().code() == Code::kBusy &&
        tries < kTries) {  // it is being moved
      std::this_thread::sleep_for(kPauseBetweenTries);
      continue;
    }
    PTC_TRY(auto found, std::move(examined));
    if (found.replaceable.empty()) {
      knowledge_.update([&](KnownJob& known) { known.counts.damaged_left += found.beyond.size(); });
      return found;
    }
    const std::vector<uint32_t> left = mend(record, *record.where, found);
    if (left.size() < found.replaceable.size()) {
      PTC_TRY(note_mended(name, record.id));
    }
    if (!left.empty()) {
      PTC_TRY(auto now, verifier_.find(name));
      if (now.id != record.id || now.stored != record.stored) continue;
      PTC_TRY(bool done,
              decisions_.replace_images(now, images_without(*record.where, left),
                                        JobDecision(place_.name), /*were_damaged=*/true));
      if (!done) continue;
      note_to_refresh({name});
    }
    for (const std::string& what : found.replaced)
      spdlog::warn("job {}: checkpoint {}: {}; it is made anew from another copy", place_.name,
                   name, what);
    knowledge_.update([&](KnownJob& known) {
      known.counts.damaged_mended += found.replaceable.size() - left.size();
      known.counts.damaged_replaced += left.size();
      known.counts.damaged_left += found.beyond.size();
    });
    place_.services.mending_wanted();
    return found;
  }
}

Result<Findings> Mender::repair_and_tell(const std::string& name) {
  PTC_TRY(auto record, verifier_.find(name));
  PTC_TRY(check_member(*place_.services.cluster));
  PTC_TRY(auto found, repair(name));
  refresh_everywhere(name);
  PTC_TRY(note_looked_over(name, record, found));
  return found;
}

void Mender::note_to_refresh(const std::set<std::string>& names) {
  MutexLock lock(mutex_);
  to_refresh_.insert(names.begin(), names.end());
}

bool Mender::refresh() {
  MutexLock one(refreshing_);
  std::set<std::string> names;
  std::map<std::string, std::string> unsaid;
  {
    MutexLock lock(mutex_);
    names.swap(to_refresh_);
    unsaid = not_said_;
  }
  for (const auto& [name, id] : unsaid)
    if (note_mended(name, id).has_value()) names.insert(name);
  for (const std::string& name : names) {
    Result<> done =
        place_.listener != nullptr ? place_.listener->contents_mended(place_.name, name) : ok();
    if (done.has_value()) continue;
    spdlog::warn("job {}: checkpoint {}: what was mended is read anew later: {}", place_.name, name,
                 done.error().message());
    note_to_refresh({name});
  }
  MutexLock lock(mutex_);
  return to_refresh_.empty() && not_said_.empty();
}

Result<> Mender::answer_refresh(const std::string& id) {
  PTC_TRY(sync_about_(id));
  if (const JobKnowledge::Snapshot now = knowledge_.now(); const auto* record = now->find_id(id))
    note_to_refresh({record->checkpoint->name()});
  return refresh() ? ok()
                   : Result<>(make_error(Code::kBusy, "what was mended cannot be read anew yet"));
}

void Mender::refresh_everywhere(const std::string& name) {
  Result<CheckpointRecord> record = verifier_.find(name);
  if (record.has_error()) return;
  const std::vector<std::string> others = peers_.others();
  const std::string request = json::serialize(json::object{{"id", record.value().id}});
  Answers<std::string> told(
      others.size(), [&](size_t i) { return peers_.ask(others[i], PeerMethod::kRefresh, request); },
      kAtWorkAtOnce);
  note_to_refresh({name});
  (void)refresh();
  for (const Result<std::string>& answer : told.wait())
    if (answer.has_error()) spdlog::warn("job {}: {}", place_.name, answer.error().message());
}

namespace {

/// What is written down of many is no more than there is room for in one value: the first of them
/// stay. How many do not.
size_t keep_first(std::vector<std::string>& all) {
  constexpr size_t kMost = 16;
  if (all.size() <= kMost) return 0;
  const size_t more = all.size() - kMost;
  all.resize(kMost);
  return more;
}

}  // namespace

Result<> Mender::look_over(const std::string& name) {
  PTC_TRY(auto record, verifier_.find(name));
  if (const std::vector<std::string> lost = record.checkpoint->lost_tensors(); !lost.empty())
    return make_error(Code::kUnavailable, "{} tensors are not within reach", lost.size());
  PTC_TRY(auto found, verifier_.examine(record, place_.services.pace));
  if (!found.good()) {
    PTC_TRY(check_member(*place_.services.cluster));
    PTC_TRY(found, repair(name));
    (void)refresh();
  }
  return note_looked_over(name, record, std::move(found));
}

void Mender::note_damage(const std::string& name) {
  {
    MutexLock lock(mutex_);
    to_mend_.insert(name);
  }
  place_.services.mending_wanted();
}

bool Mender::mend_noted() {
  std::set<std::string> names;
  {
    MutexLock lock(mutex_);
    names.swap(to_mend_);
  }
  std::set<std::string> again;
  for (const std::string& name : names) {
    const Result<Findings> done = repair_and_tell(name);
    if (done.has_value() || done.error().code() == Code::kNotFound) continue;
    spdlog::warn("job {}: checkpoint {}: what is damaged of it is not mended yet: {}", place_.name,
                 name, done.error().message());
    const Code code = done.error().code();
    if (code == Code::kBusy || code == Code::kConflict || code == Code::kUnavailable)
      again.insert(name);  // else somebody verifies it again, or it is looked over
  }
  MutexLock lock(mutex_);
  to_mend_.merge(again);
  return to_mend_.empty();
}

/// status.json says so, of all nodes.
Result<> Mender::note_looked_over(const std::string& name, const CheckpointRecord& record,
                                  Findings found) {
  LookedOver looked{now_ns(),   std::move(found.beyond),   std::move(found.replaced), found.away,
                    /*more=*/0, std::move(found.not_right)};
  for (const std::string& what : looked.found)
    spdlog::error("job {}: checkpoint {}: {}; no other copy has it right", place_.name, name, what);
  looked.more = static_cast<int64_t>(keep_first(looked.found));
  if (const size_t more = keep_first(looked.mended); more > 0)
    looked.mended.push_back(fmt::format("and {} more", more));
  JobDecision decision(place_.name);
  std::vector<std::string> forgotten;  // of checkpoints that are no more
  {
    const JobKnowledge::Snapshot now = knowledge_.now();
    const auto known = now->checkpoints.find(name);
    if (known == now->checkpoints.end() || known->second.id != record.id)
      return ok();  // it was removed
    decision.rests_on(name, known->second);
    for (const auto& [id, before] : now->looked_over)
      if (forgotten.size() < kMostForgotten && now->find_id(id) == nullptr) forgotten.push_back(id);
  }
  for (const std::string& id : forgotten) decision.forget_looked_over(id);
  decision.put_looked_over(record.id, looked);
  Result<int64_t> written = place_.commit(std::move(decision));
  if (written.has_error() && written.error().code() == Code::kConflict)
    return make_error(Code::kBusy, "it has changed meanwhile");
  PTC_TRY(std::move(written));
  note_to_refresh(knowledge_.update([&](KnownJob& known) {
    known.looked_over.insert_or_assign(record.id, std::move(looked));
    for (const std::string& id : forgotten) known.looked_over.erase(id);
    return known.show_damage(place_.services.reads_damaged);
  }));
  (void)refresh();
  return ok();
}

}  // namespace ptc
