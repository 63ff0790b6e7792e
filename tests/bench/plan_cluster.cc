#include "tests/bench/plan_cluster.h"

#include <fmt/format.h>

#include <ctime>
#include <memory>
#include <utility>
#include <vector>

#include "reshard/checkpoint/checkpoint.h"
#include "reshard/move/change.h"
#include "reshard/move/placement.h"
#include "reshard/move/plan_report.h"
#include "tests/support/synthetic_model.h"

namespace ptc::bench {
namespace {

class Stopwatch {
 public:
  /// Since it was asked last; of this process, which has one thread, on whatever else the machine
  /// has to do.
  double seconds() {
    const std::clock_t now = std::clock();
    return static_cast<double>(now - std::exchange(last_, now)) / CLOCKS_PER_SEC;
  }

 private:
  std::clock_t last_ = std::clock();
};

CheckpointRef make_checkpoint(const Model& model, const LayoutSpec& spec, SharedResults& results) {
  Manifest manifest;
  manifest.name = "base";
  manifest.id = "0";
  manifest.written_spec = spec;
  manifest.model = std::make_shared<const Model>(model);
  manifest.checksums.resize(model.tensors().size());
  auto facts = CheckpointFacts::of(std::move(manifest), "text", "", results).value();
  return std::make_shared<Checkpoint>(std::move(facts), &results, nullptr, [] { return false; });
}

StoredImage image_of(const StateFile& file, const std::string& node, size_t number) {
  StoredImage image;
  image.id = fmt::format("{:016x}", number);
  image.image =
      std::make_shared<const Image>(ImageId{image.id}, MemoryPlace{node}, file.layout.bytes);
  image.state = file.owner;
  image.path = file.path;
  image.node = node;
  return image;
}

uint64_t arrays_in(const std::vector<StateFile>& files) {
  uint64_t arrays = 0;
  for (const StateFile& file : files) arrays += file.layout.arrays.size();
  return arrays;
}

}  // namespace

ClusterTimes plan_on_cluster(const ClusterCase& one) {
  const Model model = testing::synthetic_model(one.config, /*with_optimizer=*/true);
  Layout from, to;
  from.spec = LayoutSpec::from_name(one.from).value();
  to.spec = LayoutSpec::from_name(one.to).value();
  from.spec.optimizer = to.spec.optimizer = one.cut;
  std::vector<std::string> alive;
  for (size_t node = 0; node < one.nodes; ++node) alive.push_back(fmt::format("w{:04}", node));
  SharedResults results;
  const CheckpointRef checkpoint = make_checkpoint(model, from.spec, results);
  ClusterTimes times;
  Stopwatch stopwatch;

  const StateFilesRef held = checkpoint->target_images(from.spec).value();
  times.files = stopwatch.seconds();

  // As committed: each file where the first rank that has it runs.
  const uint64_t world = from.spec.sizes.world_size();
  std::vector<uint64_t> first_rank(state_count(from.spec), world);
  for (uint64_t rank = world; rank-- > 0;)
    first_rank[state_index(from.spec, state_of(from.spec, from.spec.coords(rank)))] = rank;
  const uint64_t block = (world + one.nodes - 1) / one.nodes;
  std::vector<StoredImage> images;
  for (const StateFile& file : *held)
    images.push_back(image_of(file, alive[first_rank[file.owner] / block], images.size()));
  std::shared_ptr<const StoredState> committed =
      checkpoint->make_stored(from.spec, std::move(images)).value();
  (void)committed->index();
  stopwatch.seconds();
  WantedState settled;
  settled.spec = from.spec;
  settled.replicas = one.replicas;
  settled.alive = alive;
  settled.placement = place_ranks(from, *checkpoint, *committed, alive).value();
  {
    const auto change = plan_change(*checkpoint, *committed, settled).value();
    times.settle = stopwatch.seconds();
    images = committed->images;
    for (const StateFile& file : change->targets)
      images.push_back(image_of(file, change->nodes[file.layout.node], images.size()));
  }
  committed.reset();
  stopwatch.seconds();
  const std::shared_ptr<const StoredState> stored =
      checkpoint->make_stored(from.spec, std::move(images)).value();
  (void)stored->index();
  times.stored = stopwatch.seconds();
  for (const ImageLayout& layout : stored->layouts()) times.arrays += layout.arrays.size();

  const StateFilesRef files = checkpoint->target_images(to.spec).value();
  times.wanted = stopwatch.seconds();
  WantedState wanted = settled;
  wanted.spec = to.spec;
  wanted.placement = place_ranks(to, *checkpoint, *stored, alive).value();
  times.place = stopwatch.seconds();
  const auto change = plan_change(*checkpoint, *stored, wanted).value();
  times.plan = stopwatch.seconds();
  uint64_t part_bytes = 0;
  for (size_t i = 0; i < change->targets.size(); ++i) {
    if (change->nodes[change->targets[i].layout.node] != alive[one.nodes / 2]) continue;
    times.part_arrays += change->targets[i].layout.arrays.size();
    const SharedVector<Transfer> transfers =
        change->transfers.transfers_of(static_cast<uint32_t>(i)).value();
    for (const Transfer& transfer : transfers) part_bytes += transfer.bytes();
  }
  PTC_CHECK(part_bytes > 0 || change->transfers.totals.moved_bytes == 0);
  times.part = stopwatch.seconds();
  const PlanReport report("job", alive[0], *checkpoint, *stored, to.spec, *change);
  const PlanTexts texts = report.texts("running", 0);
  PTC_CHECK(!texts.json.empty());
  times.report = stopwatch.seconds();
  constexpr uint64_t kSets = 64;
  for (uint64_t i = 0; i < kSets; ++i) {
    const uint64_t rank = i * (to.spec.sizes.world_size() / kSets);
    const FileSetRef names = checkpoint->rank_files(to.spec, rank).value();
    const FileSetRef tensors = checkpoint->rank_tensors(to.spec, rank).value();
    PTC_CHECK(!names->entries().empty() && !tensors->entries().empty());
  }
  times.sets = stopwatch.seconds() / kSets;
  const TransferPlan::Totals& totals = change->transfers.totals;
  PTC_CHECK(totals.moved_bytes == totals.minimum_bytes);
  times.arrays += arrays_in(change->targets);
  times.distinct = arrays_in(*held) + arrays_in(*files);
  return times;
}

}  // namespace ptc::bench
