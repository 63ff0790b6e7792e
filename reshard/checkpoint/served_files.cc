// layouts/vllm-tp8/: what the workers of an inference engine load, as its own loader of files of
// single workers reads it. A file has the engine's arrays, each of one tensor's part or of several
// behind each other; their bytes are gathered when they are read, as of all computed files.
#include <fmt/ranges.h>

#include <algorithm>
#include <bit>
#include <charconv>
#include <cstring>
#include <iterator>

#include "reshard/checkpoint/described_set.h"
#include "reshard/serve/served_layout.h"
#include "store/base/json.h"

namespace ptc {
namespace {

/// Of the files of all workers together: each is laid out, for its size, when somebody looks into
/// the directory, which takes some seconds.
constexpr size_t kMostParts = 2'000'000;

std::string bytes_of_float(float value) {
  static_assert(std::endian::native == std::endian::little, "as safetensors has them");
  std::string bytes(sizeof value, '\0');
  std::memcpy(bytes.data(), &value, sizeof value);
  return bytes;
}

/// The number behind "layers." in a name.
std::optional<uint32_t> layer_in(std::string_view name) {
  constexpr std::string_view kLayers = "layers.";
  const size_t at = name.find(kLayers);
  if (at == name.npos || (at > 0 && name[at - 1] != '.')) return std::nullopt;
  const std::string_view rest = name.substr(at + kLayers.size());
  uint32_t number = 0;
  const auto [end, error] = std::from_chars(rest.data(), rest.data() + rest.size(), number);
  if (error != std::errc() || end == rest.data()) return std::nullopt;
  return number;
}

/// What the engine keeps beside the family's arrays where config.json says that weights are
/// quantised. kInvalidArgument: that is not known.
Result<std::vector<Engine::Constant>> of_quantised(const Engine& engine, const std::string& config,
                                                   const std::optional<BlockScales>& scales) {
  using Constants = std::vector<Engine::Constant>;
  PTC_TRY(const json::value value, parse_json(config));
  const json::value* said = nullptr;
  if (value.is_object()) said = value.get_object().if_contains("quantization_config");
  if (said == nullptr || said->is_null()) return Constants();
  if (engine.fp8_blocks() == nullptr || !said->is_object())
    return invalid_argument("what {} keeps of a quantised model is not known", engine.name());
  const json::object& object = said->get_object();
  const std::string method = json_text(object, "quant_method");
  const json::value* blocks = object.if_contains("weight_block_size");
  const uint64_t block = scales ? scales->block : 0;
  if (method == "fp8" && blocks != nullptr && block != 0 &&
      *blocks == json::value(json::array{block, block}))
    return *engine.fp8_blocks();
  return invalid_argument(
      "{} keeps weights of {}{} otherwise than files have them, once it has loaded them; of "
      "quantised ones those of fp8 in blocks of {} are made here, and its other loaders read hf/",
      engine.name(), quoted(method),
      method == "fp8" ? blocks == nullptr ? " without blocks" : " in such blocks" : "", block);
}

/// A header, and what lies behind it, which may touch it.
Literals with_constants(const Literals& header, std::vector<Literals::Piece> constants) {
  if (constants.empty()) return header;
  std::vector<Literals::Piece> pieces = header.pieces();
  std::sort(constants.begin(), constants.end(),
            [](const auto& a, const auto& b) { return a.offset < b.offset; });
  for (Literals::Piece& one : constants) {
    if (!pieces.empty() && pieces.back().end() == one.offset) pieces.back().bytes += one.bytes;
    else pieces.push_back(std::move(one));
  }
  return Literals(std::move(pieces));
}

}  // namespace

struct Checkpoint::Served {
  explicit Served(ServedModel made) : model(std::move(made)) {}
  const ServedModel model;
};

std::vector<uint32_t> Checkpoint::parameters() const {
  std::vector<uint32_t> parameters;
  for (uint32_t t = 0; t < model().tensors().size(); ++t)
    if (facts_->primary[t] && !model().is_optimizer_state(t)) parameters.push_back(t);
  return parameters;
}

Result<std::shared_ptr<const Checkpoint::Served>> Checkpoint::served(
    const ServedLayout& layout) const {
  using Made = std::shared_ptr<const Served>;
  return results_->get<Served>(key("served").add(layout.name()), [&]() -> Result<Made> {
    const Engine& engine = *layout.engine;
    const auto type = model_type_of(manifest().config);
    if (!type)
      return invalid_argument(
          "{}'s names for a model depend on its model_type, and the checkpoint has no config.json "
          "that says it",
          engine.name());
    const Engine::Family* const family = engine.family(*type);
    if (family == nullptr)
      return invalid_argument(
          "{}'s names for models of type {} are not known; its other loaders "
          "read hf/ (known: {})",
          engine.name(), quoted(*type), fmt::join(engine.model_types(), ", "));
    Engine::Family with_more = *family;
    PTC_TRY(auto more, of_quantised(engine, manifest().config, model().rules().scales()));
    std::move(more.begin(), more.end(), std::back_inserter(with_more.constants));
    const uint32_t layers = model().layers();
    LayoutSpec stages;
    stages.sizes.pp = layout.pp;
    PTC_TRY(check_facts_under(stages));
    if (layout.pp > std::max(layers, 1u))
      return invalid_argument("{} stages, and the model has {} layers", layout.pp, layers);
    std::vector<uint32_t> tensors = parameters();
    for (const uint32_t t : tensors)
      if (const TensorInfo& tensor = model().tensors()[t];
          tensor.by_stage || dtype_bits(tensor.dtype) < 8)
        return invalid_argument("{} is no weight as {} names them", tensor.name, engine.name());
    // Of layers behind the model's, for the prediction of further tokens, is a model of its own.
    std::erase_if(tensors, [&](uint32_t t) {
      return layer_in(model().tensors()[t].name).value_or(0) >= std::max(layers, 1u);
    });
    std::vector<std::string> names;
    for (const uint32_t t : tensors) names.push_back(model().tensors()[t].name);
    names = model().rules().without_wrappers(std::move(names));
    std::vector<NamedTensor> named;
    for (size_t i = 0; i < tensors.size(); ++i) named.push_back({tensors[i], std::move(names[i])});
    PTC_TRY(auto made, ServedModel::make(layout, std::move(with_more), model(), std::move(named)));
    return std::make_shared<const Served>(std::move(made));
  });
}

Result<ImageLayout> Checkpoint::served_file(const Served& served, uint32_t worker) const {
  PTC_TRY(auto arrays, served_arrays(served.model, worker));
  std::vector<NewArray> wanted;
  wanted.reserve(arrays.size());
  for (const ServedArray& array : arrays) wanted.push_back({array.name, array.dtype, &array.shape});
  PTC_TRY(auto file, safetensors_format().lay_out(wanted, {}));
  std::vector<ArraySlot> slots;
  std::vector<Literals::Piece> constants;
  for (size_t i = 0; i < arrays.size(); ++i) {
    uint64_t offset = file.offsets[i];
    if (arrays[i].constant) constants.push_back({offset, bytes_of_float(*arrays[i].constant)});
    for (Model::Held& part : arrays[i].parts) {
      PTC_TRY(const uint64_t bytes, array_bytes(part.part->local_shape, arrays[i].dtype));
      if (bytes > 0) slots.push_back({part.tensor, offset, std::move(part.part)});
      offset += bytes;
    }
  }
  ImageLayout made;
  made.bytes = file.bytes;
  made.literals = with_constants(file.literals, std::move(constants));
  sort_arrays(slots);
  made.arrays = std::move(slots);
  return made;
}

Result<FileSetRef> Checkpoint::served_files(const ServedLayout& layout,
                                            std::optional<uint32_t> worker) const {
  const std::string set_key = worker ? fmt::format("{}/{}", layout.name(), *worker) : layout.name();
  return cached(set_key, [&]() -> Result<FileSetRef> {
    auto set = std::make_shared<DescribedSet>(set_key, shared_from_this());
    const auto add_workers = [&]() -> Result<> {
      PTC_TRY(const auto all, served(layout));
      if (!worker && layout.workers() > kMostParts / std::max<size_t>(all->model.tensors.size(), 1))
        return invalid_argument(
            "{} workers and {} tensors are too much for one directory: rank/<worker>/ has each",
            layout.workers(), all->model.tensors.size());
      ReadRights rights = rights_of_all();
      bool first = true;
      for (const NamedTensor& one : all->model.tensors) {
        rights = first ? rights_of(one.tensor) : rights.narrowed_to(rights_of(one.tensor));
        first = false;
      }
      for (uint32_t w = worker.value_or(0); w < (worker ? *worker + 1 : layout.workers()); ++w) {
        PTC_TRY(const auto file, served_file(*all, w));
        // Made again for who opens it: that of all workers would take very much memory.
        set->add(
            {layout.file_name(w), file.bytes, "", rights},
            [this, all, layout, w](const ContentSource& source) -> Result<FileContentRef> {
              PTC_TRY(auto made, served_file(*all, w));
              return source.open_gathered(std::make_shared<const ImageLayout>(std::move(made)));
            });
      }
      return ok();
    };
    if (Result<> added = add_workers(); added.has_error()) {
      // Names of tensors are in it.
      set = std::make_shared<DescribedSet>(set_key, shared_from_this());
      set->add_text(kLeftOut, "Nothing is here: " + added.error().message() + "\n",
                    rights_of_all());
      return FileSetRef(std::move(set));
    }
    for (const uint32_t file : other_files(RankCoords()))
      if (!manifest().files[file].path.ends_with(".safetensors.index.json")) set->add_other(file);
    set->finish();
    return FileSetRef(std::move(set));
  });
}

}  // namespace ptc
