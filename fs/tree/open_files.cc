#include "fs/tree/open_files.h"

#include <fcntl.h>

#include <algorithm>
#include <cerrno>
#include <optional>
#include <string_view>
#include <utility>

#include "store/base/mutex.h"

namespace ptc {
namespace {

// Beside the mode: it was of a process that is gone, and nobody can go on with it.
constexpr int32_t kModeBits = 0xff, kLost = 0x100;
constexpr uint64_t kNoText = UINT64_MAX;

/// What was written into it, or asked, went with the process that had it.
class LostHandle : public Handle {
 public:
  explicit LostHandle(int error = EIO) : error_(error) {}
  FsResult<size_t> read(std::span<std::byte>, uint64_t, const Interrupted&) override {
    return Errno{error_};
  }
  FsResult<size_t> write(std::span<const std::byte>, uint64_t) override { return Errno{error_}; }
  /// A file that is not found again had nothing to say at its close.
  FsResult<> flush() override {
    if (error_ == ESTALE) return ok();
    return Errno{error_};
  }
  FsResult<> sync(bool) override { return Errno{error_}; }
  FsResult<> truncate(uint64_t) override { return Errno{error_}; }
  bool can_reopen() const override { return false; }

 private:
  const int error_;
};

/// A text that was made for one open, as an earlier process has written it down.
class KeptText : public Handle {
 public:
  explicit KeptText(std::string_view text) : text_(text) {}
  FsResult<size_t> read(std::span<std::byte> out, uint64_t offset, const Interrupted&) override {
    if (offset >= text_.size()) return size_t{0};
    return text_.copy(reinterpret_cast<char*>(out.data()), out.size(), offset);
  }

 private:
  const std::string_view text_;
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
  if (state_ != nullptr) write_down(number, file);
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
    if (file.draft != 0) {  // what was written is saved by its end
      file.handle = reopen_draft(file);
      hold_draft(file);
    }
    give_back(file);
    return file;
  }
  Shard& shard = shard_of(number);
  ExclusiveLock lock(shard.mutex);
  const auto found = shard.files.find(number);
  if (found == shard.files.end()) return {};
  file = std::move(found->second);
  shard.files.erase(found);
  give_back(file);
  constexpr size_t kSmall = 1024;
  if (shard.files.bucket_count() > kSmall && shard.files.size() * 8 < shard.files.bucket_count())
    shard.files.rehash(0);
  return file;
}

void OpenFiles::write_down(uint64_t number, OpenFile& file) {
  std::atomic<uint64_t>& last = state_->header().files_given;
  uint64_t given = last.load(std::memory_order_relaxed);
  while (given < number && !last.compare_exchange_weak(given, number)) {
  }
  file.kept = state_->take_file();
  if (file.kept == 0) return;
  KeptFile& written = state_->file(file.kept);
  written.node = file.node;
  written.request = file.request;
  const std::optional<std::string_view> text = file.handle->text_of_open();
  written.bytes = text ? text->size() : kNoText;
  written.flags = file.flags;
  written.mode = static_cast<int32_t>(file.mode) | (file.handle->can_reopen() ? 0 : kLost);
  written.backing_id = file.backing_id;
  written.uid = file.caller.uid;
  written.gid = file.caller.gid;
  written.pid = file.caller.pid;
  written.draft = 0;
  if (text && text->size() <= KeptDraft::kMost) {
    file.draft = state_->take_draft();
    if (file.draft != 0) {
      KeptDraft& kept = state_->draft(file.draft);
      text->copy(kept.text, text->size());
      kept.bytes = static_cast<uint32_t>(text->size());
      kept.flags = KeptDraft::kOfOpen;
    }
    written.draft = file.draft;
    hold_draft(file);
  } else if (!file.handle->can_reopen()) {
    file.draft = state_->take_draft();
    if (file.draft != 0 && !file.handle->keep_draft(state_->draft(file.draft), false))
      state_->give_back_draft(std::exchange(file.draft, 0));
    written.draft = file.draft;
    hold_draft(file);
  }
  written.number.store(number, std::memory_order_release);
}

/// A draft, and that somebody has it, is written down until its last save has come to its end.
void OpenFiles::hold_draft(OpenFile& file) {
  if (file.draft == 0) return;
  std::shared_ptr<Handle> handle = std::move(file.handle);
  Handle* const raw = handle.get();
  auto end = [handle = std::move(handle), state = state_, kept = file.kept,
              draft = file.draft](Handle*) mutable {
    handle.reset();
    state->give_back_file(kept);
    state->give_back_draft(draft);
  };
  file.handle = std::shared_ptr<Handle>(raw, std::move(end));
}

void OpenFiles::give_back(const OpenFile& file) {
  if (file.kept != 0 && file.draft == 0) state_->give_back_file(file.kept);
}

void OpenFiles::keep_in(LiveState& state, NodeTable& nodes, Passthrough& passthrough) {
  state_ = &state;
  nodes_ = &nodes;
  passthrough_ = &passthrough;
  uint64_t given = state.header().files_given.load();
  MutexLock lock(left_mutex_);
  state.each_file([&](LiveState::Place place, const KeptFile& written) PTC_REQUIRES(left_mutex_) {
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
    file.draft = written.draft;
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

/// Null: it cannot be, now.
std::shared_ptr<Handle> OpenFiles::open_again(const OpenFile& file) {
  const KeptFile& written = state_->file(file.kept);
  if (file.draft != 0) return reopen_draft(file);
  if ((written.mode & kLost) != 0) return std::make_shared<LostHandle>();
  const NodeRef node = nodes_->at(file.node);
  if (node == nullptr) return nullptr;
  auto opened = node->open(file.caller, file.flags & ~(O_TRUNC | O_CREAT | O_EXCL));
  if (!opened) return nullptr;
  std::shared_ptr<Handle> handle = std::move(opened.value().handle);
  if (written.bytes == kNoText) return handle;
  return std::make_shared<OtherText>(std::move(handle), written.bytes);
}

/// Of a text that is not saved yet, and perhaps never was: then its name is only that of the draft.
std::shared_ptr<Handle> OpenFiles::reopen_draft(const OpenFile& file) {
  KeptDraft& draft = state_->draft(file.draft);
  if ((draft.flags & KeptDraft::kOfOpen) != 0)
    return std::make_shared<KeptText>(std::string_view(draft.text, draft.bytes));
  std::unique_ptr<Handle> handle;
  if (const NodeRef node = nodes_->at(file.node)) {
    auto opened = node->open(file.caller, file.flags & ~(O_TRUNC | O_CREAT | O_EXCL));
    if (opened) handle = std::move(opened.value().handle);
  } else if (auto created = nodes_->create_again(file.node, file.caller,
                                                 static_cast<mode_t>(draft.mode), file.flags)) {
    handle = std::move(created->opened.handle);
  }
  if (handle == nullptr || !handle->keep_draft(draft, true)) return std::make_shared<LostHandle>();
  return handle;
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
  std::shared_ptr<Handle> handle = open_again(file);
  if (handle == nullptr) return std::make_shared<LostHandle>(ESTALE);
  {
    MutexLock lock(left_mutex_);
    const auto left = left_.find(number);
    if (left == left_.end()) {  // closed, or another was quicker
      if (file.draft != 0) handle->discard();
      return handle;
    }
    file = std::move(left->second);
    left_.erase(left);
    file.handle = handle;
    hold_draft(file);
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
  if (OpenFile file = take(number); file.handle != nullptr) file.handle->discard();
}

void OpenFiles::each(const std::function<void(uint64_t number, const OpenFile&)>& visit) const {
  for (const Shard& shard : shards_) {
    SharedLock lock(shard.mutex);
    for (const auto& [number, file] : shard.files) visit(number, file);
  }
}

}  // namespace ptc
