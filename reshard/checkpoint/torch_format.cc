// Files of torch.save's. Their outline (written_torch_file.h) is the file without its tensors'
// bytes: the zip archive's own (headers, directory), the pickle, and storages of values that are no
// tensors of the model.
#include <algorithm>
#include <optional>
#include <unordered_map>
#include <utility>

#include "reshard/checkpoint/file_format.h"
#include "reshard/checkpoint/torch_contents.h"
#include "reshard/checkpoint/torch_merge.h"
#include "reshard/checkpoint/torch_names.h"
#include "reshard/checkpoint/written_torch_file.h"
#include "store/base/json.h"
#include "store/codec/torch_compose.h"
#include "store/codec/torch_file.h"
#include "store/codec/torch_layout.h"

namespace ptc {
namespace {

/// Of a file that are no tensors'.

/// Refuses, by name, what has no array in the file that could be cut.
Result<> check_arrays(const TorchFile& file, const TorchModelTensors& model) {
  for (const TorchOpaque& opaque : file.opaque()) {
    const std::vector<TorchStep> path = file.path(opaque.place);
    if (path.empty() || is_random_state(path)) continue;
    return invalid_argument("{} cannot be cut: {}", ptc::quoted(opaque.name), opaque.reason);
  }
  for (size_t i = 0; i < model.numbers.size(); ++i) {
    const TorchTensor& tensor = file.tensors()[model.numbers[i]];
    const auto refuse = [&](std::string_view why) {
      return invalid_argument("tensor {} cannot be cut: {}", ptc::quoted(model.names[i]), why);
    };
    if (!tensor.contiguous)
      return refuse("its elements do not follow each other, as of a transpose: save .contiguous()");
    if (tensor.sharding != TorchTensor::kNone && !file.shardings()[tensor.sharding].box)
      return refuse(
          "it is a DTensor that does not say which part of the whole it is: save "
          ".to_local() or .full_tensor()");
  }
  std::vector<uint32_t> order(model.numbers.size());
  for (uint32_t i = 0; i < order.size(); ++i) order[i] = i;
  auto tensor = [&](uint32_t i) -> const TorchTensor& { return file.tensors()[model.numbers[i]]; };
  std::sort(order.begin(), order.end(), [&](uint32_t a, uint32_t b) {
    return std::pair(tensor(a).offset, tensor(a).bytes) <
           std::pair(tensor(b).offset, tensor(b).bytes);
  });
  uint64_t end = 0;
  uint32_t last = 0;
  for (const uint32_t i : order) {
    const TorchTensor& now = tensor(i);
    if (now.bytes == 0) continue;
    const bool same = end > 0 && now.offset == tensor(last).offset &&
                      now.shape == tensor(last).shape && now.dtype == tensor(last).dtype;
    if (now.offset < end && !same)
      return invalid_argument(
          "tensors {} and {} share some of their bytes, and are not the same: save .clone() of one",
          ptc::quoted(model.names[last]), ptc::quoted(model.names[i]));
    end = now.offset + now.bytes;
    last = i;
  }
  return ok();
}

/// A file with other parts of the same tensors.
Result<FileLayout> lay_out_like(const WrittenTorchFile& like, std::span<const NewArray> arrays) {
  const TorchFile& file = like.file();
  std::unordered_map<std::string_view, uint32_t> array_of;
  for (uint32_t i = 0; i < arrays.size(); ++i) array_of.emplace(arrays[i].name, i);
  std::vector<TorchNewTensor> wanted = same_tensors(file);
  std::vector<uint32_t> number(wanted.size(), TorchTensor::kNone);  // of the array
  for (size_t i = 0; i < like.model().numbers.size(); ++i)
    number[like.model().numbers[i]] = array_of.at(like.model().names[i]);
  for (uint32_t i = 0; i < wanted.size(); ++i) {
    wanted[i].plain = true;
    if (number[i] == TorchTensor::kNone) continue;  // its rank's own
    const NewArray& array = arrays[number[i]];
    wanted[i].shape = *array.shape;
    const uint32_t same = wanted[i].same_as;
    if (same != TorchTensor::kNone &&
        (number[same] == TorchTensor::kNone || arrays[number[same]].content != array.content))
      wanted[i].same_as = TorchTensor::kNone;
  }
  // One object under several names is one array again, so it cannot be cut in two ways.
  std::unordered_map<PickleId, uint32_t> objects;  // the first of them
  for (uint32_t i = 0; i < wanted.size(); ++i) {
    const auto [first, is_new] = objects.try_emplace(file.tensors()[i].arguments, i);
    if (is_new) continue;
    const uint32_t other = number[first->second];
    const bool same =
        number[i] == other || (number[i] != TorchTensor::kNone && other != TorchTensor::kNone &&
                               arrays[number[i]].content == arrays[other].content);
    if (!same)
      return invalid_argument(
          "tensors {} and {} are one object in the file, and this layout cuts them differently: "
          "save .clone() of one",
          ptc::quoted(file.tensors()[first->second].name), ptc::quoted(file.tensors()[i].name));
  }
  PTC_TRY(auto made, lay_out_torch_file(file, wanted));
  std::vector<uint64_t> offsets(arrays.size());
  std::vector<Literals::Piece> literals;
  for (uint32_t i = 0; i < wanted.size(); ++i) {
    const TorchLayout::Place& place = made.tensors[i];
    if (number[i] != TorchTensor::kNone) {
      offsets[number[i]] = place.offset;
      continue;
    }
    PTC_TRY(auto bytes, like.bytes(file.tensors()[i].offset, place.bytes));
    literals.push_back({place.offset, std::move(bytes)});
  }
  for (const TorchLayout::Copy& copy : made.copies) {
    PTC_TRY(auto bytes, like.bytes(copy.source_offset, copy.bytes));
    literals.push_back({copy.offset, std::move(bytes)});
  }
  return finish_torch_layout(std::move(made), std::move(offsets), std::move(literals));
}

class TorchFormat final : public FileFormat {
 public:
  Result<std::string> outline(const ReadAt& read, uint64_t file_bytes,
                              std::optional<DType>) const override {
    PTC_TRY(const auto file, TorchFile::read(read, file_bytes));
    PTC_TRY(const TorchModelTensors model, torch_model_tensors(file, {}, true));
    std::vector<TorchOutlineRange> arrays;
    for (const uint32_t i : model.numbers) {
      const TorchTensor& tensor = file.tensors()[i];
      if (tensor.bytes > 0) arrays.push_back({tensor.offset, tensor.offset + tensor.bytes});
    }
    PTC_TRY(auto text, read_torch_outline(read, file_bytes, std::move(arrays)));
    if (!model.naming.inside.empty()) text = with_naming(text, model.naming);
    return text;
  }

  Result<FileTensors> tensors(const FileOutline& outline, std::string_view,
                              std::optional<DType>) const override {
    FileTensors found;
    PTC_TRY(found.literals, torch_literals(outline));
    PTC_TRY(const auto file,
            TorchFile::read(read_torch_literals(found.literals), outline.file_bytes));
    std::string_view text = outline.text;
    PTC_TRY(const auto naming, take_torch_naming(text));
    PTC_TRY(const TorchModelTensors model, torch_model_tensors(file, naming));
    found.naming = model.naming;
    found.megatron = model.megatron;
    PTC_TRY(check_arrays(file, model));
    uint64_t name_bytes = 0;
    for (const std::string_view name : model.names) name_bytes += name.size();
    if (name_bytes > 4 * outline.text.size() + (1 << 20))
      return invalid_argument(
          "the names of its tensors take more memory than a file of {} bytes beside them may",
          outline.text.size());
    const std::vector<TorchNewTensor> same = same_tensors(file);
    std::unordered_map<uint32_t, uint32_t> first;  // by number in the file
    for (uint32_t i = 0; i < model.numbers.size(); ++i) {
      const uint32_t number = model.numbers[i];
      const TorchTensor& tensor = file.tensors()[number];
      found.tensors.push_back(
          {std::string(model.names[i]), tensor.dtype, tensor.shape, tensor.offset, tensor.bytes});
      if (!file.shardings().empty()) found.said.emplace_back();
      if (tensor.sharding != TorchTensor::kNone) {
        const TorchSharding& sharding = file.shardings()[tensor.sharding];
        found.said.back() = SaidPart{*sharding.box, sharding.global_shape};
      }
      first.emplace(number, i);
      const auto other = first.find(same[number].same_as);
      found.same_as.push_back(other == first.end() ? i : other->second);
    }
    return found;
  }

  Result<FileLayout> lay_out(std::span<const NewArray> arrays, std::span<const FileOutline> like,
                             std::span<const NewArgument> arguments) const override {
    if (like.empty())
      return make_error(Code::kInternal, "there is no file that a torch file could be like");
    PTC_TRY(const auto first, WrittenTorchFile::read(like.front(), arguments));
    if (first->has_exactly(arrays)) return lay_out_like(*first, arrays);
    return merge_torch_files(arrays, first, like.subspan(1));
  }
};

}  // namespace

Result<TorchContents> torch_contents(const Literals& literals, uint64_t file_bytes,
                                     std::string_view like) {
  PTC_TRY(const auto naming, take_torch_naming(like));
  const ReadAt read = read_torch_literals(literals);
  PTC_TRY(const auto file, TorchFile::read(read, file_bytes));
  PTC_TRY(const TorchModelTensors model, torch_model_tensors(file, naming));
  TorchContents contents;
  // Each is told by its whole path, and one that holds others is copied out of the whole pickle.
  constexpr uint64_t kMostNameBytes = 64 << 20, kMostSteps = uint64_t{1} << 29;
  uint64_t name_bytes = 0, steps = 0;
  const auto check_names = [&](const std::vector<TorchStep>& path) -> Result<> {
    for (const TorchStep& step : path) name_bytes += step.key.size() + sizeof(step);
    if (name_bytes <= kMostNameBytes) return ok();
    return invalid_argument("the paths of its values take more than {} MiB", kMostNameBytes >> 20);
  };
  const auto check_steps = [&](PickleId node) -> Result<> {
    const PickleKind kind = file.pickle().kind(node);
    if (kind != PickleKind::kNone && kind != PickleKind::kFalse && kind != PickleKind::kTrue &&
        kind != PickleKind::kInt && kind != PickleKind::kFloat && kind != PickleKind::kText)
      steps += file.pickle().size();
    if (steps <= kMostSteps) return ok();
    return invalid_argument("it has too many values that hold others");
  };
  size_t next = 0;  // of the model's
  for (uint32_t i = 0; i < file.tensors().size(); ++i) {
    const TorchTensor& tensor = file.tensors()[i];
    TorchContents::Tensor made{
        "", tensor.name, file.path(tensor.place), tensor.offset, tensor.dtype, tensor.shape, false};
    PTC_TRY(check_names(made.path));
    if (next < model.numbers.size() && model.numbers[next] == i) {
      made.name = model.names[next++];
      made.of_model = true;
    } else if (!tensor.contiguous) {
      contents.others.push_back(ptc::quoted(tensor.name) + " (a transpose)");
      continue;
    }
    contents.tensors.push_back(std::move(made));
  }
  for (const TorchLiteral& literal : file.literals()) {
    std::vector<TorchStep> path = file.path(literal.place);
    PTC_TRY(check_names(path));
    PTC_TRY(check_steps(literal.node));
    PTC_TRY(auto archive, save_value(file.pickle(), literal.node));
    contents.values.push_back({torch_name(path), std::move(path), std::move(archive)});
  }
  for (const TorchOpaque& opaque : file.opaque())
    contents.others.push_back(fmt::format("{} ({})", ptc::quoted(opaque.name), opaque.reason));
  for (const TorchPair& pair : file.pairs())
    contents.others.push_back(fmt::format("{}[{}] (its key is neither a text nor a whole number)",
                                          ptc::quoted(file.name(pair.place)),
                                          file.pickle().describe(pair.key)));
  return contents;
}

const FileFormat& torch_format() {
  static const TorchFormat format;
  return format;
}

}  // namespace ptc
