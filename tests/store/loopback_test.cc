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

INSTANTIATE_TEST_SUITE_P(Loopback, TransportConformance,
                         testing::Values(TransportBackend{
                             "loopback", [] { return std::make_unique<LoopbackWorld>(); }}));

}  // namespace
}  // namespace ptc
