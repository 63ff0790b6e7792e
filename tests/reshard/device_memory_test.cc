// Random layouts, out of the host's memory into those of devices and back.
#include <gtest/gtest.h>

#include <iostream>
#include <random>

#include "reshard/exec/fetch_images.h"
#include "reshard/exec/image_sums.h"
#include "reshard/ptc/slicing.h"
#include "store/transport/device.h"
#include "tests/store/expect_error.h"
#include "tests/store/temp_dir.h"

namespace ptc {
namespace {

class DeviceMemories : public testing::Test {
 protected:
  uint64_t below(uint64_t end) { return random_() % end; }

  void some_tensors() {
    facts_.clear();
    bits_.clear();
    for (uint64_t i = 0, count = 1 + below(6); i < count; ++i) {
      Shape shape;
      for (uint64_t axis = 0, axes = 1 + below(3); axis < axes; ++axis)
        shape.push_back(1 + below(axis + 1 == axes && below(2) == 0 ? 2000 : 24));
      facts_.push_back({below(2) == 0 ? DType::kU8 : DType::kF32, shape, {}});
      bits_.push_back(static_cast<uint8_t>(dtype_bits(facts_.back().dtype)));
    }
  }

  /// All tensors in so many files, each cut in one way, in memories that there are.
  std::vector<ImageLayout> some_files(uint64_t count, bool in_host) {
    std::vector<ImageLayout> files(count);
    std::vector<uint64_t> cut_axes;
    for (const TensorFacts& facts : facts_) cut_axes.push_back(below(facts.shape.size()));
    for (uint64_t file = 0; file < count; ++file) {
      std::vector<ArraySlot> slots;
      uint64_t bytes = 16;
      for (uint32_t tensor = 0; tensor < facts_.size(); ++tensor) {
        SubTensor part = SubTensor::whole(facts_[tensor].shape);
        const auto axis = static_cast<uint32_t>(cut_axes[tensor]);
        const uint64_t size = facts_[tensor].shape[axis], each = size / count + 1;
        const uint64_t begin = std::min(file * each, size), left = std::min(each, size - begin);
        if (left == 0) continue;
        if (left < size) cut_axis(part, axis, {left, {{begin, 0, left}}});
        bytes += below(3) == 0 ? below(100) : 0;  // padding
        for (uint64_t times = below(6) == 0 ? 2 : 1; times > 0; --times) {
          slots.push_back({tensor, bytes, SharedPart(part)});
          bytes += Box::whole(part.local_shape).volume() * bits_[tensor] / 8;
        }
      }
      files[file].bytes = bytes + below(20);
      files[file].literals = std::string(16, 'h');
      files[file].arrays = std::move(slots);
      if (!in_host && below(4) > 0) files[file].memory = NodeMemory::cuda(below(2));
    }
    return files;
  }

  Result<std::vector<ImageRef>> make(const std::vector<ImageLayout>& held,
                                     const std::vector<ImageRef>& images,
                                     const std::vector<ImageLayout>& wanted,
                                     ChecksumLedger& ledger) {
    const SourceIndex index(held, bits_);
    PTC_TRY(const TransferPlan plan, plan_transfers(index, wanted));
    std::vector<FetchTarget> targets;
    for (uint32_t i = 0; i < wanted.size(); ++i) {
      FetchTarget target{i, &wanted[i], {}};
      if (plan.images[i].kept) {
        // Made once more.
        PTC_TRY(auto transfers, index.plan_image(wanted[i]));
        target.transfers = std::move(transfers);
      } else {
        PTC_TRY(target.transfers, plan.transfers_of(i));
      }
      targets.push_back(std::move(target));
    }
    std::atomic<uint64_t> bytes_done = 0;
    return fetch_images(*store_, executor_, targets, {images, {}, nullptr}, facts_, ledger,
                        bytes_done, {});
  }

  /// All of the tensors, in one image of the host's.
  std::string whole(const std::vector<ImageLayout>& held, const std::vector<ImageRef>& images) {
    const SourceIndex index(held, bits_);
    ImageLayout all = whole_;
    const GatherProgram program(all.literals, all.bytes, index.plan_image(all).value(), images);
    std::string bytes(all.bytes, '?');
    EXPECT_TRUE(
        is_ok(program.read(executor_.transport(), 0, std::as_writable_bytes(std::span(bytes)))));
    return bytes;
  }

  void expect_sums(const ChecksumLedger& ledger) {
    for (uint32_t tensor = 0; tensor < facts_.size(); ++tensor)
      EXPECT_EQ(ledger.total(tensor), facts_[tensor].checksum) << tensor;
  }

  TempDir dir_;
  std::shared_ptr<const Devices> devices_ = Devices::open("host:64M,64M").value();
  std::unique_ptr<ImageStore> store_ =
      ImageStore::open(dir_.file("images"), {.devices = devices_}).value();
  Executor executor_{2, make_device_transport(devices_, make_loopback_transport())};
  std::mt19937_64 random_;
  std::vector<TensorFacts> facts_;
  std::vector<uint8_t> bits_;
  ImageLayout whole_;
};

TEST_F(DeviceMemories, RandomLayoutsKeepTheirBytesOverTheMemories) {
  const char* given = std::getenv("PTC_SEED");
  const char* rounds = std::getenv("PTC_ROUNDS");
  const uint64_t seed = given ? std::strtoull(given, nullptr, 10) : std::random_device()();
  const uint64_t last = seed + (rounds ? std::strtoull(rounds, nullptr, 10) : 40);
  for (uint64_t now = seed; now < last && !HasFailure(); ++now) {
    SCOPED_TRACE("PTC_SEED=" + std::to_string(now) + " PTC_ROUNDS=1");
    random_.seed(now);
    some_tensors();
    std::vector<ImageLayout> held = some_files(1, true);
    whole_ = held.front();
    std::string content(whole_.bytes, '\0');
    for (char& byte : content) byte = static_cast<char>(random_());
    content.replace(0, 16, std::string(16, 'h'));
    std::vector<ImageRef> images;
    {
      ImageWriter writer = store_->create(content.size()).value();
      ASSERT_TRUE(is_ok(writer.write(0, std::as_bytes(std::span(content)))));
      images.push_back(store_->publish(std::move(writer)).value());
    }
    ChecksumLedger first;
    {
      // The same tensor twice in one file is the same bytes: made so by the first copy.
      ChecksumLedger unused;
      std::vector<ImageLayout> once = some_files(2, true);
      images = make(held, images, once, unused).value();
      held = once;
      std::vector<Executor::StoredArrays> stored;
      for (size_t i = 0; i < held.size(); ++i) stored.push_back({&held[i], images[i].get()});
      ASSERT_TRUE(is_ok(executor_.hash_images(stored, facts_, first, {})));
    }
    for (uint32_t tensor = 0; tensor < facts_.size(); ++tensor)
      facts_[tensor].checksum = first.total(tensor);
    const std::string before = whole(held, images);
    for (int step = 0; step < 4; ++step) {
      SCOPED_TRACE(step);
      const std::vector<ImageLayout> wanted = some_files(1 + below(4), step == 3);
      ChecksumLedger ledger, again;
      auto made = make(held, images, wanted, ledger);
      ASSERT_TRUE(is_ok(made));
      expect_sums(ledger);
      for (const ImageRef& image : images) ASSERT_TRUE(is_ok(store_->remove(image->id())));
      held = wanted;
      images = std::move(made).value();
      std::vector<Executor::StoredArrays> stored;
      for (size_t i = 0; i < held.size(); ++i) {
        EXPECT_EQ(images[i]->place().memory, held[i].memory);
        stored.push_back({&held[i], images[i].get()});
        const ImageSums sums = ImageSums::make(held[i], facts_).value();
        if (images[i]->device() != nullptr) {
          EXPECT_TRUE(sums.padding_is_zero_on_device(*images[i]).value());
        } else {
          EXPECT_TRUE(sums.padding_is_zero(images[i]->host_bytes().value()));
        }
      }
      ASSERT_TRUE(is_ok(executor_.hash_images(stored, facts_, again, {})));
      expect_sums(again);
      EXPECT_TRUE(whole(held, images) == before);
    }
    for (const ImageRef& image : images) ASSERT_TRUE(is_ok(store_->remove(image->id())));
  }
  for (const auto& device : devices_->room())
    EXPECT_EQ(device.room.free + 4 * Staging::kBytes, device.room.bytes) << "memory that is kept";
}

TEST_F(DeviceMemories, PaddingThatIsNotZeroIsSeen) {
  facts_ = {{DType::kU8, {1000}, {}}};
  ImageLayout layout;
  layout.literals = std::string(16, 'h');
  layout.arrays = {{0, 20, SharedPart(SubTensor::whole({1000}))}};
  layout.bytes = 1100;
  const ImageSums sums = ImageSums::make(layout, facts_).value();
  for (const uint64_t at : {uint64_t{0}, uint64_t{15}, uint64_t{16}, uint64_t{19}, uint64_t{20},
                            uint64_t{1019}, uint64_t{1020}, uint64_t{1099}}) {
    SCOPED_TRACE(at);
    ImageWriter writer =
        store_->create(layout.bytes, ImageStore::TakeSpace::kNow, NodeMemory::cuda(0)).value();
    const std::byte one{1};
    ASSERT_TRUE(is_ok(writer.write(at, {&one, 1})));
    const ImageRef image = store_->publish(std::move(writer)).value();
    const bool is_padding = (at >= 16 && at < 20) || at >= 1020;
    EXPECT_EQ(sums.padding_is_zero_on_device(*image).value(), !is_padding);
    ASSERT_TRUE(is_ok(store_->remove(image->id())));
  }
}

TEST_F(DeviceMemories, TooLittleRoomLeavesNothingBehind) {
  facts_ = {{DType::kU8, {40 << 20}, {}}};
  bits_ = {8};
  ImageLayout layout;
  layout.arrays = {{0, 0, SharedPart(SubTensor::whole({40 << 20}))}};
  layout.bytes = 40 << 20;
  ImageWriter writer = store_->create(layout.bytes).value();
  const ImageRef source = store_->publish(std::move(writer)).value();
  ImageLayout wanted = layout;
  wanted.memory = NodeMemory::cuda(1);
  ChecksumLedger ledger;
  EXPECT_TRUE(has_error(make({layout}, {source}, {wanted, wanted}, ledger), Code::kNoSpace,
                        "an image of 40.0 MiB: cuda:1 has"));
  EXPECT_EQ(store_->list().value().size(), 1u);
  EXPECT_EQ(devices_->room()[1].room.free + 4 * Staging::kBytes, 64u << 20);
}

}  // namespace
}  // namespace ptc
