// From the description of a file to its bytes, from where these lie at that moment. For the files
// of a checkpoint (file_sets.cc) alone.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "reshard/checkpoint/checkpoint.h"

namespace ptc {

/// Where the bytes of a file are to be had in a stored state.
struct Source {
  ImageRef image;                        // that is the file; or null:
  std::optional<GatherProgram> program;  // of what it is gathered; or nullopt:
  ImageLayout layout = {};               // it is planned as it is read (PlannedFile)
  std::string elsewhere = {};            // other nodes that some of it is on
};
using FindSource = std::function<Result<Source>(const StoredState&)>;
/// The image that is the file as it is; null: there is none, it is gathered.
using FindImage = std::function<Result<ImageRef>(const StoredState&)>;

/// Turns descriptions of files into contents. Threads: any.
class ContentSource {
 public:
  explicit ContentSource(std::shared_ptr<const Checkpoint> checkpoint)
      : checkpoint_(std::move(checkpoint)) {}

  const Checkpoint& checkpoint() const { return *checkpoint_; }

  Result<FileContentRef> open(FindSource find) const;
  /// Whether what is opened now is an image on this node. Nothing is planned.
  bool is_stored(const FindImage& find) const;
  Result<FileContentRef> open_gathered(std::shared_ptr<const ImageLayout> layout) const;

  static Result<Source> gather(const Checkpoint& checkpoint, const StoredState& stored,
                               const ImageLayout& layout);

  /// kCorrupt: some tensor of it is known to be wrong in all copies.
  static Result<> check_tensors(const Checkpoint& checkpoint, const ImageLayout& layout);
  static bool is_damaged(const Checkpoint& checkpoint, const StoredImage& image);
  static Source whole(const ImageRef& image);
  /// Of a file without tensors, as its rank wrote it; `index` into Manifest::files. Never null.
  static Result<ImageRef> written(const Checkpoint& checkpoint, const StoredState& stored,
                                  uint32_t index);

 private:
  std::shared_ptr<const Checkpoint> checkpoint_;
};

/// The content of a file that has no tensors.
FileContentRef text_content(std::shared_ptr<const std::string> text);

}  // namespace ptc
