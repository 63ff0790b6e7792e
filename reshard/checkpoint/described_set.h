// A set of files of which each is described by its layout when it is opened. For the files of a
// checkpoint (file_sets.cc, served_files.cc) alone.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <numeric>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#include "reshard/checkpoint/content_source.h"
#include "store/codec/npy.h"

namespace ptc {

/// What a directory is without, and why, stands in a file of this name in it.
inline constexpr const char* kLeftOut = "LEFT_OUT.txt";

/// A set of which each file is described by its layout when it is opened.
class DescribedSet : public FileSet {
 public:
  using Open = std::function<Result<FileContentRef>(const ContentSource&)>;

  DescribedSet(std::string key, std::shared_ptr<const Checkpoint> checkpoint)
      : FileSet(std::move(key)), source_(std::move(checkpoint)) {}

  /// Computed when it is read.
  void add(Entry entry, Open open) {
    add(std::move(entry), {0, nullptr, std::move(open), nullptr, nullptr});
  }
  /// Stored, perhaps: under the layout in force, and on this node. Where it has no image, `gather`
  /// says what it is made of.
  void add_stored(Entry entry, FindImage image, FindSource gather) {
    add(std::move(entry), {0, nullptr, nullptr, std::move(image), std::move(gather)});
  }
  bool has(const std::string& path) const { return added_.contains(path); }  // until finish()
  void finish() {
    added_ = {};
    std::vector<uint32_t> order(entries_.size());
    std::iota(order.begin(), order.end(), 0);
    std::sort(order.begin(), order.end(),
              [&](uint32_t a, uint32_t b) { return entries_[a].path < entries_[b].path; });
    std::vector<Entry> entries;
    std::vector<File> files;
    entries.reserve(order.size());
    files.reserve(order.size());
    for (uint32_t i : order) {
      entries.push_back(std::move(entries_[i]));
      files.push_back(std::move(files_[i]));
    }
    entries_ = std::move(entries);
    files_ = std::move(files);
    memory_bytes_ += entries_.size() * (sizeof(Entry) + sizeof(File) + kBytesOfFile);
  }
  /// Beside its files: what says how they are laid out.
  void add_memory(uint64_t bytes) { memory_bytes_ += bytes; }
  Result<FileContentRef> open(size_t index) const override {
    const File& file = files_[index];
    const auto open_now = [&] {
      if (file.open) return file.open(source_);
      return file.image ? open_stored(file) : open_npy(file, entries_[index].bytes);
    };
    Result<FileContentRef> content = open_now();
    // The node that has it may have come a moment ago.
    if (content.has_error() && content.error().code() == Code::kCorrupt &&
        source_.checkpoint().catch_up())
      content = open_now();
    if (content.has_error() && source_.checkpoint().removed())
      return make_error(Code::kNotFound, "checkpoint {} was removed", source_.checkpoint().name());
    return content;
  }
  bool is_stored(size_t index) const override {
    return files_[index].image != nullptr && source_.is_stored(files_[index].image);
  }

  /// Adds a tensor, or its part, as one .npy. There may be very many of them.
  Result<> add_npy(std::string path, uint32_t tensor,
                   std::unique_ptr<const SubTensor> part = nullptr) {
    const TensorInfo& info = source_.checkpoint().model().tensors()[tensor];
    const Shape shape = part != nullptr ? part->local_shape : info.shape_in_files();
    PTC_TRY(auto bytes, array_bytes(shape, info.dtype));
    bool unknown_to_numpy = dtype_npy_descr(info.dtype).find('V') != std::string_view::npos;
    entries_.push_back({std::move(path), npy_header_bytes(info.dtype, shape) + bytes,
                        unknown_to_numpy ? std::string(dtype_name(info.dtype)) : std::string(),
                        source_.checkpoint().rights_of(tensor)});
    files_.push_back({tensor, std::move(part), nullptr, nullptr, nullptr});
    return ok();
  }

  void add_other(uint32_t index) {
    const WrittenFile& file = source_.checkpoint().manifest().files[index];
    add_other(index, file.path, source_.checkpoint().manifest().rights_of(file));
  }
  void add_other(uint32_t index, const std::string& path, const ReadRights& rights) {
    if (has(path)) return;
    const auto image = [index, &checkpoint = source_.checkpoint()](const StoredState& stored) {
      return ContentSource::written(checkpoint, stored, index);
    };
    add_stored({path, source_.checkpoint().manifest().files[index].bytes, "", rights}, image,
               nullptr);
  }

  void add_text(std::string path, std::string text, const ReadRights& rights) {
    add_text(std::move(path), std::make_shared<const std::string>(std::move(text)), rights);
  }
  void add_text(std::string path, std::shared_ptr<const std::string> text,
                const ReadRights& rights) {
    const uint64_t bytes = text->size();
    add({std::move(path), bytes, "", rights},
        [text = std::move(text)](const ContentSource&) -> Result<FileContentRef> {
          return text_content(text);
        });
  }

 private:
  static constexpr uint64_t kBytesOfFile = 300;  // its path, and what its functions have
  struct File {
    uint32_t tensor;                        // of an .npy
    std::unique_ptr<const SubTensor> part;  // null: all of it
    Open open;                              // of what else is computed
    FindImage image;                        // of what may be stored
    FindSource gather;
  };

  void add(Entry entry, File file) {
    added_.insert(entry.path);
    entries_.push_back(std::move(entry));
    files_.push_back(std::move(file));
  }

  Result<FileContentRef> open_stored(const File& file) const {
    return source_.open([image = file.image, gather = file.gather](const StoredState& now) {
      return find_source(image, gather, now);
    });
  }
  static Result<Source> find_source(const FindImage& find_image, const FindSource& gather,
                                    const StoredState& now) {
    PTC_TRY(const ImageRef image, find_image(now));
    return image != nullptr ? ContentSource::whole(image) : gather(now);
  }

  /// Tensors of a model have few shapes, and neighbours often the same.
  uint64_t npy_header_bytes(DType dtype, const Shape& shape) {
    if (last_header_bytes_ == 0 || dtype != last_dtype_ || !(shape == last_shape_)) {
      last_dtype_ = dtype;
      last_shape_ = shape;
      last_header_bytes_ = write_npy_header(dtype, shape).size();
    }
    return last_header_bytes_;
  }

  Result<FileContentRef> open_npy(const File& file, uint64_t bytes) const {
    const TensorInfo& info = source_.checkpoint().model().tensors()[file.tensor];
    const SubTensor part = file.part != nullptr ? *file.part : info.whole();
    auto layout = std::make_shared<ImageLayout>();
    std::string header = write_npy_header(info.dtype, part.local_shape);
    layout->arrays.push_back({file.tensor, header.size(), part});
    layout->literals = std::move(header);
    layout->bytes = bytes;
    return source_.open_gathered(std::move(layout));
  }

  ContentSource source_;
  DType last_dtype_ = DType::kF32;
  Shape last_shape_;
  uint64_t last_header_bytes_ = 0;
  std::vector<File> files_;  // of entries(), in the same order
  std::unordered_set<std::string> added_;
};

}  // namespace ptc
