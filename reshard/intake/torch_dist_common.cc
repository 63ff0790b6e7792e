#include "reshard/intake/torch_dist_common.h"

#include <deque>
#include <span>
#include <string_view>
#include <vector>

#include "store/codec/pickle_writer.h"
#include "store/codec/torch_compose.h"
#include "store/codec/torch_file.h"

namespace ptc {
namespace {

constexpr std::string_view kInBuckets = "dp_reshardable", kByParameters = "fully_reshardable";
constexpr std::string_view kOptimizerOf = "optimizer";

TorchStep key_of(std::string_view key) { return {TorchStep::Kind::kKey, std::string(key), 0}; }

class Common {
 public:
  explicit Common(const ReadAt& read) : read_(read) {}

  bool add_file(uint64_t file_bytes) {
    auto file = TorchFile::read(read_, file_bytes);
    // Megatron has no tensors there.
    if (file.has_error() || !file.value().opaque().empty() || !file.value().tensors().empty())
      return false;
    const TorchFile& common = files_.emplace_back(std::move(file).value());
    PickleWriter writer;
    writer.text(kByParameters);
    text_ = std::move(writer).finish();
    auto other = Pickle::parse(text_);
    if (other.has_error()) return false;
    other_.emplace(std::move(other).value());
    const Pickle& pickle = common.pickle();
    for (const TorchLiteral& literal : common.literals()) {
      TorchPathValue& value = values_.emplace_back();
      value.path = common.path(literal.place);
      value.pickle = &pickle;
      value.node = literal.node;
      const bool says =
          !value.path.empty() && (value.path.back() == key_of("param_state_sharding_type") ||
                                  value.path.back() == key_of("distrib_optim_sharding_type"));
      if (!says || !pickle.is(literal.node, PickleKind::kText) ||
          pickle.text(literal.node) != kInBuckets)
        continue;
      value.pickle = &*other_;
      value.node = other_->root();
      said_ = true;
    }
    for (const TorchPair& pair : common.pairs()) {
      TorchPathValue& value = values_.emplace_back();
      value.path = common.path(pair.place);
      value.pickle = &pickle;
      value.node = pair.node;
      value.key = pair.key;
    }
    return said_;
  }

  /// A list with the settings alone.
  bool add_settings(const std::vector<TorchStep>& at, std::string_view archive) {
    auto read = TorchFile::read(read_at(std::as_bytes(std::span(archive))), archive.size());
    if (read.has_error() || !read.value().opaque().empty() || !read.value().tensors().empty() ||
        !read.value().pairs().empty())
      return false;
    const TorchFile& file = files_.emplace_back(std::move(read).value());
    for (const TorchLiteral& literal : file.literals()) {
      const std::vector<TorchStep> path = file.path(literal.place);
      if (path.empty() || path[0] != TorchStep{TorchStep::Kind::kListIndex, {}, 0}) return false;
      TorchPathValue& value = values_.emplace_back();
      value.path = at;
      value.path.insert(value.path.end(), path.begin() + 1, path.end());
      value.pickle = &file.pickle();
      value.node = literal.node;
    }
    return true;
  }

  std::optional<std::string> finish() const {
    auto made = compose_torch_file(values_, "common");
    if (made.has_error()) return std::nullopt;
    std::string file(made.value().zip.file_bytes, '\0');
    for (const ZipWriter::Piece& piece : made.value().zip.pieces)
      file.replace(piece.offset, piece.bytes.size(), piece.bytes);
    return file;
  }

 private:
  const ReadAt& read_;
  std::deque<TorchFile> files_;  // whose pickles the values point to
  std::vector<TorchPathValue> values_;
  std::string text_;
  std::optional<Pickle> other_;
  bool said_ = false;
};

}  // namespace

std::optional<std::string> common_of_parameters(const ReadAt& read, uint64_t file_bytes,
                                                std::span<const OptimizerSettings> settings,
                                                bool apart) {
  Common common(read);
  if (!common.add_file(file_bytes)) return std::nullopt;
  for (const OptimizerSettings& one : settings) {
    std::vector<TorchStep> at{key_of(kOptimizerOf)};
    if (apart) at.push_back({TorchStep::Kind::kNumberKey, {}, one.optimizer});
    at.push_back(key_of(one.key));
    if (!common.add_settings(at, one.archive)) return std::nullopt;
  }
  return common.finish();
}

}  // namespace ptc
