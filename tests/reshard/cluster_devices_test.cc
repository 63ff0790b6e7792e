// Layouts in the memory of devices of several nodes.
#include "tests/reshard/cluster_fixture.h"
#include "tests/support/becomes.h"

namespace ptc::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::UnorderedElementsAre;

/// w0 and w1 have two devices each, and w2 has none.
class DevicesTest : public ClusterTest {
 protected:
  DevicesTest() : ClusterTest(3, {}, {"host:64M,64M", "host:64M,64M", "off"}) {
    EXPECT_TRUE(cluster_.store(0).create_job("job").has_value());
    write(0, LayoutSpec());
    commit(0);
  }
  /// Where files with tensors are, and within reach.
  std::set<std::string> places(unsigned node) {
    std::set<std::string> found;
    const auto stored = cluster_.job(node, "job")->find_checkpoint("base")->stored();
    for (size_t i = 0; i < stored->images.size(); ++i) {
      const StoredImage& image = stored->images[i];
      if (image.image != nullptr && !stored->layouts()[i].arrays.empty())
        found.insert(MemoryPlace{image.node, image.memory}.to_string());
    }
    return found;
  }
  std::string refusal(const std::string& text) {
    const Result<> saved = cluster_.job(0, "job")->save_layout(text);
    return saved.has_error() ? saved.error().message() : "accepted";
  }
};

constexpr const char* kOnBoth =
    R"({"tp": 4, "pp": 1, "dp": 1, "memory": "device",
        "devices": ["w0:0", "w0:1", "w1:0", "w1:1"]})";

TEST_F(DevicesTest, RanksFilesAreInTheMemoryOfTheirDevicesAndReadFromEverywhere) {
  edit(0, kOnBoth);
  cluster_.wait_settled();
  EXPECT_THAT(places(2), UnorderedElementsAre("w0/cuda:0", "w0/cuda:1", "w1/cuda:0", "w1/cuda:1"));
  expect_everywhere({0, 1, 2}, spec_of(R"({"tp": 4, "pp": 1, "dp": 1})"));
  // From devices to others, also of another node.
  edit(1, R"({"tp": 2, "pp": 1, "dp": 1, "memory": "device", "devices": ["w1:1", "w0:0"]})");
  cluster_.wait_settled();
  EXPECT_THAT(places(0), UnorderedElementsAre("w0/cuda:0", "w1/cuda:1"));
  expect_everywhere({0, 1, 2}, spec_of(R"({"tp": 2, "pp": 1, "dp": 1})"));
  // And out of them.
  edit(2, R"({"tp": 2, "pp": 1, "dp": 1, "devices": ["w2:0", "w0:0"]})");
  cluster_.wait_settled();
  EXPECT_THAT(places(1), UnorderedElementsAre("w0", "w2"));
  expect_everywhere({0, 1, 2}, spec_of(R"({"tp": 2, "pp": 1, "dp": 1})"));
}

TEST_F(DevicesTest, NodesWithoutDevicesAreNamed) {
  EXPECT_THAT(refusal(R"({"tp": 1, "pp": 1, "dp": 1, "memory": "device", "devices": ["w2:0"]})"),
              AllOf(HasSubstr("node w2 has no device for rank 0"),
                    HasSubstr("start its ptcfs with --gpu")));
  EXPECT_THAT(
      refusal(R"({"tp": 1, "pp": 1, "dp": 1, "memory": "device", "devices": ["w1:7"]})"),
      AllOf(HasSubstr("device w1:7, which node w1 does not have"), HasSubstr("cuda:0, cuda:1")));
  EXPECT_THAT(places(0), UnorderedElementsAre("w0"));
}

TEST_F(DevicesTest, ReplicasAreInTheHostsMemoryAndOutliveTheDevices) {
  edit(0, R"({"tp": 4, "pp": 1, "dp": 1, "memory": "device", "replicas": 1,
              "devices": ["w0:0", "w0:1", "w1:0", "w1:1"]})");
  cluster_.wait_settled();
  ASSERT_TRUE(becomes([&] {
    return places(2) == std::set<std::string>{"w0/cuda:0", "w0/cuda:1", "w1/cuda:0", "w1/cuda:1",
                                              "w0",        "w1",        "w2"} ||
           (places(2).contains("w0/cuda:0") && places(2).contains("w1/cuda:1"));
  }));
  const LayoutSpec spec = spec_of(R"({"tp": 4, "pp": 1, "dp": 1})");
  for (uint64_t rank = 0; rank < 4; ++rank) EXPECT_EQ(holders(0, spec, rank).size(), 2u) << rank;
  // What was in w1's devices is gone after its start, and is made anew.
  cluster_.stop(1);
  cluster_.start(1);
  cluster_.wait_settled();
  EXPECT_THAT(cluster_.job(0, "job")->find_checkpoint("base")->lost_tensors(), IsEmpty());
  EXPECT_TRUE(
      becomes([&] { return places(0).contains("w1/cuda:0") && places(0).contains("w1/cuda:1"); }));
  expect_everywhere({0, 1, 2}, spec);
}

TEST_F(DevicesTest, CopiesInDevicesAreNoReplicas) {
  edit(0, R"({"tp": 1, "pp": 1, "dp": 2, "memory": "device", "replicas": 1,
              "devices": ["w0:0", "w1:0"]})");
  cluster_.wait_settled();
  const std::set<std::string> found = places(2);
  EXPECT_TRUE(found.contains("w0/cuda:0") && found.contains("w1/cuda:0"));
  EXPECT_TRUE(found.contains("w0") || found.contains("w1") || found.contains("w2"));
  // All daemons end at once, and with them what is in devices.
  for (unsigned node : {0, 1, 2}) cluster_.stop(node);
  for (unsigned node : {0, 1, 2}) cluster_.start(node);
  cluster_.wait_settled();
  EXPECT_THAT(cluster_.job(0, "job")->find_checkpoint("base")->lost_tensors(), IsEmpty());
  EXPECT_TRUE(
      becomes([&] { return places(0).contains("w0/cuda:0") && places(0).contains("w1/cuda:0"); }));
  expect_everywhere({0, 1, 2}, spec_of(R"({"tp": 1, "pp": 1, "dp": 2})"));
}

TEST_F(DevicesTest, RanksGoToNodesWithDevicesAndWhereNoneIsLeftToTheHost) {
  edit(0, R"({"tp": 2, "pp": 1, "dp": 1, "memory": "device", "replicas": 1})");
  cluster_.wait_settled();
  const auto in_devices = [&](unsigned node) {
    std::set<std::string> found = places(node);
    std::erase_if(found, [](const std::string& place) { return place.find('/') == place.npos; });
    return found;
  };
  EXPECT_TRUE(becomes([&] { return in_devices(2).size() == 2; }));
  const LayoutSpec spec = spec_of(R"({"tp": 2, "pp": 1, "dp": 1})");
  cluster_.stop(1);  // w0 has devices, and w2 none
  cluster_.wait_settled();
  EXPECT_TRUE(becomes([&] {
    return in_devices(0) == std::set<std::string>{"w0/cuda:0", "w0/cuda:1"} &&
           cluster_.job(0, "job")->status_json().find("missing_copy_bytes") == std::string::npos;
  })) << cluster_.job(0, "job")->status_json();
  EXPECT_THAT(cluster_.job(0, "job")->status_json(), HasSubstr(R"("state": "idle")"));
  cluster_.stop(0);
  cluster_.wait_settled();
  expect_everywhere({2}, spec);
  EXPECT_THAT(places(2), UnorderedElementsAre("w2"));
  EXPECT_THAT(cluster_.job(2, "job")->status_json(), HasSubstr(R"("state": "idle")"));
}

}  // namespace
}  // namespace ptc::testing
