// The transport over links, with devices that are none: what NCCL does, a socket does.
#include <gmock/gmock.h>

#include <thread>

#include "link_world.h"
#include "transport_conformance.h"

namespace ptc {
namespace {

using namespace std::chrono_literals;

INSTANTIATE_TEST_SUITE_P(Link, TransportConformance,
                         testing::Values(TransportBackend{"link", [] {
                                                            LinkWorld::Options options;
                                                            options.moves_targets = true;
                                                            return std::make_unique<LinkWorld>(
                                                                options);
                                                          }}));

}  // namespace
}  // namespace ptc
