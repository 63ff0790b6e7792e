// A real ptcfs on temporary directories.
#pragma once

#include <gtest/gtest.h>
#include <sys/types.h>

#include <cerrno>
#include <string>
#include <vector>

namespace ptc {

/// One daemon in the foreground. Ended, unmounted and reaped whatever happens.
class TestMount {
 public:
  TestMount();
  ~TestMount();

  /// Why nothing can be mounted here; empty if it can.
  static std::string why_not();

  void start(const std::vector<std::string>& options = {});
  /// kill -9, as a crash would; leaves a dead mount.
  void kill();
  /// SIGTERM; returns the daemon's exit status.
  int terminate();
  bool running() const { return pid_ > 0; }

  const std::string& path() const { return mount_; }
  const std::string& store() const { return store_; }
  const std::string& top() const { return top_; }
  std::string log() const;

 private:
  std::string top_, mount_, store_;
  pid_t pid_ = -1;
};

/// A mount with one job, "job".
class MountTest : public ::testing::Test {
 protected:
  void SetUp() override;
  void TearDown() override;
  std::string job(const std::string& path = "") const {
    return mount_.path() + "/job" + (path.empty() ? "" : "/" + path);
  }
  TestMount mount_;
};

std::string read_file(const std::string& path);
/// 0, or the errno of the first call that failed: open, write or close.
int write_file(const std::string& path, const std::string& text, int flags = 0);
/// A safetensors file with one F32 tensor "w" of these shape and values 0, 1, 2 ….
std::string tiny_safetensors(int rows, int columns);
/// Writes a checkpoint of one rank into incoming/<name>.
void write_incoming(const std::string& job, const std::string& name);
/// 0 or errno of mv incoming/<name> checkpoints/<name>.
int commit(const std::string& job, const std::string& name);
inline int errno_of(int result) { return result == 0 ? 0 : errno; }
/// What .ptc/ask answers.
std::string ask(const TestMount& mount, const std::string& question);
/// Runs a command with sh; its exit status.
int shell(const std::string& command);

}  // namespace ptc
