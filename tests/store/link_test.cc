#include "link_conformance.h"
#include "store/device/cuda_device.h"
#include "store/device/host_device.h"
#include "store/device/host_link.h"
#include "store/device/nccl_library.h"
#include "store/device/nccl_link.h"

namespace ptc {
namespace {

LinkEnds host_ends(std::string&) {
  return {std::make_unique<HostDevice>(), std::make_unique<HostDevice>(),
          std::make_unique<HostLinkMaker>(), std::make_unique<HostLinkMaker>()};
}
INSTANTIATE_TEST_SUITE_P(Host, LinkConformance, ::testing::Values(LinkKind{"host", &host_ends}));

/// Two devices where there are two, else one as two: then NCCL wants NCCL_MULTI_RANK_GPU_ENABLE=1.
LinkEnds nccl_ends(std::string& why) {
  auto maker = make_nccl_links(), other = make_nccl_links();
  auto asks = open_cuda_device(0), answers = open_cuda_device(cuda_device_count() > 1 ? 1 : 0);
  if (maker.has_error() || asks.has_error() || answers.has_error()) {
    why = maker.has_error() ? maker.error().message()
                            : (asks.has_error() ? asks : answers).error().message();
    return {};
  }
  return {std::move(asks).value(), std::move(answers).value(), std::move(maker).value(),
          std::move(other).value()};
}
INSTANTIATE_TEST_SUITE_P(Nccl, LinkConformance, ::testing::Values(LinkKind{"nccl", &nccl_ends}));

TEST(NcclLibrary, WhatIsNotThereIsSaidAndWhatIsHasItsName) {
  const auto nccl = NcclLibrary::load();
  if (nccl.has_error()) {
    EXPECT_TRUE(has_error(nccl, Code::kUnavailable, "nvidia-nccl-cu13"));
    EXPECT_TRUE(has_error(make_nccl_links(), Code::kUnavailable, "libnccl2"));
    GTEST_SKIP() << nccl.error().message();
  }
  EXPECT_THAT(nccl.value()->name, ::testing::MatchesRegex("NCCL 2\\.[0-9]+\\.[0-9]+"));
  EXPECT_EQ(NcclLibrary::load().value(), nccl.value());
  EXPECT_TRUE(is_ok(nccl.value()->check(NcclLibrary::kInProgress, "x")));
  EXPECT_TRUE(has_error(nccl.value()->check(4, "what"), Code::kUnavailable, "what: "));
}

}  // namespace
}  // namespace ptc
