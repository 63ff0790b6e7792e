// Images in the memory of a device.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "expect_error.h"
#include "store/image/image_store.h"
#include "temp_dir.h"

namespace ptc {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

constexpr uint64_t kRoom = 32 << 20;
const NodeMemory kSecond = NodeMemory::cuda(1);

class DeviceImages : public testing::Test {
 protected:
  DeviceImages() { open(); }
  void open() {
    devices_ = Devices::open("host:32M,32M").value();
    store_ = ImageStore::open(dir_.file("images"), {.devices = devices_}).value();
  }
  uint64_t used() const { return kRoom - devices_->find(kSecond)->room().value().free; }
  /// Once lanes are there: they stay.
  void make_lanes() {
    const DeviceMemory some = devices_->find(kSecond)->allocate(1).value();
    ASSERT_TRUE(is_ok(devices_->zero(some.begin(), 1)));
  }
  static std::string text_of(const Image& image) {
    std::string text(image.bytes(), '?');
    StridedCopy copy;
    copy.run_bytes = image.bytes();
    EXPECT_TRUE(is_ok(image.device()->devices->read(image.map().value(), copy, 0, text.size(),
                                                    reinterpret_cast<std::byte*>(text.data()))));
    return text;
  }
  static std::span<const std::byte> bytes_of(std::string_view text) {
    return std::as_bytes(std::span(text));
  }

  TempDir dir_;
  std::shared_ptr<const Devices> devices_;
  std::unique_ptr<ImageStore> store_;
};

TEST_F(DeviceImages, AreFilledPublishedAndFound) {
  make_lanes();
  const uint64_t before = used();
  ImageWriter writer = store_->create(10, ImageStore::TakeSpace::kLater, kSecond).value();
  EXPECT_EQ(writer.map().value().memory(), kSecond);
  EXPECT_TRUE(has_error(writer.host_bytes(), Code::kInvalidArgument, "cuda:1"));
  EXPECT_TRUE(is_ok(writer.take_space(0, 10)));
  EXPECT_TRUE(is_ok(writer.write(2, bytes_of("abc"))));
  const ImageRef shown = store_->show(writer).value();
  EXPECT_EQ(text_of(*shown), std::string("\0\0abc\0\0\0\0\0", 10));
  const MemoryPointer at = writer.map().value();
  ImageRef image = store_->publish(std::move(writer)).value();
  EXPECT_EQ(image, shown);
  EXPECT_EQ(image->map().value(), ConstMemoryPointer(at.memory(), at.address()));
  EXPECT_EQ(image->place(), (MemoryPlace{"", kSecond}));
  EXPECT_TRUE(image->is_here());
  EXPECT_FALSE(image->has_host_bytes());
  EXPECT_TRUE(has_error(image->host_bytes(), Code::kInvalidArgument, "cuda:1"));
  EXPECT_TRUE(has_error(image->use_file(), Code::kUnavailable, "the memory of cuda:1"));
  EXPECT_EQ(used() - before, 10u);

  const ImageId id = image->id();
  EXPECT_THAT(store_->list().value(), ElementsAre(id));
  EXPECT_TRUE(store_->is_draft(id));
  EXPECT_TRUE(is_ok(store_->confirm(id)));
  EXPECT_FALSE(store_->is_draft(id));
  EXPECT_TRUE(has_error(store_->open(id, 11), Code::kCorrupt, "10 bytes instead of 11"));
  EXPECT_EQ(store_->open(id, 10).value(), image);
}

TEST_F(DeviceImages, AreHeldByTheStoreUntilTheyAreRemovedAndThenByTheirHolders) {
  make_lanes();
  const uint64_t before = used();
  const auto publish = [&] {
    ImageWriter writer = store_->create(100, ImageStore::TakeSpace::kNow, kSecond).value();
    EXPECT_TRUE(is_ok(writer.write(0, bytes_of(std::string(100, 'x')))));
    return store_->publish(std::move(writer)).value()->id();
  };
  const ImageId held = publish(), free = publish();
  EXPECT_EQ(used() - before, 200u);
  EXPECT_TRUE(is_ok(store_->remove(free)));
  EXPECT_EQ(used() - before, 100u);
  EXPECT_TRUE(has_error(store_->open(free), Code::kNotFound, free.text));
  ImageRef image = store_->open(held).value();
  EXPECT_TRUE(is_ok(store_->remove(held)));
  EXPECT_THAT(store_->list().value(), IsEmpty());
  EXPECT_THAT(store_->drafts(), IsEmpty());
  EXPECT_EQ(store_->open(held).value(), image);  // as others ask for it by its id
  EXPECT_EQ(text_of(*image), std::string(100, 'x'));
  EXPECT_TRUE(is_ok(store_->remove(held)));  // it is gone already
  EXPECT_EQ(text_of(*image), std::string(100, 'x'));
  store_.reset();
  std::weak_ptr<const Devices> devices = devices_;
  EXPECT_EQ(used() - before, 100u);
  devices_.reset();
  EXPECT_EQ(text_of(*image), std::string(100, 'x'));
  image.reset();
  EXPECT_EQ(devices.lock(), nullptr);
}

TEST_F(DeviceImages, AreGivenUpWithTheirWriter) {
  make_lanes();
  const uint64_t before = used();
  { const auto writer = store_->create(1000, ImageStore::TakeSpace::kNow, kSecond).value(); }
  EXPECT_EQ(used(), before);
  EXPECT_THAT(store_->list().value(), IsEmpty());
}

TEST_F(DeviceImages, AreNotThereAfterAStart) {
  const ImageId id =
      store_->publish(store_->create(8, ImageStore::TakeSpace::kNow, kSecond).value())
          .value()
          ->id();
  store_.reset();
  open();
  EXPECT_TRUE(has_error(store_->open(id), Code::kNotFound, id.text));
  EXPECT_THAT(store_->list().value(), IsEmpty());
  EXPECT_THAT(store_->drafts(), IsEmpty());
}

TEST_F(DeviceImages, AnEmptyOneIsNowhereInItsMemory) {
  const ImageRef image =
      store_->publish(store_->create(0, ImageStore::TakeSpace::kNow, kSecond).value()).value();
  EXPECT_EQ(image->map().value(), ConstMemoryPointer(kSecond, 0));
}

TEST_F(DeviceImages, TooLittleRoomIsSaidByDevice) {
  EXPECT_TRUE(has_error(store_->create(kRoom + 1, ImageStore::TakeSpace::kNow, kSecond),
                        Code::kNoSpace,
                        "an image of 32.0 MiB: cuda:1 has 32.0 MiB of 32.0 MiB left"));
  EXPECT_TRUE(has_error(store_->create(1, ImageStore::TakeSpace::kNow, NodeMemory::cuda(2)),
                        Code::kInvalidArgument, "cuda:2 is not here"));
  const auto without = ImageStore::open(dir_.file("others")).value();
  EXPECT_TRUE(has_error(without->create(1, ImageStore::TakeSpace::kNow, kSecond),
                        Code::kInvalidArgument, "cuda:1 is not here: this node has 0 devices"));
}

}  // namespace
}  // namespace ptc
