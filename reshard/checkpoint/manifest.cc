#include "reshard/checkpoint/manifest.h"

#include <boost/json/array.hpp>
#include <boost/json/object.hpp>
#include <boost/json/serialize.hpp>
#include <ctime>

#include "reshard/checkpoint/json_numbers.h"
#include "reshard/checkpoint/shared_results.h"
#include "store/base/json.h"

namespace ptc {
namespace {

// Manifests are our own files: a member that is missing or of another type means damage.
template <class T>
Result<T> member(const json::object& object, std::string_view key,
                 std::string_view what = "manifest") {
  const json::value* value = object.if_contains(key);
  if (value != nullptr) {
    if constexpr (std::is_same_v<T, std::string>) {
      if (value->is_string()) return std::string(value->as_string());
    } else if constexpr (std::is_same_v<T, bool>) {
      if (value->is_bool()) return value->as_bool();
    } else {
      boost::system::error_code error;
      T number = value->to_number<T>(error);
      if (!error) return number;
    }
  }
  return make_error(Code::kCorrupt, "{}: {} is missing or of a wrong type", what, quoted(key));
}

Result<const json::array*> array_member(const json::object& object, std::string_view key) {
  const json::value* value = object.if_contains(key);
  if (value == nullptr || !value->is_array())
    return make_error(Code::kCorrupt, "manifest: array '{}' is missing", key);
  return &value->as_array();
}

Result<Dims> dims_member(const json::object& object, std::string_view key) {
  try {
    return dims_from(object.at(key));
  } catch (const std::exception&) {
    return make_error(Code::kCorrupt, "manifest: {} is no shape", quoted(key));
  }
}

Result<Checksum> checksum_member(const json::object& object) {
  PTC_TRY(auto hex, member<std::string>(object, "checksum"));
  return Checksum::from_hex(hex);
}

Result<TensorInfo> parse_tensor(const json::object& object) {
  TensorInfo tensor;
  PTC_TRY(tensor.name, member<std::string>(object, "name"));
  PTC_TRY(tensor.file, member<std::string>(object, "file"));
  PTC_TRY(auto dtype, member<std::string>(object, "dtype"));
  PTC_TRY(tensor.dtype, parse_dtype(dtype));
  PTC_TRY(tensor.shape, dims_member(object, "shape"));
  PTC_TRY(tensor.vocab_multiple, member<uint64_t>(object, "vocab_multiple"));
  PTC_TRY(tensor.pad_single_rank, member<bool>(object, "pad_single_rank"));
  if (object.contains("whole_on_dp")) {
    PTC_TRY(tensor.whole_on_dp, member<bool>(object, "whole_on_dp"));
  }
  if (object.contains("by_stage")) {
    PTC_TRY(tensor.by_stage, member<bool>(object, "by_stage"));
  }
  if (object.contains("folded_into")) {
    PTC_TRY(tensor.folded_into, member<uint32_t>(object, "folded_into"));
    if (*tensor.folded_into + size_t{1} >= tensor.shape.size())
      return make_error(Code::kCorrupt, "manifest: {} has no axis {} behind the first",
                        quoted(tensor.name), *tensor.folded_into + 1);
  }
  return tensor;
}

Result<WrittenFile> parse_file(const json::object& object) {
  WrittenFile file;
  PTC_TRY(file.rank, member<uint64_t>(object, "rank"));
  PTC_TRY(file.path, member<std::string>(object, "path"));
  PTC_TRY(file.bytes, member<uint64_t>(object, "bytes"));
  PTC_TRY(file.image, member<std::string>(object, "image"));
  PTC_TRY(file.has_tensors, member<bool>(object, "has_tensors"));
  if (file.has_tensors) {
    if (object.contains("dp_cut")) {
      PTC_TRY(file.dp_cut, member<bool>(object, "dp_cut"));
    }
    PTC_TRY(file.set, member<std::string>(object, "set"));
    if (object.contains("boxes")) {
      PTC_TRY(file.boxes, member<bool>(object, "boxes"));
    }
    if (object.contains("inside")) {
      PTC_TRY(file.inside, member<std::string>(object, "inside"));
    }
    PTC_TRY(file.header_bytes, member<uint64_t>(object, "header_bytes"));
    PTC_TRY(file.header_offset, member<uint64_t>(object, "header_offset"));
  } else {
    PTC_TRY(file.checksum, checksum_member(object));
  }
  if (object.contains("mode")) {
    ReadRights rights;
    PTC_TRY(rights.uid, member<uint32_t>(object, "uid"));
    PTC_TRY(rights.gid, member<uint32_t>(object, "gid"));
    PTC_TRY(rights.mode, member<uint32_t>(object, "mode"));
    rights.mode &= 0444;
    file.rights = rights;
  }
  return file;
}

Result<RuleSet::Facts> parse_facts(const json::object& object) {
  RuleSet::Facts facts;
  if (const json::value* numbers = object.if_contains("facts"); numbers && numbers->is_object())
    for (const auto& fact : numbers->as_object()) {
      PTC_TRY(const uint64_t number, member<uint64_t>(numbers->as_object(), fact.key()));
      facts.numbers.emplace(fact.key(), number);
    }
  if (const json::value* tied = object.if_contains("tied"); tied && tied->is_bool())
    facts.tied = tied->as_bool();
  return facts;
}

}  // namespace

std::string state_key(const LayoutSpec& spec) {
  LayoutSpec key = spec;
  const ParallelConfig group = spec.sharing(true);
  // Where ep ranks share state too, which part one has depends on how many ranks are before them.
  const bool over_ep = spec.shard_ep && spec.sizes.etp == 0;
  key.sizes.cp = (over_ep && spec.order.is_before("cp", "ep") ? group.cp : 1) *
                 (over_ep && spec.order.is_before("dp", "ep") ? group.dp : 1);
  key.sizes.dp = spec.dp_parts() / key.sizes.cp;
  key.shard_cp = key.sizes.cp > 1;
  key.shard_ep = spec.sharing(false).ep > 1;
  key.dp_shard = 0;
  key.order = RankOrder();
  return key_text(key);
}

std::string key_text(const LayoutSpec& spec) {
  json::object object = spec.to_json();
  if (spec.rules) object["rules"] = ResultKey("rules").add(spec.rules.text()).digest();
  return spec.name() + json::serialize(object);  // a name alone has a hash of 32 bits
}

std::vector<TensorFacts> Manifest::tensor_facts() const {
  std::vector<TensorFacts> facts;
  facts.reserve(model->tensors().size() + padding.size());
  for (size_t i = 0; i < model->tensors().size(); ++i)
    facts.push_back({model->tensors()[i].dtype, model->tensors()[i].shape, checksums[i]});
  for (const Padding& pad : padding)
    facts.push_back({model->tensors()[pad.tensor].dtype, pad.local.extent, pad.checksum});
  return facts;
}

std::vector<uint8_t> Manifest::element_bits() const {
  std::vector<uint8_t> bits;
  for (const TensorInfo& tensor : model->tensors()) bits.push_back(dtype_bits(tensor.dtype));
  for (const Padding& pad : padding) bits.push_back(bits[pad.tensor]);
  return bits;
}

std::string Manifest::tensor_name(uint32_t tensor) const {
  size_t count = model->tensors().size();
  if (tensor < count) return model->tensors()[tensor].name;
  return "padding of " + model->tensors()[padding[tensor - count].tensor].name;
}

ReadRights ReadRights::narrowed_to(const ReadRights& other) const {
  ReadRights both{uid, gid, mode & other.mode};
  // What is nobody's alone is root's; a group's member has the rights of all others, then.
  if (uid != other.uid) both.uid = 0;
  if (gid != other.gid) {
    both.gid = 0;
    both.mode = (both.mode & ~040u) | (both.mode & 04u) << 3;
  }
  return both;
}

uint32_t Manifest::owner_of(const WrittenFile& file) const {
  StateCoords state = state_of(written_spec, written_spec.coords(file.rank));
  if (!file.dp_cut) state.dp = 0;
  return state_index(written_spec, state);
}

/// What the commit has found of the model stays true: names, shapes, facts that these rules do not
/// look for themselves.
Result<std::shared_ptr<const Model>> Manifest::model_under(const LayoutSpec& spec) const {
  if (!spec.rules || spec.rules.text() == model->rules().text()) return model;
  PTC_TRY(RuleSet::Facts facts, spec.rules.set()->facts(config));
  for (const auto& [fact, value] : model->facts().numbers) facts.numbers.try_emplace(fact, value);
  if (!facts.tied) facts.tied = model->facts().tied;
  PTC_TRY(auto bound, Model::bind(spec.rules.set(), std::move(facts), model->tensors()));
  return std::make_shared<const Model>(std::move(bound));
}

std::string Manifest::to_text() const {
  json::object root;
  root["format"] = "ptc-manifest/1";
  root["name"] = name;
  root["id"] = id;
  root["time_ns"] = time_ns;
  root["uid"] = uid;
  root["gid"] = gid;
  root["mode"] = mode;
  root["written_spec"] = written_spec.to_json();
  root["rules"] = model->rules().text();
  json::object facts;
  for (const auto& [key, value] : model->facts().numbers) facts[key] = value;
  root["facts"] = std::move(facts);
  if (model->facts().tied) root["tied"] = *model->facts().tied;
  json::array tensors;
  for (size_t i = 0; i < model->tensors().size(); ++i) {
    const TensorInfo& tensor = model->tensors()[i];
    tensors.push_back(json::object{{"name", tensor.name},
                                   {"file", tensor.file},
                                   {"dtype", dtype_name(tensor.dtype)},
                                   {"shape", to_array(tensor.shape)},
                                   {"vocab_multiple", tensor.vocab_multiple},
                                   {"pad_single_rank", tensor.pad_single_rank},
                                   {"checksum", checksums[i].to_hex()}});
    if (tensor.whole_on_dp) tensors.back().as_object()["whole_on_dp"] = true;
    if (tensor.by_stage) tensors.back().as_object()["by_stage"] = true;
    if (tensor.folded_into) tensors.back().as_object()["folded_into"] = *tensor.folded_into;
  }
  root["tensors"] = std::move(tensors);
  json::array file_array;
  for (const WrittenFile& file : files) {
    json::object object{{"rank", file.rank},
                        {"path", file.path},
                        {"bytes", file.bytes},
                        {"image", file.image},
                        {"has_tensors", file.has_tensors}};
    if (file.has_tensors) {
      if (file.dp_cut) object["dp_cut"] = true;
      object["set"] = file.set;
      if (file.boxes) object["boxes"] = true;
      if (!file.inside.empty()) object["inside"] = file.inside;
      object["header_bytes"] = file.header_bytes;
      object["header_offset"] = file.header_offset;
    } else {
      object["checksum"] = file.checksum.to_hex();
    }
    if (file.rights) {
      object["uid"] = file.rights->uid;
      object["gid"] = file.rights->gid;
      object["mode"] = file.rights->mode;
    }
    file_array.push_back(std::move(object));
  }
  root["files"] = std::move(file_array);
  json::array pads;
  for (const Padding& pad : padding)
    pads.push_back(json::object{{"file", pad.file},
                                {"tensor", pad.tensor},
                                {"offset", to_array(pad.local.offset)},
                                {"extent", to_array(pad.local.extent)},
                                {"checksum", pad.checksum.to_hex()}});
  root["padding"] = std::move(pads);
  if (consumed) root["consumed"] = *consumed;
  if (!config.empty()) root["config"] = config;
  return json::serialize(root);
}

Result<Manifest> Manifest::from_text(std::string_view text) {
  PTC_TRY(auto value, parse_json(text, {.max_bytes = size_t{1} << 32, .max_depth = 32}));
  if (!value.is_object()) return Error(Code::kCorrupt, "manifest: no JSON object");
  const json::object& root = value.as_object();
  PTC_TRY(auto format, member<std::string>(root, "format"));
  if (format != "ptc-manifest/1")
    return make_error(Code::kCorrupt, "manifest: format {} is not known to this version",
                      ptc::quoted(format));
  Manifest manifest;
  PTC_TRY(manifest.name, member<std::string>(root, "name"));
  PTC_TRY(manifest.id, member<std::string>(root, "id"));
  PTC_TRY(manifest.time_ns, member<int64_t>(root, "time_ns"));
  PTC_TRY(manifest.uid, member<uint32_t>(root, "uid"));
  PTC_TRY(manifest.gid, member<uint32_t>(root, "gid"));
  PTC_TRY(manifest.mode, member<uint32_t>(root, "mode"));
  const json::value* spec = root.if_contains("written_spec");
  if (spec == nullptr || !spec->is_object())
    return Error(Code::kCorrupt, "manifest: 'written_spec' is missing");
  PTC_TRY(manifest.written_spec, LayoutSpec::from_json(spec->as_object()));

  PTC_TRY(auto rules_text, member<std::string>(root, "rules"));
  PTC_TRY(auto rules, RuleSet::parse(rules_text));
  PTC_TRY(auto facts, parse_facts(root));
  PTC_TRY(const json::array* tensors, array_member(root, "tensors"));
  std::vector<TensorInfo> infos;
  for (const json::value& entry : *tensors) {
    if (!entry.is_object()) return Error(Code::kCorrupt, "manifest: 'tensors' is damaged");
    PTC_TRY(auto tensor, parse_tensor(entry.as_object()));
    infos.push_back(std::move(tensor));
    PTC_TRY(auto checksum, checksum_member(entry.as_object()));
    manifest.checksums.push_back(checksum);
  }
  PTC_TRY(auto model, Model::bind(std::move(rules), std::move(facts), std::move(infos)));
  manifest.model = std::make_shared<const Model>(std::move(model));

  PTC_TRY(const json::array* files, array_member(root, "files"));
  for (const json::value& entry : *files) {
    if (!entry.is_object()) return Error(Code::kCorrupt, "manifest: 'files' is damaged");
    PTC_TRY(auto file, parse_file(entry.as_object()));
    manifest.files.push_back(std::move(file));
  }
  PTC_TRY(const json::array* pads, array_member(root, "padding"));
  for (const json::value& entry : *pads) {
    if (!entry.is_object()) return Error(Code::kCorrupt, "manifest: 'padding' is damaged");
    const json::object& object = entry.as_object();
    Padding pad;
    PTC_TRY(pad.file, member<uint32_t>(object, "file"));
    PTC_TRY(pad.tensor, member<uint32_t>(object, "tensor"));
    PTC_TRY(pad.local.offset, dims_member(object, "offset"));
    PTC_TRY(pad.local.extent, dims_member(object, "extent"));
    PTC_TRY(pad.checksum, checksum_member(object));
    if (pad.tensor >= manifest.checksums.size() || pad.file >= manifest.files.size())
      return Error(Code::kCorrupt, "manifest: 'padding' is damaged");
    manifest.padding.push_back(pad);
  }
  if (root.contains("consumed")) {
    PTC_TRY(manifest.consumed, member<uint64_t>(root, "consumed"));
  }
  if (root.contains("config")) {
    PTC_TRY(manifest.config, member<std::string>(root, "config"));
  }
  return manifest;
}

const SourceIndex& StoredLayouts::index() const {
  std::call_once(indexed_,
                 [&] { index_ = std::make_unique<SourceIndex>(layouts_, element_bits_, names_); });
  return *index_;
}

int64_t StoredState::best(uint32_t state, std::string_view path, int32_t written) const {
  // Few files a state, thousands of states at most: images are sorted by (state, path, written).
  const auto key = std::tuple(state, path, written);
  auto key_of = [](const StoredImage& image) {
    return std::tuple(image.state, std::string_view(image.path), image.written);
  };
  auto it =
      std::lower_bound(images.begin(), images.end(), key,
                       [&](const StoredImage& image, const auto& k) { return key_of(image) < k; });
  int64_t found = -1;
  for (; it != images.end() && key_of(*it) == key; ++it) {
    if (it->image != nullptr && it->image->is_here()) return it - images.begin();
    if (found < 0 || images[found].image == nullptr) found = it - images.begin();
  }
  return found;
}

int64_t StoredState::find(uint32_t state, std::string_view path) const {
  return path.empty() ? -1 : best(state, path, -1);
}

int64_t StoredState::find_other(uint32_t file) const {
  return best(0, "", static_cast<int32_t>(file));
}

std::vector<ImageRef> StoredState::image_refs() const {
  std::vector<ImageRef> refs;
  refs.reserve(images.size());
  for (const StoredImage& image : images) refs.push_back(image.image);
  return refs;
}

std::string StoredState::to_text() const {
  json::array array;
  for (size_t i = 0; i < images.size(); ++i) {
    json::object image{{"id", images[i].id},
                       {"bytes", layouts()[i].bytes},
                       {"state", images[i].state},
                       {"path", images[i].path},
                       {"written", images[i].written}};
    if (!images[i].node.empty()) image["node"] = images[i].node;
    if (!images[i].memory.is_host()) image["memory"] = images[i].memory.to_string();
    if (images[i].missing) image["missing"] = true;
    array.push_back(std::move(image));
  }
  return json::serialize(json::object{
      {"format", "ptc-stored/1"}, {"spec", spec.to_json()}, {"images", std::move(array)}});
}

namespace {

Result<StoredText> parse_stored(std::string_view text) {
  constexpr std::string_view kWhat = "what says where bytes lie";
  PTC_TRY(const auto value, parse_json(text, {.max_bytes = size_t{1} << 32, .max_depth = 32}));
  const json::object* const root = value.if_object();
  const json::value* const spec = root == nullptr ? nullptr : root->if_contains("spec");
  const json::value* const images = root == nullptr ? nullptr : root->if_contains("images");
  if (spec == nullptr || !spec->is_object() || images == nullptr || !images->is_array())
    return make_error(Code::kCorrupt, "{}: 'spec' or 'images' is missing", kWhat);
  StoredText stored;
  PTC_TRY(stored.spec, LayoutSpec::from_json(spec->get_object()));
  for (const json::value& entry : images->get_array()) {
    if (!entry.is_object()) return make_error(Code::kCorrupt, "{}: 'images' is damaged", kWhat);
    const json::object& object = entry.get_object();
    StoredImage image;
    PTC_TRY(image.id, member<std::string>(object, "id", kWhat));
    PTC_TRY(image.state, member<uint32_t>(object, "state", kWhat));
    PTC_TRY(image.path, member<std::string>(object, "path", kWhat));
    PTC_TRY(image.written, member<int32_t>(object, "written", kWhat));
    if (object.contains("node")) {
      PTC_TRY(image.node, member<std::string>(object, "node", kWhat));
    }
    if (object.contains("memory")) {
      PTC_TRY(const auto memory, member<std::string>(object, "memory", kWhat));
      PTC_TRY(image.memory, NodeMemory::parse(memory));
    }
    if (object.contains("missing")) {
      PTC_TRY(image.missing, member<bool>(object, "missing", kWhat));
    }
    PTC_TRY(stored.bytes.emplace_back(), member<uint64_t>(object, "bytes", kWhat));
    stored.images.push_back(std::move(image));
  }
  return stored;
}

}  // namespace

Result<StoredText> StoredText::from_text(std::string_view text) {
  Result<StoredText> stored = parse_stored(text);
  if (stored.has_error()) return Error(Code::kCorrupt, stored.error().message());
  return stored;
}

}  // namespace ptc
