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
#include <chrono>
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

constexpr size_t kMaxFileBytes = size_t{1} << 32;
/// A node that has not taken files by then is not waited for: so long, and what it takes to send
/// them at this rate to as many at the same time as PieceSizes::fan_out says.
constexpr std::chrono::milliseconds kToTake{3000};
constexpr uint64_t kSlowBytesInMs = 10'000;

/// Of stored-<generation>… and plan-<generation>…; 0: of another file.
int64_t generation_in(std::string_view file) {
  for (const std::string_view kind : {"stored-", "plan-"})
    if (file.starts_with(kind))
      return std::strtoll(std::string(file.substr(kind.size())).c_str(), nullptr, 10);
  return 0;
}

/// Those that are there, as `self` asks them: the next by name first, so that not all ask the same.
std::vector<std::string> from_next(std::vector<std::string> others, const std::string& self) {
  std::sort(others.begin(), others.end());
  std::rotate(others.begin(), std::upper_bound(others.begin(), others.end(), self), others.end());
  return others;
}

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

NamedFile CheckpointFiles::file_of(const CheckpointEntry& entry, std::string name) {
  const auto facts = entry.files.find(name);
  NamedFile file{entry.id, std::move(name)};
  if (facts != entry.files.end()) file.facts = facts->second;
  return file;
}

std::vector<NamedFile> CheckpointFiles::files_of(const CheckpointEntry& entry) {
  return {file_of(entry, "manifest.json"), file_of(entry, "headers.bin"),
          file_of(entry, entry.stored)};
}

std::vector<NamedFile> CheckpointFiles::lacking(std::vector<NamedFile> files,
                                                const FetchedFiles& fetched) const {
  if (!place_.services.cluster->shares_bytes()) return {};
  std::erase_if(
      files, [&](const NamedFile& name) { return fetched.contains(name) || is_right_here(name); });
  return files;
}

bool CheckpointFiles::is_right_here(const NamedFile& name) const {
  if (!name.facts) return has(name.id, name.file);
  const Result<FileFacts> here =
      FileFacts::of_file(place_.checkpoint_dir(name.id) + "/" + name.file);
  if (here.has_value() && here.value() != *name.facts)
    spdlog::error("job {}: {} of checkpoint {} is damaged on this node", place_.name, name.file,
                  name.id);
  return here.has_value() && here.value() == *name.facts;
}

Result<std::string> CheckpointFiles::read(const NamedFile& name,
                                          const FetchedFiles& fetched) const {
  const auto known = fetched.find(name);
  if (known != fetched.end()) {
    if (known->second.has_error()) return known->second.error();
    if (known->second.value()) return *known->second.value();
  }
  Result<std::string> here =
      read_text_file(AT_FDCWD, place_.checkpoint_dir(name.id) + "/" + name.file, kMaxFileBytes);
  const bool can_ask = place_.services.cluster->shares_bytes();
  if (here.has_value() && name.facts && FileFacts::of(here.value()) != *name.facts)
    return make_error(can_ask ? Code::kUnavailable : Code::kCorrupt, "{} is not what was written",
                      name.file);
  if (here.has_value() || !can_ask || here.error().code() != Code::kNotFound) return here;
  return make_error(Code::kUnavailable, "{} is not here", name.file);  // any more, or yet
}

Result<CheckpointRecord> CheckpointFiles::load(const CheckpointEntry& entry,
                                               const FetchedFiles& fetched) const {
  PTC_TRY(auto manifest_text, read(file_of(entry, "manifest.json"), fetched));
  PTC_TRY(auto headers, read(file_of(entry, "headers.bin"), fetched));
  PTC_TRY(auto facts,
          CheckpointFacts::read(manifest_text, std::move(headers), *place_.services.results));
  CheckpointRecord record;
  record.id = entry.id;
  record.generation = entry.generation;
  record.stored = entry.stored;
  record.checkpoint = std::make_shared<Checkpoint>(std::move(facts), place_.services.results,
                                                   &place_.services.executor->transport(),
                                                   place_.services.catch_up);
  PTC_TRY(auto stored, load_stored(*record.checkpoint, entry, fetched));
  record.where = stored;
  record.checkpoint->replace_stored(std::move(stored));
  return record;
}

Result<std::shared_ptr<const StoredState>> CheckpointFiles::load_stored(
    const Checkpoint& checkpoint, const CheckpointEntry& entry, const FetchedFiles& fetched) const {
  PTC_TRY(auto text, read(file_of(entry, entry.stored), fetched));
  auto failed = [&](const Error& error) {
    // What cannot be asked for cannot have been stored.
    const Code code = error.code() == Code::kInvalidArgument ? Code::kCorrupt : error.code();
    return Error(code, error.message()).with_context(entry.stored + " of checkpoint " + entry.id);
  };
  Result<StoredText> parsed = StoredText::from_text(text);
  if (parsed.has_error()) return failed(parsed.error());
  auto& [spec, images, bytes] = parsed.value();
  for (size_t i = 0; i < images.size(); ++i) {
    PTC_TRY(images[i].image, open_image(images[i], bytes[i]));
  }
  Result<std::shared_ptr<const StoredState>> stored =
      checkpoint.make_stored(spec, std::move(images));
  if (stored.has_error()) return failed(stored.error());
  return stored;
}

std::optional<PlanTexts> CheckpointFiles::load_plan(const std::string& id,
                                                    const std::string& stored_file,
                                                    const FetchedFiles& fetched) const {
  const std::string file = plan_file_of(stored_file);
  if (file.empty()) return std::nullopt;
  Result<std::string> text = read({id, file}, fetched);
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
    return ImageRef(std::make_shared<const Image>(ImageId{image.id},
                                                  MemoryPlace{image.node, image.memory}, bytes));
  }
  // An image that is gone or cut short is a loss that the checkpoint knows to tell of. What was in
  // a device's memory went with the daemon that had it there.
  Result<ImageRef> here = place_.services.images->open({image.id}, bytes);
  const bool is_there = here.has_value() && here.value()->place().memory == image.memory;
  if (is_there) return here;
  if (!image.missing && !image.memory.is_host())
    spdlog::error("job {}: image {} was in the memory of {}, which does not last", place_.name,
                  image.id, image.memory.to_string());
  else if (!image.missing && here.has_error())
    spdlog::error("job {}: {}", place_.name, here.error().message());
  if (here.has_value()) return ImageRef();
  const Code code = here.error().code();
  if (code == Code::kNotFound || code == Code::kCorrupt) return ImageRef();
  return here;
}

Result<std::string> CheckpointFiles::fetch(const NamedFile& name,
                                           const std::vector<std::string>& nodes,
                                           const std::optional<FileFacts>& facts,
                                           Activity& activity) const {
  PieceOptions options;
  options.piece = place_.services.pieces.piece;
  options.limit = kMaxFileBytes;
  options.facts = facts;
  options.stop = activity.stop_token();
  options.progress = [&](uint64_t bytes, uint64_t of_bytes) {
    activity.begin("fetching", of_bytes);
    activity.bytes_done() = bytes;
  };
  return fetch_in_pieces(
      [&](const std::string& node, const std::string& body) {
        return peers_.ask(node, PeerMethod::kFile, body, options.stop);
      },
      nodes, name, options);
}

Result<> CheckpointFiles::store(const NamedFile& name, std::string_view content) const {
  return write_file_atomically(AT_FDCWD, place_.checkpoint_dir(name.id) + "/" + name.file, content);
}

void CheckpointFiles::fetch(const std::vector<NamedFile>& files, FetchedFiles& fetched) const {
  if (files.empty()) return;
  const std::vector<std::string> nodes =
      from_next(peers_.others(), place_.services.cluster->self());
  auto fetch_one = [&](const NamedFile& name) -> Result<std::optional<std::string>> {
    const KeyedLock::Held one = fetching_.hold(name.id + "/" + name.file);
    if (is_right_here(name)) return std::optional<std::string>();
    const auto activity = activities_.begin({Activity::Kind::kFetch, name.id, "", name.file});
    PTC_TRY(auto content, fetch(name, nodes, name.facts, *activity));
    auto keep = [&]() -> Result<> {
      PTC_TRY(make_directory_of(name.id));
      return store(name, content);
    };
    Result<> kept = keep();
    if (kept.has_value()) return std::optional<std::string>();
    // Without room for it this node asks again when it needs it.
    if (kept.error().code() != Code::kNoSpace) return std::move(kept).error();
    return std::optional<std::string>(std::move(content));
  };
  std::map<std::string, Error> in_vain;  // by id: without the one the others are of no use
  for (const NamedFile& name : files) {
    const auto before = in_vain.find(name.id);
    auto one = before == in_vain.end() ? fetch_one(name) : before->second;
    if (one.has_error()) in_vain.emplace(name.id, one.error());
    fetched.insert_or_assign(name, std::move(one));
  }
}

Result<std::string> CheckpointFiles::piece(const json::object& request,
                                           const NamedFile& name) const {
  PieceRequest piece{name};
  PTC_TRY(auto offset, json_uint(request, "offset"));
  PTC_TRY(auto most, json_uint(request, "most"));
  const json::value* sum = request.if_contains("sum");
  if (!offset || !most || sum == nullptr || !sum->is_bool())
    return invalid_argument("the request does not say which piece of a file");
  piece.offset = *offset;
  piece.most = *most;
  piece.sum = sum->get_bool();
  return read_piece(place_.checkpoint_dir(name.id) + "/" + name.file, piece);
}

Result<> CheckpointFiles::give(const std::string& id, const std::vector<std::string>& files,
                               const StoredState& stored, Activity* activity,
                               const std::optional<MetaTransaction::Compare>& decides) const {
  const std::string& self = place_.services.cluster->self();
  const PieceSizes& sizes = place_.services.pieces;
  const std::vector<std::string> others = from_next(peers_.others(), self);
  if (others.empty()) return ok();
  json::array list;
  uint64_t bytes = 0;
  for (const std::string& file : files) {
    PTC_TRY(auto facts, FileFacts::of_file(place_.checkpoint_dir(id) + "/" + file));
    list.push_back(json::array{json::value(file), facts.bytes, json::value(facts.sum)});
    bytes += facts.bytes;
  }
  std::string contents;
  const bool with_question = bytes * others.size() <= sizes.with_question;
  for (const std::string& file : files) {
    if (!with_question) break;
    PTC_TRY(auto content,
            read_text_file(AT_FDCWD, place_.checkpoint_dir(id) + "/" + file, kMaxFileBytes));
    contents += content;
  }
  json::object request{{"id", id}, {"files", std::move(list)}};
  if (decides) {
    request["from"] = self;
    request["fence"] = decides->revision;
  }
  const std::stop_token stop = activity != nullptr ? activity->stop_token() : std::stop_token();
  if (activity != nullptr) activity->begin("describing", bytes * others.size());
  const auto time = kToTake + std::chrono::milliseconds(bytes * sizes.fan_out / kSlowBytesInMs);
  // Those that have got it last give it to the next, each to a few, and none again; this node to
  // the first.
  std::vector<std::string> sources{self};
  size_t given = 0;
  for (size_t next = 0; next < others.size();) {
    const size_t left = others.size() - next;
    const size_t count = with_question ? left : std::min(left, sizes.fan_out * sources.size());
    const std::vector<std::string> nodes(others.begin() + next, others.begin() + next + count);
    std::vector<std::string> bodies;
    for (size_t i = 0; i < count; ++i) {
      // The others where the first is gone.
      json::array from{json::value(sources[i % sources.size()])};
      if (sources.size() > 1) from.push_back(json::value(sources[(i + 1) % sources.size()]));
      if (sources.front() != self) from.push_back(json::value(self));
      if (!with_question) request["nodes"] = std::move(from);
      bodies.push_back(json::serialize(request) + "\n" + contents);
    }
    const auto answers = peers_.ask_all(nodes, PeerMethod::kFiles, bodies, stop, time);
    std::vector<std::string> have;
    for (size_t i = 0; i < count; ++i) {
      // A node that does not answer now asks for them itself when it is there again.
      if (answers[i].has_error())
        spdlog::warn("job {}: {}", place_.name, answers[i].error().message());
      else have.push_back(nodes[i]);
    }
    given += have.size();
    if (activity != nullptr) activity->bytes_done() += bytes * count;
    if (!have.empty()) sources = std::move(have);
    next += count;
  }
  const bool all_here = std::all_of(stored.images.begin(), stored.images.end(),
                                    [&](const StoredImage& image) { return image.node == self; });
  if (given > 0 || all_here) return ok();
  return make_error(Code::kUnavailable,
                    "no other node answers, and where bytes lie that they hold must not be known "
                    "to node {} alone",
                    self);
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
  const std::shared_ptr<const StoredState> stored = record.checkpoint->stored();
  for (const StoredImage& image : stored->images)
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

void CheckpointFiles::remove_undecided(const std::string& id,
                                       const std::string& stored_file) const {
  const JobKnowledge::Snapshot now = knowledge_.now();
  if (const CheckpointRecord* known = now->find_id(id);
      known != nullptr && known->stored == stored_file)
    return;
  for (const std::string& file : {stored_file, plan_file_of(stored_file)})
    if (!file.empty()) unlink(fmt::format("{}/{}", place_.checkpoint_dir(id), file).c_str());
}

/// Left by a flip that was cut off on either side of its transaction, or replaced. As long as there
/// is no room here for the file that says what is so now, the images that are here are known by
/// those before it. What is of a later generation may be about to be decided on.
Result<> CheckpointFiles::remove_stale(const std::string& id, const std::string& stored) const {
  if (!has(id, stored)) return ok();
  PTC_TRY(auto files, names_in(place_.checkpoint_dir(id)));
  for (const std::string& file : files) {
    const int64_t generation = generation_in(file);
    if (generation == 0 || generation > generation_in(stored) || file == stored ||
        file == plan_file_of(stored))
      continue;
    PTC_TRY(remove_tree(AT_FDCWD, place_.checkpoint_dir(id) + "/" + file));
  }
  return ok();
}

Result<> CheckpointFiles::remove_earlier_states(const CheckpointRecord& record,
                                                bool drafts_too) const {
  std::set<std::string> used;
  const std::shared_ptr<const StoredState> stored = record.checkpoint->stored();
  for (const StoredImage& image : stored->images) used.insert(image.id);
  const bool is_here = has(record.id, record.stored);
  PTC_TRY(auto files, names_in(place_.checkpoint_dir(record.id)));
  for (const std::string& file : files) {
    if (!file.starts_with("stored-") || file == record.stored) continue;
    const std::string path = place_.checkpoint_dir(record.id) + "/" + file;
    const bool earlier = generation_in(file) < record.generation;
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
    const std::string of = "stored" + file.substr(std::min(file.find('-'), file.size()));
    std::error_code error;
    if (!file.starts_with("plan-") ||
        std::filesystem::exists(place_.checkpoint_dir(record.id) + "/" + of, error))
      continue;
    PTC_TRY(remove_tree(AT_FDCWD, place_.checkpoint_dir(record.id) + "/" + file));
  }
  return ok();
}

void CheckpointFiles::remove(const CheckpointRecord& record) const {
  std::vector<ImageRef> here;
  const std::shared_ptr<const StoredState> stored = record.checkpoint->stored();
  for (const StoredImage& image : stored->images) {
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

Result<> CheckpointFiles::keep(const std::string& id, const json::object& request,
                               std::string_view contents) const {
  const json::value* files = request.if_contains("files");
  const json::value* sources = request.if_contains("nodes");
  const bool with_question = sources == nullptr;
  if (files == nullptr || !files->is_array() || (!with_question && !sources->is_array()))
    return invalid_argument("the request has no files");
  std::vector<std::string> nodes;
  for (const json::value& node : with_question ? json::array() : sources->as_array()) {
    if (!node.is_string()) return invalid_argument("the request names no nodes");
    nodes.emplace_back(node.as_string());
  }
  PTC_TRY(make_directory_of(id));
  for (const json::value& file : files->as_array()) {
    const json::array* one = file.if_array();
    if (one == nullptr || one->size() != 3 || !(*one)[0].is_string() || !(*one)[2].is_string() ||
        !can_be_file(std::string_view((*one)[0].as_string())))
      return invalid_argument("the request names a file that cannot be one");
    const NamedFile name{id, std::string((*one)[0].as_string())};
    boost::system::error_code bad;
    const FileFacts facts{(*one)[1].to_number<uint64_t>(bad), std::string((*one)[2].as_string())};
    if (bad || (with_question && facts.bytes > contents.size()))
      return invalid_argument("the request is cut short");
    if (with_question) {
      PTC_TRY(store(name, contents.substr(0, facts.bytes)));
      contents.remove_prefix(facts.bytes);
      continue;
    }
    const KeyedLock::Held held = fetching_.hold(id + "/" + name.file);
    if (has(id, name.file)) continue;  // asked once more
    const auto activity =
        activities_.begin({Activity::Kind::kFetch, id, nodes.empty() ? "" : nodes[0], name.file});
    activity->begin("fetching", facts.bytes);
    PTC_TRY(auto content, fetch(name, nodes, facts, *activity));
    PTC_TRY(store(name, content));
  }
  return sync_directory(AT_FDCWD, place_.dir + "/checkpoints");
}

}  // namespace ptc
