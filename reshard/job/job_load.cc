// A job at start: what the metadata say exists, and what a crash left half-done.
#include <fcntl.h>
#include <spdlog/spdlog.h>
#include <sys/stat.h>
#include <unistd.h>

#include <boost/json/object.hpp>
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
    Result<CheckpointRecord> record = load_checkpoint(std::string(id->as_string()), generation);
    if (record.has_error())
      return std::move(record).error().with_context(
          fmt::format("job {}, checkpoint {}", job->name(), name));
    PTC_TRY(record.value().sequence, number(object, "sequence"));
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
  auto open_image = [&](const std::string& image_id, uint64_t bytes) -> ImageRef {
    Result<ImageRef> image = services.images->open({image_id}, bytes);
    if (image.has_value()) return image.value();
    spdlog::error("job {}, checkpoint {}: {}", job->name(), manifest.name, image.error().message());
    return nullptr;
  };
  std::unordered_map<std::string, ImageRef> others;
  for (const WrittenFile& file : manifest.files)
    if (!file.has_tensors) others.emplace(file.image, open_image(file.image, file.bytes));

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
    image.image = open_image(image.id, object.at("bytes").to_number<uint64_t>());
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
  std::error_code error;
  const fs::path committing = dir + "/committing";
  for (const auto& taken : fs::directory_iterator(committing, error)) {
    const std::string id = taken.path().filename();
    bool committed = std::any_of(checkpoints.begin(), checkpoints.end(),
                                 [&](const auto& entry) { return entry.second.id == id; });
    if (!committed) {
      for (const auto& entry : fs::directory_iterator(taken.path(), error)) {
        const std::string name = entry.path().filename();
        fs::path target = job->files_dir() + "/incoming/" + name;
        if (fs::exists(fs::symlink_status(target))) target += ".recovered-" + id;
        if (rename(entry.path().c_str(), target.c_str()) != 0)
          return errno_error(errno, entry.path().string());
        spdlog::info("job {}: the commit of incoming/{} was cut off and is taken back", job->name(),
                     target.filename().string());
      }
    }
    PTC_TRY(remove_tree(AT_FDCWD, taken.path()));
  }
  for (const auto& directory : fs::directory_iterator(dir + "/checkpoints", error)) {
    const std::string id = directory.path().filename();
    auto owner = std::find_if(checkpoints.begin(), checkpoints.end(),
                              [&](const auto& entry) { return entry.second.id == id; });
    if (owner == checkpoints.end()) {
      PTC_TRY(remove_tree(AT_FDCWD, directory.path()));
      continue;
    }
    // Left by a flip that was cut off on either side of its transaction.
    const std::string stored = fmt::format("stored-{}.json", owner->second.generation);
    for (const auto& file : fs::directory_iterator(directory.path(), error)) {
      const std::string name = file.path().filename();
      if (name.starts_with("stored-") && name != stored) {
        PTC_TRY(remove_tree(AT_FDCWD, file.path()));
      }
    }
  }
  return ok();
}

}  // namespace ptc
