#include "reshard/job/verifier.h"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <boost/json/array.hpp>
#include <boost/json/object.hpp>
#include <boost/json/serialize.hpp>
#include <chrono>
#include <optional>
#include <unordered_map>

#include "reshard/checkpoint/examine.h"
#include "reshard/cluster/tell.h"
#include "reshard/exec/image_sums.h"
#include "reshard/job/scrub.h"
#include "reshard/move/change.h"
#include "reshard/move/placement.h"
#include "store/base/fan_out.h"
#include "store/base/mutex.h"

namespace ptc {

namespace {

/// What no tensor's checksum covers. Empty: nothing is wrong.
Result<std::string> problem_beside_tensors(const ImageLayout& layout, const ImageSums& sums,
                                           const Image& image, const Checksum* padding) {
  if (image.bytes() != layout.bytes) return "it does not have all of its bytes";
  for (const Literals::Piece& piece : layout.literals.pieces()) {
    std::vector<std::byte> held(piece.bytes.size());
    PTC_TRY(image.read(piece.offset, held));
    if (!std::ranges::equal(held, std::as_bytes(std::span(piece.bytes))))
      return piece.offset == 0 ? "its header is not what it was"
                               : "what is between its tensors is not what it was";
  }
  bool zero = false;
  if (padding != nullptr) {
    zero = *padding == Checksum();
  } else if (image.device() != nullptr) {
    PTC_TRY(zero, sums.padding_is_zero_on_device(image));
  } else {
    PTC_TRY(const auto bytes, image.host_bytes());
    zero = sums.padding_is_zero(bytes);
  }
  return zero ? "" : "its padding is not zero any more";
}

/// Of all bytes of one that is here.
Result<Checksum> checksum_of(const Image& image) {
  PTC_TRY(const ConstMemoryPointer begin, image.map());
  if (image.device() == nullptr) {
    PTC_TRY(const auto bytes, image.host_bytes());
    return checksum_of_run(bytes, 0);
  }
  Checksum sum;
  const DeviceRun all{begin, image.bytes(), 0, 0};
  PTC_TRY(image.device()->devices->add_checksums(begin.memory(), {&all, 1}, {&sum, 1}));
  return sum;
}

/// An image, by this thread alone and as slowly as `pace` asks. kBusy: it was moved or removed; who
/// reads it all the same keeps its memory for as long.
Result<> read_slowly(const Checkpoint& checkpoint, const StoredState& stored, uint32_t number,
                     const Image& image, Pace& pace,
                     const std::function<void(uint64_t, std::span<const std::byte>)>& take) {
  const auto is_stored = [&] {
    const std::shared_ptr<const StoredState> now = checkpoint.stored();
    return now.get() == &stored ||
           std::any_of(now->images.begin(), now->images.end(), [&](const StoredImage& image) {
             return image.id == stored.images[number].id && image.image != nullptr;
           });
  };
  const bool in_host = image.has_host_bytes();
  std::span<const std::byte> bytes;
  if (in_host) {
    PTC_TRY(bytes, image.host_bytes());
  }
  std::vector<std::byte> buffer;
  for (uint64_t at = 0; at < image.bytes(); at += Pace::kWindowBytes) {
    if (!is_stored()) return make_error(Code::kBusy, "it is moved or removed just now");
    const uint64_t count = std::min(Pace::kWindowBytes, image.bytes() - at);
    Result<> read = ok();
    PTC_TRY(pace.read(count, [&] {
      if (in_host) return take(at, bytes.subspan(at, count));
      buffer.resize(count);
      read = image.read(at, buffer);
      if (read.has_value()) take(at, buffer);
    }));
    PTC_TRY(std::move(read));
  }
  return ok();
}

/// What a node is asked, one request after the other, so that no answer becomes long.
class Batches {
 public:
  /// `images`: none: all that it has. What it is made of outlives it.
  Batches(const CheckpointRecord& record, const StoredState& stored, const CommonCuts& cuts,
          const std::string& node, std::vector<uint32_t> images, bool paced)
      : record_(record), stored_(stored), cuts_(cuts), images_(std::move(images)), paced_(paced) {
    if (images_.empty())
      for (uint32_t i = 0; i < stored.images.size(); ++i)
        if (stored.images[i].node == node) images_.push_back(i);
  }
  bool all_asked_for() const { return next_ == images_.size(); }
  std::string next() {
    constexpr uint64_t kBatchBytes = 256 << 20;
    std::vector<uint32_t> batch;
    for (uint64_t bytes = 0; !all_asked_for() && (batch.empty() || bytes < kBatchBytes); ++next_) {
      batch.push_back(images_[next_]);
      bytes += stored_.layouts()[images_[next_]].bytes;
    }
    return json::serialize(json::object{{"id", record_.id},
                                        {"stored", record_.stored},
                                        {"paced", paced_},
                                        {"images", json::array(batch.begin(), batch.end())},
                                        {"cuts", to_json(cuts_, stored_, batch)}});
  }

 private:
  const CheckpointRecord& record_;
  const StoredState& stored_;
  const CommonCuts& cuts_;
  std::vector<uint32_t> images_;
  bool paced_;
  size_t next_ = 0;
};

}  // namespace

/// This node's images of the stored state, each by itself.
Result<std::vector<ImageContent>> Verifier::read_own_images(const Checkpoint& checkpoint,
                                                            const StoredState& stored,
                                                            const CommonCuts& cuts, Pace* pace,
                                                            const std::vector<uint32_t>& only,
                                                            std::stop_token stop) const {
  std::vector<ImageContent> contents;
  for (uint32_t i = 0; i < stored.images.size(); ++i) {
    if (stored.images[i].node != place_.node_key()) continue;
    if (!only.empty() && std::find(only.begin(), only.end(), i) == only.end()) continue;
    if (stop.stop_requested()) return make_error(Code::kCancelled, "nobody waits for it any more");
    PTC_TRY(auto content, read_image(checkpoint, stored, i, cuts, pace, stop));
    contents.push_back(std::move(content));
  }
  return contents;
}

Result<ImageContent> Verifier::read_image(const Checkpoint& checkpoint, const StoredState& stored,
                                          uint32_t number, const CommonCuts& cuts, Pace* pace,
                                          std::stop_token stop) const {
  const Manifest& manifest = checkpoint.manifest();
  const std::vector<TensorFacts>& facts = checkpoint.tensor_facts();
  const StoredImage& image = stored.images[number];
  const ImageLayout& described = stored.layouts()[number];
  ImageContent content{number};
  auto read = [&]() -> Result<> {
    if (image.image == nullptr) return make_error(Code::kCorrupt, "its file is gone or cut short");
    const Image& held = *image.image;
    PTC_TRY(held.map());  // it is whole
    if (image.written >= 0 && !manifest.files[image.written].has_tensors) {
      if (pace != nullptr) {
        content.whole.emplace();
        PTC_TRY(read_slowly(checkpoint, stored, number, held, *pace, [&](uint64_t at, auto window) {
          *content.whole += checksum_of_run(window, at);
        }));
      } else {
        PTC_TRY(content.whole, checksum_of(held));
      }
      return ok();
    }
    PTC_TRY(auto sums, ImageSums::make(described, {facts, cuts}));
    ChecksumLedger ledger;
    Checksum padding;
    if (pace != nullptr) {
      PTC_TRY(read_slowly(checkpoint, stored, number, held, *pace, [&](uint64_t at, auto window) {
        sums.add(at, window);
        padding += sums.beside(at, window);
      }));
      PTC_TRY(sums.give_to(ledger));
    } else {
      PTC_TRY(place_.services.executor->hash_images({{&described, image.image.get()}},
                                                    {facts, cuts}, ledger, stop));
    }
    ledger.for_each([&](uint32_t tensor, const Box& box, const Checksum& sum) {
      content.sums.push_back({tensor, box, sum});
    });
    PTC_TRY(content.problem,
            problem_beside_tensors(described, sums, held, pace != nullptr ? &padding : nullptr));
    return ok();
  };
  if (Result<> done = read(); done.has_error()) {
    if (done.error().code() != Code::kCorrupt) return std::move(done).error();
    content.problem = done.error().message();
  }
  return content;
}

Result<CheckpointRecord> Verifier::find_stored(const std::string& id,
                                               const std::string& stored_file) const {
  auto find = [&] {
    const JobKnowledge::Snapshot now = knowledge_.now();
    const CheckpointRecord* known = now->find_id(id);
    return known != nullptr && known->stored == stored_file ? *known : CheckpointRecord();
  };
  CheckpointRecord record = find();
  if (record.where == nullptr) {  // decided a moment ago
    PTC_TRY(sync_about_(id));
    record = find();
  }
  if (record.where == nullptr) return make_error(Code::kBusy, "it is being moved; try again");
  return record;
}

Result<std::string> Verifier::answer(const json::object& request, const std::string& id,
                                     const std::string& stored_file) const {
  const json::value* paced = request.if_contains("paced");
  std::vector<uint32_t> only;
  if (const json::value* images = request.if_contains("images")) {
    if (!images->is_array()) return invalid_argument("the request names no images");
    for (const json::value& image : images->as_array()) {
      boost::system::error_code bad;
      only.push_back(image.to_number<uint32_t>(bad));
      if (bad) return invalid_argument("the request names no images");
    }
  }
  CommonCuts cuts;
  if (const json::value* boxes = request.if_contains("cuts")) {
    try {
      cuts = cuts_from(*boxes);
    } catch (const std::exception&) {
      return invalid_argument("the request does not say how tensors are cut");
    }
  }
  PTC_TRY(auto record, find_stored(id, stored_file));
  Pace* pace =
      paced != nullptr && paced->is_bool() && paced->get_bool() ? place_.services.pace : nullptr;
  PTC_TRY(auto contents, read_own_images(*record.checkpoint, *record.where, cuts, pace, only, {}));
  return to_text(contents);
}

Result<std::vector<ImageContent>> Verifier::read_images(
    const CheckpointRecord& record, const StoredState& stored,
    const std::map<std::string, std::vector<uint32_t>>& by_node, const CommonCuts& cuts, Pace* pace,
    std::stop_token stop) const {
  if (pace != nullptr) stop = pace->stopped();
  // Where one fails nobody wants what the others read.
  std::stop_source given_up;
  const std::stop_callback passes_on(stop, [&] { given_up.request_stop(); });
  struct Shared {
    Mutex mutex;
    Result<> read PTC_GUARDED_BY(mutex) = ok();  // the first error
    std::vector<ImageContent> contents PTC_GUARDED_BY(mutex);
    std::vector<std::string> answers PTC_GUARDED_BY(mutex);  // taken apart when all have come
  } shared;
  const auto add = [&](Result<std::vector<ImageContent>> some) {
    MutexLock lock(shared.mutex);
    if (some.has_value()) {
      std::move(some.value().begin(), some.value().end(), std::back_inserter(shared.contents));
      return;
    }
    if (shared.read.has_value()) shared.read = std::move(some).error();
    given_up.request_stop();
  };
  std::vector<Batches> elsewhere;
  std::vector<std::string> nodes, first;
  for (const auto& [node, images] : by_node) {
    if (node == place_.node_key()) continue;
    Batches batches(record, stored, cuts, node, images, pace != nullptr);
    if (batches.all_asked_for()) continue;
    nodes.push_back(node);
    first.push_back(batches.next());
    elsewhere.push_back(std::move(batches));
  }
  const auto then = [&](size_t i, const Result<std::string>& answer) -> std::optional<NextCall> {
    if (answer.has_error()) {
      add(make_error(answer.error().code(), "node {}: {}", nodes[i], answer.error().message()));
      return std::nullopt;
    }
    {
      MutexLock lock(shared.mutex);
      shared.answers.push_back(answer.value());
    }
    if (elsewhere[i].all_asked_for()) return std::nullopt;
    if (given_up.stop_requested()) {
      add(make_error(Code::kCancelled, "nobody waits for it any more"));
      return std::nullopt;
    }
    return NextCall{elsewhere[i].next()};
  };
  // Waited for by one thread, while this one reads what is here.
  Answers<std::vector<Result<std::string>>> answers(
      nodes.empty() ? 0 : 1, [&](size_t) -> Result<std::vector<Result<std::string>>> {
        return peers_.ask_all(nodes, PeerMethod::kExamine, first, given_up.get_token(), {}, then);
      });
  if (const auto own = by_node.find(place_.node_key()); own != by_node.end())
    add(read_own_images(*record.checkpoint, stored, cuts, pace, own->second, given_up.get_token()));
  for (Result<std::vector<Result<std::string>>>& theirs : answers.wait()) {
    if (theirs.has_error()) add(theirs.error());
    if (theirs.has_value())
      for (Result<std::string>& one : theirs.value())
        if (one.has_error()) add(std::move(one).error());  // it may not even have been asked
  }
  std::vector<std::string> said;
  {
    MutexLock lock(shared.mutex);
    said = std::move(shared.answers);
  }
  for (const std::string& answer : said) add(contents_from(answer));
  MutexLock lock(shared.mutex);
  PTC_TRY(std::move(shared.read));
  return std::move(shared.contents);
}

Result<Findings> Verifier::examine(const CheckpointRecord& record, Pace* pace,
                                   std::stop_token stop) const {
  const StoredState& stored = *record.where;
  std::map<std::string, std::vector<uint32_t>> all;
  std::vector<std::string> away;
  for (const std::string& node : stored.nodes) {
    if (node == place_.node_key() || is_among(place_.services.cluster->alive(), node)) all[node];
    else away.push_back(node);
  }
  PTC_TRY(auto contents, read_images(record, stored, all, cuts_of(stored), pace, std::move(stop)));
  PTC_TRY(auto found, find_damage(*record.checkpoint, stored, std::move(contents)));
  if (!found.good()) {
    PTC_TRY(check_it_is_still_so(record));
  }
  found.away = std::move(away);
  knowledge_.update([&](KnownJob& known) {
    known.counts.damaged_found += found.replaceable.size() + found.beyond.size();
  });
  return found;
}

Result<> Verifier::check_it_is_still_so(const CheckpointRecord& record) const {
  const std::string& name = record.checkpoint->name();
  const JobKnowledge::Snapshot now = knowledge_.now();
  const CheckpointRecord* known = now->record_of(name);
  if (known == nullptr || known->id != record.id)
    return make_error(Code::kNotFound, "checkpoint {} was removed meanwhile", name);
  if (known->stored != record.stored)
    return make_error(Code::kBusy, "it is moved just now; try again");
  return ok();
}

Result<CheckpointRecord> Verifier::find(std::string_view name) const {
  const JobKnowledge::Snapshot now = knowledge_.now();
  const auto known = now->checkpoints.find(name);
  if (known != now->checkpoints.end()) return known->second;
  if (const auto bad = now->damaged.find(name); bad != now->damaged.end())
    return make_error(bad->second.lost ? Code::kUnavailable : Code::kCorrupt, "checkpoint {}: {}",
                      name, bad->second.why);
  return make_error(Code::kNotFound, "job {} has no checkpoint '{}'", place_.name, name);
}

}  // namespace ptc
