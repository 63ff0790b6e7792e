#include "fs/nodes/checkpoint/content_file.h"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <optional>
#include <utility>

#include "fs/nodes/checkpoint/file_set_dir.h"

namespace ptc {
namespace {

constexpr const char* kDtypeXattr = "user.ptc.dtype";

// An open waits for two seconds at most, in its queue included.
const Awaited kGathering{"files that are gathered", 64, true};
constexpr uint64_t kGathersForLong = 4 << 20;

/// What the kernel is handed, while it takes it; it holds the file by itself then.
class ToHand {
 public:
  ToHand(const Passthrough& passthrough, const ImageRef& image,
         const GatherCache::FileRef& gathered) {
    if (gathered && gathered->is_whole()) fd_ = gathered->fd();
    if (!image || !image->has_host_bytes() || !passthrough.enabled()) return;
    auto use = image->use_file();
    if (use.has_error()) return;  // reads, which come to the handle, say why
    image_.emplace(std::move(use).value());
    fd_ = image_->fd();
  }
  int fd() const { return fd_; }

 private:
  std::optional<FileInUse> image_;
  int fd_ = -1;
};

}  // namespace

/// Holds the content, so that a reader keeps its bytes whatever happens to the checkpoint.
class ContentHandle : public Handle {
 public:
  ContentHandle(std::shared_ptr<ContentFile> file, DescriptorShareRef share, FileContentRef content,
                const std::string& content_key, const Caller& caller)
      : file_(std::move(file)),
        content_(std::move(content)),
        nodes_(awaited_for(*content_)),
        image_(content_->image()),
        share_(std::move(share)),
        gathered_(image_ || !share_ ? nullptr : file_->gather(content_, content_key, caller)),
        hold_(file_->job_->tree().passthrough(), file_->mode_,
              ToHand(file_->job_->tree().passthrough(), image_, gathered_).fd()) {
    if (gathered_ == nullptr) share_.reset();
  }

  int32_t backing_id() const { return hold_.backing_id(); }
  const Awaited* awaited() const override { return nodes_ ? &*nodes_ : nullptr; }

  FsResult<size_t> read(std::span<std::byte> out, uint64_t offset, const Interrupted&) override {
    if (offset >= content_->bytes()) return size_t{0};
    size_t size = std::min<uint64_t>(out.size(), content_->bytes() - offset);
    GatherCache& cache = file_->job_->tree().gathered();
    if (gathered_ && cache.read(gathered_, offset, out.first(size))) return size;
    auto got = content_->read(offset, out.first(size));
    if (got) return size;
    spdlog::error("job '{}', checkpoint '{}': reading {} at byte {} failed: {}",
                  file_->job_->job().name(), file_->checkpoint_->checkpoint->name(), file_->path(),
                  offset, got.error().message());
    return Errno{to_errno(got.error())};
  }
  FsResult<Pages> pages(const Caller& caller) override {
    if (const ImageRef there = content_->image_in_device(); there != nullptr) {
      auto shared = PageFiles::of(*there->device(), file_->rights_.uid, caller);
      if (shared) return shared;
    }
    // What is gathered for the kernel is in memory.
    if (!image_) return Errno{backing_id() != 0 ? EALREADY : EOPNOTSUPP};
    PTC_TRY(const FileInUse file, as_fs(image_->use_file()));
    if (backing_id() != 0) return Errno{lies_in_memory(file.fd()) ? EALREADY : EOPNOTSUPP};
    PTC_TRY(check_descriptors(file.fd()));
    return file_->job_->tree().page_files().of(file.fd(), O_RDONLY, caller);
  }

 private:
  static std::optional<Awaited> awaited_for(const FileContent& content) {
    const std::string nodes = content.other_nodes();
    if (nodes.empty()) return std::nullopt;
    return Awaited{.name = "node " + nodes};
  }

  const std::shared_ptr<ContentFile> file_;
  const FileContentRef content_;
  const std::optional<Awaited> nodes_;
  const ImageRef image_;
  DescriptorShareRef share_;  // null: it takes none
  const GatherCache::FileRef gathered_;
  const InodeModeHold hold_;
};

ContentFile::ContentFile(JobViewRef job, std::shared_ptr<CheckpointView> checkpoint,
                         std::string key, FileSetSourceRef source, const FileSet& set, size_t index)
    : Node(std::move(key)),
      job_(std::move(job)),
      checkpoint_(std::move(checkpoint)),
      source_(std::move(source)),
      index_(index),
      bytes_(set.entries()[index].bytes),
      dtype_(set.entries()[index].dtype),
      rights_(set.entries()[index].rights) {}

GatherCache::Content ContentFile::gathered(FileContentRef content) const {
  auto fill_from = [](FileContentRef from) {
    return [from = std::move(from)](uint64_t offset, std::span<std::byte> out) {
      return from->read_past_caches(offset, out);
    };
  };
  using Fill = GatherCache::Fill;
  const uint64_t bytes = content->bytes();
  auto again = [fill_from, source = source_, index = index_,
                checkpoint = checkpoint_->checkpoint]() -> Result<Fill> {
    PTC_TRY(const FileSetRef set, source->get());
    Result<FileContentRef> now = set->open(index);
    // Nobody opens it until it is right, and then this is asked again.
    if (now.has_error() && now.error().code() == Code::kCorrupt && checkpoint->damage() != nullptr)
      return Fill();
    if (now.has_error()) return std::move(now).error();
    return Fill(fill_from(std::move(now).value()));
  };
  return {.bytes = bytes, .fill = fill_from(std::move(content)), .again = std::move(again)};
}

GatherCache::FileRef ContentFile::gather(const FileContentRef& content,
                                         const std::string& content_key,
                                         const Caller& caller) const {
  Tree& tree = job_->tree();
  // Of what comes from other nodes no more is to move than is read: the kernel reads ahead of those
  // who read on.
  if (!tree.passthrough().enabled() || !content->other_nodes().empty()) return nullptr;
  auto leaves = [&] { return mode_.is_read_through() || caller.is_dying(); };
  return tree.gathered().get(checkpoint_->key + "/" + content_key, gathered(content), leaves,
                             caller.queued);
}

const Awaited* ContentFile::awaited_by_open() const {
  return bytes_ >= kGathersForLong ? &kGathering : nullptr;
}

FsResult<struct stat> ContentFile::attributes() {
  struct stat stat = checkpoint_->attributes(S_IFREG | rights_.mode, path());
  stat.st_uid = rights_.uid;
  stat.st_gid = rights_.gid;
  stat.st_size = static_cast<off_t>(bytes_);
  // What takes memory counts in `du`; what is computed when read takes none.
  PTC_TRY(const FileSetRef set, as_fs(source_->get()));
  if (set->is_stored(index_)) stat.st_blocks = (stat.st_size + 511) / 512;
  return stat;
}

FsResult<Opened> ContentFile::open(const Caller& caller, int flags) {
  if (!opens_to_read(flags)) return Errno{EROFS};
  PTC_TRY(const FileSetRef set, as_fs(source_->get()));
  auto content = set->open(index_);
  if (!content) {
    spdlog::error("job '{}', checkpoint '{}': opening {} failed: {}", job_->job().name(),
                  checkpoint_->checkpoint->name(), path(), content.error().message());
    return Errno{to_errno(content.error())};
  }
  auto self = std::static_pointer_cast<ContentFile>(shared_from_this());
  auto handle =
      std::make_unique<ContentHandle>(std::move(self), share_.of(job_->tree(), caller.uid),
                                      std::move(content).value(), set->content_key(index_), caller);
  int32_t backing_id = handle->backing_id();
  return Opened{std::move(handle), IoMode::kKeepCache, backing_id};
}

FsResult<std::string> ContentFile::get_xattr(const std::string& name) {
  if (name == kDtypeXattr && !dtype_.empty()) return dtype_;
  return Errno{ENODATA};
}

FsResult<std::vector<std::string>> ContentFile::list_xattrs() {
  std::vector<std::string> names;
  if (!dtype_.empty()) names.emplace_back(kDtypeXattr);
  return names;
}

}  // namespace ptc
