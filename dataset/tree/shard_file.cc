#include <algorithm>
#include <atomic>
#include <chrono>
#include <unordered_map>

#include "dataset/tree/mds_text.h"
#include "dataset/tree/sample_form.h"
#include "dataset/tree/tar_header.h"
#include "dataset/tree/virtual_file.h"
#include "store/base/mutex.h"
#include "store/base/utf8.h"

namespace ptc {
namespace {

constexpr uint64_t kMdsTableEntryBytes = 4;

/// Head, samples one behind the other, tail.
class ShardFile : public VirtualFile {
 public:
  ShardFile(TreeKind kind, SampleSourceRef source, std::vector<uint64_t> ids)
      : source_(std::move(source)),
        kind_(kind),
        form_(form_of(kind, source_->format())),
        ids_(std::move(ids)),
        begins_(ids_.size() + 1) {
    by_key_ = kind == TreeKind::kTar && source_->keys_repeat();
    if (kind == TreeKind::kTar && !by_key_) count_repeats();
    if (kind == TreeKind::kMds) config_ = mds_config(*source_);
    begins_[0] =
        kind == TreeKind::kMds ? kMdsTableEntryBytes * (ids_.size() + 2) + config_.size() : 0;
    for (size_t i = 0; i < ids_.size(); ++i) {
      begins_[i + 1] = begins_[i] + form_.bytes(*source_, ids_[i], repeat(i));
    }
    size_ = begins_.back() + (kind == TreeKind::kTar ? kTarEndBytes : 0);
  }

  uint64_t size() const override { return size_; }
  /// Samples of all shards: that costs something, and MosaicML's reader opens the file for each
  /// sample.
  Result<> may_read() const override {
    const Clock::time_point now = Clock::now();
    if (now.time_since_epoch().count() < trusted_until_.load()) return ok();
    PTC_TRY(source_->may_read(ids_));
    trusted_until_ = (now + kTrusted).time_since_epoch().count();
    return ok();
  }
  /// MosaicML's reader opens the shard for each sample.
  bool read_through() const override { return kind_ != TreeKind::kMds; }

  Result<size_t> read(uint64_t offset, std::span<std::byte> out) const override {
    return fill(offset, out, Stores::kPlain);
  }
  Result<size_t> gather(uint64_t offset, std::span<std::byte> out) const override {
    return fill(offset, out, form_.reads_back() ? Stores::kPlain : Stores::kPastCaches);
  }

 private:
  Result<size_t> fill(uint64_t offset, std::span<std::byte> out, Stores stores) const {
    if (offset >= size_) return size_t{0};
    out = out.first(std::min<uint64_t>(out.size(), size_ - offset));
    PTC_TRY(know_keys());
    Window window(*source_, offset, out, stores);
    if (offset < begins_[0]) head(window);
    const auto above =
        std::upper_bound(begins_.begin(), begins_.end(), std::max(offset, begins_[0]));
    size_t i = static_cast<size_t>(above - begins_.begin()) - 1;
    for (window.move_to(begins_[i]); i < ids_.size() && !window.full(); ++i) {
      PTC_TRY(form_.render(*source_, ids_[i], repeat(i), window));
      if (window.position() != begins_[i + 1]) {
        return make_error(Code::kCorrupt,
                          "{}: sample {} takes {} bytes and not the {} that the index says",
                          source_->shard_path(source_->extent(ids_[i]).shard), ids_[i],
                          window.position() - begins_[i], begins_[i + 1] - begins_[i]);
      }
    }
    window.zeros(size_ - window.position());
    PTC_TRY(window.flush());
    return out.size();
  }

  void count_repeats() {
    std::unordered_map<uint64_t, uint32_t> seen;
    for (size_t i = 0; i < ids_.size(); ++i) {
      const uint32_t before = seen[ids_[i]]++;
      if (before == 0) continue;
      repeats_.resize(ids_.size());
      repeats_[i] = before;
    }
  }
  /// Where samples of one key can meet, all keys are read before anything else is; no size depends
  /// on them.
  Result<> know_keys() const {
    if (!by_key_) return ok();
    MutexLock lock(mutex_);
    if (!repeats_.empty()) return ok();
    std::vector<uint32_t> repeats;
    std::unordered_map<std::string, uint32_t> seen;
    for (const uint64_t id : ids_) {
      PTC_TRY(std::string key, source_->key(id));
      repeats.push_back(seen[std::move(key)]++);
    }
    repeats_ = std::move(repeats);
    return ok();
  }
  uint64_t repeat(size_t i) const { return repeats_.empty() ? 0 : repeats_[i]; }

  /// Of MDS: the number of samples, where each begins and the last ends, the columns.
  void head(Window& window) const {
    window.numbers<uint32_t>(1, [&](uint64_t) { return static_cast<uint32_t>(ids_.size()); });
    window.numbers<uint32_t>(begins_.size(),
                             [&](uint64_t i) { return static_cast<uint32_t>(begins_[i]); });
    window.literal(config_);
  }

  using Clock = std::chrono::steady_clock;
  static constexpr std::chrono::milliseconds kTrusted{500};

  const SampleSourceRef source_;
  const TreeKind kind_;
  const SampleForm& form_;
  const std::vector<uint64_t> ids_;
  mutable std::atomic<Clock::rep> trusted_until_{0};
  bool by_key_ = false;
  mutable Mutex mutex_;
  /// How often its key came before; empty: each comes once. by_key_: written once, under the mutex
  /// that each read takes.
  mutable std::vector<uint32_t> repeats_;
  std::vector<uint64_t> begins_;  // of each sample; the last: where they end
  std::string config_;
  uint64_t size_ = 0;
};

}  // namespace

std::string_view tree_name(TreeKind kind) {
  switch (kind) {
    case TreeKind::kTar:
      return "tar";
    case TreeKind::kMds:
      return "mds";
    case TreeKind::kMegatron:
      return "megatron";
    case TreeKind::kJsonl:
      return "jsonl";
    case TreeKind::kTfrecord:
      return "tfrecord";
    case TreeKind::kFiles:
      break;
  }
  return "files";
}

std::vector<TreeKind> trees_of(const SampleSource& source) {
  std::vector<TreeKind> trees = {TreeKind::kTar};
  const std::vector<std::string>& names = source.field_names();
  const SourceFormat format = source.format();
  const bool texts =
      std::all_of(names.begin(), names.end(), [](const auto& name) { return is_utf8(name); });
  if (format == SourceFormat::kMds || (!names.empty() && texts)) trees.push_back(TreeKind::kMds);
  if (format == SourceFormat::kMegatron) trees.push_back(TreeKind::kMegatron);
  if (format == SourceFormat::kJsonl) trees.push_back(TreeKind::kJsonl);
  if (format == SourceFormat::kFiles || names.size() == 1) trees.push_back(TreeKind::kTfrecord);
  trees.push_back(TreeKind::kFiles);
  return trees;
}

uint64_t sample_bytes(TreeKind kind, const SampleSource& source, uint64_t id) {
  return form_of(kind, source.format()).bytes(source, id, 0) +
         (kind == TreeKind::kMds ? kMdsTableEntryBytes : 0);
}

Result<VirtualFileRef> make_shard(TreeKind kind, SampleSourceRef source,
                                  std::vector<uint64_t> ids) {
  const auto trees = trees_of(*source);
  if (kind == TreeKind::kMegatron || kind == TreeKind::kFiles ||
      std::find(trees.begin(), trees.end(), kind) == trees.end()) {
    return invalid_argument("a source of {} is not shown as shards of {}",
                            format_name(source->format()), tree_name(kind));
  }
  for (const uint64_t id : ids) {
    if (id >= source->samples())
      return invalid_argument("there is no sample {}: the source has {}", id, source->samples());
  }
  auto shard = std::make_shared<const ShardFile>(kind, std::move(source), std::move(ids));
  if (kind == TreeKind::kMds) {
    PTC_TRY(check_mds_bytes(shard->size()));
  }
  return VirtualFileRef(std::move(shard));
}

}  // namespace ptc
