#include "store/meta/etcd_watch.h"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <utility>

namespace ptc {
namespace {

constexpr int kPageEntries = 50;                         // of up to 1 MiB each
constexpr std::chrono::milliseconds kSilence{2000};      // after which the member is probed
constexpr std::chrono::milliseconds kPauseOfWatch{100};  // after a stream that broke
constexpr std::chrono::milliseconds kPauseOfRefused{1000};

}  // namespace

Task<std::optional<MetaClient::Changes>> changes_in_etcd(EtcdGateway& gateway, std::string prefix,
                                                         std::string strip, int64_t revision) {
  json::object request = range_of(prefix);
  request["limit"] = kPageEntries;
  request["min_mod_revision"] = std::to_string(revision + 1);
  PTC_CO_TRY(json::object page, co_await gateway.ask("kv/range", request));
  std::optional<MetaClient::Changes> changes;
  if (true_field(page, "more")) co_return changes;
  changes.emplace();
  for (const json::value& key_value : array_field(page, "kvs")) {
    if (!key_value.is_object()) continue;
    PTC_CO_TRY(MetaEntry entry, entry_of(key_value.get_object(), strip));
    changes->entries.push_back(std::move(entry));
  }
  // Of all that are in the range, whatever they were asked for by.
  PTC_CO_TRY(const int64_t keys, number_field(page, "count"));
  changes->keys = static_cast<size_t>(keys);
  co_return changes;
}

Task<EtcdListing> list_etcd(EtcdGateway& gateway, std::string prefix, std::string strip) {
  EtcdListing listing;
  json::object request = range_of(prefix);
  request["limit"] = kPageEntries;
  for (;;) {
    auto answer = co_await gateway.ask("kv/range", request);
    if (!answer && answer.error().code() == Code::kConflict && listing.revision != 0) {
      // Compacted between two pages.
      listing = {};
      request = range_of(prefix);
      request["limit"] = kPageEntries;
      continue;
    }
    PTC_CO_TRY(json::object page, std::move(answer));
    for (const json::value& key_value : array_field(page, "kvs")) {
      if (!key_value.is_object()) continue;
      PTC_CO_TRY(MetaEntry entry, entry_of(key_value.get_object(), strip));
      listing.entries.push_back(std::move(entry));
    }
    if (listing.revision == 0) {
      PTC_CO_TRY(listing.revision, number_field(object_field(page, "header"), "revision"));
    }
    if (!true_field(page, "more") || listing.entries.empty()) co_return listing;
    request["revision"] = std::to_string(listing.revision);
    request["key"] = to_base64(strip + listing.entries.back().key + '\0');
  }
}

EtcdWatch::EtcdWatch(std::shared_ptr<const EtcdAccess> access, std::string prefix, WatchHub& hub)
    : gateway_(std::move(access)), prefix_(std::move(prefix)), hub_(hub) {}

EtcdWatch::~EtcdWatch() { gateway_.stop(); }

Result<> EtcdWatch::start(IoThreads& io) {
  PTC_TRY(EtcdListing listing,
          run_here([&](IoExecutor) { return list_etcd(gateway_, prefix_, prefix_); }));
  complete_ = listing.revision;
  for (const MetaEntry& entry : listing.entries) revisions_[entry.key] = entry.revision;
  following_.start(io.next(), [this](std::stop_token stop) { return run(std::move(stop)); });
  return ok();
}

asio::awaitable<void> EtcdWatch::run(std::stop_token stop) {
  while (!stop.stop_requested()) {
    try {
      // The next stream begins where this one ended, whatever went wrong.
      Result<> followed = ok();
      if (compacted_) followed = co_await list_again();
      else followed = co_await follow();
      if (!followed && followed.error().code() == Code::kPermissionDenied && !refused_) {
        refused_ = true;
        spdlog::error("nothing is heard of what others decide: {}", followed.error().message());
      }
    } catch (const std::exception&) {  // no memory: what was not published comes again
    }
    const auto waits = refused_ ? kPauseOfRefused : kPauseOfWatch;
    co_await pause(waits, stop);
  }
}

Task<> EtcdWatch::follow() {
  json::object create = range_of(prefix_);
  create["start_revision"] = std::to_string(complete_ + 1);
  create["progress_notify"] = true;
  create["fragment"] = true;
  json::object request{{"create_request", std::move(create)}};
  const json::object anything{{"key", to_base64(prefix_)}, {"count_only", true}};
  // A token that is no longer good is exchanged by this.
  PTC_CO_TRY(co_await gateway_.ask("kv/range", anything));
  PTC_CO_TRY(auto stream, co_await gateway_.stream("watch", std::move(request)));
  while (!compacted_) {
    PTC_CO_TRY(auto result, co_await stream->next(kSilence));
    if (result) {
      PTC_CO_TRY(take(*result));
    } else {
      PTC_CO_TRY(co_await stream->probe("kv/range", anything));
    }
  }
  co_return ok();
}

Result<> EtcdWatch::take(const json::object& result) {
  PTC_TRY(int64_t compact_revision, number_field(result, "compact_revision"));
  if (true_field(result, "canceled")) {
    compacted_ = compact_revision != 0;
    const json::value* why = result.if_contains("cancel_reason");
    const std::string reason(why != nullptr && why->is_string()
                                 ? std::string_view(why->get_string())
                                 : std::string_view());
    const bool refused = reason.find("permission denied") != std::string::npos;
    return make_error(refused ? Code::kPermissionDenied : Code::kUnavailable,
                      "etcd ended the watch: {}", reason);
  }
  if (std::exchange(refused_, false)) spdlog::info("what others decide is heard of again");
  std::vector<MetaEvent> events;
  int64_t last = complete_;
  for (const json::value& value : array_field(result, "events")) {
    if (!value.is_object()) continue;
    const json::object& event = value.get_object();
    PTC_TRY(MetaEntry entry, entry_of(object_field(event, "kv"), prefix_));
    last = std::max(last, entry.revision);
    auto known = revisions_.find(entry.key);
    const json::value* type = event.if_contains("type");
    bool deleted = type != nullptr && *type == "DELETE";
    // Parts of a revision may come twice, after a stream that broke within it.
    if (known == revisions_.end() ? deleted : known->second >= entry.revision) continue;
    if (deleted) {
      revisions_.erase(known);
      events.push_back({std::move(entry.key), std::nullopt, entry.revision});
    } else {
      revisions_[entry.key] = entry.revision;
      events.push_back({std::move(entry.key), std::move(entry.value), entry.revision});
    }
  }
  if (true_field(result, "fragment")) {
    --last;  // the rest of it is yet to come
  } else if (array_field(result, "events").empty() && !true_field(result, "created")) {
    PTC_TRY(last, number_field(object_field(result, "header"), "revision"));  // nothing until then
  }
  complete_ = std::max(complete_, last);
  hub_.publish(std::move(events));
  return ok();
}

Task<> EtcdWatch::list_again() {
  PTC_CO_TRY(EtcdListing listing, co_await list_etcd(gateway_, prefix_, prefix_));
  std::vector<MetaEvent> events;
  std::map<std::string, int64_t, std::less<>> revisions;
  for (MetaEntry& entry : listing.entries) {
    revisions[entry.key] = entry.revision;
    auto known = revisions_.find(entry.key);
    if (known == revisions_.end() || known->second < entry.revision)
      events.push_back({std::move(entry.key), std::move(entry.value), entry.revision});
  }
  std::stable_sort(events.begin(), events.end(),
                   [](const MetaEvent& a, const MetaEvent& b) { return a.revision < b.revision; });
  for (const auto& [key, revision] : revisions_)
    if (!revisions.contains(key)) events.push_back({key, std::nullopt, listing.revision});
  events.push_back({{}, std::nullopt, listing.revision});  // a gap
  revisions_ = std::move(revisions);
  complete_ = listing.revision;
  compacted_ = false;
  hub_.publish(std::move(events));
  co_return ok();
}

}  // namespace ptc
