#include "reshard/job/part_maker.h"

#include <fcntl.h>
#include <spdlog/spdlog.h>

#include <algorithm>
#include <boost/json/object.hpp>
#include <boost/json/serialize.hpp>
#include <unordered_map>
#include <unordered_set>

#include "reshard/exec/fetch_images.h"
#include "reshard/job/drain.h"
#include "reshard/job/part_request.h"
#include "store/base/fan_out.h"

namespace ptc {
namespace {

/// Over all nodes together that is what the plan writes.
uint64_t bytes_to_make(const ChangePlan& change, const StoredState& stored, std::string_view node) {
  uint64_t bytes = 0;
  for (size_t i = 0; i < change.targets.size(); ++i)
    if (!change.transfers.images[i].kept && change.nodes[change.targets[i].layout.node] == node)
      bytes += change.targets[i].layout.bytes;
  for (const ChangePlan::OtherCopy& copy : change.copies)
    if (change.nodes[copy.node] == node) bytes += stored.layouts()[copy.source_image].bytes;
  return bytes;
}

/// Nodes speak of a plan's files by their numbers in it: so its name says which those are.
PlanName name_of_plan(const std::string& id, std::string wanted_text, const ChangePlan& change,
                      const StoredState& stored) {
  for (size_t i = 0; i < change.targets.size(); ++i) {
    const StateFile& target = change.targets[i];
    const std::optional<uint32_t>& kept = change.transfers.images[i].kept;
    wanted_text +=
        fmt::format("\n{} {} {} {}", target.owner, target.path,
                    MemoryPlace{change.nodes[target.layout.node], target.layout.memory}.to_string(),
                    kept ? stored.images[*kept].id : "");
  }
  for (const ChangePlan::OtherCopy& copy : change.copies)
    wanted_text +=
        fmt::format("\n{} {}", stored.images[copy.source_image].written, change.nodes[copy.node]);
  return {id, checksum_of_run(std::as_bytes(std::span(wanted_text)), 0).to_hex()};
}

}  // namespace

Result<NodeParts> PartMaker::make_all(
    const CheckpointRecord& record, const StoredState& stored, const WantedState& wanted,
    const ChangePlan& change, Activity& activity, Fences& fences, int64_t epoch,
    const std::optional<MetaTransaction::Compare>& decides) const {
  std::set<std::string> needed;
  for (size_t i = 0; i < change.targets.size(); ++i)
    if (!change.transfers.images[i].kept || !change.same_states)
      needed.insert(change.nodes[change.targets[i].layout.node]);
  for (const ChangePlan::OtherCopy& copy : change.copies) needed.insert(change.nodes[copy.node]);
  const std::string self = uses_.place.node_key();
  for (const std::string& node : needed) {
    if (node != self) fences.push_back(uses_.place.services.cluster->fence_of(node));
    if (!node.empty()) fences.push_back({drained_key(node), 0});
  }
  PartRequest request{.id = record.id,
                      .generation = record.generation,
                      .stored = record.stored,
                      .revision = uses_.knowledge.now()->saved.revision,
                      .wanted = wanted,
                      .epoch = epoch};
  if (decides) request.commit = {uses_.place.services.cluster->self(), decides->revision};
  const PlanName plan_name = name_of_plan(record.id, request.plan_text(), change, stored);
  const std::string text = request.to_text();
  auto part_of = [&](const std::string& node, const Result<std::string>& told) -> Result<PlanPart> {
    PTC_TRY(const std::string answer, told);
    auto part = PlanPart::from_text(answer);
    if (part.has_error()) return std::move(part).error().with_context("node " + node);
    if (part.value().plan != plan_name.digest)
      return make_error(Code::kUnavailable,
                        "node {} does not see the same nodes as this one yet, and had another plan",
                        node);
    return part;
  };
  std::vector<std::string> elsewhere(needed.begin(), needed.end());
  std::erase(elsewhere, self);
  using Told = std::vector<Result<std::string>>;
  Answers<Told> others(elsewhere.empty() ? 0 : 1, [&](size_t) -> Result<Told> {
    return uses_.peers.ask_all(elsewhere, PeerMethod::kPart, text, activity.stop_token());
  });
  NodeParts parts;
  Result<> made = ok();
  if (needed.contains(self)) {
    const KeyedLock::Held one = uses_.shelf.making(record.id);
    Result<PlanPart> own = make(plan_name, *record.checkpoint, stored, change, activity);
    if (own.has_error()) made = std::move(own).error();
    else parts.emplace_back(self, std::move(own).value());
  }
  const std::vector<Result<Told>> told = others.wait();
  for (size_t i = 0; i < elsewhere.size(); ++i) {
    const Result<Told>& all = told.front();
    Result<PlanPart> theirs =
        part_of(elsewhere[i], all ? all.value()[i] : Result<std::string>(all.error()));
    if (theirs.has_value()) parts.emplace_back(elsewhere[i], std::move(theirs).value());
    else if (made.has_value()) made = std::move(theirs).error();
  }
  if (made.has_value()) return parts;
  give_up(record, parts, epoch);
  return std::move(made).error();
}

void PartMaker::give_up(const CheckpointRecord& record, const NodeParts& parts,
                        int64_t epoch) const {
  StoredState orphans;
  for (const auto& [node, part] : parts)
    for (const auto* list : {&part.images, &part.copies})
      for (const auto& [number, id] : *list)
        orphans.images.push_back({id, nullptr, 0, "", -1, node});
  give_up(record, orphans, epoch);
}

Result<> PartMaker::compare(const CheckpointRecord& record, const StoredState& stored,
                            const ChangePlan& change, const NodeParts& parts, bool known,
                            const std::stop_token& stop) const {
  const Checkpoint& checkpoint = *record.checkpoint;
  const std::vector<TensorFacts>& facts = checkpoint.tensor_facts();
  auto name = [&](uint32_t tensor) { return checkpoint.manifest().tensor_name(tensor); };
  ChecksumLedger ledger;
  std::vector<std::unordered_set<Box, BoxHash>> there(
      facts.size());  // of tensors that were touched
  for (const auto& [node, part] : parts)
    for (const PlanPart::Sum& sum : part.sums) {
      if (sum.tensor >= facts.size())
        return make_error(Code::kCorrupt, "node {} made what is in no plan", node);
      PTC_TRY(ledger.add(sum.tensor, sum.box, sum.sum));
      there[sum.tensor].insert(sum.box);
    }
  if (!change.same_states) return compare_checksums(ledger, facts, name);
  // Copies of some files. The other boxes of their tensors are read from one copy each, where that
  // lies.
  std::map<std::string, std::vector<uint32_t>> to_read;  // images by node
  for (uint32_t i = 0; known && i < stored.images.size(); ++i) {
    if (stored.images[i].image == nullptr) continue;
    bool wanted = false;
    for (const ArraySlot& slot : stored.layouts()[i].arrays) {
      if (there[slot.tensor].empty()) continue;
      for (const Piece& piece : slot.part->pieces) {
        std::vector<const Box*> boxes = change.cuts.of(slot.tensor, piece.global);
        if (boxes.empty() && !piece.global.empty()) boxes.push_back(&piece.global);
        for (const Box* box : boxes) wanted = there[slot.tensor].insert(*box).second || wanted;
      }
    }
    if (wanted) to_read[stored.images[i].node].push_back(i);
  }
  PTC_TRY(auto contents, uses_.verifier.read_images(record, stored, to_read, change.cuts,
                                                    /*pace=*/nullptr, stop));
  for (const ImageContent& content : contents)
    for (const auto& [tensor, box, sum] : content.sums)
      if (tensor < facts.size() && !there[tensor].empty()) {
        PTC_TRY(ledger.add(tensor, box, sum));
      }
  return compare_whole_tensors(ledger, facts, name);
}

Result<PlanPart> PartMaker::make(const PlanName& plan_name, const Checkpoint& checkpoint,
                                 const StoredState& stored, const ChangePlan& change,
                                 Activity& activity) const {
  const std::stop_token stop = activity.stop_token();
  std::atomic<uint64_t>& bytes_done = activity.bytes_done();
  const std::string self = uses_.place.node_key();
  const std::vector<TensorFacts>& facts = checkpoint.tensor_facts();
  const std::vector<ImageRef> sources = stored.image_refs();
  std::vector<uint32_t> numbers;
  std::vector<SharedVector<Transfer>> transfers;  // of each of them
  std::vector<Executor::StoredArrays> kept;
  bool all_here = true;  // and goes into the host's memory
  for (uint32_t i = 0; i < change.targets.size(); ++i) {
    if (change.nodes[change.targets[i].layout.node] != self) continue;
    const ImagePlan& image = change.transfers.images[i];
    if (image.kept) {
      kept.push_back({&change.targets[i].layout, sources[*image.kept].get()});
      continue;
    }
    numbers.push_back(i);
    PTC_TRY(transfers.emplace_back(), change.transfers.transfers_of(i));
    all_here = all_here && change.targets[i].layout.memory.is_host();
    for (const Transfer& transfer : transfers.back())
      all_here = all_here && transfer.source_image < sources.size() &&
                 sources[transfer.source_image]->is_here();
  }
  ChecksumLedger ledger;
  PTC_TRY(uses_.place.services.executor->hash_images(kept, {facts, change.cuts}, ledger, stop));

  std::vector<ImageRef> written;
  if (all_here) {
    std::vector<std::unique_ptr<GatherProgram>> programs;
    std::vector<Executor::Target> targets;
    for (size_t i = 0; i < numbers.size(); ++i) {
      const ImageLayout& file = change.targets[numbers[i]].layout;
      programs.push_back(std::make_unique<GatherProgram>(file.literals, file.bytes,
                                                         std::move(transfers[i]), sources));
      targets.push_back({&file, programs.back().get()});
    }
    PTC_TRY(written, uses_.place.services.executor->materialise(*uses_.place.services.images,
                                                                targets, {facts, change.cuts},
                                                                ledger, bytes_done, stop));
  } else {
    std::vector<FetchTarget> targets;
    for (size_t i = 0; i < numbers.size(); ++i)
      targets.push_back({numbers[i], &change.targets[numbers[i]].layout, std::move(transfers[i])});
    auto other_holder = [&](uint32_t image, uint32_t attempt) -> ImageRef {
      auto same = [&](const StoredImage& other) {
        const StoredImage& one = stored.images[image];
        return other.image != nullptr && other.state == one.state && other.path == one.path &&
               other.written == one.written;
      };
      std::vector<ImageRef> holders;
      for (size_t i = image; i-- > 0 && same(stored.images[i]);)
        holders.push_back(stored.images[i].image);
      for (size_t i = image; i < stored.images.size() && same(stored.images[i]); ++i)
        holders.push_back(stored.images[i].image);
      const std::vector<std::string> now = uses_.place.services.cluster->alive();
      std::erase_if(holders, [&](const ImageRef& holder) {
        return !holder->is_here() && std::find(now.begin(), now.end(), holder->node()) == now.end();
      });
      return holders.empty() ? nullptr : holders[attempt % holders.size()];
    };
    PlanRelays relays(uses_.arrivals, uses_.peers, name_among_relays(plan_name, stored), change);
    PTC_TRY(written, fetch_images(*uses_.place.services.images, *uses_.place.services.executor,
                                  targets, {sources, other_holder, &relays, self},
                                  {facts, change.cuts}, ledger, bytes_done, stop));
  }
  PlanPart part;
  part.plan = plan_name.digest;
  auto take_back = [&] {
    for (const ImageRef& image : written) (void)uses_.place.services.images->remove(image->id());
  };
  for (size_t i = 0; i < numbers.size(); ++i)
    part.images.emplace_back(numbers[i], written[i]->id().text);
  for (uint32_t i = 0; i < change.copies.size(); ++i) {
    const ChangePlan::OtherCopy& copy = change.copies[i];
    if (change.nodes[copy.node] != self) continue;
    ImageLayout opaque;
    opaque.bytes = stored.layouts()[copy.source_image].bytes;
    Transfer whole{copy.source_image, {}};
    whole.copy.run_bytes = opaque.bytes;
    FetchTarget target{0, &opaque, {}};
    if (opaque.bytes > 0) target.transfers.push_back(whole);
    ChecksumLedger none;
    auto copied =
        fetch_images(*uses_.place.services.images, *uses_.place.services.executor, {target},
                     {sources, [](uint32_t, uint32_t) { return nullptr; }, nullptr, self}, facts,
                     none, bytes_done, stop);
    if (copied.has_error()) {
      take_back();
      return std::move(copied).error();
    }
    const WrittenFile& file = checkpoint.manifest().files[stored.images[copy.source_image].written];
    written.push_back(copied.value().front());
    auto content = written.back()->host_bytes();
    if (content.has_error() || checksum_of_run(content.value(), 0) != file.checksum) {
      take_back();
      return make_error(Code::kCorrupt, "{} of rank {} does not have the checksum it had",
                        file.path, file.rank);
    }
    part.copies.emplace_back(i, written.back()->id().text);
  }
  Result<> synced = uses_.place.services.images->sync();
  if (synced.has_error()) {
    take_back();
    return std::move(synced).error();
  }
  ledger.for_each([&](uint32_t tensor, const Box& box, const Checksum& sum) {
    part.sums.push_back({tensor, box, sum});
  });
  bytes_done = bytes_to_make(change, stored, self);  // headers and padding, too
  return part;
}

Result<PlanPart> PartMaker::make_for(std::string_view request) const {
  PTC_TRY(const auto asked, PartRequest::from_text(request));
  const auto& [id, generation, stored_file, wanted_revision, wanted, epoch, commit] = asked;
  const bool commits = commit.has_value();
  if (commits) {
    PTC_TRY(uses_.taken.note(json::object{{"from", commit->from}, {"fence", commit->fence}}, id));
  }
  std::string wanted_plan = asked.plan_text();
  CheckpointRecord record;
  // An edit that is heard of later ends what it finds running: so of this one first. And what was
  // made here for another plan may have been decided on: then it stays.
  bool behind = true;
  {
    const JobKnowledge::Snapshot now = uses_.knowledge.now();
    const CheckpointRecord* known = now->find_id(id);
    if (known != nullptr && known->generation >= generation)
      behind = now->saved.revision < wanted_revision;
  }
  behind = behind || uses_.shelf.has_of_other_plan(id, wanted_plan);
  if (behind) {
    PTC_TRY(uses_.sync_about(id));
  }
  // Of one that is being committed it may lack what describes it, as a node that was not heard.
  FetchedFiles fetched;
  const JobKnowledge::Snapshot before = uses_.knowledge.now();
  const CheckpointRecord* here = before->find_id(id);
  CheckpointEntry entry{id};
  if (here != nullptr) entry = *here;
  entry.generation = generation;
  entry.stored = stored_file;
  if (here == nullptr || here->stored != stored_file)
    uses_.files.fetch(uses_.files.lacking(CheckpointFiles::files_of(entry), fetched), fetched);
  // One part for a checkpoint at a time; what was made for the same plan before is not made again.
  const KeyedLock::Held one = uses_.shelf.making(id);
  PTC_TRY(auto made_before, uses_.shelf.find(id, wanted_plan, epoch));
  if (made_before) return *std::move(made_before);
  {
    const JobKnowledge::Snapshot now = uses_.knowledge.now();
    const CheckpointRecord* known = now->find_id(id);
    if (known != nullptr && known->stored == stored_file) record = *known;
  }
  uses_.shelf.drop(id);
  if (record.checkpoint == nullptr) {
    PTC_TRY(record, uses_.files.load(entry, fetched));
  }
  std::shared_ptr<const StoredState> stored = record.where;
  PTC_TRY(auto change, plan_change(*record.checkpoint, *stored, wanted));
  const uint64_t bytes = bytes_to_make(*change, *stored, uses_.place.node_key());
  std::unique_ptr<Activity> activity =
      uses_.activities.begin({commits ? Activity::Kind::kCommit : Activity::Kind::kPart,
                              record.checkpoint->name(), stored->spec.name(), wanted.spec.name()});
  const TransferPlan::Totals& totals = change->transfers.totals;
  const uint64_t all_bytes =
      totals.total_bytes - totals.kept_bytes;  // on all nodes, as whoever leads says it
  activity->begin("moving", commits ? bytes : all_bytes);
  Result<PlanPart> part = make(name_of_plan(id, wanted_plan, *change, *stored), *record.checkpoint,
                               *stored, *change, *activity);
  if (part.has_value())
    uses_.shelf.keep(id, {std::move(wanted_plan),
                          part.value(),
                          epoch,
                          {false, "moving", record.checkpoint->name(), stored->spec.name(),
                           wanted.spec.name(), bytes, all_bytes}});
  activity.reset();  // from here on it is among the finished ones
  uses_.knowledge.tell();
  // Whoever gives it up drops what is there already.
  if (!commits || uses_.taken.holds(id)) return part;
  uses_.shelf.drop(id);
  return make_error(Code::kConflict, "the commit was given up");
}

Result<std::vector<StoredImage>> PartMaker::compose(const Checkpoint& checkpoint,
                                                    const StoredState& stored,
                                                    const ChangePlan& change,
                                                    const NodeParts& parts) const {
  std::unordered_map<uint32_t, const std::string*> image_of, copy_of;
  for (const auto& [node, part] : parts) {
    for (const auto& [number, id] : part.images) image_of.emplace(number, &id);
    for (const auto& [number, id] : part.copies) copy_of.emplace(number, &id);
  }
  std::vector<StoredImage> images;
  auto add = [&](StoredImage image, const std::string& id, uint32_t node,
                 uint64_t bytes) -> Result<> {
    image.id = id;
    image.node = change.nodes[node];
    PTC_TRY(image.image, uses_.files.open_image(image, bytes));
    images.push_back(std::move(image));
    return ok();
  };
  // What stays: files without tensors, and where the states are the same all of it; of nodes that
  // are away only what may be nowhere else, and of nodes that shall hold nothing, nothing.
  const std::vector<WrittenFile>& files = checkpoint.manifest().files;
  const bool complete = checkpoint.lost_tensors().empty();
  for (uint32_t i = 0; i < stored.images.size(); ++i) {
    const StoredImage& image = stored.images[i];
    if (std::binary_search(change.leaving.begin(), change.leaving.end(), i)) continue;
    const bool other = image.written >= 0 && !files[image.written].has_tensors;
    if (!other && !change.same_states) continue;
    const int64_t best = other ? stored.find_other(image.written) : 0;
    const bool elsewhere = other ? stored.images[best].image != nullptr : complete;
    if (image.image != nullptr || !elsewhere) images.push_back(image);
  }
  for (uint32_t i = 0; i < change.targets.size(); ++i) {
    const StateFile& target = change.targets[i];
    if (const std::optional<uint32_t>& kept = change.transfers.images[i].kept) {
      StoredImage image = stored.images[*kept];
      image.state = target.owner;
      image.path = target.path;
      image.written = -1;
      images.push_back(std::move(image));
      continue;
    }
    const auto made = image_of.find(i);
    if (made == image_of.end())
      return make_error(Code::kInternal, "nobody made {} of state {}", target.path, target.owner);
    PTC_TRY(add({"", nullptr, target.owner, target.path, -1, "", target.layout.memory},
                *made->second, target.layout.node, target.layout.bytes));
  }
  for (uint32_t i = 0; i < change.copies.size(); ++i) {
    const auto made = copy_of.find(i);
    if (made == copy_of.end()) return make_error(Code::kInternal, "nobody made copy {}", i);
    const StoredImage& source = stored.images[change.copies[i].source_image];
    PTC_TRY(add({"", nullptr, source.state, source.path, source.written}, *made->second,
                change.copies[i].node, stored.layouts()[change.copies[i].source_image].bytes));
  }
  return images;
}

/// What was made for a decision that did not come: here, and on the other nodes.
void PartMaker::give_up(const CheckpointRecord& record, const StoredState& made, int64_t epoch,
                        const std::string& stored_file) const {
  uses_.files.remove_images_not_in(made, *record.checkpoint->stored());
  json::object request{{"id", record.id}, {"epoch", epoch}};
  if (!stored_file.empty()) {
    uses_.files.remove_undecided(record.id, stored_file);
    request["stored"] = stored_file;
  }
  (void)uses_.peers.ask_all(uses_.peers.others(), PeerMethod::kDrop, json::serialize(request));
}

}  // namespace ptc
