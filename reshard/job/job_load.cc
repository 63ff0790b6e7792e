// A job at start: what the metadata say exists, and what a crash left half-done.
#include <fcntl.h>
#include <spdlog/spdlog.h>
#include <sys/stat.h>
#include <unistd.h>

#include <boost/json/object.hpp>
#include <cstring>
#include <filesystem>

#include "reshard/job/job_impl.h"
#include "store/base/file.h"

namespace ptc {
namespace {

constexpr size_t kMaxManifestBytes = size_t{1} << 32;

Result<json::object> parse_object(const std::string& text, std::string_view what) {
  PTC_TRY(auto value, parse_json(text));
  if (!value.is_object()) return make_error(Code::kCorrupt, "{}: no JSON object", what);
  return std::move(value.as_object());
}

Result<int64_t> number(const json::object& object, std::string_view key) {
  PTC_TRY(auto value, json_uint(object, key, INT64_MAX));
  return static_cast<int64_t>(value.value_or(0));
}

}  // namespace

Result<> Job::Impl::load() {
  PTC_TRY(auto entries, services.meta->list(meta_key("")));
  std::vector<std::pair<std::string, MetaEntry>> records;
  for (MetaEntry& entry : entries) {
    std::string what = entry.key.substr(meta_key("").size());
    if (what == "layout") {
      PTC_TRY(auto object, parse_object(entry.value, entry.key));
      PTC_TRY(revision, number(object, "revision"));
      const json::value* text = object.if_contains("text");
      if (text == nullptr || !text->is_string())
        return make_error(Code::kCorrupt, "{} has no text", entry.key);
      layout_text = std::string(text->as_string());
      PTC_TRY(layout, Layout::parse(layout_text));
      layout_meta_revision = entry.revision;
    } else if (what == "in_force") {
      PTC_TRY(auto object, parse_object(entry.value, entry.key));
      PTC_TRY(in_force.revision, number(object, "revision"));
      const json::value* spec = object.if_contains("spec");
      if (spec == nullptr || !spec->is_object())
        return make_error(Code::kCorrupt, "{} has no spec", entry.key);
      PTC_TRY(in_force.spec, LayoutSpec::from_json(spec->as_object()));
      if (const json::value* current = object.if_contains("current"); current && current->is_string())
        in_force.current = std::string(current->as_string());
      in_force.meta_revision = entry.revision;
    } else if (what == "rules") {
      rules_text = entry.value;
    } else if (what.starts_with("specs/")) {
      PTC_TRY(auto object, parse_object(entry.value, entry.key));
      PTC_TRY(custom_specs[what.substr(6)], LayoutSpec::from_json(object));
    } else if (what.starts_with("checkpoints/")) {
      records.emplace_back(what.substr(12), std::move(entry));
    }
  }
  for (auto& [name, entry] : records) {
    PTC_TRY(auto object, parse_object(entry.value, entry.key));
    const json::value* id = object.if_contains("id");
    if (id == nullptr || !id->is_string()) return make_error(Code::kCorrupt, "{} has no id", entry.key);
    PTC_TRY(int64_t generation, number(object, "generation"));
    Result<CheckpointRecord> record = Error(Code::kCorrupt, "");
    try {
      record = load_checkpoint(std::string(id->as_string()), generation);
    } catch (const std::exception& error) {  // a damaged file of our own
      record = make_error(Code::kCorrupt, "{}", error.what());
    }
    if (record.has_error()) {
      // Everything else stays intact, and so do its files: they may still be mended by hand.
      damaged[name] = record.error().message();
      damaged_ids.insert(std::string(id->as_string()));
      spdlog::error("job {}: checkpoint {} is damaged: {}", job->name(), name, damaged[name]);
      continue;
    }
    PTC_TRY(record.value().sequence, number(object, "sequence"));
    if (const json::value* pinned = object.if_contains("pinned"))
      record.value().pinned = pinned->is_bool() && pinned->as_bool();
    record.value().meta_revision = entry.revision;
    checkpoints.emplace(name, std::move(record).value());
  }
  return recover_commits();
}

Result<CheckpointRecord> Job::Impl::load_checkpoint(const std::string& id, int64_t generation) {
  const std::string where = checkpoint_dir(id);
  PTC_TRY(auto manifest_text, read_text_file(AT_FDCWD, where + "/manifest.json", kMaxManifestBytes));
  PTC_TRY(auto manifest, Manifest::from_text(manifest_text));
  PTC_TRY(auto headers, read_text_file(AT_FDCWD, where + "/headers.bin", kMaxManifestBytes));
  PTC_TRY(auto stored_text, read_text_file(AT_FDCWD, fmt::format("{}/stored-{}.json", where, generation),
                                           kMaxManifestBytes));
  // An image that is gone or cut short is a loss that the checkpoint knows to tell of.
  auto open_image = [&](const std::string& image_id, uint64_t bytes) -> Result<ImageRef> {
    Result<ImageRef> image = services.images->open({image_id}, bytes);
    if (image.has_value()) return image;
    spdlog::error("job {}, checkpoint {}: {}", job->name(), manifest.name, image.error().message());
    const Code code = image.error().code();
    if (code == Code::kNotFound || code == Code::kCorrupt) return ImageRef();
    return image;
  };
  std::unordered_map<std::string, ImageRef> others;
  for (const WrittenFile& file : manifest.files) {
    if (file.has_tensors) continue;
    PTC_TRY(others[file.image], open_image(file.image, file.bytes));
  }

  PTC_TRY(auto value, parse_json(stored_text, {.max_bytes = kMaxManifestBytes}));
  boost::system::error_code bad;
  const json::value* spec_value = value.find_pointer("/spec", bad);
  const json::value* image_array = value.find_pointer("/images", bad);
  if (spec_value == nullptr || !spec_value->is_object() || image_array == nullptr ||
      !image_array->is_array())
    return make_error(Code::kCorrupt, "{}/stored-{}.json is damaged", where, generation);
  PTC_TRY(auto spec, LayoutSpec::from_json(spec_value->as_object()));
  std::vector<StoredImage> images;
  for (const json::value& entry : image_array->as_array()) {
    const json::object& object = entry.as_object();
    StoredImage image;
    image.id = std::string(object.at("id").as_string());
    image.state = object.at("state").to_number<uint32_t>();
    image.path = std::string(object.at("path").as_string());
    image.written = object.at("written").to_number<int32_t>();
    PTC_TRY(image.image, open_image(image.id, object.at("bytes").to_number<uint64_t>()));
    images.push_back(std::move(image));
  }
  CheckpointRecord record;
  record.id = id;
  record.generation = generation;
  record.checkpoint = std::make_shared<Checkpoint>(std::move(manifest), std::move(headers),
                                                   std::move(others), &services.executor->transport());
  PTC_TRY(auto stored, record.checkpoint->make_stored(spec, std::move(images)));
  record.checkpoint->replace_stored(std::move(stored));
  return record;
}

Result<> Job::Impl::recover_commits() {
  namespace fs = std::filesystem;
  auto names_of = [](const std::string& directory) -> Result<std::vector<std::string>> {
    std::vector<std::string> names;
    std::error_code error;
    if (!fs::exists(directory, error)) return names;
    for (fs::directory_iterator it(directory, error), end; !error && it != end; it.increment(error))
      names.push_back(it->path().filename());
    if (error) return errno_error(error.value(), "reading " + directory);
    return names;
  };
  PTC_TRY(remove_tree(AT_FDCWD, dir + "/" + kScratchDir));
  std::unordered_map<std::string, int64_t> generations;  // of committed ids
  for (const auto& [name, record] : checkpoints) generations.emplace(record.id, record.generation);

  PTC_TRY(auto taken, names_of(dir + "/committing"));
  for (const std::string& id : taken) {
    const std::string directory = dir + "/committing/" + id;
    if (generations.contains(id) || damaged_ids.contains(id)) {
      PTC_TRY(remove_tree(AT_FDCWD, directory));
      continue;
    }
    PTC_TRY(auto names, names_of(directory));
    for (const std::string& name : names) {
      const std::string from = directory + "/" + name;
      const std::string to = job->files_dir() + "/incoming/" + name;
      const std::string other = job->files_dir() + "/incoming/recovered-" + id;
      if (renameat2(AT_FDCWD, from.c_str(), AT_FDCWD, to.c_str(), RENAME_NOREPLACE) == 0 ||
          rename(from.c_str(), other.c_str()) == 0)
        spdlog::info("job {}: the commit of incoming/{} was cut off and is taken back", job->name(), name);
      else
        spdlog::error("job {}: incoming/{} could not be put back ({}); it is in {}", job->name(), name,
                      std::strerror(errno), from);
    }
    rmdir(directory.c_str());
  }
  PTC_TRY(auto ids, names_of(dir + "/checkpoints"));
  for (const std::string& id : ids) {
    const std::string directory = checkpoint_dir(id);
    if (damaged_ids.contains(id)) continue;
    auto owner = generations.find(id);
    if (owner == generations.end()) {
      PTC_TRY(remove_tree(AT_FDCWD, directory));
      continue;
    }
    // Left by a flip that was cut off on either side of its transaction.
    PTC_TRY(auto files, names_of(directory));
    const std::string stored = fmt::format("stored-{}.json", owner->second);
    for (const std::string& file : files) {
      if (!file.starts_with("stored-") || file == stored) continue;
      PTC_TRY(remove_tree(AT_FDCWD, directory + "/" + file));
    }
  }
  return ok();
}

}  // namespace ptc
