#include "store/base/memory_place.h"

#include <gtest/gtest.h>

#include "expect_error.h"

namespace ptc {
namespace {

static_assert(sizeof(NodeMemory) == 4 && sizeof(MemoryPointer) == 16);

TEST(NodeMemory, HasTheNamesThatPeopleWrite) {
  EXPECT_TRUE(NodeMemory().is_host());
  EXPECT_EQ(NodeMemory::host().to_string(), "host");
  EXPECT_EQ(NodeMemory::cuda(0).to_string(), "cuda:0");
  EXPECT_EQ(NodeMemory::parse("host").value(), NodeMemory::host());
  for (const uint32_t device : {0u, 7u, 10u, NodeMemory::kMostDevices - 1}) {
    const NodeMemory memory = NodeMemory::cuda(device);
    EXPECT_FALSE(memory.is_host());
    EXPECT_EQ(memory.device(), device);
    EXPECT_EQ(NodeMemory::parse(memory.to_string()).value(), memory);
  }
}

TEST(NodeMemory, RefusesOtherNames) {
  for (const char* name :
       {"", "hosts", "HOST", " host", "cuda", "cuda:", "cuda:-1", "cuda:+1", "cuda:01", "cuda:1 ",
        "cuda:1x", "cuda:1024", "cuda:4294967296", "cuda:99999999999999999999", "rocm:0", "0"})
    EXPECT_TRUE(has_error(NodeMemory::parse(name), Code::kInvalidArgument, "no memory of a node"))
        << name;
}

TEST(MemoryPlace, IsANodeAndItsMemoryUnlessThatIsTheHosts) {
  const std::pair<MemoryPlace, const char*> cases[] = {{{}, ""},
                                                       {{"w1"}, "w1"},
                                                       {{"w1", NodeMemory::cuda(3)}, "w1/cuda:3"},
                                                       {{"", NodeMemory::cuda(0)}, "/cuda:0"},
                                                       {{"host"}, "host"},
                                                       {{"a.b-c"}, "a.b-c"}};
  for (const auto& [place, text] : cases) {
    EXPECT_EQ(place.to_string(), text);
    EXPECT_EQ(MemoryPlace::parse(text).value(), place) << text;
  }
  EXPECT_TRUE(has_error(MemoryPlace::parse("w1/"), Code::kInvalidArgument));
  EXPECT_TRUE(has_error(MemoryPlace::parse("w1/cuda"), Code::kInvalidArgument, "'cuda'"));
}

TEST(MemoryPointer, IsTheProcessorsInTheHostsMemoryOnly) {
  std::byte bytes[8] = {};
  MemoryPointer here = in_host_memory(bytes);
  EXPECT_EQ(here.host().value(), bytes);
  EXPECT_EQ((here + 3).host().value(), bytes + 3);
  here += 8;
  EXPECT_EQ(here.host().value(), bytes + 8);
  EXPECT_EQ(in_host_memory(static_cast<const std::byte*>(bytes)).host().value(), bytes);

  const MemoryPointer device(NodeMemory::cuda(2), 0x7f00'0000'0000);
  EXPECT_EQ((device + 16).address(), 0x7f00'0000'0010u);
  EXPECT_EQ((device + 16).memory(), NodeMemory::cuda(2));
  EXPECT_TRUE(has_error(device.host(), Code::kInvalidArgument, "cuda:2"));
  EXPECT_NE(device, MemoryPointer(NodeMemory::cuda(1), device.address()));
}

}  // namespace
}  // namespace ptc
