#include "store/meta/etcd_commit.h"

#include <random>

#include "store/base/mutex.h"
#include "store/meta/backend.h"

namespace ptc {
namespace {

constexpr size_t kMarkersAtOnce = 8;
constexpr std::chrono::seconds kMarkerTtl{300};
constexpr std::string_view kDone = "done", kForbidden = "forbidden";

json::object put_of(std::string_view key, std::string_view value, const MetaLease* lease) {
  json::object put{{"key", to_base64(key)}, {"value", to_base64(value)}};
  if (lease != nullptr) put["lease"] = std::to_string(lease->id());
  return {{"request_put", std::move(put)}};
}

json::object absent(std::string_view key) {
  return {
      {"key", to_base64(key)}, {"target", "CREATE"}, {"result", "EQUAL"}, {"create_revision", "0"}};
}

Result<int64_t> revision_of(const json::object& answer) {
  return number_field(object_field(answer, "header"), "revision");
}

/// The key and value that the n-th read of a transaction found; no key: it found nothing.
Result<MetaEntry> found_by(const json::object& answer, size_t n) {
  const json::array& responses = array_field(answer, "responses");
  if (n >= responses.size() || !responses[n].is_object())
    return make_error(Code::kCorrupt, "etcd's answer lacks what a transaction read");
  const json::array& found =
      array_field(object_field(responses[n].get_object(), "response_range"), "kvs");
  if (found.empty() || !found[0].is_object()) return MetaEntry();
  return entry_of(found[0].get_object(), "");
}

}  // namespace

EtcdCommitter::EtcdCommitter(EtcdGateway& gateway, EtcdLeases& leases, std::string cluster_prefix,
                             std::string key_prefix)
    : gateway_(gateway), leases_(leases), key_prefix_(std::move(key_prefix)) {
  std::random_device random;
  marker_prefix_ = fmt::format("{}txn/{:08x}{:08x}/", cluster_prefix, random(), random());
}

Result<int64_t> EtcdCommitter::commit(const MetaTransaction& transaction) {
  if (transaction.puts.empty() && transaction.leased_puts.empty() && transaction.deletes.empty())
    return read_only(transaction);
  auto deadline = EtcdGateway::Clock::now() + gateway_.patience();
  (void)settle_until(deadline);
  for (bool lease_was_gone = false;;) {
    PTC_TRY(Marker marker, new_marker());
    std::vector<std::string> known = take_known();
    bool sent = false;
    auto answer =
        gateway_.call_once("kv/txn", request_of(transaction, marker, known), deadline, sent);
    if (answer && true_field(answer.value(), "succeeded")) {
      add_known({marker.key});
      return revision_of(answer.value());
    }
    add_known(std::move(known));
    if (answer) return conflict(transaction, answer.value());
    if (answer.error().code() == Code::kNotFound && !std::exchange(lease_was_gone, true)) {
      drop_lease(marker.lease);  // or it was the caller's, then it is again
      continue;
    }
    if (answer.error().code() == Code::kNotFound && !transaction.leased_puts.empty())
      return lease_ended(transaction.leased_puts[0].first);
    if (!sent) return std::move(answer).error();
    auto done = forbid(marker, deadline);
    if (!done) {
      MutexLock lock(mutex_);
      doubtful_.push_back(std::move(marker));
      return make_error(Code::kInDoubt, "this change may or may not have been done: {}; then: {}",
                        answer.error().message(), done.error().message());
    }
    if (done.value()) {
      add_known({marker.key});
      return *done.value();
    }
    if (EtcdGateway::Clock::now() >= deadline) return std::move(answer).error();
  }
}

Result<> EtcdCommitter::settle() {
  return settle_until(EtcdGateway::Clock::now() + gateway_.patience());
}

Result<EtcdCommitter::Marker> EtcdCommitter::new_marker() {
  UniqueLock lock(mutex_);
  if (lease_ == nullptr) {
    lock.unlock();
    PTC_TRY(std::shared_ptr<MetaLease> lease, leases_.grant(kMarkerTtl));
    lock.lock();
    if (lease_ == nullptr) lease_ = std::move(lease);
  }
  return Marker{fmt::format("{}{}", marker_prefix_, ++last_number_), lease_};
}

void EtcdCommitter::drop_lease(const std::shared_ptr<MetaLease>& lease) {
  std::shared_ptr<MetaLease> dropped;  // ended after the lock
  MutexLock lock(mutex_);
  if (lease_ == lease) dropped = std::move(lease_);
}

std::vector<std::string> EtcdCommitter::take_known() {
  MutexLock lock(mutex_);
  size_t count = std::min(known_.size(), kMarkersAtOnce);
  std::vector<std::string> taken(known_.end() - static_cast<ptrdiff_t>(count), known_.end());
  known_.resize(known_.size() - count);
  return taken;
}

void EtcdCommitter::add_known(std::vector<std::string> markers) {
  MutexLock lock(mutex_);
  for (std::string& marker : markers) known_.push_back(std::move(marker));
}

json::array EtcdCommitter::compares_of(const MetaTransaction& transaction) const {
  json::array compares;
  for (const auto& compare : transaction.compares)
    compares.push_back(json::object{{"key", to_base64(key_prefix_ + compare.key)},
                                    {"target", "MOD"},
                                    {"result", "EQUAL"},
                                    {"mod_revision", std::to_string(compare.revision)}});
  return compares;
}

json::array EtcdCommitter::reads_of(const MetaTransaction& transaction) const {
  json::array reads;
  for (const auto& compare : transaction.compares)
    reads.push_back(json::object{
        {"request_range", {{"key", to_base64(key_prefix_ + compare.key)}, {"keys_only", true}}}});
  return reads;
}

json::object EtcdCommitter::request_of(const MetaTransaction& transaction, const Marker& marker,
                                       const std::vector<std::string>& known) const {
  json::array compares = compares_of(transaction);
  compares.push_back(absent(marker.key));
  json::array writes;
  for (const auto& [key, value] : transaction.puts)
    writes.push_back(put_of(key_prefix_ + key, value, nullptr));
  for (const auto& [key, value] : transaction.leased_puts)
    writes.push_back(put_of(key_prefix_ + key, value, transaction.lease));
  auto erase = [&](const std::string& key) {
    writes.push_back(json::object{{"request_delete_range", {{"key", to_base64(key)}}}});
  };
  for (const std::string& key : transaction.deletes) erase(key_prefix_ + key);
  for (const std::string& key : known) erase(key);
  writes.push_back(put_of(marker.key, kDone, marker.lease.get()));
  return {{"compare", std::move(compares)},
          {"success", std::move(writes)},
          {"failure", reads_of(transaction)}};
}

Result<int64_t> EtcdCommitter::read_only(const MetaTransaction& transaction) {
  json::object request{{"compare", compares_of(transaction)}, {"failure", reads_of(transaction)}};
  PTC_TRY(json::object answer, gateway_.call("kv/txn", request));
  if (!true_field(answer, "succeeded")) return conflict(transaction, answer);
  return revision_of(answer);
}

Error EtcdCommitter::conflict(const MetaTransaction& transaction,
                              const json::object& answer) const {
  for (size_t i = 0; i < transaction.compares.size(); ++i) {
    auto found = found_by(answer, i);
    if (!found) return std::move(found).error();
    const auto& compare = transaction.compares[i];
    if (found.value().revision != compare.revision)
      return compare_failed(compare.key, compare.revision, found.value().revision);
  }
  return make_error(Code::kConflict, "etcd refused a change whose compares hold");
}

Result<std::optional<int64_t>> EtcdCommitter::forbid(const Marker& marker, Deadline deadline) {
  json::object read{{"request_range", {{"key", to_base64(marker.key)}}}};
  json::object request{{"compare", json::array{absent(marker.key)}},
                       {"success", json::array{put_of(marker.key, kForbidden, marker.lease.get())}},
                       {"failure", json::array{std::move(read)}}};
  deadline = std::max(deadline, EtcdGateway::Clock::now() + std::chrono::seconds(1));
  PTC_TRY(json::object answer, gateway_.call("kv/txn", request, deadline));
  if (true_field(answer, "succeeded")) return std::optional<int64_t>();
  PTC_TRY(MetaEntry found, found_by(answer, 0));
  return found.value == kDone ? std::optional(found.revision) : std::nullopt;
}

/// A marker that cannot be written any more, as its lease is gone, settles it too: then the
/// transaction, which puts it under that lease, can not be done any more either.
Result<> EtcdCommitter::settle_until(Deadline deadline) {
  MutexLock one(settling_);
  std::vector<Marker> doubtful;
  {
    MutexLock lock(mutex_);
    doubtful = doubtful_;
  }
  for (const Marker& marker : doubtful) {
    auto done = forbid(marker, deadline);
    if (!done && done.error().code() !=
                     Code::kNotFound)  // it forbids nothing: etcd is full, or lets nobody write
      return make_error(Code::kUnavailable, "whether it was done cannot be settled yet: {}",
                        done.error().message());
    MutexLock lock(mutex_);
    std::erase_if(doubtful_, [&](const Marker& known) { return known.key == marker.key; });
    if (done && done.value()) known_.push_back(marker.key);
  }
  return ok();
}

}  // namespace ptc
