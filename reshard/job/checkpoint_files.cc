#include "reshard/job/checkpoint_files.h"

#include <fcntl.h>
#include <spdlog/spdlog.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <boost/json/array.hpp>
#include <boost/json/object.hpp>
#include <boost/json/serialize.hpp>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <set>

#include "reshard/cluster/tombstones.h"
#include "reshard/job/names.h"
#include "reshard/move/placement.h"
#include "store/base/file.h"
#include "store/base/json.h"

namespace ptc {
namespace {

constexpr size_t kMaxManifestBytes = size_t{1} << 32;
constexpr size_t kMaxFileBytes = size_t{1} << 32;

}  // namespace

Result<std::vector<std::string>> names_in(const std::string& directory) {
  namespace fs = std::filesystem;
  std::vector<std::string> names;
  std::error_code error;
  if (!fs::exists(directory, error)) return names;
  for (fs::directory_iterator it(directory, error), end; !error && it != end; it.increment(error))
    names.push_back(it->path().filename());
  if (error) return errno_error(error.value(), "reading " + directory);
  return names;
}

Result<CheckpointRecord> CheckpointFiles::load(const std::string& id, int64_t generation,
                                               const std::string& stored_file) const {
  PTC_TRY(auto manifest_text, read(id, "manifest.json", kMaxManifestBytes));
  PTC_TRY(auto headers, read(id, "headers.bin", kMaxManifestBytes));
  PTC_TRY(auto facts,
          CheckpointFacts::read(manifest_text, std::move(headers), *place_.services.results));
  CheckpointRecord record;
  record.id = id;
  record.generation = generation;
  record.stored = stored_file;
  record.checkpoint = std::make_shared<Checkpoint>(std::move(facts), place_.services.results,
                                                   &place_.services.executor->transport(),
                                                   place_.services.catch_up);
  PTC_TRY(auto stored, load_stored(*record.checkpoint, id, stored_file));
  record.where = stored;
  record.checkpoint->replace_stored(std::move(stored));
  return record;
}

Result<std::shared_ptr<const StoredState>> CheckpointFiles::load_stored(
    const Checkpoint& checkpoint, const std::string& id, const std::string& name) const {
  PTC_TRY(auto text, read(id, name, kMaxManifestBytes));
  PTC_TRY(auto value, parse_json(text, {.max_bytes = kMaxManifestBytes}));
  boost::system::error_code bad;
  const json::value* spec_value = value.find_pointer("/spec", bad);
  const json::value* image_array = value.find_pointer("/images", bad);
  if (spec_value == nullptr || !spec_value->is_object() || image_array == nullptr ||
      !image_array->is_array())
    return make_error(Code::kCorrupt, "{} of checkpoint {} is damaged", name, id);
  PTC_TRY(auto spec, LayoutSpec::from_json(spec_value->as_object()));
  std::vector<StoredImage> images;
  for (const json::value& entry : image_array->as_array()) {
    const json::object& object = entry.as_object();
    StoredImage image;
    image.id = std::string(object.at("id").as_string());
    image.state = object.at("state").to_number<uint32_t>();
    image.path = std::string(object.at("path").as_string());
    image.written = object.at("written").to_number<int32_t>();
    if (const json::value* node = object.if_contains("node"))
      image.node = std::string(node->as_string());
    if (const json::value* missing = object.if_contains("missing"))
      image.missing = missing->as_bool();
    PTC_TRY(image.image, open_image(image, object.at("bytes").to_number<uint64_t>()));
    images.push_back(std::move(image));
  }
  return checkpoint.make_stored(spec, std::move(images));
}

std::optional<PlanTexts> CheckpointFiles::load_plan(const std::string& id,
                                                    const std::string& stored_file) const {
  constexpr size_t kMaxPlanBytes = size_t{1} << 28;
  const std::string file = plan_file_of(stored_file);
  if (file.empty()) return std::nullopt;
  Result<std::string> text = read(id, file, kMaxPlanBytes);
  Result<PlanTexts> plan =
      text.has_value() ? PlanTexts::from_text(text.value()) : std::move(text).error();
  if (plan.has_value()) return std::move(plan).value();
  spdlog::warn("job {}: the last plan is not known: {}", place_.name, plan.error().message());
  return std::nullopt;
}

Result<ImageRef> CheckpointFiles::open_image(const StoredImage& image, uint64_t bytes) const {
  if (image.node != place_.node_key()) {
    const bool reachable = is_among(knowledge_.now()->alive, image.node);
    if (image.missing || !reachable) return ImageRef();
    return ImageRef(std::make_shared<const Image>(ImageId{image.id}, image.node, bytes));
  }
  // An image that is gone or cut short is a loss that the checkpoint knows to tell of.
  Result<ImageRef> here = place_.services.images->open({image.id}, bytes);
  if (here.has_value()) return here;
  if (!image.missing) spdlog::error("job {}: {}", place_.name, here.error().message());
  const Code code = here.error().code();
  if (code == Code::kNotFound || code == Code::kCorrupt) return ImageRef();
  return here;
}

Result<std::string> CheckpointFiles::read(const std::string& id, const std::string& file,
                                          size_t limit) const {
  const std::string path = place_.checkpoint_dir(id) + "/" + file;
  Result<std::string> here = read_text_file(AT_FDCWD, path, limit);
  if (here.has_value() || !place_.services.cluster->shares_bytes() ||
      here.error().code() != Code::kNotFound)
    return here;
  std::optional<Error> silent;  // a node that may have it
  for (const std::string& node : peers_.others()) {
    Result<std::string> there = peers_.ask(
        node, PeerMethod::kFile, json::serialize(json::object{{"id", id}, {"file", file}}));
    if (there.has_error()) {
      if (there.error().code() != Code::kNotFound)
        silent = make_error(Code::kUnavailable, "{}", there.error().message());
      continue;
    }
    auto keep = [&]() -> Result<> {
      PTC_TRY(make_directory_of(id));
      return write_file_atomically(AT_FDCWD, path, there.value());
    };
    // Without room for it this node asks again when it needs it.
    if (Result<> kept = keep(); kept.has_error() && kept.error().code() != Code::kNoSpace)
      return std::move(kept).error();
    return there;
  }
  if (silent) return *std::move(silent);
  return make_error(Code::kNotFound, "no node that is there has {}", file);
}

Result<> CheckpointFiles::give(const std::string& id, const std::vector<std::string>& files,
                               const StoredState& stored,
                               const std::optional<MetaTransaction::Compare>& decides) const {
  const std::vector<std::string> others = peers_.others();
  if (others.empty()) return ok();
  json::array list;
  std::string contents;
  for (const std::string& file : files) {
    PTC_TRY(auto content,
            read_text_file(AT_FDCWD, place_.checkpoint_dir(id) + "/" + file, kMaxFileBytes));
    list.push_back(json::array{json::value(file), content.size()});
    contents += content;
  }
  json::object request{{"id", id}, {"files", std::move(list)}};
  if (decides) {
    request["from"] = place_.services.cluster->self();
    request["fence"] = decides->revision;
  }
  const std::string body = json::serialize(request) + "\n" + contents;
  bool given_to_any = false;
  for (const Result<std::string>& given : peers_.ask_all(others, PeerMethod::kFiles, body)) {
    // A node that does not answer now asks for them itself when it is there again.
    if (given.has_error()) spdlog::warn("job {}: {}", place_.name, given.error().message());
    else given_to_any = true;
  }
  const bool all_here = std::all_of(
      stored.images.begin(), stored.images.end(),
      [&](const StoredImage& image) { return image.node == place_.services.cluster->self(); });
  if (given_to_any || all_here) return ok();
  return make_error(
      Code::kUnavailable,
      "no other node answers, and where bytes lie that they hold must not be known to "
      "node {} alone",
      place_.services.cluster->self());
}

Result<> CheckpointFiles::make_directory_of(const std::string& id) const {
  PTC_TRY(make_directory(AT_FDCWD, place_.dir + "/checkpoints"));
  if (mkdir(place_.checkpoint_dir(id).c_str(), 0700) != 0) {
    if (errno == EEXIST) return ok();
    return errno_error(errno, place_.checkpoint_dir(id));
  }
  PTC_TRY(open_file(AT_FDCWD, place_.checkpoint_dir(id) + "/" + kDraftMark, O_WRONLY | O_CREAT));
  return ok();
}

bool CheckpointFiles::has(const std::string& id, const std::string& file) const {
  return access(fmt::format("{}/{}", place_.checkpoint_dir(id), file).c_str(), F_OK) == 0;
}

/// Not before the file that names the images lies beside them: when others have moved them away, or
/// removed the checkpoint, while this node is away, it is by that file that they are known.
void CheckpointFiles::confirm(const CheckpointRecord& record) const {
  if (!has(record.id, record.stored)) return;
  unlink(fmt::format("{}/{}", place_.checkpoint_dir(record.id), kDraftMark).c_str());
  for (const StoredImage& image : record.checkpoint->stored()->images)
    if (Result<> done = place_.services.images->confirm({image.id}); done.has_error())
      spdlog::warn("job {}: {}", place_.name, done.error().message());
}

void CheckpointFiles::remove_images_not_in(const StoredState& these,
                                           const StoredState& those) const {
  std::unordered_set<std::string_view> kept;
  for (const StoredImage& image : those.images) kept.insert(image.id);
  for (const StoredImage& image : these.images)
    if (!kept.contains(image.id)) (void)place_.services.images->remove({image.id});
  if (place_.listener != nullptr) place_.listener->images_removed(place_.name);
}

/// Left by a flip that was cut off on either side of its transaction, or replaced. As long as there
/// is no room here for the file that says what is so now, the images that are here are known by
/// those before it.
Result<> CheckpointFiles::remove_stale(const std::string& id, const std::string& stored) const {
  if (!has(id, stored)) return ok();
  PTC_TRY(auto files, names_in(place_.checkpoint_dir(id)));
  for (const std::string& file : files) {
    if (!(file.starts_with("stored-") || file.starts_with("plan-")) || file == stored ||
        file == plan_file_of(stored))
      continue;
    PTC_TRY(remove_tree(AT_FDCWD, place_.checkpoint_dir(id) + "/" + file));
  }
  return ok();
}

Result<> CheckpointFiles::remove_earlier_states(const CheckpointRecord& record,
                                                bool drafts_too) const {
  std::set<std::string> used;
  for (const StoredImage& image : record.checkpoint->stored()->images) used.insert(image.id);
  const bool is_here = has(record.id, record.stored);
  PTC_TRY(auto files, names_in(place_.checkpoint_dir(record.id)));
  for (const std::string& file : files) {
    if (!file.starts_with("stored-") || file == record.stored) continue;
    const std::string path = place_.checkpoint_dir(record.id) + "/" + file;
    const bool earlier =
        std::strtoll(file.c_str() + strlen("stored-"), nullptr, 10) < record.generation;
    if (!earlier && !drafts_too) continue;
    bool stays = false, needed = false;
    for (const ImageId& id : images_named_in(path)) {
      needed = needed || (!is_here && used.contains(id.text));
      if (used.contains(id.text)) continue;
      if (earlier) (void)place_.services.images->remove(id);
      else
        stays = stays || (!place_.services.images->is_draft(id) &&
                          place_.services.images->open(id).has_value());
    }
    if (stays) {
      spdlog::warn("job {}: {} names files that are here and that no decision names: it is kept",
                   place_.name, path);
      continue;
    }
    if (needed) continue;  // as in remove_stale()
    PTC_TRY(remove_tree(AT_FDCWD, path));
  }
  for (const std::string& file : files) {
    const std::string stored = "stored" + file.substr(std::min(file.find('-'), file.size()));
    std::error_code error;
    if (!file.starts_with("plan-") ||
        std::filesystem::exists(place_.checkpoint_dir(record.id) + "/" + stored, error))
      continue;
    PTC_TRY(remove_tree(AT_FDCWD, place_.checkpoint_dir(record.id) + "/" + file));
  }
  return ok();
}

void CheckpointFiles::remove(const CheckpointRecord& record) const {
  std::vector<ImageRef> here;
  for (const StoredImage& image : record.checkpoint->stored()->images) {
    (void)place_.services.images->remove({image.id});
    if (image.image != nullptr && image.image->is_here()) here.push_back(image.image);
  }
  record.checkpoint->let_go();
  place_.services.removed->keep(place_.which(), record.id, std::move(here));
  if (place_.listener != nullptr) place_.listener->images_removed(place_.name);
  (void)remove_tree(AT_FDCWD, place_.checkpoint_dir(record.id));
}

Result<> CheckpointFiles::remove_unreadable(const std::string& id) const {
  return remove_checkpoint_directory(*place_.services.images, place_.checkpoint_dir(id));
}

Result<std::string> CheckpointFiles::read_own(const std::string& id,
                                              const std::string& file) const {
  return read_text_file(AT_FDCWD, place_.checkpoint_dir(id) + "/" + file, kMaxFileBytes);
}

Result<> CheckpointFiles::keep(const std::string& id, const json::object& request,
                               std::string_view contents) const {
  const json::value* files = request.if_contains("files");
  if (files == nullptr || !files->is_array()) return invalid_argument("the request has no files");
  PTC_TRY(make_directory_of(id));
  for (const json::value& file : files->as_array()) {
    const json::array* pair = file.if_array();
    if (pair == nullptr || pair->size() != 2 || !(*pair)[0].is_string() ||
        !can_be_file(std::string_view((*pair)[0].as_string())))
      return invalid_argument("the request names a file that cannot be one");
    boost::system::error_code bad;
    const auto bytes = (*pair)[1].to_number<uint64_t>(bad);
    if (bad || bytes > contents.size()) return invalid_argument("the request is cut short");
    PTC_TRY(write_file_atomically(
        AT_FDCWD, place_.checkpoint_dir(id) + "/" + std::string((*pair)[0].as_string()),
        contents.substr(0, bytes)));
    contents.remove_prefix(bytes);
  }
  return sync_directory(AT_FDCWD, place_.dir + "/checkpoints");
}

}  // namespace ptc
