// Files that are computed on read, gathered into memory that the kernel reads by itself.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "store/base/mutex.h"
#include "store/base/spare_threads.h"
#include "store/image/scratch_space.h"

namespace ptc {

/// Of a file that was opened a moment ago the memory is still there; of one not asked for in half a
/// minute it is given back, so that at rest there is one copy of everything. Memory that is written
/// again (much cheaper than fresh pages) was asked for by nobody for some seconds, or would have to
/// go for lack of room, and is open and mapped nowhere.
///
/// Whoever opens a file waits for it two seconds at most (fresh memory may take a large one
/// longer), and ends at once when it is killed. The rest is gathered meanwhile, and readers have
/// what is there: each piece is made once, by the one who comes to it first. Threads: any.
class GatherCache {
 public:
  class File;
  using FileRef = std::shared_ptr<File>;

  /// Takes `limit_bytes` of memory at most; 0: does nothing. Without CAP_SYS_ADMIN the same.
  GatherCache(uint64_t limit_bytes, unsigned threads);
  ~GatherCache();

  /// What a file holds. `fill` makes its bytes from `offset` on, on several threads at once.
  using Fill = std::function<Result<>(uint64_t offset, std::span<std::byte> out)>;
  struct Content {
    uint64_t bytes;
    Fill fill;
    bool once =
        false;  // opened once as a rule: its memory may be written again as soon as it is closed
    /// The same anew, of where its bytes lie by then; no Fill: they are not known yet, and what is
    /// held stays. None: nothing that it is made of is ever mended.
    std::function<Result<Fill>()> again = nullptr;
    /// Whom making it may wait for; then it is made by threads that nobody else needs, and who
    /// opens it waits until all of it is there.
    std::string awaited = {};
  };

  /// One file of memory, whole or being gathered.
  class File {
   public:
    /// From then on all its bytes are in the file that the kernel may be handed.
    bool is_whole() const { return left_.load(std::memory_order_acquire) == 0; }
    int fd() const { return memory_->fd(); }  // once it is whole

   private:
    friend class GatherCache;
    enum class Piece : uint8_t { kNone, kBeingMade, kMade };
    File(std::string key, const Content& content, uint64_t piece_bytes);
    std::span<std::byte> piece(size_t i);
    const std::string key_;
    const uint64_t bytes_, piece_bytes_;
    Fill fill_;                            // until it is whole
    std::unique_ptr<ScratchFile> memory_;  // set before `begun_`
    std::vector<std::atomic<Piece>> pieces_;
    std::atomic<size_t> next_{0}, left_;  // pieces: to be begun by those who gather; not made yet
    std::atomic<bool> begun_{false}, failed_{false};
  };

  /// For who waits: to be called now and then; true: do not wait any longer.
  using Leaves = std::function<bool()>;
  /// All of `content` in one file, held while the caller wants it. `key` stands for its bytes:
  /// equal keys, equal bytes. Waits for a while until it is whole. nullptr when reading it as it is
  /// serves better (small), or it cannot be had (no room, some byte is lost).
  /// `waited`: before, for the same.
  FileRef get(const std::string& key, const Content& content, const Leaves& leaves = nullptr,
              std::chrono::steady_clock::duration waited = {});

  /// Fills `out` from a file that may not be whole yet; false: not all of this is there.
  bool read(const FileRef& file, uint64_t offset, std::span<std::byte> out);

  /// The same in the background, for an open that is likely to come: `make` is called there, on one
  /// thread for all that may wait for the same (`awaited`). Forgotten when many wait.
  void prepare(const std::string& key, const std::string& awaited,
               std::function<Result<Content>()> make);

  /// What files with such keys are made of has been mended: bytes that differ are written over in
  /// the very memory that readers have open or mapped. Returns when that is done; the first error,
  /// when some of it could not be had.
  Result<> refresh(const std::string& prefix);

  /// Gives back what nobody has open or mapped: each file of it takes a descriptor.
  void drop_unused();

  /// Waits until nothing is gathered of what lies in the store, so that it can be closed; what is
  /// not whole by then will never be. After the last open.
  void stop();

  uint64_t limit_bytes() const { return limit_bytes_; }
  struct Numbers {
    uint64_t bytes = 0, files = 0;  // held now
    uint64_t hits = 0, misses = 0;  // opens that found a file, or had it gathered
    uint64_t refused = 0;           // no room
    uint64_t gathered_bytes = 0;
    uint64_t evicted_for_room = 0, evicted_idle = 0;
  };
  Numbers numbers() const;

 private:
  using Clock = std::chrono::steady_clock;
  struct Entry {
    FileRef file;
    bool once = false;  // as Content says, and was opened
    Clock::time_point used;
    std::function<Result<Fill>()> again;
  };
  using Files = std::vector<std::unique_ptr<ScratchFile>>;

  struct Wanted {
    std::string key, awaited;
    std::function<Result<Content>()> make;
  };
  /// Finds it, or makes an entry for it, which whoever made it is to gather (`begun`: by memory of
  /// these). nullptr: no room.
  FileRef find_or_begin(const std::string& key, const Content& content, bool opened,
                        std::optional<Files>& begun);
  /// By others than its entry. If not, all that they did with it is done.
  static bool is_used(const FileRef& file);
  /// Takes entries out, least recently used first, until `bytes` more fit; false: they do not.
  /// `out` is to be dropped without the mutex.
  bool make_room(uint64_t bytes, Files& out) PTC_REQUIRES(mutex_);
  Result<std::unique_ptr<ScratchFile>> memory(uint64_t bytes, Files& reusable);
  /// Gives it memory; false: it has failed.
  bool begin(File& file, Files& reusable);
  /// By threads that are there for it, and this one unless that may take long.
  void gather(const FileRef& file, Files reusable);
  void begin_to_gather(const FileRef& file, Files reusable);
  /// Who may wait for others has threads of its own.
  void gather_alone(const FileRef& file, Files reusable);
  void gather_ahead(const Wanted& wanted);
  void work(File& file);  // makes the pieces that nobody has begun
  bool make_piece(File& file, size_t i);
  void fail(File& file, const Error& error);
  void wait_for(const File& file, Clock::time_point until, const Leaves& leaves);
  void drop_idle(std::chrono::seconds unused_for) PTC_REQUIRES(mutex_);
  void be_given_back() PTC_REQUIRES(mutex_);  // somebody looks for what is idle, from now on
  void begin_ahead() PTC_REQUIRES(mutex_);    // and what is wanted is made
  void work_ahead();
  void give_back_idle();

  const uint64_t limit_bytes_;
  std::unique_ptr<ScratchSpace> space_;
  const unsigned threads_;
  mutable Mutex mutex_;
  ConditionVariable gathered_, ended_;
  std::unordered_map<std::string, Entry> entries_ PTC_GUARDED_BY(mutex_);
  std::deque<Wanted> queue_ PTC_GUARDED_BY(mutex_);
  std::set<std::string> ahead_of_
      PTC_GUARDED_BY(mutex_);                        // those that a thread may be waiting for now
  uint64_t bytes_ PTC_GUARDED_BY(mutex_) = 0;        // of all entries
  Numbers counts_ PTC_GUARDED_BY(mutex_);            // without what is held now
  int working_ahead_ PTC_GUARDED_BY(mutex_) = 0;     // threads
  bool giving_back_ PTC_GUARDED_BY(mutex_) = false;  // a thread looks for what is idle
  std::atomic<bool> ending_{false};                  // set with the mutex
  // Last: they use all of the above. They are there while there is something to do.
  SpareThreads ahead_{"ptcfs-ahead"}, idle_{"ptcfs-gathered"}, gathering_;
};

}  // namespace ptc
