#include "reshard/job/mender.h"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <boost/json/array.hpp>
#include <boost/json/object.hpp>
#include <boost/json/serialize.hpp>
#include <cerrno>
#include <chrono>
#include <thread>
#include <unordered_map>

#include "reshard/checkpoint/examine.h"
#include "reshard/exec/gather.h"
#include "reshard/exec/image_sums.h"
#include "reshard/job/scrub.h"
#include "reshard/move/placement.h"
#include "reshard/move/superfluous.h"
#include "store/base/fan_out.h"
#include "store/base/json.h"
#include "store/base/mutex.h"
#include "store/base/utf8.h"
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

Result<std::vector<uint32_t>> numbers_in(const json::object& object, std::string_view key) {
  const json::value* list = object.if_contains(key);
  if (list == nullptr || !list->is_array())
    return invalid_argument("what is said of damaged images has no list '{}'", key);
  std::vector<uint32_t> numbers;
  for (const json::value& number : list->get_array()) {
    boost::system::error_code bad;
    numbers.push_back(number.to_number<uint32_t>(bad));
    if (bad) return invalid_argument("'{}' names an image by no number", key);
  }
  return numbers;
}

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

Result<bool> Mender::mend_image(const Checkpoint& checkpoint, const StoredState& stored,
                                const StoredState& others, const DamagedImage& bad,
                                const std::stop_token& stop) const {
  const StoredImage& image = stored.images[bad.image];
  const ImageLayout& described = stored.layouts()[bad.image];
  const WrittenFile* file =
      image.written >= 0 ? &checkpoint.manifest().files[image.written] : nullptr;
  const bool has_tensors = file == nullptr || file->has_tensors;
  if (image.image == nullptr) return false;  // its file is gone or cut short
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
        if (stop.stop_requested()) return make_error(Code::kCancelled, "shutting down");
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

  Result<ImageMender> mender = ImageMender::open(*image.image);
  if (mender.has_error()) {
    const int why = mender.error().errno_value();
    if (why == EMFILE || why == ENFILE || why == ENOMEM)  // not the image's fault
      return make_error(Code::kUnavailable, "{}", mender.error().message());
    return false;
  }
  bool keeps = true;
  const Result<> written = read_others([&](uint64_t at, std::span<const std::byte> window) {
    Result<> done = mender.value().write(at, window);
    keeps = keeps && done.has_value();
    return done;
  });
  if (!keeps) return false;
  PTC_TRY(written);
  if (mender.value().finish().has_error()) return false;
  PTC_TRY(auto now, verifier_.read_image(checkpoint, stored, bad.image, cuts, nullptr, stop));
  good = now.problem.empty() && (has_tensors || now.whole == file->checksum);
  for (const ImageContent::Sum& sum : now.sums) {
    const Checksum* wanted = right.find(sum.tensor, sum.box);
    good = good && (wanted == nullptr || *wanted == sum.sum);
  }
  return good;
}

Mender::Mended Mender::mend_own(const Checkpoint& checkpoint, const StoredState& stored,
                                const std::vector<uint32_t>& damaged_anywhere,
                                const std::vector<DamagedImage>& bad,
                                const std::stop_token& stop) const {
  Mended mended;
  Result<std::shared_ptr<const StoredState>> others =
      checkpoint.make_stored(stored.spec, images_without(stored, damaged_anywhere));
  for (const DamagedImage& one : bad) {
    const Result<bool> done = others.has_error()
                                  ? Result<bool>(others.error())
                                  : mend_image(checkpoint, stored, *others.value(), one, stop);
    if (done.has_value()) {
      (done.value() ? mended.right : mended.never).push_back(one.image);
      if (!done.value())
        spdlog::warn(
            "job {}: checkpoint {}: image {} does not hold what is written to it, or is "
            "gone",
            place_.name, checkpoint.name(), stored.images[one.image].id);
      continue;
    }
    spdlog::warn("job {}: checkpoint {}: image {} cannot be mended now: {}", place_.name,
                 checkpoint.name(), stored.images[one.image].id, done.error().message());
    mended.not_now = done.error();
  }
  return mended;
}

Result<std::string> Mender::answer(const json::object& request, const std::string& id,
                                   const std::string& stored_file) const {
  PTC_TRY(auto record, verifier_.find_stored(id, stored_file));
  const StoredState& stored = *record.where;
  const json::value* images = request.if_contains("damaged");
  if (images == nullptr) return invalid_argument("the request does not say what is damaged");
  PTC_TRY(auto anywhere, numbers_in(request, "anywhere"));
  std::sort(anywhere.begin(), anywhere.end());
  PTC_TRY(auto bad, damaged_images_from(*images));
  for (const DamagedImage& one : bad)
    if (one.image >= stored.images.size() || stored.images[one.image].node != place_.node_key() ||
        !std::binary_search(anywhere.begin(), anywhere.end(), one.image))
      return invalid_argument("the request names an image that is not on this node");
  const Mended mended = mend_own(*record.checkpoint, stored, anywhere, bad, stop_of_scrub());
  json::object answer{{"right", json::array(mended.right.begin(), mended.right.end())},
                      {"never", json::array(mended.never.begin(), mended.never.end())}};
  if (mended.not_now) answer["not_now"] = printable(mended.not_now->message(), 1000);
  return json::serialize(answer);
}

Mender::Mended Mender::mend(const CheckpointRecord& record, const StoredState& stored,
                            const Findings& found, const std::stop_token& stop) const {
  std::map<std::string, std::vector<DamagedImage>> by_node;
  for (const DamagedImage& one : found.damaged)
    by_node[stored.images[one.image].node].push_back(one);
  std::vector<std::string> others, requests;  // by node
  for (const auto& [node, bad] : by_node) {
    if (node == place_.node_key()) continue;
    json::object request{{"id", record.id}, {"stored", record.stored}, {"damaged", to_json(bad)}};
    request["anywhere"] = json::array(found.replaceable.begin(), found.replaceable.end());
    others.push_back(node);
    requests.push_back(json::serialize(request));
  }
  using Told = std::vector<Result<std::string>>;
  Answers<Told> asked(others.empty() ? 0 : 1, [&](size_t) -> Result<Told> {
    return peers_.ask_all(others, PeerMethod::kMend, requests, stop);
  });
  Mended mended;
  if (const auto own = by_node.find(place_.node_key()); own != by_node.end())
    mended = mend_own(*record.checkpoint, stored, found.replaceable, own->second, stop);
  const auto take = [&](const Result<std::string>& text) -> Result<> {
    PTC_TRY(const std::string answer, text);
    PTC_TRY(const auto value, parse_json(answer));
    if (!value.is_object()) return make_error(Code::kCorrupt, "no answer about damaged images");
    const json::object& object = value.get_object();
    PTC_TRY(const auto right, numbers_in(object, "right"));
    PTC_TRY(const auto never, numbers_in(object, "never"));
    mended.right.insert(mended.right.end(), right.begin(), right.end());
    mended.never.insert(mended.never.end(), never.begin(), never.end());
    if (const json::value* why = object.if_contains("not_now"); why != nullptr && why->is_string())
      return make_error(Code::kUnavailable, "{}", std::string_view(why->get_string()));
    return ok();
  };
  const auto note_error = [&](const Error& error) {
    spdlog::warn("job {}: {}", place_.name, error.message());
    mended.not_now = error;
  };
  for (const Result<Told>& told : asked.wait()) {
    if (told.has_error()) note_error(told.error());
    else
      for (const Result<std::string>& text : told.value())
        if (const Result<> taken = take(text); taken.has_error()) note_error(taken.error());
  }
  for (std::vector<uint32_t>* list : {&mended.right, &mended.never}) {
    std::sort(list->begin(), list->end());
    std::erase_if(*list, [&](uint32_t image) {
      return !std::binary_search(found.replaceable.begin(), found.replaceable.end(), image);
    });
  }
  return mended;
}

Result<> Mender::note_mended(const std::string& name, const std::string& id) {
  for (int tries = 1;; ++tries) {
    const Result<bool> decided = decisions_.count_mending(name, id);
    {
      MutexLock lock(mutex_);
      if (decided.has_value()) {
        if (decided.value()) to_refresh_.insert(name);  // else it was removed
        if (const auto known = not_said_.find(name);
            known != not_said_.end() && known->second == id)
          not_said_.erase(known);
        return ok();
      }
      not_said_.insert_or_assign(name, id);  // nobody would find the damage any more
    }
    if (decided.error().code() != Code::kConflict || tries >= kTries) return decided.error();
    PTC_TRY(sync_about_(id));
  }
}

Result<Findings> Mender::repair(const std::string& name, std::stop_token stop) {
  const KeyedLock::Held one = repairing_.hold(name);
  for (int tries = 1;; ++tries) {
    PTC_TRY(auto record, verifier_.find(name));
    // As they are before anything is read there.
    std::map<std::string, MetaTransaction::Compare> fences;
    for (const std::string& node : record.where->nodes)
      if (node != place_.node_key()) fences.emplace(node, place_.services.cluster->fence_of(node));
    const int64_t before = last_look(record.id);
    Result<Findings> examined = verifier_.examine(record, nullptr, stop);
    if (examined.has_error() && examined.error().code() == Code::kBusy &&
        tries < kTries) {  // it is being moved
      std::this_thread::sleep_for(kPauseBetweenTries);
      continue;
    }
    PTC_TRY(auto found, std::move(examined));
    size_t done_after_all = 0;
    {
      MutexLock lock(mutex_);
      if (const auto doubt = in_doubt_.extract(record.id); !doubt.empty())
        done_after_all = doubt.mapped() - std::min(doubt.mapped(), found.replaceable.size());
    }
    knowledge_.update([&](KnownJob& known) { known.counts.damaged_mended += done_after_all; });
    if (found.replaceable.empty()) {
      knowledge_.update([&](KnownJob& known) { known.counts.damaged_left += found.beyond.size(); });
      return found;
    }
    const Mended mended = mend(record, *record.where, found, stop);
    // What was asked of a node that did not answer may have been done.
    if (!mended.right.empty() || mended.not_now) {
      if (Result<> noted = note_mended(name, record.id); noted.has_error()) {
        place_.services.mending_wanted();  // to say so later
        return std::move(noted).error();
      }
    }
    if (!mended.never.empty()) {
      PTC_TRY(bool done, take_out(name, record, mended.never, fences));
      if (!done && tries < kTries) continue;
      if (!done) return make_error(Code::kConflict, "checkpoint {} changes all the time", name);
      note_to_refresh({name});
    }
    if (!mended.not_now)
      for (const std::string& what : found.replaced)
        spdlog::warn("job {}: checkpoint {}: {}; it is made anew from another copy", place_.name,
                     name, what);
    knowledge_.update([&](KnownJob& known) {
      known.counts.damaged_mended += mended.right.size();
      known.counts.damaged_replaced += mended.never.size();
      known.counts.damaged_left += found.beyond.size();
    });
    place_.services.mending_wanted();
    if (mended.not_now) note_wrong_copies(name, record, before, found, mended);
    if (mended.not_now) {
      MutexLock lock(mutex_);
      in_doubt_[record.id] = found.replaceable.size() - mended.right.size() - mended.never.size();
    }
    if (mended.not_now)
      return Error(*mended.not_now)
          .with_context(fmt::format("checkpoint {}: not all damaged copies are mended yet", name));
    return found;
  }
}

void Mender::note_wrong_copies(const std::string& name, const CheckpointRecord& record,
                               int64_t before, const Findings& found, const Mended& mended) {
  Findings left = found;
  left.replaced.clear();  // not yet
  for (const uint32_t image : found.replaceable)
    if (!std::binary_search(mended.right.begin(), mended.right.end(), image) &&
        !std::binary_search(mended.never.begin(), mended.never.end(), image))
      left.not_right.copies.push_back(record.where->images[image].id);
  std::sort(left.not_right.copies.begin(), left.not_right.copies.end());
  // Where it cannot be said, it is once it is tried again.
  (void)note_looked_over(name, record, before, std::move(left), /*whole=*/false);
}

Result<bool> Mender::take_out(const std::string& name, const CheckpointRecord& seen,
                              const std::vector<uint32_t>& images,
                              const std::map<std::string, MetaTransaction::Compare>& fences) {
  PTC_TRY(auto now, verifier_.find(name));
  if (now.id != seen.id || now.stored != seen.stored) return false;
  const auto others_are_as_read = [&](JobUpdate& update) -> Result<bool> {
    for (const auto& [node, held] : copies_beside(*seen.checkpoint, *seen.where, images))
      if (node != place_.node_key()) update.rests_on({fences.at(node)});
    return true;
  };
  return decisions_.replace_images(now, images_without(*seen.where, images),
                                   /*leader=*/nullptr, others_are_as_read, /*were_damaged=*/true);
}

Result<Findings> Mender::repair_and_tell(const std::string& name, std::stop_token stop) {
  PTC_TRY(auto record, verifier_.find(name));
  PTC_TRY(check_member(*place_.services.cluster));
  const int64_t before = last_look(record.id);
  PTC_TRY(auto found, repair(name, std::move(stop)));
  refresh_everywhere(name);
  // What was decided about it meanwhile is looked at once more.
  if (note_looked_over(name, record, before, found).has_error()) note_damage(name);
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
  using Told = std::vector<Result<std::string>>;
  Answers<Told> asked(others.empty() ? 0 : 1, [&](size_t) -> Result<Told> {
    return peers_.ask_all(others, PeerMethod::kRefresh, request);
  });
  note_to_refresh({name});
  (void)refresh();
  for (const Result<Told>& told : asked.wait())
    for (const Result<std::string>& answer : told ? told.value() : Told{told.error()})
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
  const int64_t before = last_look(record.id);
  PTC_TRY(auto found, verifier_.examine(record, place_.services.pace));
  if (!found.good()) {
    PTC_TRY(check_member(*place_.services.cluster));
    Result<Findings> mended = repair(name, stop_of_scrub());
    (void)refresh();
    if (mended.has_error()) note_damage(name);  // it is tried again, and not as often as one looks
    PTC_TRY(found, std::move(mended));
  }
  return note_looked_over(name, record, before, std::move(found));
}

void Mender::note_damage(const std::string& name) {
  {
    MutexLock lock(mutex_);
    to_mend_.try_emplace(name);
  }
  place_.services.mending_wanted();
}

std::stop_token Mender::stop_of_scrub() const {
  return place_.services.pace != nullptr ? place_.services.pace->stopped() : std::stop_token();
}

void Mender::wait_until_tried(const std::string& name, std::chrono::milliseconds at_most) {
  MutexLock lock(mutex_);
  tried_.wait_for(mutex_, at_most, [&]() PTC_REQUIRES(mutex_) {
    const auto noted = to_mend_.find(name);
    const bool is_new = noted != to_mend_.end() && noted->second.not_before == Noted().not_before;
    return !is_new && !trying_.contains(name);
  });
}

bool Mender::mend_noted() {
  constexpr auto kAtMost = std::chrono::seconds(300);
  const auto now = std::chrono::steady_clock::now();
  std::map<std::string, Noted> due;
  {
    MutexLock lock(mutex_);
    for (auto one = to_mend_.begin(); one != to_mend_.end();) {
      const auto next = std::next(one);
      if (one->second.not_before <= now) {
        trying_.insert(one->first);
        due.insert(to_mend_.extract(one));
      }
      one = next;
    }
  }
  const auto tried = [this](const std::string& name) {
    MutexLock lock(mutex_);
    trying_.erase(name);
    tried_.notify_all();
  };
  for (auto& [name, noted] : due) {
    const Result<Findings> done = repair_and_tell(name, stop_of_scrub());
    tried(name);
    if (done.has_value() || done.error().code() == Code::kNotFound) continue;
    spdlog::warn("job {}: checkpoint {}: what is damaged of it is not mended yet: {}", place_.name,
                 name, done.error().message());
    const Code code = done.error().code();
    const bool passes = code == Code::kBusy || code == Code::kConflict || code == Code::kNoSpace ||
                        code == Code::kUnavailable || code == Code::kInDoubt;
    if (!passes) continue;  // somebody verifies it again, or it is looked over
    noted.pause = std::min(2 * noted.pause, std::chrono::seconds(kAtMost));
    noted.not_before = std::chrono::steady_clock::now() + noted.pause;
    MutexLock lock(mutex_);
    to_mend_.insert_or_assign(name, noted);
  }
  MutexLock lock(mutex_);
  return to_mend_.empty();
}

int64_t Mender::last_look(const std::string& id) const {
  const JobKnowledge::Snapshot now = knowledge_.now();
  const auto look = now->looked_over.find(id);
  return look != now->looked_over.end() ? look->second.meta_revision : 0;
}

/// One that is not known here may be so new, or not to be read here: it is still there.
Result<std::vector<std::string>> Mender::removed_of(std::vector<std::string> ids) const {
  if (ids.empty()) return ids;
  PTC_TRY(const auto agreed, JobRecord::read(*place_.services.meta, place_.name));
  for (const auto& [name, entry] : agreed.checkpoints) std::erase(ids, entry.id);
  if (ids.size() > kMostForgotten) ids.resize(kMostForgotten);
  return ids;
}

/// status.json says so, of all nodes.
Result<> Mender::note_looked_over(const std::string& name, const CheckpointRecord& record,
                                  int64_t before, Findings found, bool whole) {
  LookedOver looked{now_ns(),   std::move(found.beyond),   std::move(found.replaced), found.away,
                    /*more=*/0, std::move(found.not_right)};
  for (const std::string& what : looked.found)
    spdlog::error("job {}: checkpoint {}: {}; no other copy has it right", place_.name, name, what);
  looked.more = static_cast<int64_t>(keep_first(looked.found));
  if (const size_t more = keep_first(looked.mended); more > 0)
    looked.mended.push_back(fmt::format("and {} more", more));
  // As others read it, too: of very much it says less.
  if (auto told = LookedOver::from_text(looked.to_text())) looked = *std::move(told);
  std::vector<std::string> forgotten;  // of checkpoints that are no more
  const auto notes = [&](JobUpdate& update) -> Result<bool> {
    const CheckpointRecord* known = update.checkpoint(name);
    if (known == nullptr || known->id != record.id) return false;  // it was removed
    // What another look found wrong, after this one had read it, is not right again by this one.
    PTC_TRY(const auto last, update.looked_over(record.id));
    if (last.meta_revision != before && last.time_ns != 0 && last.not_right != looked.not_right)
      return make_error(Code::kBusy, "another look has found something else meanwhile");
    if (!whole && last.time_ns != 0) looked.time_ns = last.time_ns;
    // No other checkpoint has the id of one that was removed.
    const KnownJob& now = update.glance();
    for (const auto& [id, look] : now.looked_over)
      if (now.find_id(id) == nullptr) forgotten.push_back(id);
    PTC_TRY(forgotten, removed_of(std::move(forgotten)));
    for (const std::string& id : forgotten) update.forget_looked_over(id);
    update.put_looked_over(record.id, looked);
    return true;
  };
  Result<int64_t> written = decisions_.update(notes);
  if (written.has_error() && written.error().code() == Code::kConflict)
    return make_error(Code::kBusy, "it has changed meanwhile");
  PTC_TRY(const int64_t revision, std::move(written));
  if (revision == 0) return ok();
  note_to_refresh(knowledge_.update([&](KnownJob& known) {
    Agreed<LookedOver>& latest = known.looked_over[record.id];
    if (latest.meta_revision < revision) latest = {std::move(looked), revision};
    for (const std::string& id : forgotten) known.looked_over.erase(id);
    return known.show_damage(place_.services.reads_damaged);
  }));
  (void)refresh();
  return ok();
}

}  // namespace ptc
