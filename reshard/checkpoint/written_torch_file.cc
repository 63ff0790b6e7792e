#include "reshard/checkpoint/written_torch_file.h"

#include <algorithm>
#include <cstring>
#include <unordered_set>
#include <utility>

#include "store/base/json.h"

namespace ptc {
namespace {

constexpr std::string_view kMagic = "ptctorch";
/// The same, then a TorchNaming: a number (1: whole), the length of the wrappers, these.
constexpr std::string_view kMagicNaming = "ptctorc2";
/// The same with the length of the key that they are inside, after that of the wrappers, and the
/// key after these.
constexpr std::string_view kMagicInside = "ptctorc3";

/// kInvalidArgument: of state by number it cannot be told whose it is.
Result<> name_by_parameters(const TorchFile& file, TorchModelTensors& found) {
  std::vector<MegatronArray> arrays;
  for (size_t i = 0; i < found.numbers.size(); ++i) {
    const TorchTensor& tensor = file.tensors()[found.numbers[i]];
    arrays.push_back({found.names[i], tensor.dtype, tensor.shape});
  }
  PTC_TRY(found.optimizer, MegatronOptimizer::find(file, arrays, found.numbers));
  if (!found.optimizer) return ok();
  std::unordered_set<std::string_view> names;
  for (size_t i = 0; i < arrays.size(); ++i) {
    if (const auto& name = found.optimizer->name(i)) found.names[i] = *name;
    if (!names.insert(found.names[i]).second)
      return invalid_argument("it has two tensors that are called {}", ptc::quoted(found.names[i]));
  }
  return ok();
}

}  // namespace

std::string torch_outline(const std::vector<TorchOutlineRange>& ranges, std::string_view bytes) {
  std::string text(kMagic);
  auto add = [&](uint64_t number) {
    text.append(reinterpret_cast<const char*>(&number), sizeof number);
  };
  add(ranges.size());
  for (const TorchOutlineRange& range : ranges) add(range.begin), add(range.end - range.begin);
  return text.append(bytes);
}

Result<std::string> read_torch_outline(const ReadAt& read, uint64_t file_bytes,
                                       std::vector<TorchOutlineRange> arrays) {
  constexpr uint64_t kMostLiteralBytes = 256 << 20;
  std::sort(
      arrays.begin(), arrays.end(),
      [](const TorchOutlineRange& a, const TorchOutlineRange& b) { return a.begin < b.begin; });
  arrays.push_back({file_bytes, file_bytes});
  std::vector<TorchOutlineRange> others;
  uint64_t end = 0, bytes = 0;
  for (const TorchOutlineRange& array : arrays) {
    if (array.begin > end) {
      others.push_back({end, array.begin});
      bytes += array.begin - end;
    }
    end = std::max(end, array.end);
  }
  if (bytes > kMostLiteralBytes)
    return invalid_argument(
        "{} bytes of it are in no tensor that is saved, and at most {} are kept: tensors that are "
        "slices of larger ones are saved with these, so save their .clone()",
        bytes, kMostLiteralBytes);
  std::string own(bytes, '\0');
  uint64_t at = 0;
  for (const TorchOutlineRange& range : others) {
    const std::span into(own.data() + at, range.end - range.begin);
    PTC_TRY(read(range.begin, std::as_writable_bytes(into)));
    at += into.size();
  }
  return torch_outline(others, own);
}

Result<std::optional<TorchNaming>> take_torch_naming(std::string_view& text) {
  std::optional<TorchNaming> naming;
  if (text.starts_with(kMagic)) return text.remove_prefix(kMagic.size()), naming;
  const bool inside = text.starts_with(kMagicInside);
  uint64_t numbers[3] = {};
  const size_t number_bytes = (inside ? 3 : 2) * sizeof numbers[0];
  if ((inside || text.starts_with(kMagicNaming)) &&
      text.size() >= kMagicNaming.size() + number_bytes) {
    text.remove_prefix(kMagicNaming.size());
    std::memcpy(numbers, text.data(), number_bytes);
    text.remove_prefix(number_bytes);
    if (numbers[1] <= text.size() && numbers[2] <= text.size() - numbers[1]) {
      naming = TorchNaming{numbers[0] == 1, std::string(text.substr(0, numbers[1])), false,
                           std::string(text.substr(numbers[1], numbers[2]))};
      return text.remove_prefix(numbers[1] + numbers[2]), naming;
    }
  }
  return make_error(Code::kCorrupt, "its outline is damaged");
}

Result<Literals> torch_literals(const FileOutline& outline) {
  const auto damaged = [] { return make_error(Code::kCorrupt, "its outline is damaged"); };
  std::string_view text = outline.text;
  auto number = [&] {
    uint64_t value = 0;
    std::memcpy(&value, text.data(), sizeof value);
    text.remove_prefix(sizeof value);
    return value;
  };
  PTC_TRY(take_torch_naming(text));
  if (text.size() < 8) return damaged();
  const uint64_t count = number();
  if (count > text.size() / 16) return damaged();
  std::string_view bytes = text.substr(count * 16);
  std::vector<Literals::Piece> pieces;
  uint64_t end = 0;
  for (uint64_t i = 0; i < count; ++i) {
    const uint64_t offset = number(), length = number();
    if (offset < end || offset > outline.file_bytes || length > outline.file_bytes - offset ||
        length > bytes.size() || length == 0)
      return damaged();
    pieces.push_back({offset, std::string(bytes.substr(0, length))});
    bytes.remove_prefix(length);
    end = offset + length;
  }
  if (!bytes.empty()) return damaged();
  return Literals(std::move(pieces));
}

ReadAt read_torch_literals(const Literals& literals) {
  return [&literals](uint64_t offset, std::span<std::byte> into) -> Result<> {
    std::memset(into.data(), 0, into.size());
    literals.for_each(offset, offset + into.size(), [&](uint64_t at, std::string_view bytes) {
      std::memcpy(into.data() + (at - offset), bytes.data(), bytes.size());
    });
    return ok();
  };
}

Result<TorchModelTensors> torch_model_tensors(const TorchFile& file,
                                              const std::optional<TorchNaming>& as,
                                              bool written_now) {
  TorchModelTensors found;
  TorchNames names;
  for (uint32_t i = 0; i < file.tensors().size(); ++i) {
    const TorchTensor& tensor = file.tensors()[i];
    const std::vector<TorchStep> path = file.path(tensor.place);
    // What has no name at all is the only thing in the file.
    if (path.empty() || (tensor.dtype == DType::kU8 && is_random_state(path))) continue;
    found.numbers.push_back(i);
    names.add(tensor.name, path);
  }
  found.names = std::move(names).finish(as, &found.naming, !written_now && !as);
  found.megatron = megatron_file(file);
  if (found.megatron) {
    PTC_TRY(name_by_parameters(file, found));
  }
  return found;
}

Result<std::shared_ptr<const WrittenTorchFile>> WrittenTorchFile::read(
    const FileOutline& outline, std::span<const NewArgument> arguments) {
  PTC_TRY(auto literals, torch_literals(outline));
  std::string_view text = outline.text;
  PTC_TRY(const auto naming, take_torch_naming(text));
  PTC_TRY(auto file, TorchFile::read(read_torch_literals(literals), outline.file_bytes));
  PTC_TRY(auto model, torch_model_tensors(file, naming));
  for (const NewArgument& argument : arguments) {
    if (!model.megatron) break;
    for (const auto& [name, node] : model.megatron->nodes)
      if (name == argument.name && file.pickle().is(node, PickleKind::kInt)) {
        if (argument.value) file.set_integer(node, *argument.value);
        else file.set_none(node);
      }
  }
  return std::shared_ptr<const WrittenTorchFile>(
      new WrittenTorchFile(std::move(literals), std::move(file), std::move(model)));
}

bool WrittenTorchFile::has_exactly(std::span<const NewArray> arrays) const {
  if (arrays.size() != model_.names.size()) return false;
  std::unordered_set<std::string_view> names(model_.names.begin(), model_.names.end());
  return std::all_of(arrays.begin(), arrays.end(),
                     [&](const NewArray& array) { return names.contains(array.name); });
}

Result<std::string> WrittenTorchFile::bytes(uint64_t offset, uint64_t count) const {
  std::string copy(count, '\0');
  PTC_TRY(read_torch_literals(literals_)(offset, std::as_writable_bytes(std::span(copy))));
  return copy;
}

FileLayout finish_torch_layout(TorchLayout made, std::vector<uint64_t> offsets,
                               std::vector<Literals::Piece> literals) {
  FileLayout layout;
  layout.bytes = made.zip.file_bytes;
  layout.offsets = std::move(offsets);
  for (ZipWriter::Piece& piece : made.zip.pieces)
    literals.push_back({piece.offset, std::move(piece.bytes)});
  std::erase_if(literals, [](const auto& piece) { return piece.bytes.empty(); });
  std::sort(literals.begin(), literals.end(),
            [](const auto& a, const auto& b) { return a.offset < b.offset; });
  literals.erase(std::unique(literals.begin(), literals.end()), literals.end());  // of two names
  layout.literals = Literals(std::move(literals));
  return layout;
}

std::string with_naming(std::string_view outline, const TorchNaming& naming) {
  if (!take_torch_naming(outline)) return std::string(outline);
  const bool inside = !naming.inside.empty();
  std::string text(inside ? kMagicInside : kMagicNaming);
  const auto add = [&](uint64_t number) {
    text.append(reinterpret_cast<const char*>(&number), sizeof number);
  };
  add(naming.whole);
  add(naming.wrappers.size());
  if (inside) add(naming.inside.size());
  return text.append(naming.wrappers).append(naming.inside).append(outline);
}

}  // namespace ptc
