#include "fs/tree/open_files.h"

#include <fcntl.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "store/base/mutex.h"

namespace ptc {
namespace {

// Beside the mode: it was of a process that is gone, and nobody can go on with it.
constexpr int32_t kModeBits = 0xff, kLost = 0x100;
constexpr uint64_t kNoText = UINT64_MAX;

LiveState::Place write_down(LiveState& state, uint64_t number, const OpenFile& file) {
  uint64_t given = state.header().files_given.load(std::memory_order_relaxed);
  while (given < number && !state.header().files_given.compare_exchange_weak(given, number)) {
  }
  const LiveState::Place place = state.take_file();
  if (place == 0) return 0;
  KeptFile& written = state.file(place);
  written.node = file.node;
  written.request = file.request;
  written.bytes = file.handle->text_bytes().value_or(kNoText);
  written.flags = file.flags;
  written.mode = static_cast<int32_t>(file.mode) | (file.handle->can_reopen() ? 0 : kLost);
  written.backing_id = file.backing_id;
  written.uid = file.caller.uid;
  written.gid = file.caller.gid;
  written.pid = file.caller.pid;
  written.number.store(number, std::memory_order_release);
  return place;
}

/// What was written into it, or asked, went with the process that had it.
class LostHandle : public Handle {
 public:
  explicit LostHandle(int error = EIO) : error_(error) {}
  FsResult<size_t> read(std::span<std::byte>, uint64_t, const Interrupted&) override {
    return Errno{error_};
  }
  FsResult<size_t> write(std::span<const std::byte>, uint64_t) override { return Errno{error_}; }
  FsResult<> flush() override { return Errno{error_}; }
  FsResult<> sync(bool) override { return Errno{error_}; }
  FsResult<> truncate(uint64_t) override { return Errno{error_}; }
  bool can_reopen() const override { return false; }

 private:
  const int error_;
};

/// A text that was made for one open, which is gone: another is as good for who has read nothing
/// of it, or all of it.
class OtherText : public Handle {
 public:
  OtherText(std::shared_ptr<Handle> text, uint64_t bytes) : text_(std::move(text)), bytes_(bytes) {}
  FsResult<size_t> read(std::span<std::byte> out, uint64_t offset,
                        const Interrupted& interrupted) override {
    if (offset == 0) begun_ = true;
    if (begun_) return text_->read(out, offset, interrupted);
    if (offset >= bytes_) return size_t{0};
    return Errno{ESTALE};
  }
  std::optional<uint64_t> text_bytes() const override { return bytes_; }

 private:
  const std::shared_ptr<Handle> text_;
  const uint64_t bytes_;
  std::atomic<bool> begun_{false};
};

}  // namespace

OpenFiles::~OpenFiles() {
  for (Shard& shard : shards_)
    for (auto& [number, file] : shard.files) (void)new std::shared_ptr(std::move(file.handle));
}

uint64_t OpenFiles::add(OpenFile file) {
  const uint64_t number = given_.fetch_add(1, std::memory_order_relaxed) + 1;
  if (state_ != nullptr) file.kept = write_down(*state_, number, file);
  Shard& shard = shard_of(number);
  ExclusiveLock lock(shard.mutex);
  shard.files.emplace(number, std::move(file));
  return number;
}

std::shared_ptr<Handle> OpenFiles::at(uint64_t number) {
  {
    Shard& shard = shard_of(number);
    SharedLock lock(shard.mutex);
    const auto found = shard.files.find(number);
    if (found != shard.files.end()) return found->second.handle;
  }
  return some_left_.load(std::memory_order_relaxed) ? reopen(number) : nullptr;
}

OpenFile OpenFiles::take(uint64_t number) {
  OpenFile file;
  if (some_left_.load(std::memory_order_relaxed)) {
    MutexLock lock(left_mutex_);
    if (const auto left = left_.find(number); left != left_.end()) {
      file = std::move(left->second);
      left_.erase(left);
    }
  }
  if (file.node != 0) {
    let_go(file);
    state_->give_back_file(file.kept);
    return file;
  }
  Shard& shard = shard_of(number);
  ExclusiveLock lock(shard.mutex);
  const auto found = shard.files.find(number);
  if (found == shard.files.end()) return {};
  file = std::move(found->second);
  shard.files.erase(found);
  if (file.kept != 0) state_->give_back_file(file.kept);
  constexpr size_t kSmall = 1024;
  if (shard.files.bucket_count() > kSmall && shard.files.size() * 8 < shard.files.bucket_count())
    shard.files.rehash(0);
  return file;
}

void OpenFiles::keep_in(LiveState& state, NodeTable& nodes, Passthrough& passthrough) {
  state_ = &state;
  nodes_ = &nodes;
  passthrough_ = &passthrough;
  uint64_t given = state.header().files_given.load();
  MutexLock lock(left_mutex_);
  state.each_file([&](LiveState::Place place, const KeptFile& written) {
    const uint64_t number = written.number.load();
    given = std::max(given, number);
    OpenFile file;
    file.node = written.node;
    file.flags = written.flags;
    file.mode = static_cast<IoMode>(written.mode & kModeBits);
    file.backing_id = written.backing_id;
    file.caller = {.uid = written.uid, .gid = written.gid, .pid = written.pid};
    file.request = written.request;
    file.kept = place;
    OfNode& of_node = left_of_[file.node];
    ++of_node.count;
    if (file.backing_id != 0) of_node.backing_id = file.backing_id;
    left_by_request_.emplace(file.request, number);
    left_.emplace(number, std::move(file));
  });
  given_ = given;
  some_left_ = !left_.empty();
}

void OpenFiles::found(uint64_t id, Node& node) {
  if (!some_left_.load()) return;
  MutexLock lock(left_mutex_);
  const auto left = left_of_.find(id);
  if (left == left_of_.end()) return;
  if (InodeMode* mode = node.inode_mode())
    mode->restore(*passthrough_, left->second.count, left->second.backing_id);
  left_of_.erase(left);
}

/// An earlier process's count of it.
void OpenFiles::let_go(const OpenFile& file) {
  const NodeRef node = nodes_->at(file.node);
  if (node != nullptr) {
    if (InodeMode* mode = node->inode_mode()) mode->leave(*passthrough_);
    return;
  }
  MutexLock lock(left_mutex_);
  const auto left = left_of_.find(file.node);
  if (left == left_of_.end() || --left->second.count > 0) return;
  if (left->second.backing_id != 0) {
    passthrough_->take_over();
    passthrough_->close_backing(left->second.backing_id);
  }
  left_of_.erase(left);
}

std::shared_ptr<Handle> OpenFiles::reopen(uint64_t number) {
  OpenFile file;
  {
    MutexLock lock(left_mutex_);
    const auto left = left_.find(number);
    if (left == left_.end()) {
      // Another thread may just have opened it.
      Shard& shard = shard_of(number);
      SharedLock of_shard(shard.mutex);
      const auto found = shard.files.find(number);
      return found == shard.files.end() ? nullptr : found->second.handle;
    }
    file = left->second;
  }
  const KeptFile& written = state_->file(file.kept);
  std::shared_ptr<Handle> handle;
  if ((written.mode & kLost) != 0) {
    handle = std::make_shared<LostHandle>();
  } else {
    const NodeRef node = nodes_->at(file.node);
    if (node == nullptr) return std::make_shared<LostHandle>(ESTALE);
    auto opened = node->open(file.caller, file.flags & ~(O_TRUNC | O_CREAT | O_EXCL));
    if (!opened) return std::make_shared<LostHandle>(opened.error().value);
    handle = std::move(opened.value().handle);
    if (written.bytes != kNoText)
      handle = std::make_shared<OtherText>(std::move(handle), written.bytes);
  }
  {
    MutexLock lock(left_mutex_);
    const auto left = left_.find(number);
    if (left == left_.end()) return handle;  // closed, or another was quicker
    file = std::move(left->second);
    left_.erase(left);
    file.handle = handle;
    Shard& shard = shard_of(number);
    ExclusiveLock of_shard(shard.mutex);
    shard.files.emplace(number, file);
  }
  let_go(file);
  return handle;
}

void OpenFiles::reopen_writers() {
  std::vector<uint64_t> writers;
  {
    MutexLock lock(left_mutex_);
    for (const auto& [number, file] : left_)
      if ((file.flags & O_ACCMODE) != O_RDONLY) writers.push_back(number);
  }
  for (const uint64_t number : writers) (void)at(number);
}

std::unordered_set<int32_t> OpenFiles::backing_ids() {
  MutexLock lock(left_mutex_);
  std::unordered_set<int32_t> ids;
  for (const auto& [number, file] : left_)
    if (file.backing_id != 0) ids.insert(file.backing_id);
  return ids;
}

void OpenFiles::drop_unanswered(uint64_t request) {
  uint64_t number = 0;
  {
    MutexLock lock(left_mutex_);
    const auto left = left_by_request_.find(request);
    if (left == left_by_request_.end()) return;
    number = left->second;
    left_by_request_.erase(left);
  }
  take(number);
}

void OpenFiles::each(const std::function<void(uint64_t number, const OpenFile&)>& visit) const {
  for (const Shard& shard : shards_) {
    SharedLock lock(shard.mutex);
    for (const auto& [number, file] : shard.files) visit(number, file);
  }
}

}  // namespace ptc
