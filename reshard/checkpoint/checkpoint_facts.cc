#include "reshard/checkpoint/checkpoint_facts.h"

#include <boost/json/array.hpp>
#include <boost/json/object.hpp>
#include <map>
#include <set>
#include <utility>

#include "reshard/checkpoint/deepspeed_name.h"
#include "reshard/checkpoint/megatron_names.h"
#include "reshard/checkpoint/meta_format.h"
#include "reshard/ptc/model_bind.h"
#include "store/base/json.h"
#include "store/base/wall_time.h"
#include "store/codec/name_order.h"
#include "store/codec/tensor_path.h"

namespace ptc {
namespace {

// A file name as one component of a path under model/.
std::string escape_slashes(std::string_view path) {
  std::string escaped;
  for (char c : path) c == '/' ? escaped += "%2F" : escaped += c;
  return escaped;
}

}  // namespace

Result<std::shared_ptr<const CheckpointFacts>> CheckpointFacts::read(std::string_view text,
                                                                     std::string headers,
                                                                     SharedResults& results) {
  return get(text, std::move(headers), results, [&] { return Manifest::from_text(text); });
}

Result<std::shared_ptr<const CheckpointFacts>> CheckpointFacts::of(Manifest manifest,
                                                                   std::string_view text,
                                                                   std::string headers,
                                                                   SharedResults& results) {
  return get(text, std::move(headers), results,
             [&]() -> Result<Manifest> { return std::move(manifest); });
}

template <class GiveManifest>
Result<std::shared_ptr<const CheckpointFacts>> CheckpointFacts::get(std::string_view text,
                                                                    std::string headers,
                                                                    SharedResults& results,
                                                                    GiveManifest&& give) {
  const ResultKey key = ResultKey("checkpoint").add(text).add(headers);
  return results.get<CheckpointFacts>(key, [&]() -> Result<std::shared_ptr<const CheckpointFacts>> {
    PTC_TRY(auto manifest, give());
    return std::make_shared<const CheckpointFacts>(std::move(manifest), std::move(headers),
                                                   key.digest());
  });
}

CheckpointFacts::CheckpointFacts(Manifest manifest_given, std::string headers_given,
                                 std::string key_given)
    : manifest(std::move(manifest_given)),
      headers(std::move(headers_given)),
      key(std::move(key_given)),
      tensors(manifest.tensor_facts()) {
  const std::vector<TensorInfo>& infos = manifest.model->tensors();
  std::vector<bool> parameters =
      find_masters(infos);  // which no rule may cover; the others, if they are
  for (uint32_t t = 0; t < infos.size(); ++t)
    parameters[t] = !parameters[t] && !manifest.model->is_optimizer_state(t);
  find_primary(parameters);
  for (uint32_t t = 0; t < infos.size(); ++t) {
    std::string prefix = primary[t] ? "" : escape_slashes(infos[t].file) + "/";
    Result<std::string> path = tensor_path(infos[t].name);
    PTC_CHECK(path.has_value());  // commit() refuses names without a path
    model_paths.push_back(prefix + path.value());
  }
  find_left_out(parameters);
  find_zero_uncut();
  for (const TensorInfo& info : infos)
    if (const size_t at = info.file.rfind('/') + 1;
        info.by_stage && info.file.substr(at) == kMegatronFile) {
      megatron_directory = info.file.substr(0, at);
      break;
    }
  find_torch_dist();
  bool first = true;
  for (const WrittenFile& file : manifest.files) {
    const ReadRights rights = manifest.rights_of(file);
    rights_of_all_ = std::exchange(first, false) ? rights : rights_of_all_.narrowed_to(rights);
    if (!file.has_tensors) continue;
    const auto [known, fresh] =
        rights_by_file_.try_emplace(file.set.empty() ? file.path : file.set, rights);
    if (!fresh) known->second = known->second.narrowed_to(rights);
  }
}

void CheckpointFacts::find_torch_dist() {
  constexpr std::string_view kCommon = "common.pt", kShard = ".distcp";
  std::set<std::string_view> commons, shards;  // directories that have one
  for (const WrittenFile& file : manifest.files) {
    const std::string_view path = file.path;
    const size_t name = path.rfind('/') + 1;
    if (name == 0) continue;
    if (file.has_tensors && path.ends_with(kShard)) shards.insert(path.substr(0, name));
    if (!file.has_tensors && path.substr(name) == kCommon) commons.insert(path.substr(0, name));
  }
  for (const std::string_view directory : commons) {
    const std::string_view below = directory.substr(0, directory.size() - 1);
    if (shards.contains(directory) && is_megatron_iteration(below.substr(below.rfind('/') + 1)))
      torch_dist_directory = directory;
  }
}

// Where two files have a tensor of the same name, a parameter comes before optimizer state, and the
// model's file first: model.safetensors before optim.safetensors. The others' tensors go under
// model/<file>/.
void CheckpointFacts::find_primary(const std::vector<bool>& parameters) {
  const std::vector<TensorInfo>& infos = manifest.model->tensors();
  auto weight = [&](uint32_t t) {
    return std::pair<bool, bool>(parameters[t], infos[t].file.starts_with("model"));
  };
  std::unordered_map<std::string_view, uint32_t> owner;
  for (uint32_t t = 0; t < infos.size(); ++t) {
    auto [it, fresh] = owner.try_emplace(infos[t].name, t);
    if (!fresh && weight(it->second) < weight(t)) it->second = t;
  }
  for (uint32_t t = 0; t < infos.size(); ++t) primary.push_back(owner.at(infos[t].name) == t);
}

void CheckpointFacts::find_left_out(const std::vector<bool>& parameters) {
  const std::vector<TensorInfo>& infos = manifest.model->tensors();
  std::unordered_map<std::string_view, uint32_t> shown;
  for (uint32_t t = 0; t < infos.size(); ++t)
    if (primary[t] && parameters[t]) shown.emplace(infos[t].name, t);
  std::map<std::pair<std::string, bool>, uint64_t> counts;
  for (uint32_t t = 0; t < infos.size(); ++t) {
    const auto other = shown.find(infos[t].name);
    if (other != shown.end() &&
        (other->second == t || (infos[t].dtype == infos[other->second].dtype &&
                                infos[t].shape == infos[other->second].shape &&
                                manifest.checksums[t] == manifest.checksums[other->second])))
      continue;
    ++counts[{infos[t].file, parameters[t]}];
  }
  for (const auto& [where, count] : counts) left_out.push_back({where.first, where.second, count});
}

void CheckpointFacts::find_zero_uncut() {
  for (const WrittenFile& file : manifest.files) {
    if (file.has_tensors) continue;
    const auto name = deepspeed_name(file.path);
    if (!name ||
        (name->kind != DeepSpeedName::Kind::kZero && name->kind != DeepSpeedName::Kind::kZeroModel))
      continue;
    if (zero_uncut.files++ == 0) zero_uncut.first = file.path;
  }
}

const std::string& CheckpointFacts::meta_json() const {
  std::call_once(meta_made_, [&] { meta_json_ = make_meta_json(); });
  return meta_json_;
}

const std::vector<uint32_t>& CheckpointFacts::name_places() const {
  std::call_once(places_made_, [&] {
    std::vector<std::string_view> names;
    names.reserve(manifest.model->tensors().size());
    for (const TensorInfo& tensor : manifest.model->tensors()) names.push_back(tensor.name);
    name_places_ = places_by_name(names);
  });
  return name_places_;
}

std::string CheckpointFacts::make_meta_json() const {
  json::object meta{{"format", kMetaFormat},
                    {"name", manifest.name},
                    {"time", time_text(manifest.time_ns)},
                    {"family", manifest.model->rules().family()},
                    {"written_as", manifest.written_spec.name()},
                    {"checksum", "ptc-linear-1"}};
  if (manifest.consumed) meta["consumed"] = *manifest.consumed;
  json::array list;
  for (uint32_t t = 0; t < manifest.model->tensors().size(); ++t) {
    const TensorInfo& tensor = manifest.model->tensors()[t];
    json::array shape;
    for (uint64_t extent : tensor.shape_in_files()) shape.push_back(extent);
    list.push_back(json::object{{"name", tensor.name},
                                {"file", tensor.file},
                                {"dtype", dtype_name(tensor.dtype)},
                                {"shape", std::move(shape)},
                                {"checksum", manifest.checksums[t].to_hex()},
                                {"path", "model/" + model_paths[t]}});
  }
  meta["tensors"] = std::move(list);
  json::array files;
  for (const WrittenFile& file : manifest.files) {
    json::object object{{"rank", file.rank}, {"path", file.path}, {"bytes", file.bytes}};
    if (!file.has_tensors) object["checksum"] = file.checksum.to_hex();
    if (!file.inside.empty()) object["inside"] = file.inside;
    files.push_back(std::move(object));
  }
  meta["files"] = std::move(files);
  json::array without;
  for (const LeftOut& one : left_out)
    without.push_back(json::object{{"file", one.file},
                                   {"tensors", one.tensors},
                                   {"why", one.same_names ? "same names" : "optimizer state"}});
  meta["left_out_of_hf"] = std::move(without);
  return pretty_json(meta);
}

}  // namespace ptc
