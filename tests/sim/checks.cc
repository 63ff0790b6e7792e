// What must hold: at any time of what a node shows, and at the end of all.
#include <boost/json/parse.hpp>
#include <tuple>

#include "store/codec/safetensors.h"
#include "tests/sim/world.h"

namespace ptc::sim {

using namespace std::chrono_literals;

std::optional<std::string> difference(const std::string& content,
                                      const std::map<std::string, testing::SlowPart>& parts) {
  const auto bytes = std::as_bytes(std::span(content));
  auto header_bytes = safetensors_header_bytes(bytes.first(8), content.size());
  if (header_bytes.has_error()) return header_bytes.error().message();
  auto header = parse_safetensors(bytes.first(header_bytes.value()), content.size());
  if (header.has_error()) return header.error().message();
  if (header.value().tensors.size() != parts.size())
    return "it does not hold the tensors that it shall";
  for (const TensorEntry& entry : header.value().tensors) {
    auto part = parts.find(entry.name);
    if (part == parts.end()) return entry.name + " is none of its tensors";
    if (!std::equal(entry.shape.begin(), entry.shape.end(), part->second.shape.begin(),
                    part->second.shape.end()))
      return entry.name + " has another shape";
    if (content.compare(entry.offset, entry.bytes, part->second.bytes) != 0)
      return entry.name + " has other bytes";
  }
  return std::nullopt;
}

/// What one node shows now.
void World::look_at(unsigned node) {
  if (cluster_.network().is_frozen(node)) return;
  std::optional<std::string> target;
  cluster_.on(node, [&](JobStore& store) {
    if (JobRef job = store.find("job")) target = job->current_target();
  });
  if (!target) return;
  const std::string& text = *target;  // checkpoints/<name>/layouts/<layout>
  const size_t name_end = text.find('/', 12);
  const std::string name = text.substr(12, name_end - 12), layout = text.substr(name_end + 9);
  if (!checkpoints_.contains(name))
    broken(fmt::format("{} shows checkpoint {}, which nobody committed", SimCluster::name(node),
                       name));
  if (!layouts_.contains(layout))
    broken(
        fmt::format("{} shows layout {}, which nobody asked for", SimCluster::name(node), layout));
}

bool World::all_settled(std::string* why) {
  const auto& agreed = cluster_.agreement().entries();
  const auto jobs = static_cast<size_t>(std::count_if(
      agreed.begin(), agreed.end(), [](const auto& entry) { return is_job_key(entry.first); }));
  for (unsigned node = 0; node < options_.nodes; ++node) {
    std::string not_yet = "is not up";
    cluster_.on(node, [&](JobStore& store) {
      not_yet.clear();
      if (store.nodes().size() != options_.nodes) not_yet = "does not see all nodes";
      JobRef job = store.find("job");
      if (job == nullptr) not_yet = "does not know the job";
      if (store.jobs().size() != jobs) not_yet = "does not know all jobs, or more";
      for (const JobRef& one : store.jobs()) {
        Result<> synced = one->sync();
        if (synced.has_error()) not_yet = "cannot take over: " + synced.error().message();
        else if (!one->is_settled())
          not_yet = "is at work on " + one->name() + ": " + one->status_json();
      }
    });
    if (not_yet.empty()) continue;
    if (why != nullptr) *why = SimCluster::name(node) + " " + not_yet;
    return false;
  }
  return true;
}

/// Whether each image lies on two nodes at least.
bool World::all_have_copies() {
  bool all = true;
  cluster_.on(0, [&](JobStore& store) {
    for (const CheckpointRef& checkpoint : store.find("job")->checkpoints()) {
      std::map<std::tuple<uint32_t, std::string, int32_t>, unsigned> copies;
      for (const auto stored_now = checkpoint->stored();
           const StoredImage& image : stored_now->images)
        if (!image.missing) ++copies[{image.state, image.path, image.written}];
      for (const auto& [image, count] : copies) all = all && count > 1;
    }
  });
  return all;
}

bool World::wait_settled(Time limit) {
  const Time deadline = now() + limit;
  for (int calm = 0; calm < 3;) {
    if (now() >= deadline) return false;
    calm = all_settled(nullptr) ? calm + 1 : 0;
    sleep(500ms);
  }
  return true;
}

const testing::RankParts& World::parts_of(Known& known, const LayoutSpec& spec, uint64_t rank) {
  auto [parts, is_new] = known.ranks.try_emplace({spec.name(), rank});
  if (is_new) parts->second = testing::slow_rank(known.sample, spec, rank);
  return parts->second;
}

void World::check_rank(const Checkpoint& checkpoint, const LayoutSpec& spec, uint64_t rank,
                       const std::string& where, const std::function<bool()>& must_read) {
  auto known = checkpoints_.find(checkpoint.name());
  if (known == checkpoints_.end()) return broken(where + ": nobody committed it");
  const std::string what = fmt::format("{}, rank {} of {}", where, rank, spec.name());
  bool must = false;
  auto unreadable = [&](const Error& error) {
    if (must) broken(what + " cannot be read: " + error.message());
  };
  auto set = checkpoint.rank_files(spec, rank);
  if (set.has_error()) {
    must = must_read();
    return unreadable(set.error());
  }
  const testing::RankParts& expected = parts_of(known->second, spec, rank);
  struct Open {
    std::string path;
    Result<FileContentRef> content;
  };
  std::vector<Open> files;
  for (size_t i = 0; i < set.value()->entries().size(); ++i)
    if (const std::string& path = set.value()->entries()[i].path; expected.contains(path))
      files.push_back({path, set.value()->open(i)});
  must = must_read();
  for (const Open& file : files) {
    if (file.content.has_error()) return unreadable(file.content.error());
    const FileContent& content = *file.content.value();
    std::string bytes(content.bytes(), '\0');
    Result<> read = content.read(0, std::as_writable_bytes(std::span(bytes)));
    if (read.has_error()) return unreadable(read.error());
    if (auto differs = difference(bytes, expected.at(file.path)))
      broken(fmt::format("{}, {}: {}", what, file.path, *differs));
  }
  if (files.size() != expected.size()) broken(what + " has not all of its files");
}

/// What is kept byte for byte: of each rank that was written, under the layout that it was written
/// in.
void World::check_other_files(const Checkpoint& checkpoint, const std::string& where) {
  const LayoutSpec& written = checkpoint.manifest().written_spec;
  std::set<uint64_t> ranks;
  for (const WrittenFile& file : checkpoint.manifest().files) ranks.insert(file.rank);
  for (uint64_t rank : ranks) {
    auto set = checkpoint.rank_files(written, rank);
    if (set.has_error()) return broken(where + ": " + set.error().message());
    for (size_t i = 0; i < set.value()->entries().size(); ++i) {
      if (set.value()->entries()[i].path != "rng.bin") continue;
      auto content = set.value()->open(i);
      std::string text(set.value()->entries()[i].bytes, '\0');
      if (content.has_value() &&
          content.value()->read(0, std::as_writable_bytes(std::span(text))).has_value() &&
          text == fmt::format("random state of rank {}", rank))
        continue;
      broken(fmt::format("{}: rng.bin of rank {} is {}", where, rank,
                         content.has_error() ? content.error().message() : "another"));
    }
  }
}

/// What is needed is there. What was made for a decision that never came may lie on a node until
/// that is started anew, and no longer.
void World::check_files(unsigned node, JobStore& store, bool started_anew) {
  std::set<std::string> needed;
  for (const JobRef& job : store.jobs())
    for (const CheckpointRef& checkpoint : job->checkpoints()) {
      const std::shared_ptr<const StoredState> stored = checkpoint->stored();
      for (const StoredImage& image : stored->images) {
        if (image.node != SimCluster::name(node)) continue;
        needed.insert(image.id);
        if (!lost_a_directory_ &&
            !std::filesystem::exists(std::filesystem::path(store.images().directory()) / image.id))
          broken(fmt::format("image {} of {} is not on {} any more", image.id, checkpoint->name(),
                             image.node));
      }
    }
  for (const auto& entry : std::filesystem::directory_iterator(store.images().directory())) {
    const std::string id = entry.path().filename();
    if (needed.contains(id)) continue;
    if (!started_anew) left_over_.insert(id);
    else if (left_over_.contains(id))
      broken(fmt::format("image {} is left over on {}", id, SimCluster::name(node)));
  }
}

/// What is in the image may be on a node as part of other files, too.
static size_t nodes_with_all_of(const StoredState& stored, const StoredImage& image) {
  const ImageLayout& layout = stored.layouts()[&image - stored.images.data()];
  size_t nodes = 0;
  for (uint32_t node = 0; node < stored.nodes.size(); ++node)
    nodes += std::all_of(layout.arrays.begin(), layout.arrays.end(), [&](const ArraySlot& slot) {
      return std::all_of(
          slot.part->pieces.begin(), slot.part->pieces.end(), [&](const Piece& piece) {
            return stored.index().missing_on_node(slot.tensor, node, {piece.global}) == 0;
          });
    });
  return nodes;
}

/// Whether the image may be needed where it lies for what it has in common with another file, of
/// which that node has no image, or nobody has one (all that is in it is in others).
static bool stands_for_another(const Checkpoint& checkpoint, const StoredState& stored,
                               const StoredImage& image) {
  const SharedVector<ArraySlot>& arrays = stored.layouts()[&image - stored.images.data()].arrays;
  auto overlaps = [&](const SharedVector<ArraySlot>& others) {
    for (const ArraySlot& one : arrays)
      for (const ArraySlot& other : others)
        for (const Piece& piece : one.part->pieces)
          for (const Piece& another : other.part->pieces)
            if (one.tensor == other.tensor && piece.global == another.global) return true;
    return false;
  };
  const auto targets = checkpoint.target_images(stored.spec);
  if (targets.has_error()) return false;
  return std::any_of(targets.value()->begin(), targets.value()->end(), [&](const StateFile& file) {
    if (file.owner == image.state && file.path == image.path) return false;
    return overlaps(file.layout.arrays) &&
           std::none_of(stored.images.begin(), stored.images.end(), [&](const StoredImage& there) {
             return there.node == image.node && there.state == file.owner &&
                    there.path == file.path;
           });
  });
}

/// nullopt: of each file there are as many copies as are asked for, each on a node of its own; of
/// the newest also what the nodes need whose ranks read it.
std::optional<std::string> World::wrong_copies(const Checkpoint& checkpoint, const Layout& layout,
                                               bool is_newest) const {
  const std::shared_ptr<const StoredState> stored = checkpoint.stored();
  const auto& agreed = cluster_.agreement().entries();
  auto is_drained = [&](const std::string& node) {
    return agreed.contains(std::string(kDrainedKeys) + node);
  };
  size_t in_service = 0;
  for (unsigned node = 0; node < options_.nodes; ++node)
    in_service += !is_drained(SimCluster::name(node));
  const size_t wanted = std::min<size_t>(layout.replicas + size_t{1}, in_service);
  std::map<std::tuple<uint32_t, std::string, int32_t>, std::vector<const StoredImage*>> copies;
  for (const StoredImage& image : stored->images)
    copies[{image.state, image.path, image.path.empty() ? image.written : -1}].push_back(&image);
  for (const auto& [file, images] : copies) {
    std::set<std::string> on, readers;
    for (const StoredImage* image : images) on.insert(image->node);
    const StoredImage& one = *images.front();
    const bool has_tensors =
        one.written < 0 || checkpoint.manifest().files[one.written].has_tensors;
    const size_t whole_on = has_tensors ? nodes_with_all_of(*stored, one) : on.size();
    uint64_t ranks = 0;
    for (uint64_t rank = 0; is_newest && has_tensors && rank < stored->spec.sizes.world_size();
         ++rank) {
      StateCoords state = state_of(stored->spec, stored->spec.coords(rank));
      bool reads = one.path.empty() || state_index(stored->spec, state) == one.state;
      state.dp = 0;
      reads = reads || state_index(stored->spec, state) == one.state;
      if (!reads) continue;
      ++ranks;
      if (!layout.devices.empty())
        readers.insert(layout.devices[rank].substr(0, layout.devices[rank].rfind(':')));
    }
    size_t most = std::max<size_t>(
        wanted, layout.devices.empty() ? std::min<size_t>(ranks, in_service) : readers.size());
    const size_t wanted_here = most;
    most += static_cast<size_t>(
        std::count_if(images.begin(), images.end(), [&](const StoredImage* image) {
          return on.size() > wanted_here && has_tensors &&
                 stands_for_another(checkpoint, *stored, *image);
        }));
    if (on.size() == images.size() && whole_on >= wanted && on.size() <= most) continue;
    std::string where;
    for (const StoredImage* image : images) where += " " + image->node;
    return fmt::format("{} of state {} has {} copies ({} ), its bytes {}; {} to {} are wanted",
                       one.path, one.state, images.size(), where, whole_on, wanted, most);
  }
  return std::nullopt;
}

void World::check_copies(const Job& job) {
  const std::string target = job.current_target().value_or("");
  const auto layout = Layout::parse(job.layout_text());
  if (layout.has_error() || job.numbers().state != JobState::kIdle) return;
  for (const CheckpointRef& checkpoint : job.checkpoints()) {
    const auto known = checkpoints_.find(checkpoint->name());
    if (known == checkpoints_.end() || !checkpoint->lost_tensors().empty()) continue;
    const bool is_newest = target.starts_with("checkpoints/" + checkpoint->name() + "/");
    if (auto wrong = wrong_copies(*checkpoint, layout.value(), is_newest))
      broken(fmt::format("{}: {}", checkpoint->name(), *wrong));
  }
}

void World::check_end(bool started_anew) {
  std::optional<std::string> first;
  for (unsigned node = 0; node < options_.nodes; ++node) {
    const std::string here = SimCluster::name(node);
    cluster_.on(node, [&](JobStore& store) {
      JobRef job = store.find("job");
      std::string view = fmt::format("current {}, layout {}, checkpoints",
                                     job->current_target().value_or("-"), job->layout_text());
      for (const CheckpointRef& checkpoint : job->checkpoints()) view += " " + checkpoint->name();
      for (const JobRef& other : store.jobs()) view += ", job " + other->name();
      if (!first) first = view;
      if (view != *first) broken(fmt::format("{} and w0 differ: {} | {}", here, view, *first));

      for (const auto& [name, known] : checkpoints_) {
        CheckpointRef checkpoint = job->find_checkpoint(name);
        if (checkpoint == nullptr) {
          if (known.acknowledged && !known.removing)
            broken(fmt::format("{} does not have {} any more", here, name));
          continue;
        }
        if (known.removed && known.tries == 1)
          broken(fmt::format("{} still has {}, which was removed", here, name));
        const std::vector<std::string> lost = checkpoint->lost_tensors();
        if (!lost.empty() && !known.may_be_lost) {
          broken(fmt::format("{} has lost {} tensors of {}, {} among them", here, lost.size(), name,
                             lost.front()));
          continue;
        }
        // In a large cluster each node reads of some.
        if (is_large(options_) && !chance(20)) continue;
        const LayoutSpec spec = checkpoint->stored()->spec;
        check_rank(*checkpoint, spec, draw(spec.sizes.world_size()), name + " on " + here,
                   lost.empty());
      }
      const JobNumbers numbers = job->numbers();
      const bool may_fail = std::any_of(checkpoints_.begin(), checkpoints_.end(),
                                        [](const auto& known) { return known.second.may_be_lost; });
      if (numbers.state != JobState::kIdle && !may_fail)
        broken(fmt::format("{} is not idle: {}", here, job->status_json()));
      check_files(node, store, started_anew);
      if (node == 0) check_copies(*job);
    });
  }
  check_again();
  // No decision names what its maker has thrown away.
  for (const std::string& line : outcome_.history)
    if (!lost_a_directory_ &&
        line.find("of the files that lay on this node are missing") != std::string::npos)
      broken("something was lost that was decided on: " + line);
  // All of it, and every checksum, once.
  const unsigned node = some_node();
  cluster_.on(node, [&](JobStore& store) {
    JobRef job = store.find("job");
    for (const CheckpointRef& checkpoint : job->checkpoints()) {
      if (!checkpoint->lost_tensors().empty()) continue;
      const LayoutSpec spec = checkpoint->stored()->spec;
      const std::string where = checkpoint->name() + " on " + SimCluster::name(node);
      std::set<uint32_t>
          read;  // states; of a large cluster one rank of those that have the same files
      for (uint64_t rank = 0; rank < spec.sizes.world_size(); ++rank)
        if (read.insert(state_index(spec, state_of(spec, spec.coords(rank)))).second ||
            !is_large(options_))
          check_rank(*checkpoint, spec, rank, where, true);
      check_other_files(*checkpoint, where);
      auto verified = job->verify(checkpoint->name());
      // A node that came back with nothing: its images count as copies until ptc verify --repair.
      const bool known =
          lost_a_directory_ && verified.has_error() &&
          verified.error().message().find("another copy has it right") != std::string::npos;
      if (verified.has_error() && !known) broken(where + ": " + verified.error().message());
    }
  });
}

/// One more edit, of a cluster that is well: it moves what its plan says, and that is the least.
void World::check_least_movement() {
  const uint64_t before = cluster_.bytes_moved();
  const unsigned node = some_node();
  edit(node);
  if (!wait_settled(10min)) return broken("the last edit does not settle");
  const uint64_t moved = cluster_.bytes_moved() - before;
  cluster_.on(node, [&](JobStore& store) {
    const auto plan = boost::json::parse(store.find("job")->plan_json());
    boost::system::error_code none;
    const auto* planned = plan.find_pointer("/bytes/moved", none);
    const auto* minimum = plan.find_pointer("/bytes/minimum", none);
    if (planned == nullptr || minimum == nullptr) return;
    say(fmt::format("the last edit moved {} bytes; plan.json: {}, at least {}", moved,
                    planned->to_number<uint64_t>(), minimum->to_number<uint64_t>()));
    if (checkpoints_.size() == 1 && moved > planned->to_number<uint64_t>())
      broken("the last edit moved more than plan.json says");
  });
}

}  // namespace ptc::sim
