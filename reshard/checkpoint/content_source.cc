#include "reshard/checkpoint/content_source.h"

#include <fmt/ranges.h>

#include <chrono>
#include <cstring>
#include <set>

#include "reshard/checkpoint/planned_file.h"
#include "store/base/mutex.h"
#include "store/tensor/stream_copy.h"

namespace ptc {
namespace {

// While a content lives, the checkpoint is in use.
struct InUse {
  std::shared_ptr<const Checkpoint> checkpoint;
  std::shared_ptr<int> token;
};

class StoredContent final : public FileContent {
 public:
  StoredContent(ImageRef image, InUse in_use)
      : image_(std::move(image)), in_use_(std::move(in_use)) {}
  uint64_t bytes() const override { return image_->bytes(); }
  Result<> read(uint64_t offset, std::span<std::byte> out) const override {
    PTC_TRY(auto source, image_->host_bytes());
    std::memcpy(out.data(), source.data() + offset, out.size());
    return ok();
  }
  ImageRef image() const override { return image_; }

 private:
  ImageRef image_;
  InUse in_use_;
};

class TextContent final : public FileContent {
 public:
  explicit TextContent(std::shared_ptr<const std::string> text) : text_(std::move(text)) {}
  uint64_t bytes() const override { return text_->size(); }
  Result<> read(uint64_t offset, std::span<std::byte> out) const override {
    std::memcpy(out.data(), text_->data() + offset, out.size());
    return ok();
  }

 private:
  const std::shared_ptr<const std::string> text_;
};

Result<> gather_past_caches(const GatherProgram& program, Transport& transport, uint64_t offset,
                            std::span<std::byte> out) {
  return program.read_in_windows(transport, offset, offset + out.size(),
                                 [&](uint64_t at, std::span<const std::byte> window) -> Result<> {
                                   stream_copy(out.data() + (at - offset), window.data(),
                                               window.size());
                                   return ok();
                                 });
}

class GatheredContent final : public FileContent {
 public:
  GatheredContent(GatherProgram program, Transport* transport, InUse in_use, ImageRef in_device)
      : program_(std::move(program)),
        transport_(transport),
        in_use_(std::move(in_use)),
        in_device_(std::move(in_device)) {}
  uint64_t bytes() const override { return program_.bytes(); }
  ImageRef image_in_device() const override { return in_device_; }
  const GatherProgram* program() const override { return &program_; }
  Result<> read(uint64_t offset, std::span<std::byte> out) const override {
    return program_.read(*transport_, offset, out);
  }
  Result<> read_past_caches(uint64_t offset, std::span<std::byte> out) const override {
    return gather_past_caches(program_, *transport_, offset, out);
  }

 private:
  GatherProgram program_;
  Transport* transport_;
  InUse in_use_;
  const ImageRef in_device_;
};

class PlannedContent final : public FileContent {
 public:
  PlannedContent(ImageLayout layout, std::shared_ptr<const StoredState> stored,
                 Transport* transport, InUse in_use, ImageRef in_device)
      : file_(std::move(layout), std::move(stored)),
        transport_(transport),
        in_use_(std::move(in_use)),
        in_device_(std::move(in_device)) {}
  uint64_t bytes() const override { return file_.bytes(); }
  ImageRef image_in_device() const override { return in_device_; }
  const GatherProgram* program() const override { return file_.whole(); }
  Result<> read(uint64_t offset, std::span<std::byte> out) const override {
    return file_.for_each_piece(
        offset, out, [&](const GatherProgram& program, uint64_t at, std::span<std::byte> part) {
          return program.read(*transport_, at, part);
        });
  }
  Result<> read_past_caches(uint64_t offset, std::span<std::byte> out) const override {
    return file_.for_each_piece(
        offset, out, [&](const GatherProgram& program, uint64_t at, std::span<std::byte> part) {
          return gather_past_caches(program, *transport_, at, part);
        });
  }

 private:
  const PlannedFile file_;
  Transport* const transport_;
  const InUse in_use_;
  const ImageRef in_device_;
};

Error damaged(const Checkpoint& checkpoint, std::string_view what) {
  return make_error(Code::kCorrupt,
                    "checkpoint {}: {} is not what was committed, and no copy within reach has it "
                    "right (ptc verify)",
                    checkpoint.name(), what);
}

Error lost(const Checkpoint& checkpoint) {
  return make_error(Code::kCorrupt, "{}",
                    checkpoint.loss().value_or(fmt::format(
                        "checkpoint {} has lost a tensor of this file", checkpoint.name())));
}

/// Of a source that is to be planned. kCorrupt: some of it is nowhere.
Result<GatherProgram> plan_now(const Checkpoint& checkpoint, const Source& source,
                               const StoredState& stored) {
  auto transfers = stored.index().plan_image(source.layout);
  if (transfers.has_error()) return lost(checkpoint);
  return GatherProgram(source.layout.literals, source.layout.bytes, std::move(transfers).value(),
                       stored.image_refs());
}

/// Nodes that did not answer a moment ago.
std::set<std::string> absent_nodes(RemoteFiles& files) {
  MutexLock lock(files.mutex);
  const auto now = RemoteFiles::Clock::now();
  std::erase_if(files.absent, [&](const auto& one) { return one.second < now; });
  std::set<std::string> nodes;
  for (const auto& [node, until] : files.absent) nodes.insert(node);
  return nodes;
}

/// `stored` as it is when what lies on these nodes is lost.
Result<std::shared_ptr<const StoredState>> stored_without(
    const Checkpoint& checkpoint, RemoteFiles& files,
    const std::shared_ptr<const StoredState>& stored, const std::set<std::string>& nodes) {
  MutexLock making(files.making_rest);
  {
    MutexLock lock(files.mutex);
    if (files.rest != nullptr && files.rest->of == stored && files.rest->without == nodes)
      return files.rest->stored;
  }
  std::vector<StoredImage> images = stored->images;
  for (StoredImage& image : images)
    if (nodes.contains(image.node)) image.image = nullptr;
  PTC_TRY(auto rest, checkpoint.make_stored(stored->spec, std::move(images)));
  MutexLock lock(files.mutex);
  if (files.stored == stored)
    files.rest = std::make_shared<const RemoteFiles::Rest>(stored, nodes, rest);
  return rest;
}

/// Some of it is on other nodes. Where one of them does not answer, or not soon, and others have
/// the same bytes, these are asked. When nobody has it any more where it was (bytes were moved), it
/// is looked for where the checkpoint's bytes lie by then: they are the same.
class RemoteContent final : public FileContent {
 public:
  RemoteContent(FindSource find, std::shared_ptr<const StoredState> stored, GatherProgram program,
                Transport* transport, InUse in_use, std::shared_ptr<RemoteFiles> files,
                std::string nodes)
      : find_(std::move(find)),
        transport_(transport),
        in_use_(std::move(in_use)),
        files_(std::move(files)),
        nodes_(std::move(nodes)),
        stored_(std::move(stored)),
        program_(std::make_shared<const GatherProgram>(std::move(program))) {}
  uint64_t bytes() const override { return now().program->bytes(); }
  std::string other_nodes() const override { return nodes_; }
  Result<> read(uint64_t offset, std::span<std::byte> out) const override {
    const auto asked = RemoteFiles::Clock::now();
    for (bool others = true;;) {  // there may be some to ask
      const Now seen = now();
      std::set<std::string> absent;
      Result<> got = seen.program->read(*transport_, offset, out,
                                        others ? kLate : Transport::kUsualSilence, absent);
      if (got.has_value() || got.error().code() != Code::kUnavailable) return got;
      if (others) {
        PTC_TRY(others, turn_to_others(seen, absent));
        if (others || !seen.given_up) continue;
      }
      if (RemoteFiles::Clock::now() - asked > kPatience) {
        give_up(seen.stored);
        return got;
      }
      PTC_TRY(bool newer,
              look_again(seen.stored, seen.given_up ? std::chrono::milliseconds(0) : kPause));
      if (seen.given_up && !newer) return got;
      others = newer;
    }
  }

 private:
  static constexpr std::chrono::seconds kPatience{
      15};  // longer than until a node is known to be away, as a rule
  static constexpr std::chrono::milliseconds kPause{200};
  static constexpr std::chrono::milliseconds kLate{
      1000};  // an answer, where another node could give it
  static constexpr std::chrono::seconds kAvoided{10};  // a node that did not answer
  struct Now {
    std::shared_ptr<const StoredState> stored;
    std::shared_ptr<const GatherProgram> program;
    bool given_up;
  };
  Now now() const {
    MutexLock lock(mutex_);
    return {stored_, program_, given_up_ == stored_};
  }
  /// Whether there is another program to try than `seen`, without what lies on these nodes and
  /// others that do not answer. If not, all of them are asked once more.
  Result<bool> turn_to_others(const Now& seen, const std::set<std::string>& absent) const {
    if (absent.empty()) return false;
    {
      MutexLock lock(files_->mutex);
      for (const std::string& node : absent)
        files_->absent[node] = RemoteFiles::Clock::now() + kAvoided;
    }
    PTC_TRY(auto rest,
            stored_without(*in_use_.checkpoint, *files_, seen.stored, absent_nodes(*files_)));
    Result<Source> source = find_(*rest);
    const bool found = source.has_value();
    if (!found) source = find_(*seen.stored);
    if (source.has_error()) return std::move(source).error();
    PTC_TRY(auto program, program_of(std::move(source).value(), found ? *rest : *seen.stored));
    MutexLock lock(mutex_);
    if (program_ != seen.program || stored_ != seen.stored)
      return true;  // another reader has turned already
    program_ = std::move(program);
    return found;
  }
  /// Whether it is known by now, or after `pause`, that bytes lie elsewhere than `seen` says.
  Result<bool> look_again(const std::shared_ptr<const StoredState>& seen,
                          std::chrono::milliseconds pause) const {
    std::shared_ptr<const StoredState> newer;
    {
      MutexLock lock(files_->mutex);
      files_->replaced.wait_for(files_->mutex, pause, [&]() PTC_REQUIRES(files_->mutex) {
        return files_->stored != seen;
      });
      newer = files_->stored;
    }
    if (newer == seen) return false;
    PTC_TRY(auto source, find_(*newer));
    PTC_TRY(auto program, program_of(std::move(source), *newer));
    MutexLock lock(mutex_);
    stored_ = std::move(newer);
    program_ = std::move(program);
    return true;
  }
  Result<std::shared_ptr<const GatherProgram>> program_of(Source source,
                                                          const StoredState& stored) const {
    if (!source.program) {
      PTC_TRY(source.program, plan_now(*in_use_.checkpoint, source, stored));
    }
    return std::make_shared<const GatherProgram>(*std::move(source.program));
  }
  /// Until it lies elsewhere, reads fail at once.
  void give_up(std::shared_ptr<const StoredState> seen) const {
    MutexLock lock(mutex_);
    given_up_ = std::move(seen);
  }

  const FindSource find_;
  Transport* const transport_;
  const InUse in_use_;
  const std::shared_ptr<RemoteFiles> files_;
  const std::string nodes_;  // when it was opened
  mutable Mutex mutex_;
  mutable std::shared_ptr<const StoredState> given_up_ PTC_GUARDED_BY(mutex_);
  mutable std::shared_ptr<const StoredState> stored_ PTC_GUARDED_BY(mutex_);
  mutable std::shared_ptr<const GatherProgram> program_
      PTC_GUARDED_BY(mutex_);  // made for it, or for what of it answers
};

}  // namespace

Result<FileContentRef> ContentSource::open(FindSource find) const {
  std::shared_ptr<const StoredState> stored;
  std::shared_ptr<RemoteFiles> files;
  {
    MutexLock lock(checkpoint_->mutex_);
    stored = checkpoint_->readable_;
    files = checkpoint_->remote_files_;
  }
  InUse in_use{checkpoint_, checkpoint_->open_token_};
  PTC_TRY(auto source, find(*stored));
  if (!source.elsewhere.empty() && files != nullptr) {
    if (const std::set<std::string> absent = absent_nodes(*files); !absent.empty()) {
      PTC_TRY(auto rest, stored_without(*checkpoint_, *files, stored, absent));
      if (Result<Source> other = find(*rest); other.has_value()) source = std::move(other).value();
    }
  }
  Transport* transport = checkpoint_->transport_;
  if (source.image != nullptr && source.image->has_host_bytes())
    return FileContentRef(
        std::make_shared<StoredContent>(std::move(source.image), std::move(in_use)));
  ImageRef in_device;
  if (source.image != nullptr && source.image->device() != nullptr)
    in_device = std::move(source.image);
  if (!source.program)
    return FileContentRef(
        std::make_shared<PlannedContent>(std::move(source.layout), std::move(stored), transport,
                                         std::move(in_use), std::move(in_device)));
  if (!source.elsewhere.empty() && files != nullptr)
    return FileContentRef(std::make_shared<RemoteContent>(
        std::move(find), std::move(stored), *std::move(source.program), transport,
        std::move(in_use), std::move(files), std::move(source.elsewhere)));
  return FileContentRef(std::make_shared<GatheredContent>(*std::move(source.program), transport,
                                                          std::move(in_use), std::move(in_device)));
}

bool ContentSource::is_stored(const FindImage& find) const {
  std::shared_ptr<const StoredState> stored;
  {
    MutexLock lock(checkpoint_->mutex_);
    stored = checkpoint_->readable_;
  }
  const auto image = find(*stored);
  return image.has_value() && image.value() != nullptr && image.value()->has_host_bytes();
}

Result<FileContentRef> ContentSource::open_gathered(
    std::shared_ptr<const ImageLayout> layout) const {
  return open([layout = std::move(layout), &checkpoint = *checkpoint_](const StoredState& stored) {
    return gather(checkpoint, stored, *layout);
  });
}

Result<Source> ContentSource::gather(const Checkpoint& checkpoint, const StoredState& stored,
                                     const ImageLayout& layout) {
  PTC_TRY(check_tensors(checkpoint, layout));
  Source source;
  source.layout = layout;
  source.layout.node = stored.here;  // what is here is read here
  if (all_are_here(stored)) return source;
  PTC_TRY(source.program, plan_now(checkpoint, source, stored));
  std::set<std::string_view> elsewhere;
  for (const Transfer& one : source.program->transfers())
    if (const Image& image = *stored.images[one.source_image].image; !image.is_here())
      elsewhere.insert(image.node());
  source.elsewhere = fmt::format("{}", fmt::join(elsewhere, ", "));
  return source;
}

Result<> ContentSource::check_tensors(const Checkpoint& checkpoint, const ImageLayout& layout) {
  const std::shared_ptr<const KnownDamage> damage = checkpoint.damage();
  if (damage == nullptr) return ok();
  for (const ArraySlot& slot : layout.arrays)
    if (damage->has_tensor(slot.tensor))
      return damaged(checkpoint, checkpoint.manifest().tensor_name(slot.tensor));
  return ok();
}

bool ContentSource::is_damaged(const Checkpoint& checkpoint, const StoredImage& image) {
  const std::shared_ptr<const KnownDamage> damage = checkpoint.damage();
  return damage != nullptr && damage->has_image(image.id);
}

Source ContentSource::whole(const ImageRef& image) {
  Transfer all;
  all.copy.run_bytes = image->bytes();
  std::vector<Transfer> transfers;
  if (image->bytes() > 0) transfers.push_back(all);
  Source source;
  source.image = image;
  source.program.emplace("", image->bytes(), std::move(transfers), std::vector<ImageRef>{image});
  if (!image->is_here()) source.elsewhere = image->node();
  return source;
}

Result<ImageRef> ContentSource::written(const Checkpoint& checkpoint, const StoredState& stored,
                                        uint32_t index) {
  const WrittenFile& file = checkpoint.manifest().files[index];
  if (const auto damage = checkpoint.damage(); damage != nullptr && damage->has_file(index))
    return damaged(checkpoint, fmt::format("{} of rank {}", file.path, file.rank));
  const int64_t image = stored.find_other(index);
  if (image >= 0 && stored.images[image].image != nullptr) return stored.images[image].image;
  return make_error(Code::kCorrupt, "checkpoint {}: {} of rank {} is lost", checkpoint.name(),
                    file.path, file.rank);
}

FileContentRef text_content(std::shared_ptr<const std::string> text) {
  return std::make_shared<TextContent>(std::move(text));
}

}  // namespace ptc
