// What a node makes for itself while it makes, or is asked to make, the same for another that
// leads.
#include <filesystem>
#include <future>

#include "tests/reshard/cluster_fixture.h"
#include "tests/support/becomes.h"

namespace ptc::testing {
namespace {

/// Bytes that come from other nodes wait here until they may pass.
class Gate {
 public:
  void wait() {
    std::unique_lock lock(mutex_);
    ++waiting_;
    opened_.wait(lock, [&] { return open_; });
  }
  void open() {
    std::lock_guard lock(mutex_);
    open_ = true;
    opened_.notify_all();
  }
  int waiting() const {
    std::lock_guard lock(mutex_);
    return waiting_;
  }

 private:
  mutable std::mutex mutex_;
  std::condition_variable opened_;
  bool open_ = false;  // guarded
  int waiting_ = 0;    // guarded
};

class PartsOfTwoTest : public ClusterTest {
 protected:
  ~PartsOfTwoTest() override { gate_.open(); }
  /// All of the checkpoint on w1: a rank there takes nothing from others.
  void put_on_w1() {
    ASSERT_TRUE(cluster_.store(0).create_job("job").has_value());
    write(0, LayoutSpec());
    commit(0);
    edit(0, R"({"tp": 1, "pp": 1, "dp": 1, "devices": ["w1:0"]})");
    cluster_.wait_settled();
    gating_ = cluster_.loses.during([this](const std::string&, std::string_view method) {
      if (method == "fetch") gate_.wait();
      return false;
    });
  }
  size_t images_on(unsigned node) const {
    size_t count = 0;
    for (const auto& entry :
         std::filesystem::directory_iterator(cluster_.directory(node) + "/images"))
      count += entry.is_regular_file() ? 1 : 0;
    return count;
  }
  /// Nothing is left of what was made and not decided on.
  void expect_only_decided_images(std::initializer_list<unsigned> nodes) {
    for (unsigned node : nodes) {
      size_t decided = 0;
      CheckpointRef checkpoint = cluster_.job(0, "job")->find_checkpoint("base");
      std::set<std::string> ids;
      for (const auto stored = checkpoint->stored(); const StoredImage& image : stored->images)
        if (image.node == LocalCluster::name(node)) ids.insert(image.id);
      decided = ids.size();
      EXPECT_TRUE(becomes([&] { return images_on(node) == decided; }))
          << "node " << node << ": " << images_on(node) << " images, decided on " << decided;
    }
  }

  Gate gate_;
  decltype(LocalCluster::loses)::Meanwhile gating_;
};

/// w0 leads, and its own part waits for bytes of w1; then w1 asks it for just this part, as one
/// does that leads next. The second waits for the first, and neither stops the other.
TEST_F(PartsOfTwoTest, WhoLeadsMakesItsOwnPartWhileAnotherAsksForIt) {
  put_on_w1();
  std::promise<std::string> told;
  std::atomic<bool> once = false;
  const auto breaking =
      cluster_.breaks.during([&](const std::string& asking, const std::string& node,
                                 std::string_view method, const std::string& request) {
        if (asking == "w0" && node == "w1" && method == "job/part" && !once.exchange(true))
          told.set_value(request);
        return false;
      });
  const std::string text = R"({"tp": 2, "pp": 1, "dp": 1, "devices": ["w1:0", "w0:0"]})";
  edit(0, text);
  const std::string request = told.get_future().get();
  ASSERT_TRUE(becomes([&] { return gate_.waiting() > 0; }));
  std::future<Result<std::string>> asked = std::async(std::launch::async, [&] {
    return cluster_.as_seen_by(1).ask("w0", PeerMethod::kPart, request);
  });
  const int before = gate_.waiting();
  EXPECT_EQ(asked.wait_for(std::chrono::milliseconds(200)), std::future_status::timeout);
  EXPECT_EQ(gate_.waiting(), before) << "both make it at the same time";
  EXPECT_EQ(cluster_.job(0, "job")->current_target(), "checkpoints/base/layouts/tp1-pp1-dp1");
  gate_.open();
  // It has a part, or hears that this was decided meanwhile.
  (void)asked.get();
  cluster_.wait_settled();
  expect_everywhere({0, 1, 2}, spec_of(text));
  EXPECT_EQ(cluster_.job(0, "job")->status_json().find("\"error\""), std::string::npos)
      << cluster_.job(0, "job")->status_json();
  expect_only_decided_images({0, 1, 2});
}

/// w1 leads, and what w0 makes for it waits for bytes; then somebody edits on w0. The part for an
/// edit that is no longer the last ends, and what w0 does of its own does not.
TEST_F(PartsOfTwoTest, WhoMakesAPartForAnotherLeadsALaterEdit) {
  put_on_w1();
  edit(1, R"({"tp": 2, "pp": 1, "dp": 1, "devices": ["w1:0", "w0:0"]})");
  ASSERT_TRUE(becomes([&] { return gate_.waiting() > 0; }));
  const std::string text = R"({"tp": 1, "pp": 2, "dp": 1, "devices": ["w0:0", "w1:0"]})";
  edit(0, text);
  gate_.open();
  cluster_.wait_settled();
  expect_everywhere({0, 1, 2}, spec_of(text));
  expect_only_decided_images({0, 1, 2});
}

}  // namespace
}  // namespace ptc::testing
