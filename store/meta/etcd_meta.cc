#include "store/meta/etcd_meta.h"

#include "store/base/mutex.h"
#include "store/meta/backend.h"
#include "store/meta/etcd_commit.h"
#include "store/meta/etcd_lease.h"
#include "store/meta/etcd_watch.h"

namespace ptc {
namespace {

class EtcdMeta : public MetaClient {
 public:
  EtcdMeta(std::shared_ptr<const EtcdAccess> access, const std::string& cluster_prefix,
           std::shared_ptr<IoThreads> io)
      : history_(access->history),
        counters_(access->counters),
        prefix_(cluster_prefix + "kv/"),
        gateway_(access),
        io_(std::move(io)),
        leases_(access, [this] { return needed_io(); }),
        committer_(gateway_, leases_, cluster_prefix, prefix_),
        watch_(access, prefix_, hub_) {}

  Result<> open() {
    PTC_TRY(last_revision());
    return ok();
  }

  Result<std::optional<MetaEntry>> get(std::string_view key) override {
    PTC_TRY(json::object answer,
            gateway_.call("kv/range", {{"key", to_base64(prefix_ + std::string(key))}}));
    const json::array& found = array_field(answer, "kvs");
    if (found.empty() || !found[0].is_object()) return std::optional<MetaEntry>();
    PTC_TRY(MetaEntry entry, entry_of(found[0].get_object(), prefix_));
    return std::optional(std::move(entry));
  }

  Result<std::vector<MetaEntry>> list(std::string_view prefix) override {
    auto listed = [&](IoExecutor) {
      return list_etcd(gateway_, prefix_ + std::string(prefix), prefix_);
    };
    PTC_TRY(EtcdListing listing, run_here(listed));
    return std::move(listing.entries);
  }

  Result<std::optional<Changes>> changes(std::string_view prefix, int64_t revision) override {
    auto asked = [&](IoExecutor) {
      return changes_in_etcd(gateway_, prefix_ + std::string(prefix), prefix_, revision);
    };
    return run_here(asked);
  }

  Result<int64_t> commit(const MetaTransaction& transaction) override {
    PTC_TRY(check_transaction(transaction));
    return committer_.commit(transaction);
  }

  Result<> settle() override { return committer_.settle(); }
  std::optional<std::string> set_back() override { return history_->set_back(); }
  MetaNumbers numbers() const override { return counters_->numbers(); }

  Result<std::unique_ptr<MetaLease>> lease(std::chrono::seconds ttl) override {
    PTC_TRY(check_ttl(ttl));
    return leases_.grant(ttl);
  }

  Result<std::shared_ptr<void>> watch(std::string prefix, OnEvent on_event) override {
    // What was committed until now may yet come out of the stream, and is left out.
    PTC_TRY(int64_t before, last_revision());
    {
      MutexLock lock(watch_mutex_);
      if (!watching_) {
        PTC_TRY(auto io, needed_io());
        PTC_TRY(watch_.start(*io));
        watching_ = true;
      }
    }
    return hub_.watch(std::move(prefix),
                      [before, call = std::move(on_event)](const MetaEvent& event) {
                        if (event.revision > before) call(event);
                      });
  }

 private:
  Result<std::shared_ptr<IoThreads>> needed_io() {
    MutexLock lock(io_mutex_);
    if (io_ == nullptr) {
      PTC_TRY(io_, IoThreads::start(1, "ptcfs-etcd"));
    }
    return io_;
  }

  Result<int64_t> last_revision() {
    PTC_TRY(json::object answer,
            gateway_.call("kv/range", {{"key", to_base64(prefix_)}, {"count_only", true}}));
    return number_field(object_field(answer, "header"), "revision");
  }

  std::shared_ptr<EtcdHistory> history_;
  std::shared_ptr<const EtcdCounters> counters_;
  std::string prefix_;
  EtcdGateway gateway_;
  Mutex io_mutex_;
  std::shared_ptr<IoThreads> io_ PTC_GUARDED_BY(io_mutex_);
  EtcdLeases leases_;
  EtcdCommitter committer_;
  Mutex watch_mutex_;
  bool watching_ PTC_GUARDED_BY(watch_mutex_) = false;
  WatchHub hub_;     // its calls end first …
  EtcdWatch watch_;  // … but for this, which calls it
};

}  // namespace

Result<std::unique_ptr<MetaClient>> open_etcd_meta(const EtcdOptions& options) {
  const std::string& cluster = options.cluster;
  if (cluster.empty() ||
      cluster.find_first_not_of("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
                                "0123456789._-") != std::string::npos)
    return invalid_argument("the cluster's name may have letters, digits, '.', '_' and '-': {}",
                            quoted(cluster));
  PTC_TRY(auto access, check_access(options));
  auto meta = std::make_unique<EtcdMeta>(std::move(access), "/" + cluster + "/", options.io);
  PTC_TRY(meta->open());
  return std::unique_ptr<MetaClient>(std::move(meta));
}

}  // namespace ptc
