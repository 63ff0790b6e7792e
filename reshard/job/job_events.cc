#include "reshard/job/job_events.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <boost/json/array.hpp>
#include <boost/json/serialize.hpp>
#include <iterator>
#include <new>
#include <utility>

#include "store/base/file.h"
#include "store/base/utf8.h"
#include "store/base/wall_time.h"

namespace ptc {
namespace {

constexpr size_t kMostFileBytes = 64 << 20, kMostWhyBytes = 2000, kMostNamedNodes = 16;

/// Whole lines.
std::string_view without_torn_end(std::string_view text) {
  const size_t end = text.rfind('\n');
  return text.substr(0, end == std::string_view::npos ? 0 : end + 1);
}

std::string_view last_lines(std::string_view text, size_t most) {
  size_t begin = text.size();
  for (size_t lines = 0; begin > 0; --begin)
    if (text[begin - 1] == '\n' && lines++ == most) break;
  return text.substr(begin);
}

/// "seq" of the last line that has one.
uint64_t last_number(std::string_view text) {
  while (!text.empty()) {
    const std::string_view line = last_lines(text, 1);
    text.remove_suffix(line.size());
    if (const auto value = parse_json(line); value && value.value().is_object())
      if (const auto number = json_uint(value.value().get_object(), "seq"))
        if (number.value()) return *number.value();
  }
  return 0;
}

/// By checkpoint, as these lines say.
std::map<std::string, uint64_t, std::less<>> tensors_lost(std::string_view text) {
  std::map<std::string, uint64_t, std::less<>> lost;
  while (!text.empty()) {
    const std::string_view line = text.substr(0, text.find('\n') + 1);  // it ends with one
    text.remove_prefix(line.size());
    const auto value = parse_json(line);
    if (!value || !value.value().is_object()) continue;
    const json::object& event = value.value().get_object();
    const json::value* name = event.if_contains("checkpoint");
    if (name == nullptr || !name->is_string()) continue;
    const auto number = json_uint(event, "tensors_lost");
    if (number && number.value()) lost[std::string(name->get_string())] = *number.value();
    else if (const json::value* kind = event.if_contains("event");
             kind != nullptr && *kind == "commit")
      lost.erase(std::string(name->get_string()));
  }
  return lost;
}

json::object event_of(std::string_view what) { return {{"event", what}}; }

json::object event_about(std::string_view what, std::string_view checkpoint) {
  return {{"event", what}, {"checkpoint", checkpoint}};
}

void add_checkpoint_events(const std::string& name, const EventView::Checkpoint& before,
                           const EventView::Checkpoint& after, std::vector<json::object>* events) {
  if (before.pinned != after.pinned)
    events->push_back(event_about(after.pinned ? "pinned" : "unpinned", name));
  if (before.lost != after.lost) {
    json::object event = event_about(after.lost > before.lost ? "lost" : "found_again", name);
    event["tensors_lost"] = after.lost;
    events->push_back(std::move(event));
  }
  if (after.mended > before.mended) events->push_back(event_about("mended", name));
  if (before.damaged != after.damaged) {
    json::object event = event_about("damage", name);
    event["without_a_right_copy"] = after.damaged;
    events->push_back(std::move(event));
  }
}

/// Of nodes that are among the second and not among the first.
void add_node_event(std::string_view what, const std::vector<std::string>& before,
                    const std::vector<std::string>& after, std::vector<json::object>* events) {
  std::vector<std::string> nodes;
  std::set_difference(after.begin(), after.end(), before.begin(), before.end(),
                      std::back_inserter(nodes));
  if (nodes.empty()) return;
  const size_t more = nodes.size() - std::min(nodes.size(), kMostNamedNodes);
  nodes.resize(nodes.size() - more);
  json::object event = event_of(what);
  event["nodes"] = json::array(nodes.begin(), nodes.end());
  if (more > 0) event["more_nodes"] = more;
  events->push_back(std::move(event));
}

/// Of a plan that is carried out: its checkpoint, and from where to where.
json::object event_of_plan(std::string_view what, const std::optional<LastReshard>& plan) {
  json::object event = event_of(what);
  if (!plan) return event;
  event["checkpoint"] = plan->checkpoint;
  event["from"] = plan->from;
  event["to"] = plan->to;
  event["bytes_kept"] = plan->totals.kept_bytes;
  event["bytes_written"] = plan->totals.total_bytes - plan->totals.kept_bytes;
  event["bytes_moved"] = plan->totals.moved_bytes;
  return event;
}

}  // namespace

EventView EventView::of(const KnownJob& known, const EventView& before) {
  EventView view;
  view.alive = known.alive;
  view.drained = known.drained;
  std::sort(view.alive.begin(), view.alive.end());
  std::sort(view.drained.begin(), view.drained.end());
  for (const auto& [name, record] : known.checkpoints) {
    Checkpoint& one = view.checkpoints[name];
    const auto was = before.checkpoints.find(name);
    if (was != before.checkpoints.end() && was->second.id == record.id) one = was->second;
    const std::shared_ptr<const StoredState> where = record.checkpoint->stored();
    if (one.where.lock() != where || one.id != record.id) {
      one.id = record.id;
      one.where = where;
      one.layout = where->spec.name();
      one.tensors = record.checkpoint->model().tensors().size();
      one.bytes = bytes_of(*where);
      one.lost = record.checkpoint->lost_tensors().size();
      one.lost_with_device =
          one.lost > 0 &&
          std::any_of(where->images.begin(), where->images.end(), [](const StoredImage& image) {
            return image.image == nullptr && !image.memory.is_host();
          });
    }
    one.mended = record.mended;
    one.pinned = record.pinned;
    const auto looked = known.looked_over.find(record.id);
    one.damaged = looked == known.looked_over.end()
                      ? 0
                      : looked->second.found.size() + static_cast<uint64_t>(looked->second.more);
  }
  for (const auto& [name, one] : known.damaged) view.unreadable[name] = one.lost;
  view.revision = known.saved.revision;
  view.wanted = known.saved.layout.spec.name();
  view.in_force_revision = known.in_force.revision;
  view.layout = known.in_force.spec.name();
  view.current = known.in_force.current.value_or("");
  view.rules = known.rules_text;
  if (known.layout_error) view.layout_refused_ns = known.layout_error->time_ns;
  if (known.last_error) view.last_error = known.last_error->what;
  view.commits_refused = known.counts.commits_refused;
  view.reshards_failed = known.counts.reshards_failed;
  view.reshards_abandoned = known.counts.reshards_abandoned;
  view.running = known.running_plan;
  view.last_plan_revision = known.last_plan_revision;
  view.last_reshard = known.last_reshard;
  return view;
}

std::vector<json::object> events_between(const EventView& before, const EventView& after) {
  std::vector<json::object> events;
  add_node_event("nodes_came", before.alive, after.alive, &events);
  add_node_event("nodes_went", after.alive, before.alive, &events);
  add_node_event("nodes_drained", before.drained, after.drained, &events);
  add_node_event("nodes_in_service", after.drained, before.drained, &events);
  const auto why = [&after](json::object event) {
    event["why"] = printable(after.last_error, kMostWhyBytes);
    return event;
  };
  if (after.commits_refused > before.commits_refused)
    events.push_back(why(event_of("commit_refused")));
  for (const auto& [name, one] : after.checkpoints) {
    const auto was = before.checkpoints.find(name);
    const bool is_new = was == before.checkpoints.end() || was->second.id != one.id;
    if (is_new && !before.unreadable.contains(name)) {
      json::object event = event_about("commit", name);
      event["tensors"] = one.tensors;
      event["bytes"] = one.bytes;
      event["layout"] = one.layout;
      events.push_back(std::move(event));
    }
    add_checkpoint_events(name, is_new ? EventView::Checkpoint{} : was->second, one, &events);
  }
  for (const auto& [name, one] : before.checkpoints)
    if (!after.checkpoints.contains(name) && !after.unreadable.contains(name))
      events.push_back(event_about("removed", name));
  for (const auto& [name, lost] : after.unreadable)
    if (!before.unreadable.contains(name))
      events.push_back(event_about(lost ? "not_readable" : "description_damaged", name));
  for (const auto& [name, lost] : before.unreadable)
    if (!after.unreadable.contains(name))
      events.push_back(
          event_about(after.checkpoints.contains(name) ? "readable_again" : "removed", name));
  if (before.rules != after.rules)
    events.push_back(event_of(after.rules ? "rules_saved" : "rules_removed"));
  // Without the reason, which may quote what not all may read (kNotToldToAll).
  if (after.layout_refused_ns > before.layout_refused_ns)
    events.push_back(event_of("layout_refused"));
  if (after.revision != before.revision)
    events.push_back(
        {{"event", "layout_saved"}, {"revision", after.revision}, {"layout", after.wanted}});
  if (after.running != nullptr && before.running == nullptr)
    events.push_back(event_of_plan("reshard_began", LastReshard::of(*after.running)));
  if (after.last_plan_revision != before.last_plan_revision && after.last_reshard) {
    json::object event = event_of_plan("reshard_ended", after.last_reshard);
    event["seconds"] = after.last_reshard->seconds;
    events.push_back(std::move(event));
  }
  if (after.reshards_failed > before.reshards_failed)
    events.push_back(why(event_of("reshard_failed")));
  if (after.reshards_abandoned > before.reshards_abandoned)
    events.push_back(event_of("reshard_abandoned"));
  if (after.in_force_revision != before.in_force_revision || after.layout != before.layout ||
      after.current != before.current) {
    json::object event{
        {"event", "in_force"}, {"revision", after.in_force_revision}, {"layout", after.layout}};
    if (!after.current.empty()) event["checkpoint"] = after.current;
    events.push_back(std::move(event));
  }
  return events;
}

void JobEvents::begin(const KnownJob& known) {
  MutexLock lock(mutex_);
  if (begun_) return;
  begun_ = true;
  const Result<std::string> file = read_text_file(AT_FDCWD, path_, kMostFileBytes);
  const std::string_view found = file ? std::string_view(file.value()) : std::string_view();
  const std::string_view whole = without_torn_end(found);
  if (whole.size() < found.size()) (void)write_file_atomically(AT_FDCWD, path_, whole);
  lines_ = static_cast<uint64_t>(std::count(whole.begin(), whole.end(), '\n'));
  next_ = last_number(whole) + 1;
  seen_ = EventView::of(known, {});
  if (whole.empty() && seen_.checkpoints.empty() && seen_.revision <= 1)
    return append({event_of("job_made")});
  std::vector<json::object> events{json::object{{"event", "daemon_started"},
                                                {"revision", seen_.in_force_revision},
                                                {"layout", seen_.layout},
                                                {"checkpoints", seen_.checkpoints.size()}}};
  // What ended with the daemon before is no change of what this one knows.
  const auto is_lost = [](const auto& one) { return one.second.lost_with_device; };
  if (std::any_of(seen_.checkpoints.begin(), seen_.checkpoints.end(), is_lost)) {
    const auto before = tensors_lost(whole);
    for (const auto& [name, one] : seen_.checkpoints) {
      const auto told = before.find(name);
      if (!one.lost_with_device || (told != before.end() && told->second == one.lost)) continue;
      json::object event = event_about("lost", name);
      event["tensors_lost"] = one.lost;
      event["why"] = "what is in the memory of devices ends with their daemon";
      events.push_back(std::move(event));
    }
  }
  append(std::move(events));
}

void JobEvents::note(const std::function<std::shared_ptr<const KnownJob>()>& now) try {
  MutexLock lock(mutex_);
  if (!begun_) return;
  EventView view = EventView::of(*now(), seen_);
  std::vector<json::object> events = events_between(seen_, view);
  seen_ = std::move(view);
  if (!events.empty()) append(std::move(events));
} catch (const std::bad_alloc&) {  // no memory: noted later, or not at all
}

void JobEvents::end() {
  MutexLock lock(mutex_);
  begun_ = false;
}

void JobEvents::append(std::vector<json::object> events) {
  std::string lines;
  for (json::object& event : events) {
    json::object line{{"seq", next_++}, {"time", time_text(now_ns())}, {"node", node_}};
    for (auto& [key, value] : event) line[key] = std::move(value);
    lines.append(json::serialize(line)).append("\n");
  }
  const UniqueFd file(
      ::open(path_.c_str(), O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600));
  const off_t end = file.get() < 0 ? -1 : ::lseek(file.get(), 0, SEEK_END);
  if (end < 0) return;
  const ssize_t written = ::write(file.get(), lines.data(), lines.size());
  if (written != static_cast<ssize_t>(lines.size())) {  // half of it is none
    (void)!::ftruncate(file.get(), end);
    return;
  }
  lines_ += events.size();
  if (lines_ <= 2 * kMost) return;
  const Result<std::string> all = read_text_file(AT_FDCWD, path_, kMostFileBytes);
  if (all && write_file_atomically(AT_FDCWD, path_, last_lines(all.value(), kMost))) lines_ = kMost;
}

std::string JobEvents::text() const {
  MutexLock lock(mutex_);
  const Result<std::string> file = read_text_file(AT_FDCWD, path_, kMostFileBytes);
  if (!file) return {};
  return std::string(last_lines(without_torn_end(file.value()), kMost));
}

}  // namespace ptc
