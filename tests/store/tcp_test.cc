#include "tcp_world.h"
#include "transport_conformance.h"

namespace ptc {
namespace {

INSTANTIATE_TEST_SUITE_P(Tcp, TransportConformance,
                         testing::Values(TransportBackend{
                             "tcp", [] { return std::make_unique<TcpWorld>(); }}));

}  // namespace
}  // namespace ptc
