// A cluster with copies of a checkpoint, which are damaged on the disk of a node.
#pragma once

#include <fcntl.h>
#include <linux/fs.h>
#include <sys/ioctl.h>
#include <sys/stat.h>

#include <filesystem>
#include <fstream>
#include <string>

#include "store/base/file.h"
#include "tests/reshard/cluster_fixture.h"

namespace ptc::testing {

/// Copies are damaged on the disk of a node: bytes change, or a file is cut.
class DamageTest : public ClusterTest {
 protected:
  void commit_with_copies(unsigned replicas) {
    ASSERT_TRUE(cluster_.store(0).create_job("job").has_value());
    spec_text_ = fmt::format(R"({{"tp": 1, "pp": 3, "dp": 1, "replicas": {}}})", replicas);
    edit(0, spec_text_);
    write(0, spec_of(spec_text_));
    commit(0);
    cluster_.wait_settled();
    ASSERT_TRUE(cluster_.job(0, "job")->verify("base").has_value());
  }
  /// The file of a rank's image on a node that has it.
  std::string image_file(unsigned node, uint64_t rank) {
    const auto stored = cluster_.job(node, "job")->find_checkpoint("base")->stored();
    for (const StoredImage& image : stored->images)
      if (image.state == rank && image.path == "model.safetensors" &&
          image.node == LocalCluster::name(node))
        return cluster_.store(node).images().directory() + "/" + image.id;
    return "";
  }
  unsigned holder_of(uint64_t rank) {
    return holders(0, spec_of(spec_text_), rank).front()[1] - '0';
  }
  static void flip_last_byte(const std::string& file) {
    flip_byte(file, std::filesystem::file_size(file) - 1);
  }
  static void flip_byte(const std::string& file, uint64_t offset) {
    ASSERT_EQ(chmod(file.c_str(), 0600), 0) << file;
    std::fstream stream(file, std::ios::in | std::ios::out | std::ios::binary);
    stream.seekg(static_cast<std::streamoff>(offset));
    const char byte = static_cast<char>(stream.get() ^ 0x10);
    stream.seekp(static_cast<std::streamoff>(offset));
    stream.put(byte);
    ASSERT_TRUE(stream.good());
  }
  /// Nobody can write it then.
  static bool set_immutable(const std::string& file, bool immutable) {
    const UniqueFd fd(::open(file.c_str(), O_RDONLY | O_CLOEXEC));
    int flags = 0;
    if (!fd.valid() || ::ioctl(fd.get(), FS_IOC_GETFLAGS, &flags) != 0) return false;
    flags = immutable ? flags | FS_IMMUTABLE_FL : flags & ~FS_IMMUTABLE_FL;
    return ::ioctl(fd.get(), FS_IOC_SETFLAGS, &flags) == 0;
  }
  std::string spec_text_;
};

}  // namespace ptc::testing
