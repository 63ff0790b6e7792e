// Where ranks and files go, against the obvious way to find out: every assignment of blocks to
// nodes, and for each file one node after the other. PTC_SEED=<seed> replays a run.
#include "reshard/move/placement.h"

#include <gtest/gtest.h>
#include <time.h>

#include <algorithm>
#include <map>
#include <random>
#include <set>
#include <tuple>

#include "reshard/move/change.h"
#include "reshard/move/superfluous.h"
#include "tests/support/random_model.h"
#include "tests/support/synthetic_model.h"

namespace ptc {
namespace {

class PlacementTest : public ::testing::Test {
 protected:
  PlacementTest() {
    const char* given = std::getenv("PTC_SEED");
    const uint64_t seed = given ? std::strtoull(given, nullptr, 10) : std::random_device()();
    std::cout << "PTC_SEED=" << seed << "\n";
    random_.seed(seed);
  }

  void make_checkpoint(const Model& model, const LayoutSpec& spec) {
    Manifest manifest;
    manifest.name = "base";
    manifest.written_spec = spec;
    manifest.model = std::make_shared<const Model>(model);
    manifest.checksums.resize(model.tensors().size());
    auto facts = CheckpointFacts::of(std::move(manifest), std::to_string(++made_), "", results_);
    checkpoint_ = std::make_shared<Checkpoint>(std::move(facts).value(), &results_, nullptr,
                                               [] { return false; });
  }

  /// Some copies of each file, at random; of some there is none.
  std::shared_ptr<const StoredState> store(const LayoutSpec& spec) {
    std::vector<StoredImage> images;
    const StateFilesRef files = checkpoint_->target_images(spec).value();
    for (const StateFile& file : *files)
      for (const std::string& node : nodes_) {
        if (random_() % 3 != 0) continue;
        StoredImage image;
        image.id = std::to_string(images.size());
        if (random_() % 8 != 0)
          image.image = std::make_shared<const Image>(ImageId{image.id}, MemoryPlace{node},
                                                      file.layout.bytes);
        image.state = file.owner;
        image.path = file.path;
        image.node = node;
        images.push_back(image);
      }
    return checkpoint_->make_stored(spec, std::move(images)).value();
  }

  /// All files on w0, once in each of these memories.
  std::shared_ptr<const StoredState> store_in(const LayoutSpec& spec,
                                              const std::vector<NodeMemory>& memories) {
    std::vector<StoredImage> images;
    const StateFilesRef files = checkpoint_->target_images(spec).value();
    for (const StateFile& file : *files)
      for (const NodeMemory memory : memories) {
        StoredImage image;
        image.id = std::to_string(images.size());
        image.image = std::make_shared<const Image>(ImageId{image.id}, MemoryPlace{"w0", memory},
                                                    file.layout.bytes);
        image.state = file.owner;
        image.path = file.path;
        image.node = "w0";
        image.memory = memory;
        images.push_back(image);
      }
    return checkpoint_->make_stored(spec, std::move(images)).value();
  }

  LayoutSpec make_random_checkpoint() {
    const testing::RandomModel sample = testing::random_model(random_, random_() % 2 == 0);
    const Model model = testing::synthetic_model(sample.config, sample.tensors);
    const LayoutSpec spec = testing::random_layout(random_, sample, model, 12);
    make_checkpoint(model, spec);
    return spec;
  }

  /// Bytes of a file that a node has; what is in no array, each has.
  uint64_t held(const StoredState& stored, const ImageLayout& file, const std::string& node) {
    const auto [known, is_new] = held_.try_emplace({file.arrays.begin(), node}, 0);
    if (is_new) known->second = find_held(stored, file, node);
    return known->second;
  }
  uint64_t find_held(const StoredState& stored, const ImageLayout& file, const std::string& node) {
    uint64_t missing = 0;
    for (const ArraySlot& slot : file.arrays)
      for (const Piece& piece : slot.part->pieces) {
        missing += stored.index().bytes_of(slot.tensor, piece.global);
        std::vector<Box> seen;
        for (size_t i = 0; i < stored.images.size(); ++i) {
          if (stored.images[i].image == nullptr || stored.images[i].node != node) continue;
          for (const ArraySlot& other : stored.layouts()[i].arrays)
            for (const Piece& its : other.part->pieces) {
              if (other.tensor != slot.tensor || its.global.empty() || piece.global.empty() ||
                  std::find(seen.begin(), seen.end(), its.global) != seen.end())
                continue;
              seen.push_back(its.global);
              if (const auto common = intersect(its.global, piece.global))
                missing -= stored.index().bytes_of(slot.tensor, *common);
            }
        }
      }
    return file.bytes - std::min(file.bytes, missing);
  }

  /// What nodes hold of what their ranks read, each file once a node; of nodes that hold nothing at
  /// all, nothing.
  uint64_t kept(const StoredState& stored, const LayoutSpec& spec,
                const std::map<std::string, std::set<uint64_t>>& ranks_of) {
    uint64_t bytes = 0;
    const StateFilesRef files = checkpoint_->target_images(spec).value();
    for (const auto& [node, ranks] : ranks_of) {
      if (!is_among(stored.nodes, node)) continue;
      for (const StateFile& file : *files)
        if (std::any_of(ranks.begin(), ranks.end(), [&, &f = file](uint64_t rank) {
              const uint32_t state = state_index(spec, state_of(spec, spec.coords(rank)));
              return std::find(f.states.begin(), f.states.end(), state) != f.states.end();
            }))
          bytes += held(stored, file.layout, node);
    }
    return bytes;
  }

  std::mt19937_64 random_;
  std::vector<std::string> nodes_;
  SharedResults results_;
  CheckpointRef checkpoint_;
  int made_ = 0;
  std::map<std::pair<const ArraySlot*, std::string>, uint64_t> held_;  // of this round
};

TEST(PutInDevices, RanksOfANodeTakeTurnsOrAreWhereTheLayoutSaysOrStayWhereTheyAre) {
  const DevicesOfNodes devices = {{"w0", {NodeMemory::cuda(0), NodeMemory::cuda(3)}},
                                  {"w1", {NodeMemory::cuda(0)}},
                                  {"w2", {}}};
  const auto put = [&](const std::vector<std::string>& nodes,
                       const std::vector<std::string>& named) -> Result<std::string> {
    Layout layout;
    layout.devices = named;
    Placement placement;
    for (const std::string& node : nodes) placement.place_of_rank.push_back({node});
    const Result<> checked = check_devices_of_ranks(layout, devices, placement);
    put_in_devices(layout, devices, placement);
    std::string text;
    for (const MemoryPlace& place : placement.place_of_rank) text += place.to_string() + " ";
    if (checked.has_error()) return Error(checked.error()).with_context(text);
    return text;
  };
  EXPECT_EQ(put({"w0", "w1", "w0", "w0", "w1"}, {}).value(),
            "w0/cuda:0 w1/cuda:0 w0/cuda:3 w0/cuda:0 w1/cuda:0 ");
  EXPECT_EQ(put({"w0", "w0", "w1"}, {"w0:3", "w0:0", "w1:0"}).value(),
            "w0/cuda:3 w0/cuda:0 w1/cuda:0 ");
  EXPECT_EQ(put({"w0", "away"}, {}).value(), "w0/cuda:0 away ");
  const auto none = put({"w0", "w2"}, {});
  ASSERT_TRUE(none.has_error());
  EXPECT_EQ(none.error().code(), Code::kInvalidArgument);
  EXPECT_EQ(none.error().message(),
            "w0/cuda:0 w2 : 'memory' is \"device\", and node w2 has no device for rank 1: start "
            "its ptcfs with "
            "--gpu (with a GPU's number it says why that cannot be had), or give the layout nodes "
            "that have some (\"devices\")");
  const auto other = put({"w0", "w0"}, {"w0:3", "w0:1"});
  ASSERT_TRUE(other.has_error());
  EXPECT_EQ(
      other.error().message(),
      "w0/cuda:3 w0 : 'memory' is \"device\", and rank 1 is given device w0:1, which node w0 "
      "does not have: "
      "it has cuda:0, cuda:3; name one of these (cuda:0 is \"w0:0\"), or start its ptcfs with "
      "others (--gpu)");
}

TEST_F(PlacementTest, RanksStayWithTheMostBytesAndFilesGoToTheirRanks) {
  for (int round = 0; round < 25; ++round) {
    SCOPED_TRACE(round);
    const testing::RandomModel sample = testing::random_model(random_, random_() % 2 == 0);
    const Model model = testing::synthetic_model(sample.config, sample.tensors);
    const LayoutSpec from = testing::random_layout(random_, sample, model, 12);
    Layout to;
    to.spec = random_() % 3 == 0 ? from : testing::random_layout(random_, sample, model, 12);
    make_checkpoint(model, from);
    nodes_.clear();
    for (uint64_t node = 0, count = 1 + random_() % 5; node < count; ++node)
      nodes_.push_back(fmt::format("w{}", node));
    const auto stored = store(from);
    std::vector<std::string> alive;
    for (const std::string& node : nodes_)
      if (random_() % 4 != 0) alive.push_back(node);
    if (random_() % 2 == 0 || alive.empty()) alive.push_back("w9");  // a new one

    held_.clear();
    const StateFilesRef files = checkpoint_->target_images(to.spec).value();  // kept, and so shared

    // Ranks: equal blocks, of whole groups of tp, and of all ways to give these to nodes the best.
    const Placement placement = place_ranks(to, *checkpoint_, *stored, alive).value();
    const uint64_t world = to.spec.sizes.world_size(), tp = to.spec.sizes.tp;
    ASSERT_EQ(placement.place_of_rank.size(), world);
    uint64_t block = (world + alive.size() - 1) / alive.size();
    if (block > tp) block = (block + tp - 1) / tp * tp;
    std::vector<uint64_t> ranks;
    for (uint64_t rank = 0; rank < world; ++rank) ranks.push_back(rank);
    std::sort(ranks.begin(), ranks.end(), [&](uint64_t a, uint64_t b) {
      if (to.spec.sizes.etp != 0) return a < b;  // tp neighbours are numbered side by side
      auto key = [&](uint64_t rank) {
        RankCoords group = to.spec.coords(rank);
        group.tp = 0;
        return std::pair(to.spec.order.global_rank(to.spec.sizes, group), to.spec.coords(rank).tp);
      };
      return key(a) < key(b);
    });
    auto kept_by = [&](const std::vector<std::string>& node_of_block) {
      std::map<std::string, std::set<uint64_t>> ranks_of;
      for (uint64_t i = 0; i < world; ++i) ranks_of[node_of_block[i / block]].insert(ranks[i]);
      return kept(*stored, to.spec, ranks_of);
    };
    std::vector<std::string> order = alive, chosen;
    uint64_t best = 0;
    do best = std::max(best, kept_by(order));
    while (std::next_permutation(order.begin(), order.end()));
    for (uint64_t i = 0; i < world; ++i) {
      const std::string& node = placement.place_of_rank[ranks[i]].node;
      if (i % block == 0) chosen.push_back(node);
      ASSERT_EQ(node, chosen.back()) << "rank " << ranks[i];
    }
    EXPECT_EQ(std::set(chosen.begin(), chosen.end()).size(), chosen.size());
    EXPECT_EQ(kept_by(chosen), best);

    // Files: to the nodes of their ranks, and then to those that have most of them.
    const uint32_t replicas = random_() % 4;
    Placement asked = placement;
    if (random_() % 3 == 0) asked.held.reset();  // as another node is told it
    if (random_() % 3 == 0) asked.place_of_rank.assign(world, {});
    if (random_() % 3 == 0) asked.place_of_rank[random_() % world] = {"gone"};
    using Copy = std::tuple<uint32_t, std::string, std::string>;
    std::vector<Copy> expected, made;
    size_t turn = 0;
    for (const StateFile& file : *files) {
      std::set<std::string> on;
      for (uint64_t rank = 0; rank < world; ++rank) {
        const uint32_t state = state_index(to.spec, state_of(to.spec, to.spec.coords(rank)));
        if (std::find(file.states.begin(), file.states.end(), state) != file.states.end() &&
            is_among(alive, asked.place_of_rank[rank].node))
          on.insert(asked.place_of_rank[rank].node);
      }
      const bool more = on.size() <= replicas && on.size() < alive.size();
      while (on.size() <= replicas && on.size() < alive.size()) {
        std::map<std::tuple<uint64_t, bool, size_t>, std::string> others;
        for (size_t i = 0; i < alive.size(); ++i) {
          if (on.contains(alive[i])) continue;
          const bool has = std::any_of(
              stored->images.begin(), stored->images.end(), [&](const StoredImage& image) {
                return image.image != nullptr && image.state == file.owner &&
                       image.path == file.path && image.node == alive[i];
              });
          const size_t distance = (i + alive.size() - turn % alive.size()) % alive.size();
          others.emplace(
              std::tuple(UINT64_MAX - held(*stored, file.layout, alive[i]), !has, distance),
              alive[i]);
        }
        on.insert(others.begin()->second);
      }
      if (more) ++turn;
      for (const std::string& node : on) expected.emplace_back(file.owner, file.path, node);
    }
    std::vector<std::string> numbered = stored->nodes;
    for (const StateFile& file :
         place_files(*files, to.spec, asked, replicas, alive, *stored, numbered)) {
      made.emplace_back(file.owner, file.path, numbered[file.layout.node]);
    }
    std::sort(expected.begin(), expected.end());
    std::sort(made.begin(), made.end());
    EXPECT_EQ(made, expected);
    if (HasFailure()) return;
  }
}

TEST_F(PlacementTest, FilesGoToEachMemoryOfTheirRanksAndCopiesToTheHostsOfOtherNodes) {
  const LayoutSpec spec = make_random_checkpoint();
  const auto stored = store_in(spec, {NodeMemory::host()});
  const std::vector<std::string> alive = {"w0", "w1", "w2"};
  const uint64_t world = spec.sizes.world_size();
  Placement placement;
  for (uint64_t rank = 0; rank < world; ++rank)
    placement.place_of_rank.push_back(
        {fmt::format("w{}", random_() % 2),
         random_() % 3 == 0 ? NodeMemory::host() : NodeMemory::cuda(random_() % 2)});
  using Copy = std::tuple<uint32_t, std::string, std::string>;
  std::vector<Copy> expected, made;
  const StateFilesRef files = checkpoint_->target_images(spec).value();
  for (const StateFile& file : *files) {
    std::set<std::string> hosts, in_devices, places;
    for (uint64_t rank = 0; rank < world; ++rank) {
      const uint32_t state = state_index(spec, state_of(spec, spec.coords(rank)));
      if (std::find(file.states.begin(), file.states.end(), state) == file.states.end()) continue;
      const MemoryPlace& place = placement.place_of_rank[rank];
      (place.memory.is_host() ? hosts : in_devices).insert(place.node);
      places.insert(place.to_string());
    }
    // As many as there are nodes: the first is in a device, where a node has it in no other memory,
    // and no more there count. w0 has it all, so w1 is that one where both could be.
    for (const std::string& host : hosts) in_devices.erase(host);
    for (const std::string& node : alive)
      if (in_devices.empty() || node != *in_devices.rbegin()) places.insert(node);
    for (const std::string& place : places) expected.emplace_back(file.owner, file.path, place);
  }
  std::vector<std::string> numbered = stored->nodes;
  for (const StateFile& file : place_files(*files, spec, placement, 2, alive, *stored, numbered))
    made.emplace_back(file.owner, file.path,
                      MemoryPlace{numbered[file.layout.node], file.layout.memory}.to_string());
  std::sort(expected.begin(), expected.end());
  std::sort(made.begin(), made.end());
  EXPECT_EQ(made, expected);
}

TEST_F(PlacementTest, AChangeOfMemoryOnANodeIsACopyThere) {
  const LayoutSpec spec = make_random_checkpoint();
  const NodeMemory host, device = NodeMemory::cuda(1);
  auto change = [&](const std::vector<NodeMemory>& from, NodeMemory to) {
    WantedState wanted;
    wanted.spec = spec;
    wanted.alive = {"w0"};
    wanted.placement.place_of_rank.assign(spec.sizes.world_size(), {"w0", to});
    const auto stored = store_in(spec, from);
    for (size_t i = 0; i < stored->images.size(); ++i)
      EXPECT_EQ(stored->layouts()[i].memory, stored->images[i].memory);
    return *plan_change(*checkpoint_, *stored, wanted).value();
  };
  const StateFilesRef files = checkpoint_->target_images(spec).value();
  const auto count = std::count_if(files->begin(), files->end(), [](const StateFile& file) {
    return std::any_of(
        file.layout.arrays.begin(), file.layout.arrays.end(), [](const ArraySlot& slot) {
          return std::any_of(slot.part->pieces.begin(), slot.part->pieces.end(),
                             [](const Piece& piece) { return !piece.global.empty(); });
        });
  });  // others have nothing that could be anywhere
  EXPECT_TRUE(change({host}, host).nothing());
  EXPECT_TRUE(change({device}, device).nothing());
  const ChangePlan copied = change({host}, device);
  EXPECT_EQ(std::ssize(copied.targets), count);
  for (const StateFile& target : copied.targets) EXPECT_EQ(target.layout.memory, device);
  for (const ImagePlan& image : copied.transfers.images) EXPECT_FALSE(image.kept.has_value());
  EXPECT_EQ(copied.transfers.totals.moved_bytes, 0u);
  EXPECT_EQ(std::ssize(change({device}, host).targets), count);
  // What is in both: one of them is too much.
  const ChangePlan both = change({host, device}, device);
  EXPECT_TRUE(both.nothing());
  EXPECT_EQ(both.superfluous.size(), files->size());
  const auto stored = store_in(spec, {host, device});
  for (const uint32_t image : both.superfluous) EXPECT_EQ(stored->images[image].memory, host);
}

/// All files on w0, and half of a tensor by itself on w1, which one node sees and another does not:
/// both make the copies for w2, and sum them up by the same cells.
TEST_F(PlacementTest, CutsAreTheSameWhateverIsWithinReach) {
  LayoutSpec spec;
  uint32_t tensor = 0;
  auto choose = [&] {
    for (bool found = false; !found;) {
      spec = make_random_checkpoint();
      const std::vector<TensorInfo>& infos = checkpoint_->model().tensors();
      for (tensor = 0; tensor < infos.size() && !found; tensor += found ? 0 : 1)
        found = infos[tensor].shape.size() > 0 && infos[tensor].shape[0] > 1;
    }
  };
  auto change = [&](bool within_reach) {
    Box half = Box::whole(checkpoint_->model().tensors()[tensor].shape);
    half.extent[0] = 1;
    StoredState stored = *store_in(spec, {NodeMemory::host()});
    std::vector<ImageLayout> layouts = stored.layouts();
    StoredImage extra = stored.images.back();
    extra.state = UINT32_MAX;
    extra.path = "half";
    extra.node = "w1";
    if (!within_reach) extra.image = nullptr;
    stored.images.push_back(extra);
    stored.nodes.push_back("w1");
    ImageLayout with_half;
    with_half.node = 1;
    with_half.bytes = layouts.back().bytes;
    with_half.arrays.push_back({tensor, 0, {half.extent, {{half, Dims(half.axes())}}}});
    layouts.push_back(with_half);
    const auto whole = std::make_shared<const std::vector<ImageLayout>>(layouts);
    if (!within_reach) layouts.back().arrays = {};
    stored.held = std::make_shared<const StoredLayouts>(
        std::move(layouts), checkpoint_->manifest().element_bits(),
        within_reach ? "with half" : "without", whole);
    WantedState wanted;
    wanted.spec = spec;
    wanted.alive = {"w0", "w2"};
    wanted.replicas = 1;
    wanted.nothing_leaves = true;
    wanted.placement.place_of_rank.assign(spec.sizes.world_size(), {"w0"});
    return plan_change(*checkpoint_, stored, wanted).value();
  };
  choose();
  auto seen = change(true);
  // None where ranks hold that half as it is: of another, then.
  for (int tries = 0; seen->cuts.of(tensor).empty() && tries < 20; ++tries) {
    choose();
    seen = change(true);
  }
  const auto unseen = change(false);
  ASSERT_FALSE(seen->targets.empty());
  EXPECT_EQ(seen->targets.size(), unseen->targets.size());
  EXPECT_FALSE(seen->cuts.of(tensor).empty());
  EXPECT_EQ(seen->cuts.of(tensor), unseen->cuts.of(tensor));
}

/// Of what is wanted and has no image of its own, the image that it is part of stays, and no other
/// that has a tensor in common with files that are there as they are wanted.
TEST_F(PlacementTest, OnlyWhatHasNoImageIsKeptAsPartOfAnother) {
  make_random_checkpoint();
  auto rows = [](std::vector<uint64_t> numbers) {
    ImageLayout layout;
    layout.bytes = 8 * numbers.size();
    std::vector<ArraySlot> slots;
    for (const uint64_t i : numbers) {
      const Box box{{i, 0}, {1, 4}};
      slots.push_back({0, 8 * slots.size(), {box.extent, {{box, Dims(2)}}}});
    }
    layout.arrays = SharedVector<ArraySlot>(std::move(slots));
    return layout;
  };
  StoredState stored;
  stored.nodes = {"w0", "w1"};
  std::vector<ImageLayout> layouts;
  auto store = [&](uint32_t state, uint32_t node, std::vector<uint64_t> numbers) {
    const std::string name = stored.nodes[node];
    const auto image = std::make_shared<const Image>(ImageId{"i"}, MemoryPlace{name}, 8);
    stored.images.push_back({"i", image, state, "f", -1, name});
    layouts.push_back(rows(std::move(numbers)));
    layouts.back().node = node;
  };
  store(0, 0, {0, 9});
  store(0, 1, {0, 9});  // row 9 is in what is wanted here, which is there by itself
  store(1, 1, {1, 9});
  store(3, 0, {3, 5});
  store(3, 1, {3, 5});  // row 5 is there nowhere else
  std::vector<StateFile> placed;
  auto want = [&](uint32_t state, uint32_t node, std::vector<uint64_t> numbers) {
    placed.push_back({"f", rows(std::move(numbers)), state});
    placed.back().layout.node = node;
  };
  want(0, 0, {0, 9});
  want(1, 1, {1, 9});
  want(2, 1, {5});
  want(3, 0, {3, 5});
  std::vector<uint8_t> bits(checkpoint_->manifest().element_bits().size(), 16);
  stored.held = std::make_shared<const StoredLayouts>(std::move(layouts), bits, "parts");
  WantedState wanted;
  wanted.alive = {"w0", "w1"};
  EXPECT_EQ(superfluous_images(*checkpoint_, stored, wanted, placed), std::vector<uint32_t>{1});
}

/// Each of very many files is there in another form, as part of another state: what is looked for
/// among all images costs no more than to look at each once.
TEST_F(PlacementTest, WhatIsSuperfluousIsFoundWithOneLookAtEachImage) {
  constexpr uint32_t kFiles = 100'000;
  const LayoutSpec spec = make_random_checkpoint();
  auto row = [](uint64_t i) {
    const Box box{{i, 0}, {1, 4}};
    ImageLayout layout;
    layout.bytes = 8;
    layout.arrays.push_back({0, 0, {box.extent, {{box, Dims(2)}}}});
    return layout;
  };
  const auto image = std::make_shared<const Image>(ImageId{"i"}, MemoryPlace{"w0"}, 8);
  StoredState stored;
  stored.nodes = {"w0"};
  std::vector<ImageLayout> layouts;
  std::vector<StateFile> placed;
  for (uint32_t i = 0; i < kFiles; ++i) {
    stored.images.push_back({"i", image, i, "f", -1, "w0"});
    layouts.push_back(row((i + 1) % kFiles));
    placed.push_back({"g", row(i), i});
  }
  stored.images.push_back({"i", image, kFiles, "f", -1, "w0"});  // nobody wants it
  layouts.push_back(row(kFiles));
  std::vector<uint8_t> bits(checkpoint_->manifest().element_bits().size(), 16);
  stored.held = std::make_shared<const StoredLayouts>(std::move(layouts), bits, "rows");
  WantedState wanted;
  wanted.alive = {"w0"};
  auto seconds = [] {  // of this thread
    timespec time;
    ::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
    return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_nsec) / 1e9;
  };
  const double before = seconds();
  EXPECT_EQ(superfluous_images(*checkpoint_, stored, wanted, placed),
            std::vector<uint32_t>{kFiles});
  EXPECT_LT(seconds() - before, 5);
}

TEST(StateKey, LayoutsOfWhichTheStatesAreTheSameHaveOne) {
  const Model model = testing::synthetic_model(R"({"model_type": "mixtral", "hidden_size": 12,
    "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 8, "vocab_size": 256, "num_local_experts": 4})");
  const auto held = [&](const LayoutSpec& spec) {
    std::vector<SubTensor> parts;
    for (uint32_t state = 0; state < state_count(spec); ++state) {
      const std::vector<Model::Held> all = model.hold(spec, state_at(spec, state)).value();
      for (const Model::Held& each : all) parts.push_back(*each.part);
    }
    return parts;
  };
  std::vector<LayoutSpec> specs;
  for (const char* name :
       {"tp1-pp1-dp4-ep2-fsdp", "tp1-pp1-dp2-ep2-cp2-fsdp-over_cp", "tp1-pp1-dp4-ep2-fsdp-over_ep",
        "tp1-pp1-dp4-ep2-cp2-fsdp-over_ep", "tp1-pp1-dp8-ep2-shard4-fsdp-over_ep",
        "tp1-pp1-dp2-ep2-cp2-fsdp-over_cp_ep",
        "tp1-pp1-dp2-ep2-cp2-fsdp-over_cp_ep-order_tp_ep_cp_dp_pp",
        "tp1-pp1-dp4-ep2-fsdp-over_ep-order_tp_dp_ep_cp_pp", "tp1-pp1-dp2-ep2-cp2-fsdp-over_ep",
        "tp1-pp1-dp2-ep2-cp2-fsdp-over_cp_ep-order_tp_dp_cp_ep_pp",
        "tp1-pp1-dp2-ep2-etp2-fsdp-over_ep", "tp1-pp1-dp1-ep2-etp2-cp2-fsdp-over_cp_ep"})
    specs.push_back(LayoutSpec::from_name(name).value());
  specs.push_back(specs[2]);
  specs.back().optimizer = OptimizerCut::kReplicated;  // as Megatron's trees are made
  specs.push_back({.sizes = specs.back().sizes});
  size_t same = 0;
  for (const LayoutSpec& a : specs)
    for (const LayoutSpec& b : specs) {
      const bool equal = state_key(a) == state_key(b);
      EXPECT_EQ(equal, held(a) == held(b)) << a.name() << " and " << b.name();
      same += equal;
    }
  EXPECT_GT(same, specs.size() + 6);
}

}  // namespace
}  // namespace ptc
