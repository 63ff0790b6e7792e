#include "fs/nodes/dataset/generation_dir.h"

#include <spdlog/spdlog.h>

#include <utility>

#include "dataset/source/shard_rights.h"
#include "fs/nodes/checkpoint/file_set_dir.h"

namespace ptc {
namespace {

// While one is read, the next is gathered, and the one after it as soon as there is time.
constexpr int kShardsAhead = 2;

/// What tells a generation's bytes from those of all others.
std::string identity_of(const ShownGeneration& shown) {
  const Run& run = shown.cuts.run();
  const Segment& s = shown.cuts.segment();
  return fmt::format("{} {:x} {} {} {} {} {} {} {} {} {}", shown.number, run.fingerprint, run.seed,
                     run.shuffle.name(), kOrderVersion, s.from, s.batch, s.dp, tail_name(s.tail),
                     s.assign.name(), s.epochs);
}

/// A time for what has none, the same on all nodes, and another one for other bytes: a client's
/// cache, which goes by path and time, takes no run for an earlier one in its place.
timespec time_of(const ShownGeneration& shown) {
  constexpr uint64_t kFrom = 1'000'000'000, kSeconds = 500'000'000,
                     kNanoseconds = 1'000'000'000;  // 2001 to 2017
  const uint64_t hash =
      inode_of(identity_of(shown)) << 1 >> 1;  // without the bit that marks an inode
  return {static_cast<time_t>(kFrom + hash % kSeconds),
          static_cast<long>(hash / kSeconds % kNanoseconds)};
}

GatherCache::Content content_of(VirtualFileRef file, const Awaited& shards) {
  const uint64_t bytes = file->size();
  auto fill = [file = std::move(file)](uint64_t offset, std::span<std::byte> out) -> Result<> {
    PTC_TRY(file->gather(offset, out));
    return ok();
  };
  return {.bytes = bytes, .fill = std::move(fill), .once = true, .awaited = shards.name};
}

}  // namespace

std::vector<uint64_t> GenerationsDir::numbers() const {
  // Half an `rm -r`: there is no order any more, and nothing to go through.
  if (job_->hidden().hidden("dataset/order.json")) return {};
  return job_->data_set().generations();
}

FsResult<struct stat> GenerationsDir::attributes() {
  const struct stat owner = job_->directory();
  struct stat stat =
      virtual_stat((owner.st_mode & ~0222u), owner.st_uid, owner.st_gid,
                   later(job_->data_set_changed(), job_->hidden().restored()), inode_of(key()));
  stat.st_nlink = 2 + numbers().size();
  return stat;
}

FsResult<NodeRef> GenerationsDir::lookup(const std::string& name) {
  for (const uint64_t number : numbers()) {
    if (generation_name(number) != name) continue;
    const ShownGenerationRef shown = job_->data_set().generation(number);
    if (shown == nullptr) break;
    NodeTable& table = job_->tree().table();
    std::string view_key = job_->generation_key(shown, inode_of(identity_of(*shown)));
    if (NodeRef known = table.find(view_key)) return known;
    auto view = std::make_shared<GenerationView>();
    view->job = job_;
    view->generation = shown;
    view->key = std::move(view_key);
    view->time = time_of(*shown);
    const struct stat owner = job_->directory();
    const User* reader = shown->source->reader();
    const ShardRights& rights = shown->source->rights();
    view->uid = reader != nullptr ? reader->uid : owner.st_uid;
    view->gid = rights.group().value_or(owner.st_gid);
    view->mode = rights.mode();
    view->shards.name = fmt::format("the shards of job {}'s data set", job_->job().name());
    view->inodes.add(job_->job().name()).add("/dataset/gen/").add(identity_of(*shown)).add("/");
    return table.intern(
        std::make_shared<SamplesDir>(view, view->key, make_generation_dir(shown), true));
  }
  return Errno{ENOENT};
}

FsResult<std::vector<DirEntry>> GenerationsDir::list() {
  std::vector<DirEntry> entries;
  for (const uint64_t number : numbers()) {
    const std::string name = generation_name(number);
    auto node = lookup(name);
    if (!node) continue;  // gone meanwhile
    PTC_TRY(auto stat, node.value()->attributes());
    entries.push_back({name, S_IFDIR, stat.st_ino, number});
  }
  return entries;
}

struct stat GenerationView::attributes(bool directory, std::string_view node_key) const {
  // Who may read a directory may enter it.
  const mode_t shown = directory ? S_IFDIR | mode | mode >> 2 : S_IFREG | mode;
  return virtual_stat(shown, uid, gid, time,
                      InodeHash(inodes).add(node_key.substr(key.size())).value());
}

FsResult<struct stat> SamplesDir::attributes() { return view_->attributes(true, key()); }

FsResult<NodeRef> SamplesDir::lookup(const std::string& name) {
  std::string child_key = key() + "/" + name;
  NodeTable& table = view_->job->tree().table();
  if (NodeRef known = table.find(child_key)) return known;
  auto found = dir_->find(name);
  if (!found) {
    if (found.error().code() != Code::kNotFound)
      view_->job->data_set().note_read_error(found.error());
    return Errno{to_errno(found.error())};
  }
  DataNode& node = found.value();
  if (node.directory != nullptr) {
    return table.intern(std::make_shared<SamplesDir>(view_, std::move(child_key),
                                                     std::move(node.directory), false));
  }
  return table.intern(
      std::make_shared<SamplesFile>(view_, std::move(child_key), dir_, name, std::move(node.file)));
}

FsResult<std::vector<DirEntry>> SamplesDir::list() {
  auto names = dir_->list();
  if (!names) {
    view_->job->data_set().note_read_error(names.error());
    return Errno{to_errno(names.error())};
  }
  std::vector<DirEntry> entries;
  entries.reserve(names.value().size());
  const InodeHash here =
      InodeHash(view_->inodes).add(std::string_view(key()).substr(view_->key.size())).add("/");
  for (DataDir::Name& name : names.value()) {
    const ino_t inode = InodeHash(here).add(name.name).value();
    entries.push_back({std::move(name.name),
                       static_cast<mode_t>(name.directory ? S_IFDIR : S_IFREG), inode,
                       entries.size() + 1});
  }
  return entries;
}

/// Holds the file, so that a reader keeps its bytes whatever becomes of the run.
class SamplesHandle : public Handle {
 public:
  SamplesHandle(std::shared_ptr<SamplesFile> node, DescriptorShareRef share, VirtualFileRef file,
                std::optional<WholeFile> whole)
      : node_(std::move(node)),
        file_(std::move(file)),
        whole_(std::move(whole)),
        share_(std::move(share)),
        gathered_(whole_ || !share_ ? nullptr : node_->gather(file_)),
        hold_(node_->view_->job->tree().passthrough(), node_->mode_,
              whole_      ? whole_->fd->get()
              : gathered_ ? gathered_->fd()
                          : -1) {
    if (!whole_ && gathered_ == nullptr) share_.reset();
  }

  int32_t backing_id() const { return hold_.backing_id(); }
  const Awaited* awaited() const override { return &node_->view_->shards; }

  FsResult<size_t> read(std::span<std::byte> out, uint64_t offset, const Interrupted&) override {
    auto got = file_->read(offset, out);
    if (!got) return node_->failed(got.error(), fmt::format("reading at byte {}", offset));
    return got.value();
  }

 private:
  const std::shared_ptr<SamplesFile> node_;
  const VirtualFileRef file_;
  const std::optional<WholeFile> whole_;
  DescriptorShareRef share_;  // null: it takes none
  const GatherCache::FileRef gathered_;
  const InodeModeHold hold_;
};

Errno SamplesFile::failed(const Error& error, std::string_view what) const {
  view_->job->data_set().note_read_error(error);
  spdlog::error("job '{}', data set, generation {}: {} of {} failed: {}", view_->job->job().name(),
                view_->generation->number, what, std::string_view(key()).substr(view_->key.size()),
                error.message());
  return Errno{to_errno(error)};
}

GatherCache::FileRef SamplesFile::gather(const VirtualFileRef& file) const {
  Tree& tree = view_->job->tree();
  if (!tree.passthrough().enabled() || !file->read_through()) return nullptr;
  auto gathered = tree.gathered().get(key(), content_of(file, view_->shards));
  std::string next = name_;
  for (int ahead = 0; gathered != nullptr && ahead < kShardsAhead; ++ahead) {
    next = dir_->after(next);
    if (next.empty()) break;
    std::string next_key = key().substr(0, key().size() - name_.size()) + next;
    auto make = [dir = dir_, next, view = view_]() -> Result<GatherCache::Content> {
      PTC_TRY(const DataNode node, dir->find(next));
      PTC_TRY(VirtualFileRef made, node.file());
      return content_of(std::move(made), view->shards);
    };
    tree.gathered().prepare(next_key, view_->shards.name, std::move(make));
  }
  return gathered;
}

FsResult<struct stat> SamplesFile::attributes() {
  uint64_t size = size_.load();
  if (size == UINT64_MAX) {
    const auto file = make_();
    if (!file) return failed(file.error(), "the size");
    size = file.value()->size();
    size_ = size;
  }
  struct stat stat = view_->attributes(false, key());
  stat.st_size = static_cast<off_t>(size);
  return stat;
}

FsResult<Opened> SamplesFile::open(const Caller& caller, int flags) {
  if (!opens_to_read(flags)) return Errno{EROFS};
  auto file = make_();
  if (!file) return failed(file.error(), "opening");
  // What else is wrong with a shard, the reads that meet it say.
  if (auto may = file.value()->may_read(); !may && may.error().code() == Code::kPermissionDenied)
    return failed(may.error(), "opening");
  DescriptorShareRef share = share_.of(view_->job->tree(), caller.uid);
  auto whole =
      share != nullptr ? file.value()->whole() : Result<std::optional<WholeFile>>(std::nullopt);
  if (!whole) return failed(whole.error(), "opening");
  auto self = std::static_pointer_cast<SamplesFile>(shared_from_this());
  auto handle = std::make_unique<SamplesHandle>(std::move(self), std::move(share),
                                                std::move(file).value(), std::move(whole).value());
  const int32_t backing_id = handle->backing_id();
  return Opened{std::move(handle), IoMode::kKeepCache, backing_id};
}

}  // namespace ptc
