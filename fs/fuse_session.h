// The mount: connects libfuse to the tree, and the kernel's passthrough to both.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "fs/tree.h"

struct fuse_session;
struct iovec;

namespace ptc {

struct MountOptions {
  std::string mount_point;  // an existing directory, absolute
  std::string source = "ptcfs";  // shown by mount(8), which knows its fstab line by it
  bool allow_other = false;
  bool debug = false;       // every request on stderr
  unsigned threads = 24;    // that answer requests
  std::vector<std::string> kernel_options;  // noexec, noatime …
};

/// Order: mount(), then unmount() (or somebody else's umount), then wait() and destruction.
/// Threads: any.
class FuseSession : public KernelCache {
 public:
  /// Mounts, and returns when the kernel has greeted. `tree` outlives the session.
  static Result<std::unique_ptr<FuseSession>> mount(Tree& tree, const MountOptions& options);
  ~FuseSession() override;

  Tree& tree() const { return tree_; }

  /// True once the mount is gone and all threads have ended.
  bool wait(std::chrono::milliseconds patience);
  /// Unmounts; where something is still open, lazily, so that the name is free and what is open is
  /// served for as long as this process lives. True if that was not needed.
  bool unmount();
  /// After this no request is answered any more.
  void stop();

  void drop_attributes(const Node& node) override;
  void drop_content(const Node& node) override;
  void expire_names() override;
  bool can_expire_names() const override { return kernel_minor_ >= kMinorWithEpochs; }

 private:
  FuseSession(Tree& tree, const MountOptions& options);
  Result<> start();
  void serve_requests();
  void set_read_ahead() const;
  static ssize_t on_read(int fd, void* buffer, size_t size, void* userdata);
  static ssize_t on_write(int fd, struct iovec* iov, int count, void* userdata);
  void answer_init(struct iovec* iov, int count);

  Tree& tree_;
  const MountOptions options_;
  fuse_session* session_ = nullptr;
  std::vector<std::thread> threads_;
  std::mutex mutex_;
  std::condition_variable ended_;
  size_t running_ = 0;             // threads that serve; guarded
  bool greeted_ = false;           // guarded
  bool unmounted_ = false;         // guarded
  bool clean_ = false;             // unmounted, and nothing was open; guarded
  static constexpr uint32_t kMinorWithEpochs = 44;  // of the protocol; Linux 6.16
  std::atomic<uint64_t> init_request_{0}, kernel_flags_{0};
  std::atomic<uint32_t> kernel_minor_{0};
};

}  // namespace ptc
