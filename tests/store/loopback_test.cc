#include "store/transport/device.h"
#include "transport_conformance.h"

namespace ptc {
namespace {

/// One node, which has all images.
class LoopbackWorld final : public TransportWorld {
 public:
  size_t nodes() const override { return 1; }
  ImageStore& store(size_t) override { return *store_; }
  ImageRef seen(size_t, const ImageRef& image) override { return image; }
  Transport& transport() override { return *transport_; }

 private:
  std::unique_ptr<ImageStore> store_ = ImageStore::open(directory() + "/images").value();
  std::unique_ptr<Transport> transport_ = make_loopback_transport();
};

/// The same with two devices.
class DeviceWorld final : public TransportWorld {
 public:
  size_t nodes() const override { return 1; }
  ImageStore& store(size_t) override { return *store_; }
  ImageRef seen(size_t, const ImageRef& image) override { return image; }
  Transport& transport() override { return *transport_; }

 private:
  std::shared_ptr<const Devices> devices_ = Devices::open("host:256M,256M").value();
  std::unique_ptr<ImageStore> store_ =
      ImageStore::open(directory() + "/images", {.devices = devices_}).value();
  std::unique_ptr<Transport> transport_ =
      make_device_transport(devices_, make_loopback_transport());
};

INSTANTIATE_TEST_SUITE_P(Loopback, TransportConformance,
                         testing::Values(TransportBackend{
                             "loopback", [] { return std::make_unique<LoopbackWorld>(); }}));
INSTANTIATE_TEST_SUITE_P(Device, TransportConformance,
                         testing::Values(TransportBackend{
                             "device", [] { return std::make_unique<DeviceWorld>(); }}));

}  // namespace
}  // namespace ptc
