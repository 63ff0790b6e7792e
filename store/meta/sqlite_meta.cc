#include <sqlite3.h>

#include "store/base/mutex.h"
#include "store/meta/backend.h"
#include "store/meta/spare_room.h"

namespace ptc {
namespace {

constexpr int kBusyTimeoutMs = 5000;

// Persisted: the layout of the database. Keys are blobs, so that they sort by bytes.
constexpr int kFormat = 1;
constexpr const char* kCreateTables = R"(
  CREATE TABLE kv(key BLOB PRIMARY KEY, value BLOB NOT NULL, revision INTEGER NOT NULL)
    WITHOUT ROWID;
  CREATE TABLE counter(id INTEGER PRIMARY KEY CHECK(id = 1), revision INTEGER NOT NULL);
  INSERT INTO counter VALUES(1, 0);
  PRAGMA user_version = 1;)";
// Keys that go with a lease of the process that has the file open; those of a killed one go here.
constexpr const char* kEndLeases = R"(
  CREATE TABLE IF NOT EXISTS leased(key BLOB PRIMARY KEY) WITHOUT ROWID;
  UPDATE counter SET revision = revision + 1 WHERE EXISTS(SELECT 1 FROM leased);
  DELETE FROM kv WHERE key IN (SELECT key FROM leased);
  DELETE FROM leased;)";

struct CloseDatabase {
  void operator()(sqlite3* database) const { sqlite3_close_v2(database); }
};
struct FinalizeStatement {
  void operator()(sqlite3_stmt* statement) const { sqlite3_finalize(statement); }
};

Code code_of(int status) {
  switch (status & 0xFF) {
    case SQLITE_BUSY:
    case SQLITE_LOCKED:
      return Code::kBusy;
    case SQLITE_FULL:
    case SQLITE_NOMEM:
      return Code::kNoSpace;
    case SQLITE_READONLY:
      return Code::kReadOnly;
    case SQLITE_PERM:
    case SQLITE_AUTH:
      return Code::kPermissionDenied;
    case SQLITE_CANTOPEN:
      return Code::kNotFound;
    case SQLITE_IOERR:
      return Code::kUnavailable;
    case SQLITE_CORRUPT:
    case SQLITE_NOTADB:
      return Code::kCorrupt;
    default:
      return Code::kInternal;
  }
}

/// An open database and the path for its messages.
class Database {
 public:
  explicit Database(std::string path) : path_(std::move(path)) {}

  Result<> open() {
    sqlite3* opened = nullptr;
    int status = sqlite3_open_v2(
        path_.c_str(), &opened,
        SQLITE_OPEN_READWRITE | SQLITE_OPEN_CREATE | SQLITE_OPEN_NOMUTEX | SQLITE_OPEN_EXRESCODE,
        nullptr);
    database_.reset(opened);  // there even when opening failed, with the reason
    if (status != SQLITE_OK) return error(status);
    sqlite3_busy_timeout(opened, kBusyTimeoutMs);
    return ok();
  }

  Result<> run(const char* statements) {
    int status = sqlite3_exec(get(), statements, nullptr, nullptr, nullptr);
    if (status != SQLITE_OK) return error(status);
    return ok();
  }

  Error error(int status) const {
    std::string reason =
        database_ ? sqlite3_errmsg(database_.get()) : std::string(sqlite3_errstr(status));
    return code_of(status) == Code::kCorrupt
               ? damaged(reason)
               : make_error(code_of(status), "metadata database {}: {}", path_, reason);
  }

  Error damaged(std::string_view reason) const {
    return make_error(Code::kCorrupt,
                      "metadata database {} is damaged ({}); stop the daemon, copy the file, then "
                      "restore it from a backup or rescue its rows with: sqlite3 {} .recover",
                      path_, reason, path_);
  }

  sqlite3* get() const { return database_.get(); }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
  std::unique_ptr<sqlite3, CloseDatabase> database_;
};

/// A prepared statement; one use of it at a time, a Query.
class Statement {
 public:
  Result<> prepare(const Database& database, const char* text) {
    sqlite3_stmt* prepared = nullptr;
    int status =
        sqlite3_prepare_v3(database.get(), text, -1, SQLITE_PREPARE_PERSISTENT, &prepared, nullptr);
    if (status != SQLITE_OK) return database.error(status);
    statement_.reset(prepared);
    return ok();
  }
  sqlite3_stmt* get() const { return statement_.get(); }

 private:
  std::unique_ptr<sqlite3_stmt, FinalizeStatement> statement_;
};

/// One run of a statement. Bound text must outlive it.
class Query {
 public:
  Query(const Database& database, const Statement& statement)
      : database_(database), statement_(statement.get()) {}
  Query(const Query&) = delete;
  ~Query() {
    sqlite3_reset(statement_);
    sqlite3_clear_bindings(statement_);
  }

  Query& bind(std::string_view bytes) {
    // A null pointer would bind NULL; an empty blob is meant.
    const char* data = bytes.empty() ? "" : bytes.data();
    note(sqlite3_bind_blob64(statement_, ++bound_, data, bytes.size(), SQLITE_STATIC));
    return *this;
  }
  Query& bind(int64_t number) {
    note(sqlite3_bind_int64(statement_, ++bound_, number));
    return *this;
  }

  /// True: there is a row to read. False: the end.
  Result<bool> step() {
    if (status_ == SQLITE_OK) note(sqlite3_step(statement_));
    int status = std::exchange(status_, SQLITE_OK);
    if (status == SQLITE_ROW) return true;
    if (status == SQLITE_DONE) return false;
    return database_.error(status);
  }

  std::string bytes(int column) const {
    const void* data = sqlite3_column_blob(statement_, column);
    return {static_cast<const char*>(data),
            static_cast<size_t>(sqlite3_column_bytes(statement_, column))};
  }
  int64_t number(int column) const { return sqlite3_column_int64(statement_, column); }
  MetaEntry entry() const { return {bytes(0), bytes(1), number(2)}; }

 private:
  void note(int status) {
    if (status_ == SQLITE_OK) status_ = status;
  }

  const Database& database_;
  sqlite3_stmt* statement_;
  int bound_ = 0;
  int status_ = SQLITE_OK;
};

class SqliteMeta : public MetaClient {
 public:
  explicit SqliteMeta(const std::string& path) : database_(path), spare_(path + "-spare") {}

  Result<> open() {
    MutexLock lock(mutex_);
    PTC_TRY(open_and_prepare());
    spare_.take();
    return ok();
  }
  /// After a failure to open(), on another object of this path.
  bool give_up_spare() {
    MutexLock lock(mutex_);
    return spare_.give_up();
  }

  Result<std::optional<MetaEntry>> get(std::string_view key) override {
    MutexLock lock(mutex_);
    return find(key);
  }

  Result<std::vector<MetaEntry>> list(std::string_view prefix) override {
    MutexLock lock(mutex_);
    std::string end = prefix_end(prefix);
    Query query(database_, end.empty() ? list_ : list_until_);
    query.bind(prefix);
    if (!end.empty()) query.bind(end);
    std::vector<MetaEntry> found;
    for (;;) {
      PTC_TRY(bool row, query.step());
      if (!row) return found;
      found.push_back(query.entry());
    }
  }

  Result<int64_t> commit(const MetaTransaction& transaction) override {
    PTC_TRY(check_transaction(transaction));
    MutexLock lock(mutex_);
    return commit_locked(transaction);
  }

  Result<> settle() override {
    MutexLock lock(mutex_);
    return settle_doubt();
  }

  Result<std::unique_ptr<MetaLease>> lease(std::chrono::seconds ttl) override {
    PTC_TRY(check_ttl(ttl));
    MutexLock lock(mutex_);
    return std::make_unique<LocalLease>(++leases_, [this](int64_t id) {
      MutexLock end_lock(mutex_);
      (void)commit_locked({.deletes = leased_.of(id)});  // else at the next start
    });
  }

  Result<std::shared_ptr<void>> watch(std::string prefix, OnEvent on_event) override {
    MutexLock lock(mutex_);
    return watches_.watch(std::move(prefix), std::move(on_event));
  }

 private:
  Result<> open_and_prepare() PTC_REQUIRES(mutex_) {
    PTC_TRY(database_.open());
    PTC_TRY(database_.run("PRAGMA journal_mode = WAL; PRAGMA synchronous = FULL"));
    PTC_TRY(check_or_create_tables());
    PTC_TRY(get_.prepare(database_, "SELECT key, value, revision FROM kv WHERE key = ?1"));
    PTC_TRY(list_.prepare(database_,
                          "SELECT key, value, revision FROM kv WHERE key >= ?1 ORDER BY key"));
    PTC_TRY(list_until_.prepare(database_,
                                "SELECT key, value, revision FROM kv "
                                "WHERE key >= ?1 AND key < ?2 ORDER BY key"));
    PTC_TRY(put_.prepare(database_,
                         "INSERT INTO kv(key, value, revision) VALUES(?1, ?2, ?3) ON CONFLICT(key) "
                         "DO UPDATE SET value = excluded.value, revision = excluded.revision"));
    PTC_TRY(delete_.prepare(database_, "DELETE FROM kv WHERE key = ?1"));
    PTC_TRY(lease_.prepare(database_, "INSERT OR REPLACE INTO leased VALUES(?1)"));
    PTC_TRY(unlease_.prepare(database_, "DELETE FROM leased WHERE key = ?1"));
    PTC_TRY(counter_.prepare(database_, "SELECT revision FROM counter"));
    PTC_TRY(set_counter_.prepare(database_, "UPDATE counter SET revision = ?1"));
    return ok();
  }

  Result<int64_t> commit_locked(const MetaTransaction& transaction) PTC_REQUIRES(mutex_) {
    auto settled = settle_doubt();
    if (!settled && settled.error().code() == Code::kNoSpace && spare_.give_up())
      settled = settle_doubt();
    PTC_TRY(settled);
    std::vector<MetaEvent> events;
    auto revision = write_or_roll_back(transaction, events);
    if (!revision && revision.error().code() == Code::kNoSpace && spare_.give_up()) {
      events.clear();
      revision = write_or_roll_back(transaction, events);
    }
    if (!revision && in_doubt_) return make_error(Code::kInDoubt, "{}", revision.error().message());
    if (!revision) return revision;
    spare_.take();
    leased_.note(transaction);
    watches_.publish(std::move(events));
    return revision;
  }

  Result<int64_t> write_or_roll_back(const MetaTransaction& transaction,
                                     std::vector<MetaEvent>& events) PTC_REQUIRES(mutex_) {
    PTC_TRY(settle_doubt());
    auto revision = write(transaction, events);
    if (!revision) {
      PTC_TRY(roll_back());
      (void)settle_doubt();
    }
    return revision;
  }

  Result<> check_or_create_tables() PTC_REQUIRES(mutex_) {
    Statement version_statement, check_statement;
    PTC_TRY(version_statement.prepare(database_, "PRAGMA user_version"));
    PTC_TRY(check_statement.prepare(database_, "PRAGMA quick_check(1)"));
    int64_t version = 0;
    {
      PTC_TRY(database_.run("BEGIN IMMEDIATE"));
      Query query(database_, version_statement);
      PTC_TRY(bool row, query.step());
      version = row ? query.number(0) : 0;
    }
    if (version == 0) {
      PTC_TRY(database_.run(kCreateTables));
    }
    if (version > kFormat) {
      return invalid_argument(
          "metadata database {} has format {}, but this program knows {} at most; use a newer one",
          database_.path(), version, kFormat);
    }
    PTC_TRY(database_.run(kEndLeases));
    PTC_TRY(database_.run("COMMIT"));
    Query query(database_, check_statement);
    PTC_TRY(bool row, query.step());
    std::string verdict = row ? query.bytes(0) : "no verdict";
    if (verdict != "ok") return database_.damaged(verdict);
    return ok();
  }

  Result<std::optional<MetaEntry>> find(std::string_view key) PTC_REQUIRES(mutex_) {
    Query query(database_, get_);
    PTC_TRY(bool row, query.bind(key).step());
    return row ? std::optional<MetaEntry>(query.entry()) : std::nullopt;
  }

  /// The transaction from BEGIN to COMMIT; on an error the caller rolls back.
  Result<int64_t> write(const MetaTransaction& transaction, std::vector<MetaEvent>& events)
      PTC_REQUIRES(mutex_) {
    PTC_TRY(database_.run("BEGIN IMMEDIATE"));
    for (const auto& compare : transaction.compares) {
      PTC_TRY(auto found, find(compare.key));
      int64_t found_revision = found ? found->revision : 0;
      if (found_revision != compare.revision)
        return compare_failed(compare.key, compare.revision, found_revision);
    }
    PTC_TRY(int64_t last_revision, read_counter());
    int64_t revision = last_revision + 1;
    for (const auto& [key, value] : transaction.puts) {
      PTC_TRY(Query(database_, put_).bind(key).bind(value).bind(revision).step());
      PTC_TRY(Query(database_, unlease_).bind(key).step());
      events.push_back({key, value, revision});
    }
    for (const auto& [key, value] : transaction.leased_puts) {
      PTC_TRY(Query(database_, put_).bind(key).bind(value).bind(revision).step());
      PTC_TRY(Query(database_, lease_).bind(key).step());
      events.push_back({key, value, revision});
    }
    for (const std::string& key : transaction.deletes) {
      PTC_TRY(Query(database_, unlease_).bind(key).step());
      PTC_TRY(Query(database_, delete_).bind(key).step());
      if (sqlite3_changes(database_.get()) > 0) events.push_back({key, std::nullopt, revision});
    }
    if (!events.empty()) {
      PTC_TRY(Query(database_, set_counter_).bind(revision).step());
    }
    in_doubt_ = true;
    PTC_TRY(database_.run("COMMIT"));
    in_doubt_ = false;
    return events.empty() ? last_revision : revision;
  }

  Result<> roll_back() PTC_REQUIRES(mutex_) {
    if (sqlite3_get_autocommit(database_.get()) != 0) return ok();
    auto rolled_back = database_.run("ROLLBACK");
    if (!rolled_back)
      return std::move(rolled_back).error().with_context("taking a transaction back");
    return ok();
  }

  /// A COMMIT that failed, at its fsync for one, has left its pages in the log, where the next
  /// start would find it done. Whatever is written in their place takes it away.
  Result<> settle_doubt() PTC_REQUIRES(mutex_) {
    if (!in_doubt_) return ok();
    auto written =
        database_.run("BEGIN IMMEDIATE; UPDATE counter SET revision = revision + 1; COMMIT");
    if (!written) {
      PTC_TRY(roll_back());
      return std::move(written).error().with_context(
          "an earlier change may or may not be found at the next start, and its place cannot be "
          "written");
    }
    in_doubt_ = false;
    return ok();
  }

  Result<int64_t> read_counter() PTC_REQUIRES(mutex_) {
    Query query(database_, counter_);
    PTC_TRY(bool row, query.step());
    if (!row) return database_.damaged("its revision counter is gone");
    return query.number(0);
  }

  Mutex mutex_;
  Database database_ PTC_GUARDED_BY(mutex_);
  SpareRoom spare_ PTC_GUARDED_BY(mutex_);
  Statement get_ PTC_GUARDED_BY(mutex_), list_ PTC_GUARDED_BY(mutex_),
      list_until_ PTC_GUARDED_BY(mutex_), put_ PTC_GUARDED_BY(mutex_),
      delete_ PTC_GUARDED_BY(mutex_), lease_ PTC_GUARDED_BY(mutex_),
      unlease_ PTC_GUARDED_BY(mutex_), counter_ PTC_GUARDED_BY(mutex_),
      set_counter_ PTC_GUARDED_BY(mutex_);
  bool in_doubt_ PTC_GUARDED_BY(mutex_) =
      false;  // a COMMIT failed, and what it wrote may still be there
  int64_t leases_ PTC_GUARDED_BY(mutex_) = 0;  // how many there were
  LeasedKeys leased_ PTC_GUARDED_BY(mutex_);
  WatchHub watches_;  // last: its calls end first
};

}  // namespace

Result<std::unique_ptr<MetaClient>> open_sqlite_meta(const std::string& path) {
  auto meta = std::make_unique<SqliteMeta>(path);
  Result<> opened = meta->open();
  if (opened.has_error() && meta->give_up_spare()) {  // all of it, for want of a page
    meta = std::make_unique<SqliteMeta>(path);
    opened = meta->open();
  }
  PTC_TRY(std::move(opened));
  return std::unique_ptr<MetaClient>(std::move(meta));
}

}  // namespace ptc
