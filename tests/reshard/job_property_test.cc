// Random models, any layout in, any layout out, against the element-by-element oracle.
#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <vector>

#include "reshard/checkpoint/planned_file.h"
#include "store/transport/transport.h"
#include "tests/support/job_fixture.h"
#include "tests/support/synthetic_model.h"

namespace ptc::testing {
namespace {

/// Files read by pieces of one array, three, or as many as there are, are those planned as a whole.
void expect_pieces(const Checkpoint& checkpoint, const LayoutSpec& spec, std::mt19937_64& random) {
  const auto transport = make_loopback_transport();
  ASSERT_TRUE(all_are_here(*checkpoint.stored()));
  const StateCoords state = state_at(spec, random() % state_count(spec));
  const StateFilesRef files = checkpoint.state_files(spec, state).value();
  for (const StateFile& file : *files) {
    for (const size_t arrays : {size_t{1}, size_t{3}, PlannedFile::kArraysOfPiece}) {
      ImageLayout layout = file.layout;  // of files that were written arrays are in any order
      std::vector<ArraySlot> slots(layout.arrays.begin(), layout.arrays.end());
      std::shuffle(slots.begin(), slots.end(), random);
      layout.arrays = std::move(slots);
      const PlannedFile planned(std::move(layout), checkpoint.stored(), arrays);
      ASSERT_NE(planned.whole(), nullptr);
      std::string whole(planned.bytes(), '\0'), window;
      ASSERT_TRUE(planned.whole()
                      ->read(*transport, 0, std::as_writable_bytes(std::span(whole)))
                      .has_value());
      for (int i = 0; i < 8; ++i) {
        const uint64_t begin = i == 0 ? 0 : random() % planned.bytes();
        window.assign(i == 0 ? planned.bytes() : random() % (planned.bytes() - begin) + 1, '?');
        const auto read = [&](const GatherProgram& program, uint64_t at,
                              std::span<std::byte> part) {
          return program.read(*transport, at, part);
        };
        const Result<> got =
            planned.for_each_piece(begin, std::as_writable_bytes(std::span(window)), read);
        ASSERT_TRUE(got.has_value()) << got.error().message();
        EXPECT_TRUE(window == whole.substr(begin, window.size()))
            << file.path << ", " << arrays << " arrays a piece, from " << begin;
      }
    }
  }
}

void round_trip(uint64_t seed) {
  SCOPED_TRACE(fmt::format("PTC_SEED={}", seed));
  std::mt19937_64 random(seed);
  constexpr uint64_t kMaxRanks = 16;
  Sample sample = make_sample(random, random_model(random, random() % 2 == 0));
  if (random() % 3 == 0) use_torch_files(sample);
  const Model model = synthetic_model(sample.config, sample.tensors);
  const LayoutSpec written = random_layout(random, sample, model, kMaxRanks);
  const LayoutSpec other = random_layout(random, sample, model, kMaxRanks);
  const LayoutSpec third = random_layout(random, sample, model, kMaxRanks);
  SCOPED_TRACE(fmt::format("{}: {} -> {}, {}", sample.config, layout_json(written),
                           layout_json(other), layout_json(third)));

  TempDir dir;
  auto store = JobStore::open({.directory = dir.path(),
                               .node = "n0",
                               .copy_threads = 2,
                               .devices = Devices::open("host:256M,256M").value()},
                              nullptr);
  ASSERT_TRUE(store.has_value()) << store.error().message();
  JobRef job = store.value()->create_job("job").value();
  Result<> saved = job->save_layout(layout_json(written));
  ASSERT_TRUE(saved.has_value()) << saved.error().message();
  job->wait_settled();
  auto files = write_ranks(sample, written, job->files_dir() + "/incoming/base");
  Result<> committed = job->commit("base", "base");
  ASSERT_TRUE(committed.has_value()) << committed.error().message();
  EXPECT_FALSE(std::filesystem::exists(job->files_dir() + "/incoming/base"));
  EXPECT_EQ(job->current_target(), "checkpoints/base/layouts/" + written.name());
  CheckpointRef checkpoint = job->find_checkpoint("base");

  auto expect_written = [&] {
    for (const auto& [path, content] : files) {
      uint64_t rank = std::stoull(path);
      auto set = checkpoint->rank_files(written, rank).value();
      EXPECT_TRUE(read_content(*set, path.substr(path.find('/') + 1)) == content) << path;
    }
  };
  expect_written();
  expect_model(*checkpoint, sample);
  expect_layout(*checkpoint, sample, other);  // computed on read
  expect_pieces(*checkpoint, other, random);
  if (other.stages.empty()) {  // its name says all
    const auto named = job->find_layout(*checkpoint, other.name());
    EXPECT_TRUE(named.has_value() && named.value() == other) << other.name();
  }

  const std::vector<LayoutSpec> specs = {other, third, written};
  for (const LayoutSpec& spec : specs) {
    // The last one is found after a restart.
    const bool on_device = &spec != &specs[2] && random() % 2 == 0;
    std::string text = layout_json(spec);
    if (on_device) text.replace(text.rfind('}'), 1, R"(, "memory": "device"})");
    saved = job->save_layout(text);
    ASSERT_TRUE(saved.has_value()) << saved.error().message();
    job->wait_settled();
    EXPECT_EQ(job->current_target(), "checkpoints/base/layouts/" + spec.name())
        << job->status_json();
    for (const ImageLayout& image : checkpoint->stored()->layouts())
      EXPECT_EQ(!image.memory.is_host(), on_device && !image.arrays.empty());
    auto set = checkpoint->rank_files(spec, 0).value();
    for (size_t i = 0; i < set->entries().size(); ++i)
      if (!on_device) {
        EXPECT_NE(set->open(i).value()->image(), nullptr) << set->entries()[i].path;
      }
    expect_layout(*checkpoint, sample, spec);
    expect_model(*checkpoint, sample);
    expect_written();
    auto verified = job->verify("base");
    EXPECT_TRUE(verified.has_value()) << verified.error().message();
  }

  // The same after a restart.
  job.reset();
  checkpoint.reset();
  store.value().reset();
  store = JobStore::open({.directory = dir.path(), .node = "n0", .copy_threads = 2}, nullptr);
  ASSERT_TRUE(store.has_value()) << store.error().message();
  job = store.value()->find("job");
  checkpoint = job->find_checkpoint("base");
  ASSERT_NE(checkpoint, nullptr);
  expect_written();
  expect_layout(*checkpoint, sample, third);
}

TEST(JobProperty, AnyLayoutInAnyLayoutOut) {
  const uint64_t seed = test_seed();
  std::cout << "PTC_SEED=" << seed << "\n";
  const char* cases = std::getenv("PTC_CASES");
  const int count = std::getenv("PTC_SEED") ? 1 : cases ? std::atoi(cases) : 25;
  for (int i = 0; i < count && !HasFailure(); ++i) round_trip(seed + i);
}

}  // namespace
}  // namespace ptc::testing
