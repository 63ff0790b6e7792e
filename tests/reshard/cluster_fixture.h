// A cluster of some nodes and one job, for tests of jobs on several nodes.
#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <initializer_list>
#include <string>
#include <vector>

#include "tests/support/local_cluster.h"
#include "tests/support/synthetic_model.h"

namespace ptc::testing {

inline LayoutSpec spec_of(const std::string& text) { return Layout::parse(text).value().spec; }

class ClusterTest : public ::testing::Test {
 protected:
  explicit ClusterTest(unsigned nodes = 3, PieceSizes pieces = {},
                       const std::vector<std::string>& devices = {})
      : cluster_(nodes, pieces, devices) {}
  void write(unsigned node, const LayoutSpec& spec) { write_ranks(sample_, spec, incoming(node)); }
  std::string incoming(unsigned node) {
    return cluster_.job(node, "job")->files_dir() + "/incoming/base";
  }
  void edit(unsigned node, const std::string& text) {
    Result<> saved = cluster_.job(node, "job")->save_layout(text);
    ASSERT_TRUE(saved.has_value()) << saved.error().message();
  }
  void commit(unsigned node) {
    Result<> committed = cluster_.job(node, "job")->commit("base", "base");
    ASSERT_TRUE(committed.has_value()) << committed.error().message();
  }
  /// A checkpoint written on w0 of which each of the others holds half, and w0 nothing.
  void put_on_w1_and_w2() {
    ASSERT_TRUE(cluster_.store(0).create_job("job").has_value());
    write(0, LayoutSpec());
    commit(0);
    edit(0, R"({"tp": 1, "pp": 2, "dp": 1, "devices": ["w1:0", "w2:0"]})");
    cluster_.wait_settled();
  }
  /// Every node that is in `nodes` shows the checkpoint whole, and `current` in the layout.
  void expect_everywhere(std::initializer_list<unsigned> nodes, const LayoutSpec& spec) {
    for (unsigned node : nodes) {
      SCOPED_TRACE(fmt::format("node {}", node));
      JobRef job = cluster_.job(node, "job");
      ASSERT_NE(job, nullptr);
      CheckpointRef checkpoint = job->find_checkpoint("base");
      ASSERT_NE(checkpoint, nullptr) << job->status_json();
      EXPECT_EQ(job->current_target(), "checkpoints/base/layouts/" + spec.name())
          << job->status_json();
      expect_model(*checkpoint, sample_);
      expect_layout(*checkpoint, sample_, spec);
      auto verified = job->verify("base");
      EXPECT_TRUE(verified.has_value()) << verified.error().message();
    }
  }
  /// Nodes that hold the rank's model file.
  std::vector<std::string> holders(unsigned asked, const LayoutSpec& spec, uint64_t rank) {
    CheckpointRef checkpoint = cluster_.job(asked, "job")->find_checkpoint("base");
    std::vector<std::string> nodes;
    const uint32_t state = state_index(spec, state_of(spec, spec.coords(rank)));
    for (const auto stored_now = checkpoint->stored();
         const StoredImage& image : stored_now->images)
      if (image.state == state && image.path == "model.safetensors" && image.image != nullptr)
        nodes.push_back(image.node);
    return nodes;
  }

  Sample sample_ = llama_sample(true, 4);
  LocalCluster cluster_;
};

}  // namespace ptc::testing
