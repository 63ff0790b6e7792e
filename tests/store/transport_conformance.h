// What every Transport must do. A backend names a way to make a world of nodes, each with its
// images:
//
//   INSTANTIATE_TEST_SUITE_P(Loopback, TransportConformance,
//     testing::Values(TransportBackend{"loopback", make}));
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <functional>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "transport_world.h"

namespace ptc {

struct TransportBackend {
  std::string name;
  std::function<std::unique_ptr<TransportWorld>()> make;
  friend void PrintTo(const TransportBackend& backend, std::ostream* out) { *out << backend.name; }
};

/// Some box of some array, so that runs are short, long, or all there is; the image's size comes
/// out.
inline StridedCopy random_copy(std::mt19937_64& random, uint64_t& image_bytes,
                               uint64_t& target_bytes) {
  const size_t axes = 1 + random() % 4;
  Dims extent, from, to;
  ArrayAt source, target;
  const uint32_t element_bytes = 1u << random() % 4;
  for (size_t axis = 0; axis < axes; ++axis) {
    auto slack = [&] { return random() % 2 == 0 ? 0 : random() % 3; };
    const bool last = axis + 1 == axes;
    const uint64_t count = 1 + random() % (last && random() % 3 == 0 ? 1500 : 6);
    extent.push_back(count);
    from.push_back(slack());
    to.push_back(slack());
    source.shape.push_back(from[axis] + count + slack());
    target.shape.push_back(to[axis] + count + slack());
  }
  source.byte_offset = random() % 300;
  target.byte_offset = random() % 300;
  image_bytes = source.byte_offset + Box::whole(source.shape).volume() * element_bytes;
  target_bytes = target.byte_offset + Box::whole(target.shape).volume() * element_bytes;
  return make_strided_copy(source, from, target, to, extent, 8 * element_bytes).value();
}

class TransportConformance : public testing::TestWithParam<TransportBackend> {
 protected:
  std::unique_ptr<TransportWorld> world_ = GetParam().make();
  std::mt19937_64 random_{1};

  Result<> fetch(std::vector<FetchItem>& items, std::stop_token stop = {}) {
    return world_->transport().fetch(items, stop);
  }

  /// A call of random items against run_strided_copy, and that nothing else is written.
  void random_round(uint64_t seed) {
    std::mt19937_64 random(seed);
    const size_t count = 1 + random() % 30;
    std::vector<Bytes> contents(world_->nodes()), targets, expected;
    std::vector<size_t> node_of;
    std::vector<FetchItem> items;
    for (size_t i = 0; i < count; ++i) {
      uint64_t image_bytes = 0, target_bytes = 0;
      StridedCopy copy = random_copy(random, image_bytes, target_bytes);
      Bytes& image = contents[node_of.emplace_back(random() % world_->nodes())];
      copy.source_offset += image.size();
      const Bytes array = random_bytes(image_bytes, random);
      image.insert(image.end(), array.begin(), array.end());
      targets.push_back(random_bytes(target_bytes, random));
      expected.push_back(targets.back());
      uint64_t begin = 0, end = target_bytes;
      if (random() % 2 == 0) {
        begin = random() % (target_bytes + 1);
        end = begin + random() % (target_bytes - begin + 1);
      }
      run_strided_copy(copy, image.data(), begin, end, expected.back().data() + begin);
      items.push_back({nullptr, copy, begin, end});
    }
    std::vector<ImageRef> images;
    for (size_t node = 0; node < contents.size(); ++node)
      images.push_back(world_->seen(node, world_->publish(node, contents[node])));
    // Some go into files, or into the memory of devices.
    std::vector<std::optional<ImageWriter>> writers(count);
    std::vector<MemoryPointer> memory;
    for (size_t i = 0; i < count; ++i) {
      items[i].source = images[node_of[i]].get();
      memory.push_back(in_host_memory(targets[i].data()));
      if (random() % 2 == 0) {
        writers[i].emplace(world_->store(0)
                               .create(targets[i].size(), ImageStore::TakeSpace::kLater,
                                       world_->memory(0, random()))
                               .value());
        ASSERT_TRUE(is_ok(writers[i]->write(0, targets[i])));
        memory[i] = writers[i]->map().value();
        items[i].writer = &*writers[i];
      }
      items[i].target_at_begin = memory[i] + items[i].begin;
    }
    ASSERT_TRUE(is_ok(fetch(items)));
    for (size_t i = 0; i < count; ++i) {
      if (writers[i]) targets[i] = content_of(*world_->store(0).show(*writers[i]).value());
      EXPECT_TRUE(targets[i] == expected[i]) << "item " << i;
      EXPECT_EQ(items[i].begin, items[i].end);
      EXPECT_EQ(items[i].target_at_begin, memory[i] + items[i].end);
    }
  }

  static Bytes content_of(const Image& image) {
    if (image.device() == nullptr) {
      const auto bytes = image.host_bytes().value();
      return {bytes.begin(), bytes.end()};
    }
    Bytes bytes(image.bytes());
    EXPECT_TRUE(is_ok(image.device()->devices->read(image.map().value(), whole_copy(bytes.size()),
                                                    0, bytes.size(), bytes.data())));
    return bytes;
  }
};

TEST_P(TransportConformance, RandomItemsArriveAsAPlainCopyMakesThem) {
  const char* given = std::getenv("PTC_SEED");
  const char* rounds = std::getenv("PTC_ROUNDS");
  const uint64_t seed = given ? std::strtoull(given, nullptr, 10) : std::random_device()();
  const uint64_t last = seed + (rounds ? std::strtoull(rounds, nullptr, 10) : 25);
  for (uint64_t now = seed; now < last && !HasFailure(); ++now) {
    SCOPED_TRACE("PTC_SEED=" + std::to_string(now) + " PTC_ROUNDS=1");
    random_round(now);
  }
}

/// They are held by who sends them while their bytes go out, however many they are.
TEST_P(TransportConformance, ManyImagesThatNobodyElseHoldsArriveWhole) {
  for (const size_t count : {63, 64, 65, 200}) {
    SCOPED_TRACE(count);
    std::vector<ImageRef> images;
    std::vector<Bytes> contents, targets;
    std::vector<FetchItem> items;
    for (size_t i = 0; i < count; ++i) {
      contents.emplace_back(i % 32 == 31 ? 4 << 20 : 4096, static_cast<std::byte>(i));
      images.push_back(world_->seen(1, world_->publish(1, contents[i])));
      targets.emplace_back(contents[i].size());
    }
    for (size_t i = 0; i < count; ++i)
      items.push_back({images[i].get(), whole_copy(targets[i].size()), 0, targets[i].size(),
                       in_host_memory(targets[i].data())});
    ASSERT_TRUE(is_ok(fetch(items)));
    EXPECT_TRUE(targets == contents);
  }
}

TEST_P(TransportConformance, ALongImageArrivesWhole) {
  const Bytes content = random_bytes((9 << 20) + 12345, random_);
  const size_t node = world_->nodes() - 1;
  ImageRef image = world_->seen(node, world_->publish(node, content));
  Bytes target(content.size());
  std::vector<FetchItem> items{
      {image.get(), whole_copy(content.size()), 0, content.size(), in_host_memory(target.data())}};
  ASSERT_TRUE(is_ok(fetch(items)));
  EXPECT_TRUE(target == content);
}

/// Images and targets of several chunks, in every pair of memories.
TEST_P(TransportConformance, LongImagesGoFromEveryMemoryToEveryOther) {
  const size_t node = world_->nodes() - 1;
  for (size_t to = 0; to < 3; ++to)
    for (size_t from = 0; from < 3; ++from) {
      SCOPED_TRACE(testing::Message() << from << " to " << to);
      const Bytes content = random_bytes((9 << 20) + 12345, random_);
      ImageRef image = world_->seen(node, world_->publish(node, content));
      // Every other 100 bytes of it.
      StridedCopy copy = whole_copy(100);
      copy.level_count = 1;
      copy.levels[0] = {content.size() / 200, 200, 150};
      Bytes expected(copy.target_end() + 10);
      run_strided_copy(copy, content.data(), 0, copy.target_end(), expected.data());
      ImageWriter writer =
          world_->store(0)
              .create(expected.size(), ImageStore::TakeSpace::kNow, world_->memory(0, to))
              .value();
      std::vector<FetchItem> items;
      for (const uint64_t begin : {0, 3'000'050})
        items.push_back({image.get(), copy, begin, begin == 0 ? 3'000'050 : copy.target_end(),
                         writer.map().value() + begin, &writer});
      ASSERT_TRUE(is_ok(fetch(items)));
      const ImageRef made = world_->store(0).publish(std::move(writer)).value();
      EXPECT_TRUE(content_of(*made) == expected);
      ASSERT_TRUE(is_ok(world_->store(0).remove(made->id())));
      ASSERT_TRUE(is_ok(world_->store(node).remove(image->id())));
    }
}

TEST_P(TransportConformance, WhatCameBeforeAnErrorStaysInEveryMemory) {
  const size_t node = world_->nodes() - 1;
  for (size_t to = 0; to < 3; ++to) {
    SCOPED_TRACE(to);
    const Bytes content = random_bytes(5000, random_);
    ImageRef image = world_->seen(node, world_->publish(node, content));
    const Image gone(ImageId{"0123456789abcdef"},
                     MemoryPlace{image->is_here() ? "elsewhere" : image->node()}, 100);
    ImageWriter writer =
        world_->store(0).create(5100, ImageStore::TakeSpace::kNow, world_->memory(0, to)).value();
    const MemoryPointer at = writer.map().value();
    std::vector<FetchItem> items{{image.get(), whole_copy(5000), 0, 5000, at, &writer},
                                 {&gone, whole_copy(100), 0, 100, at + 5000, &writer}};
    EXPECT_TRUE(has_error(fetch(items), Code::kUnavailable, "0123456789abcdef"));
    EXPECT_EQ(items[0].begin, 5000u);
    EXPECT_EQ(items[0].target_at_begin, at + 5000);
    EXPECT_EQ(items[1].begin, 0u);
    const Bytes came = content_of(*world_->store(0).show(writer).value());
    EXPECT_TRUE(std::equal(content.begin(), content.end(), came.begin()));
  }
}

TEST_P(TransportConformance, MoreItemsThanARequestHoldsArrive) {
  constexpr size_t kItems = 70'000, kImages = 100, kItemBytes = 5;
  const size_t node = world_->nodes() - 1;
  std::vector<Bytes> contents;
  std::vector<ImageRef> images;
  for (size_t i = 0; i < kImages; ++i) {
    contents.push_back(random_bytes(10'000, random_));
    images.push_back(world_->seen(node, world_->publish(node, contents[i])));
  }
  Bytes target(kItems * kItemBytes), expected(target.size());
  std::vector<FetchItem> items;
  for (size_t i = 0; i < kItems; ++i) {
    StridedCopy copy = whole_copy(kItemBytes);
    copy.source_offset = random_() % 9'000;
    const size_t image = random_() % kImages;
    std::copy_n(contents[image].begin() + static_cast<ptrdiff_t>(copy.source_offset), kItemBytes,
                expected.begin() + static_cast<ptrdiff_t>(i * kItemBytes));
    items.push_back(
        {images[image].get(), copy, 0, kItemBytes, in_host_memory(target.data() + i * kItemBytes)});
  }
  ASSERT_TRUE(is_ok(fetch(items)));
  EXPECT_TRUE(target == expected);
}

TEST_P(TransportConformance, NothingToFetchIsNoError) {
  std::vector<FetchItem> none;
  EXPECT_TRUE(is_ok(fetch(none)));
  ImageRef image = world_->seen(0, world_->publish(0, Bytes(10)));
  std::byte target{7};
  std::vector<FetchItem> items{{image.get(), whole_copy(10), 10, 20, in_host_memory(&target)},
                               {image.get(), whole_copy(0), 0, 5, in_host_memory(&target)},
                               {image.get(), whole_copy(10), 3, 3, in_host_memory(&target)}};
  EXPECT_TRUE(is_ok(fetch(items)));
  for (const FetchItem& item : items) EXPECT_EQ(item.begin, item.end);
  EXPECT_EQ(target, std::byte{7});
}

TEST_P(TransportConformance, AnImageThatIsGoneIsUnavailableAndWhatCameBeforeStays) {
  const size_t node = world_->nodes() - 1;
  const Bytes content = random_bytes(5000, random_);
  ImageRef image = world_->seen(node, world_->publish(node, content));
  const Image gone(ImageId{"0123456789abcdef"},
                   MemoryPlace{image->is_here() ? "elsewhere" : image->node()}, 100);
  Bytes target(5100);
  std::vector<FetchItem> items{
      {image.get(), whole_copy(5000), 0, 5000, in_host_memory(target.data())},
      {&gone, whole_copy(100), 0, 100, in_host_memory(target.data() + 5000)},
  };
  EXPECT_TRUE(has_error(fetch(items), Code::kUnavailable, "0123456789abcdef"));
  EXPECT_EQ(items[0].begin, 5000u);
  EXPECT_EQ(items[1].begin, 0u);
  EXPECT_TRUE(std::equal(content.begin(), content.end(), target.begin()));
}

TEST_P(TransportConformance, AnImageShorterThanItsRunsIsCorrupt) {
  const size_t node = world_->nodes() - 1;
  ImageRef image = world_->seen(node, world_->publish(node, Bytes(4096)));
  Bytes target(8192);
  std::vector<FetchItem> items{
      {image.get(), whole_copy(8192), 0, 8192, in_host_memory(target.data())}};
  EXPECT_TRUE(has_error(fetch(items), Code::kCorrupt, image->id().text));
}

TEST_P(TransportConformance, ATargetInADevicesMemoryIsRefusedByName) {
  const size_t node = world_->nodes() - 1;
  const Bytes content = random_bytes(8192, random_);
  ImageRef image = world_->seen(node, world_->publish(node, content));
  Bytes target(4096);
  std::vector<FetchItem> items{
      {image.get(), whole_copy(4096), 0, 4096, in_host_memory(target.data())},
      {image.get(), whole_copy(8192), 4096, 8192, MemoryPointer(NodeMemory::cuda(3), 1 << 20)}};
  EXPECT_TRUE(has_error(fetch(items), Code::kInvalidArgument, "cuda:3"));
  EXPECT_EQ(items[1].begin, 4096u);
  EXPECT_EQ(items[1].target_at_begin, MemoryPointer(NodeMemory::cuda(3), 1 << 20));
}

TEST_P(TransportConformance, ASourceInADevicesMemoryIsUnavailable) {
  const Image source(ImageId{"0123456789abcdef"}, {"", NodeMemory::cuda(3)}, 4096);
  Bytes target(4096);
  std::vector<FetchItem> items{{&source, whole_copy(4096), 0, 4096, in_host_memory(target.data())}};
  EXPECT_TRUE(has_error(fetch(items), Code::kUnavailable, "cuda:3"));
}

TEST_P(TransportConformance, ACallThatIsCancelledSaysSo) {
  const size_t node = world_->nodes() - 1;
  ImageRef image = world_->seen(node, world_->publish(node, Bytes(4096)));
  Bytes target(4096);
  std::vector<FetchItem> items{
      {image.get(), whole_copy(4096), 0, 4096, in_host_memory(target.data())}};
  std::stop_source stop;
  stop.request_stop();
  EXPECT_TRUE(has_error(fetch(items, stop.get_token()), Code::kCancelled));
}

TEST_P(TransportConformance, CallsRunAtTheSameTime) {
  std::vector<std::thread> threads;
  const uint64_t seed = std::random_device()();
  SCOPED_TRACE("PTC_SEED=" + std::to_string(seed));
  for (uint64_t i = 0; i < 4; ++i)
    threads.emplace_back([this, seed, i] { random_round(seed + i); });
  for (std::thread& thread : threads) thread.join();
}

}  // namespace ptc
